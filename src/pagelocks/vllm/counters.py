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
from collections.abc import Iterator
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
    """The writing side: `values[layer, field]` of this process's engine.

    Raises
    ------
    PermissionError
        If the directory is another user's.
    """

    def __init__(self, instance: str) -> None:
        directory().mkdir(mode=0o700, exist_ok=True)
        if directory().lstat().st_uid != os.getuid():
            raise PermissionError(f"{directory()} is another user's. Set TMPDIR to a directory of your own.")
        remove_stale()
        self.path = directory() / f"{os.getpid()}-{_started(os.getpid())}-{instance}.counters"
        part = self.path.with_suffix(".part")
        with open(part, "w+b") as file:
            file.truncate(_HEADER_BYTES + _DTYPE.itemsize * _MAX_LAYERS * len(FIELDS))
            self._map = mmap.mmap(file.fileno(), 0)
        self.values: Any = np.frombuffer(self._map, _DTYPE, offset=_HEADER_BYTES).reshape(_SHAPE)
        self.describe({"instance": instance, "layers": []})
        part.rename(self.path)  # whoever finds it finds it whole

    def describe(self, header: dict[str, Any]) -> None:
        """Write what a reader needs to know: at least `instance` and the names of the `layers`."""
        text = json.dumps(header).encode() + b"\n"
        if len(text) > _HEADER_BYTES:
            raise ValueError(f"the header takes {len(text)} bytes, at most {_HEADER_BYTES} fit")
        self._map[: len(text)] = text


def totals(values: Any) -> dict[str, int]:
    """Every field over the layers, int (layers, fields): steps and rows of one layer (they pass every layer), the sum
    of pages, summaries and records."""
    if len(values) == 0:
        return dict.fromkeys(FIELDS, 0)
    several = [*values[:, :PAGES_READ].max(0), *values[:, PAGES_READ:].sum(0)]
    return dict(zip(FIELDS, map(int, several), strict=True))


@dataclass(frozen=True)
class Counters:
    """What a counter file said at one moment."""

    pid: int
    header: dict[str, Any]
    values: Any

    @property
    def by_layer(self) -> dict[str, dict[str, int]]:
        """Every field of every layer."""
        rows = zip(self.header["layers"], self.values, strict=True)
        return {name: dict(zip(FIELDS, map(int, row), strict=True)) for name, row in rows}

    def totals(self) -> dict[str, int]:
        """Every field over the layers."""
        return totals(self.values)


def read_all(pids: set[int] | None = None) -> list[Counters]:
    """The counters of every running engine of this user, or of those run by the given processes."""
    found = []
    for path, pid, started in _files():
        if (pids is None or pid in pids) and _started(pid) == started:
            with contextlib.suppress(FileNotFoundError):
                data = path.read_bytes()
                header = json.loads(data[:_HEADER_BYTES].split(b"\n")[0])
                values = np.frombuffer(data, _DTYPE, offset=_HEADER_BYTES).reshape(_SHAPE)
                found.append(Counters(pid, header, values[: len(header["layers"])]))
    return found


def _files() -> Iterator[tuple[Path, int, int]]:
    """Counter files, with the process and its time of start that their names give."""
    for path in sorted(directory().glob("*.counters")):
        parts = path.name.split("-")
        if len(parts) >= 3 and parts[0].isdigit() and parts[1].isdigit():
            yield path, int(parts[0]), int(parts[1])


def _started(pid: int) -> int | None:
    """When a process started, in seconds; None if there is none.  A pid alone may be another process's by now."""
    import psutil

    try:
        return int(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return None


def family() -> set[int]:
    """This process and all that it started, directly or not."""
    import psutil

    me = psutil.Process()
    return {me.pid, *(child.pid for child in me.children(recursive=True))}


def remove_stale() -> None:
    """Delete the files of processes that are gone: one that was killed could not do so itself."""
    for path, pid, started in _files():
        if _started(pid) != started:
            path.unlink(missing_ok=True)
