"""Counters that one process writes and others read, without a message or a lock.

The worker that runs the model and the server that answers `/metrics` are different processes, and vLLM has no channel
for a backend's numbers between them.  So each worker keeps its counters in a small memory-mapped file: 64-bit stores
in one process, plain reads in another, no system call in a step.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FIELDS = ("steps", "rows_sparse", "rows_dense", "pages_read", "pages_skipped", "summaries_built", "records_read")
"""A layer's counters.  Pages, summaries and records are counted for each KV head; a row is one request in one step."""

STEPS, ROWS_SPARSE, ROWS_DENSE, PAGES_READ, PAGES_SKIPPED, SUMMARIES_BUILT, RECORDS_READ = range(len(FIELDS))

_HEADER_BYTES = 1 << 16
_MAX_LAYERS = 1024
_DTYPE = np.dtype("<i8")
_SHAPE = (_MAX_LAYERS, len(FIELDS))


def directory() -> Path:
    """Where this user's counter files lie."""
    return Path(tempfile.gettempdir()) / f"pagelocks-{os.getuid()}"


class CounterFile:
    """The writing side: `values[layer, field]` of this process's engine."""

    def __init__(self, instance: str) -> None:
        directory().mkdir(mode=0o700, exist_ok=True)
        remove_stale()
        self.path = directory() / f"{os.getpid()}-{instance}.counters"
        with open(self.path, "w+b") as file:
            file.truncate(_HEADER_BYTES + _DTYPE.itemsize * _MAX_LAYERS * len(FIELDS))
            self._map = mmap.mmap(file.fileno(), 0)
        self.values: Any = np.frombuffer(self._map, _DTYPE, offset=_HEADER_BYTES).reshape(_SHAPE)
        self.describe({"instance": instance, "layers": []})

    def describe(self, header: dict[str, Any]) -> None:
        """Write what a reader needs to know: at least `instance` and the names of the `layers`."""
        text = json.dumps(header).encode() + b"\n"
        if len(text) > _HEADER_BYTES:
            raise ValueError(f"the header takes {len(text)} bytes, at most {_HEADER_BYTES} fit")
        self._map[: len(text)] = text


@dataclass(frozen=True)
class Counters:
    """What a counter file said at one moment."""

    pid: int
    header: dict[str, Any]
    by_layer: dict[str, dict[str, int]]

    def total(self, field: str) -> int:
        """Steps and rows of one layer (they pass every layer), pages and summaries of all layers."""
        values = [layer[field] for layer in self.by_layer.values()]
        return max(values, default=0) if field in ("steps", "rows_sparse", "rows_dense") else sum(values)

    def totals(self) -> dict[str, int]:
        """Every field's total."""
        return {field: self.total(field) for field in FIELDS}


def read_all(pids: set[int] | None = None) -> list[Counters]:
    """The counters of every running engine of this user, or of those run by the given processes."""
    found = []
    for path in sorted(directory().glob("*.counters")):
        pid = int(path.name.split("-")[0])
        if pids is None or pid in pids:
            with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
                found.append(_read(path, pid))
    return found


def _read(path: Path, pid: int) -> Counters:
    data = path.read_bytes()
    header = json.loads(data[:_HEADER_BYTES].split(b"\n")[0] or b"{}")
    values = np.frombuffer(data, _DTYPE, offset=_HEADER_BYTES).reshape(_SHAPE)
    rows = zip(header["layers"], values, strict=False)
    layers = {name: dict(zip(FIELDS, map(int, row), strict=True)) for name, row in rows}
    return Counters(pid, header, layers)


def family() -> set[int]:
    """This process and all that it started, directly or not."""
    import psutil

    me = psutil.Process()
    return {me.pid, *(child.pid for child in me.children(recursive=True))}


def remove_stale() -> None:
    """Delete the files of processes that are gone: one that was killed could not do so itself."""
    import psutil

    for path in directory().glob("*.counters"):
        if not psutil.pid_exists(int(path.name.split("-")[0])):
            path.unlink(missing_ok=True)
