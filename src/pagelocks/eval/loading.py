"""A model in Transformers for an evaluation, its tokenizer, and what a result says of both."""

from __future__ import annotations

import hashlib
import os
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ..config import reject
from ..models import resolve
from ..provenance import provenance


def device_of(name: str | None) -> str:
    """The device to run on, of "cpu", "cuda" or None for the GPU if there is one."""
    device = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise reject("--device", device, "PyTorch finds no GPU here", "Use --device cpu.")
    return device


def need_transformers() -> None:
    """Raise ValueError where Transformers is not installed; for before the first import of what needs it."""
    if find_spec("transformers") is None:
        raise ValueError('transformers is missing: pip install "pagelocks[models,eval]"')


def check_output(path: Path, flag: str = "--output") -> None:
    """Raise unless a file can be written there, before any work; makes the folder it lies in."""
    remedy = "Name a file in a folder of yours."
    if path.is_dir():
        raise reject(flag, str(path), "a file, and this is a folder", remedy)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise reject(flag, str(path), f"a file in a folder that can be made ({error})", remedy) from error
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise reject(flag, str(path), "a file that may be written", remedy)


def load_tokenizer(name: str) -> tuple[Path, Any]:
    """Folder and tokenizer of a known model, or of one in a folder."""
    need_transformers()
    from transformers import AutoTokenizer

    folder = Path(resolve(name, partial(print, file=sys.stderr)))
    return folder, AutoTokenizer.from_pretrained(folder)


def load_model(folder: Path, dtype: str, device: str) -> tuple[Any, dict[str, Any]]:
    """The model for inference, and what identifies it: name, versions, a digest of its configuration and the first
    megabyte of each file of weights.

    Raises
    ------
    ValueError
        If all its layers have windows.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    text: Any = AutoConfig.from_pretrained(folder).get_text_config()
    kinds = getattr(text, "layer_types", None) or ["sliding" if getattr(text, "sliding_window", None) else "full"]
    if not any("full" in kind for kind in kinds):
        allowed = f"a layer that attends everything; it has {', '.join(sorted(set(kinds)))} attention alone"
        raise reject("--model", str(folder), allowed, "Nothing is selected in windows: take another model.")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):  # another training run's weights have the same sizes
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
    about = {"model": folder.name, "config": digest.hexdigest()[:16], "dtype": dtype, **provenance(device)}
    return model.to(device).eval(), about


def stop_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Token ids that end an answer, ascending."""
    ends = model.generation_config.eos_token_id
    return sorted({tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None})
