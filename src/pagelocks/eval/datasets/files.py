"""The files of the benchmarks, row by row, and what is said of one that will not do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ...config import reject

_REMEDY = "Give the file as published."


@dataclass(frozen=True)
class Row:
    """One object of a file, and where it stands there."""

    task: str
    place: str
    data: dict[str, Any]

    def error(self, wrong: str) -> ValueError:
        """What to raise for a row that the task cannot take."""
        return _error(self.task, self.place, wrong)

    def get(self, name: str) -> Any:
        """The value of a field that must be there."""
        if name not in self.data:
            raise self.error(f"the field {name!r} is missing (there are {', '.join(sorted(self.data)) or 'none'})")
        return self.data[name]

    def text(self, name: str, empty: bool = False) -> str:
        """A field that is text, with something in it unless `empty`."""
        value = self.get(name)
        if not isinstance(value, str) or not (empty or value.strip()):
            raise self.error(f"the field {name!r} must be text, not {short(value)}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A field that is a list of text, with something in it."""
        value = self.get(name)
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise self.error(f"the field {name!r} must be a list of text, not {short(value)}")
        return tuple(value)


def short(value: object) -> str:
    """A value as an error shows it."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _error(task: str, place: str, wrong: str) -> ValueError:
    return reject("path", place, f"for {task}, {wrong}", _REMEDY)


def read_rows(path: str | Path, task: str, limit: int | None = None) -> Iterator[Row]:
    """The objects of a file: one a line, or a JSON list of them; the first `limit` if that is given.

    Parameters
    ----------
    path : path
        A file in UTF-8.  Blank lines do not count.
    task : str
        For the errors.
    limit : int, optional
        Files of long contexts are large: of one with an object a line, nothing after these is read.
    """
    if not Path(path).is_file():
        raise reject("path", str(path), f"{task} takes a file of JSON, an object a line", "Give an existing file.")
    made = 0
    try:
        for place, data in islice(_objects(Path(path), task), limit):
            if not isinstance(data, dict):
                raise _error(task, place, f"an object is needed, not {short(data)}")
            made += 1
            yield Row(task, place, data)
    except UnicodeDecodeError as error:
        raise _error(task, str(path), f"text in UTF-8 is needed; byte {error.start} is none") from None
    if not made:
        raise _error(task, str(path), "at least one object is needed; the file is empty")


def _objects(path: Path, task: str) -> Iterator[tuple[str, Any]]:
    # utf-8-sig: some editors put a mark in front that json would stumble over.
    with path.open(encoding="utf-8-sig") as file:
        begun = False
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            if not begun and line.lstrip().startswith("["):
                listed = _decoded(line + file.read(), f"{path}", task)
                yield from ((f"{path}, object {at}", data) for at, data in enumerate(listed, 1))
                return
            begun = True
            yield f"{path}, line {number}", _decoded(line, f"{path}, line {number}", task)


def _decoded(text: str, place: str, task: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}" if "\n" in text.rstrip("\n") else f"column {error.colno}"
        raise _error(task, place, f"JSON is needed; it breaks at {at}: {error.msg}") from None
