"""One prompt, one answer: with stock attention, with LOCKS, or with both for comparison.

Each answer comes from an engine of its own, in a process of its own, so that the dense side is stock vLLM and nothing
that vLLM prints or sets reaches the caller.  What was measured, and how:

- `prefill_s` runs from the request's arrival in the engine to its first token, `ms_per_token` is the mean time of the
  tokens after it, both as the engine's core process stamps them.  A request of two tokens warms the engine up first
  (not when a trace is written, which costs time itself); it fills no block, so the prompt finds nothing in the prefix
  cache and both sides do the same work.
- Reads are counted in decode rows that LOCKS handled; the prefill reads everything, and is stock.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from .console import Progress
from .models import resolve

_STOP_S = 2.0
# -P: whatever lies in the current folder must not stand in for a module.
_CHILD = (sys.executable, "-P", "-m", "pagelocks.vllm.serve")


class BadPrompt(ValueError):
    """The prompt cannot be asked: it is empty, or does not fit into the model's context."""


class EngineFailure(RuntimeError):
    """The engine did not start or died; the message is the root cause and `log` holds vLLM's last lines."""

    def __init__(self, message: str, log: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.log = list(log)


@dataclass(frozen=True)
class LayerReads:
    """What the decode rows of one layer read.  Pages and records are counted for each KV head.

    Attributes
    ----------
    layer : str
    rows_sparse, rows_dense : int
        Rows (this request in a step) that LOCKS and stock attention handled; the prefill is dense.
    pages_read, pages_skipped, records_read : int
        Of the sparse rows.  A record is a page's summary.
    share : float or None
        Bytes read, records included, of the bytes of K and V that dense attention would have read in the sparse rows;
        None if there were none.
    """

    layer: str
    rows_sparse: int
    rows_dense: int
    pages_read: int
    pages_skipped: int
    records_read: int
    share: float | None


@dataclass(frozen=True)
class Generation:
    """An answer, with what it cost.

    Attributes
    ----------
    model : str
        The folder of the model.
    locks : dict or None
        The options LOCKS ran with; None for stock attention.
    prompt_tokens : int
    token_ids : list of int
        The tokens generated.
    text, finish_reason : str
    start_s, prefill_s : float
        Seconds until the engine was ready, and from the request until its first token.
    ms_per_token : float or None
        Of the tokens after the first; None if there was only one.
    page_bytes, record_bytes : int or None
        K and V of one page, and its summary, of one KV head; None for stock attention.
    layers : list of LayerReads
        Empty for stock attention.
    vllm : str
        The release that ran.
    """

    model: str
    locks: dict[str, Any] | None
    prompt_tokens: int
    token_ids: list[int]
    text: str
    finish_reason: str
    start_s: float
    prefill_s: float
    ms_per_token: float | None
    page_bytes: int | None
    record_bytes: int | None
    layers: list[LayerReads]
    vllm: str

    @property
    def share(self) -> float | None:
        """`LayerReads.share` over all layers together."""
        read, skipped, records = map(self.total, ("pages_read", "pages_skipped", "records_read"))
        return share_read(read, skipped, records, self.page_bytes or 1, self.record_bytes or 0)

    @property
    def rows_sparse(self) -> int:
        """Decode rows that LOCKS handled (every layer sees the same ones; layers that stay stock are not listed)."""
        return max((layer.rows_sparse for layer in self.layers), default=0)

    def total(self, name: str) -> int:
        """The sum over the layers of one count of `LayerReads`."""
        return sum(getattr(layer, name) for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """All fields and properties, ready for JSON."""
        return {**asdict(self), "share": self.share, "rows_sparse": self.rows_sparse}


@dataclass(frozen=True)
class Comparison:
    """The same prompt answered by stock attention and by LOCKS."""

    dense: Generation
    locks: Generation

    @property
    def first_difference(self) -> int | None:
        """Index of the first generated token that differs; None if the answers are the same."""
        ours, theirs = self.locks.token_ids, self.dense.token_ids
        for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
            if one != other:
                return index
        return None if len(ours) == len(theirs) else min(len(ours), len(theirs))

    def to_dict(self) -> dict[str, Any]:
        """Both sides and where they part, ready for JSON."""
        return {
            "dense": self.dense.to_dict(),
            "locks": self.locks.to_dict(),
            "first_difference": self.first_difference,
        }


def share_read(pages_read: int, pages_skipped: int, records: int, page_bytes: int, record_bytes: int) -> float | None:
    """Bytes of the pages and records read, of the bytes of all pages; None if there were no pages."""
    pages = pages_read + pages_skipped
    return (pages_read * page_bytes + records * record_bytes) / (pages * page_bytes) if pages else None


def generate(
    model: str | os.PathLike[str],
    prompt: str | Sequence[int],
    locks: Mapping[str, Any] | None = None,
    *,
    max_tokens: int = 64,
    temperature: float = 0.0,
    chat: bool | None = None,
    engine: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    log: TextIO | None = None,
) -> Generation:
    """Start an engine, answer one prompt, stop the engine.

    Parameters
    ----------
    model : str or path
        A model folder, or a name that `pagelocks.models` knows (fetched the first time).
    prompt : str or sequence of int
        Text, or token ids, which are taken as they are.
    locks : mapping, optional
        Options for LOCKS, as in `--additional-config '{"locks": {…}}'`; `{}` for its defaults.  None, the default,
        for stock attention.
    max_tokens : int
    temperature : float
        0 is greedy.
    chat : bool, optional
        Whether to wrap the text as a user's turn in the model's chat template.  None: if the model has one.
    engine : mapping, optional
        Further arguments of `vllm.LLM`.
    progress : callable, optional
        Called with short lines as the work goes on.
    log : text file, optional
        Gets what vLLM and its processes print; None drops it.

    Returns
    -------
    Generation

    Raises
    ------
    ValueError
        Bad options, an unknown model, or a folder that holds none; `BadPrompt` for a prompt that is empty or too long.
    pagelocks.models.ModelError
        The model could not be fetched.
    EngineFailure
        The engine did not start or died.
    """
    say = progress or (lambda line: None)
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens} is not allowed: the least is 1. Use 1 or more.")
    if locks is not None:
        from .vllm.options import Options

        Options.parse(locks)
    if importlib.util.find_spec("vllm") is None:
        raise EngineFailure("vLLM is not installed. Run pip install 'pagelocks[cpu]' on a machine without a GPU.")
    folder = resolve(model, say)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{str(folder)!r} is not a model folder: it has no config.json. Give the folder that has one.")
    job = {
        "model": str(folder),
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "locks": None if locks is None else dict(locks),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "chat": chat,
        "engine": dict(engine or {}),
    }
    lines: deque[str] = deque(maxlen=2000)
    for event in _in_child(job, lines, log):
        if event["event"] == "progress":
            say(event["text"])
        elif event["event"] == "bad prompt":
            raise BadPrompt(event["text"])
        elif event["event"] == "failure":
            text = event["text"]
            wrapped = any(wrapper in text for wrapper in _WRAPPERS)
            raise EngineFailure(root_cause(lines, text) if wrapped else text, lines)
        elif event["event"] == "result":
            return _generation(event["result"])
    raise EngineFailure(root_cause(lines, "the engine's process ended without an answer"), lines)


def _generation(result: dict[str, Any]) -> Generation:
    sizes = result["page_bytes"], result["record_bytes"]
    layers = [
        LayerReads(
            **counts,
            share=share_read(counts["pages_read"], counts["pages_skipped"], counts["records_read"], *sizes),
        )
        for counts in result["layers"]
    ]
    return Generation(**{**result, "layers": layers})


def compare(
    model: str | os.PathLike[str],
    prompt: str | Sequence[int],
    locks: Mapping[str, Any],
    *,
    progress: Progress | None = None,
    **options: Any,
) -> Comparison:
    """Answer one prompt by stock attention, then by LOCKS; arguments, errors as for `generate`."""
    say = progress or (lambda line: None)
    sides = [
        generate(model, prompt, side, progress=lambda line, name=name: say(f"{name}: {line}"), **options)  # type: ignore[misc]
        for name, side in (("dense", None), ("LOCKS", locks))
    ]
    return Comparison(*sides)


_WRAPPERS = (
    "Engine core initialization failed",
    "EngineCore encountered an issue",
    "WorkerProc initialization failed",
    "Worker failed with error",
)


def root_cause(lines: Sequence[str], otherwise: str) -> str:
    """The last exception in vLLM's log that is not merely the report of another process's, else `otherwise`.

    Every process of vLLM logs its traceback, each line behind a prefix with its name, and the outer ones say only
    "see root cause above".
    """
    prefix = re.compile(r"^\([^)]*pid=\d+\) ?|^(?:ERROR|CRITICAL) \S+ \S+ \[[^\]]*\] ?")
    cause, inside = None, False
    for line in lines:
        while (stripped := prefix.sub("", line)) != line:
            line = stripped
        if line.startswith("Traceback (most recent call last)"):
            inside = True
        elif inside and line[:1].strip() and not line.startswith(("|", "+")):
            inside = False
            name, found, message = line.partition(": ")
            if found and " " not in name and not message.startswith(_WRAPPERS):
                cause = f"{name.rpartition('.')[2]}: {message.strip()}"
    return cause or otherwise


def _in_child(job: dict[str, Any], lines: deque[str], log: TextIO | None) -> Iterator[dict[str, Any]]:
    """Run a job in a new process: yield its events, collect what its family prints, leave nobody behind."""
    events, write = os.pipe()
    env = {**os.environ}
    # A folder needs no hub, and 2 GiB hold any prompt this is for; without it vLLM takes most of the machine's memory.
    for name, value in (("HF_HUB_OFFLINE", "1"), ("VLLM_NO_USAGE_STATS", "1"), ("VLLM_CPU_KVCACHE_SPACE", "2")):
        env.setdefault(name, value)
    # A session of its own: one signal ends all of vLLM's processes.
    child = subprocess.Popen(
        [*_CHILD, str(write)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(write,),
        env=env,
        start_new_session=True,
        text=True,
        errors="replace",
    )
    os.close(write)

    def collect() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            lines.append(line.rstrip("\n"))
            if log is not None:
                log.write(line)
                log.flush()

    reader = threading.Thread(target=collect, daemon=True)
    reader.start()
    try:
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError), child.stdin:
            json.dump(job, child.stdin)
        with open(events, encoding="utf-8") as stream:
            for line in stream:
                event = json.loads(line)
                if event["event"] == "failure":  # the cause may still be on its way through the other pipe
                    _stop(child)
                    reader.join(_STOP_S)
                yield event
    finally:
        _stop(child)
        reader.join(_STOP_S)
        if job["locks"] is not None:
            from .vllm.counters import remove_stale

            remove_stale()  # a worker that was stopped has left its file


def _stop(child: subprocess.Popen[str]) -> None:
    """End a child and all that it started: ask, wait, then insist."""
    import psutil

    deadline, number = time.monotonic() + _STOP_S, int(signal.SIGTERM)
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(child.pid, number)  # fails when nobody is left
            number = 0
            child.poll()  # reaps it, or its group would never be empty
            time.sleep(0.05)
    # vLLM's workers often outstay their welcome.  Python's resource tracker ends by itself after the last of them, and
    # must be let to: it removes the shared memory that they leave.
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if os.getpgid(process.pid) == child.pid and "resource_tracker" not in " ".join(process.cmdline()):
                process.kill()
    child.wait()
