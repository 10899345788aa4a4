"""What calibrated selectors are given beforehand, and what KVzip is told: from text that no record holds.

Loki gets a basis for each layer and KV head, TriAttention the model's frequencies and each query head's mean query,
centred LOCKS each KV head's mean key.  All come from RULER records of `TASKS`, made with another seed than the run's,
so that text of the tasks' kind, though none of their own, has been seen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import hf
from ..config import LocksConfig, reject
from ..selectors import (
    CALIBRATED_SELECTORS,
    REPEATING_SELECTORS,
    Exact,
    LocksCentred,
    Loki,
    PageSource,
    Selector,
    TriAttention,
)
from ..selectors import make_selector as make_plain
from ..selectors.loki import calibrate
from ..selectors.triattention import query_means
from . import ruler
from .chat import next_turn

TASKS = ("niah_single_2", "niah_multikey_3", "vt", "cwe", "fwe", "qa_1")
"""One record each: prose, random numbers, noise, words, random words, passages."""
LENGTH = 1024
"""Tokens of each."""
SEED_OFFSET = 1_000_000
"""Added to the run's seed."""


@dataclass(frozen=True)
class Text:
    """Token ids of the text to calibrate on, and what a result says of it."""

    sequences: tuple[tuple[int, ...], ...]
    about: dict[str, Any]


def calibration_text(tokenizer: Any, seed: int, length: int = LENGTH) -> Text:
    """Records of RULER's `TASKS` of at most so many tokens, with a seed that is not the run's."""
    other = seed + SEED_OFFSET
    records = [ruler.task(name).make(tokenizer, length, other) for name in TASKS]
    sequences = tuple(record.prompt_token_ids for record in records)
    digest = hashlib.sha256(json.dumps(sequences).encode()).hexdigest()[:16]
    about = {"tasks": list(TASKS), "seed": other, "length": length, "tokens": sum(map(len, sequences))}
    return Text(sequences, about | {"digest": digest})


@dataclass(frozen=True)
class Calibration:
    """What was measured on a text, by layer, on the model's device.

    Attributes
    ----------
    bases : fp32 (kv_heads, d, d), as `loki.calibrate` makes them
    means : complex and real (kv_heads, G, d / 2), as `triattention.query_means` makes them; empty without frequencies
    frequencies : (d / 2), the model's, or None where TriAttention does not know its kind of RoPE
    mean_keys : fp32 (kv_heads, d)
    """

    bases: dict[int, Tensor]
    means: dict[int, tuple[Tensor, Tensor]]
    frequencies: Tensor | None
    mean_keys: dict[int, Tensor]

    def selector(self, name: str, layer: int, config: LocksConfig) -> Selector:
        """A calibrated selector for one layer of one batch."""
        if layer not in self.bases:
            raise reject("layer", layer, f"it was calibrated for {sorted(self.bases)}", "Calibrate on this model.")
        if name == "loki":
            return Loki(self.bases[layer])
        if name == "locks-centred":
            return LocksCentred(self.mean_keys[layer])
        if name == "triattention":
            if self.frequencies is None:
                allowed = "RoPE over the whole head, one kind for all layers, keys not rescaled"
                raise reject("selector", name, allowed, "Leave it out for this model.")
            return TriAttention(self.frequencies, config, means=self.means[layer])
        raise reject("selector", name, f"one of {', '.join(CALIBRATED_SELECTORS)}", 'Use "loki".')


class _Listener:
    """Takes a layer's keys and mean queries as they are prefilled, a sequence at a time."""

    def __init__(self, frequencies: Tensor | None) -> None:
        self._frequencies = frequencies
        self.keys: list[Tensor] = []
        self.means: list[tuple[Tensor, Tensor, int]] = []

    def observe(self, query: Tensor, keys: Tensor, scale: float) -> None:
        self.keys.append(keys[0])
        if self._frequencies is not None:
            self.means.append((*query_means(query[0], self._frequencies), query.shape[-2]))

    def log_mass(self, query: Tensor, pages: PageSource, scale: float) -> Tensor:
        raise AssertionError("a prompt is prefilled, and nothing decoded")

    def page_bytes(self, head_dim: int, page_size: int = 16, itemsize: int = 2, group: int = 1) -> float:
        return Exact().page_bytes(head_dim, page_size, itemsize)


def measure(model: Any, sequences: Sequence[Sequence[int]]) -> Calibration:
    """Prefill each sequence, of two tokens or more; keys and queries are taken in all layers without a window."""
    frequencies = rope_of(model)
    listeners: dict[int, _Listener] = {}
    hf.attach(model, LocksConfig(), lambda layer: listeners.setdefault(layer, _Listener(frequencies)))
    try:
        with torch.inference_mode():
            for ids in sequences:
                model(torch.tensor([list(ids)], device=model.device), use_cache=False, logits_to_keep=1)
    finally:
        hf.detach(model)
    keys = {layer: torch.cat(each.keys, -2) for layer, each in listeners.items()}
    bases = {layer: calibrate(each) for layer, each in keys.items()}
    mean_keys = {layer: each.double().mean(-2).float() for layer, each in keys.items()}
    means = {layer: _joined(each.means) for layer, each in listeners.items() if each.means}
    return Calibration(bases, means, frequencies, mean_keys)


def _joined(means: Sequence[tuple[Tensor, Tensor, int]]) -> tuple[Tensor, Tensor]:
    tokens = sum(count for *_, count in means)
    centre = torch.stack([centre * (count / tokens) for centre, _, count in means]).sum(0)
    norm = torch.stack([norm * (count / tokens) for _, norm, count in means]).sum(0)
    return centre, norm


def rope_of(model: Any) -> Tensor | None:
    """fp64 (d / 2): a model's RoPE, radians a position; None where TriAttention's formula does not hold for it."""
    rotary: Any = getattr(model.get_decoder(), "rotary_emb", None)
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    frequencies: Tensor | None = getattr(rotary, "inv_freq", None)
    if frequencies is None or frequencies.shape != (head_dim // 2,) or rotary.attention_scaling != 1:
        return None
    if rotary.rope_type in ("dynamic", "longrope"):  # other frequencies as the sequence grows
        return None
    return frequencies.to(torch.float64)


def make_selector(name: str, config: LocksConfig, layer: int, calibration: Calibration | None = None) -> Selector:
    """A new selector of any name for one layer of one batch; ValueError where it lacks its calibration."""
    if name in CALIBRATED_SELECTORS and calibration is not None:
        return calibration.selector(name, layer, config)
    if name in REPEATING_SELECTORS:
        return REPEATING_SELECTORS[name](config)
    return make_plain(name, config)


def repetition_request(tokenizer: Any) -> list[int]:
    """What stands between a prompt and its repetition: a user's turn that asks for it."""
    text = next_turn(tokenizer, "Repeat everything above from the beginning, word for word.")
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids
