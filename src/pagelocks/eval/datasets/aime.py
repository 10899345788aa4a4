"""AIME: problems whose answer is a whole number from 0 to 999, in JSON, a list or an object a line.

Several publish them, under field names that differ in case (MathArena, Hugging Face H4, OpenCompass, which says
`question` for `problem` and keeps a degree sign in an answer).
"""

from __future__ import annotations

import re

from .base import Example, Parts, Task
from .boxed import last_boxed
from .files import Row, short

MOST = 999
NEW_TOKENS = 32_768
"""What DeepSeek-R1's evaluation allows an answer; reasoning models need it."""

_BEFORE = "Solve the following problem.\n\n"
_AFTER = (
    "\n\nThink it through one step after another. The result is a whole number from 0 to 999: "
    "at the very end, write it as \\boxed{...}."
)
# Spaces, dollar signs, commas between thousands, and units after the number.
_DROP = re.compile(r"\\[,!;: ]|[\s$,~]|\{,\}|\^\{?\\circ\}?|°|\\(?:text|mathrm)\{[^{}]*\}")


def integer(text: str) -> int | None:
    """The whole number that this text is, after a last = if it has one; None if it is something else."""
    number = _DROP.sub("", text.rsplit("=", 1)[-1])
    return int(number) if re.fullmatch(r"\d{1,9}", number, re.ASCII) else None


def _make(row: Row) -> Parts:
    row = Row(row.task, row.place, {name.lower(): value for name, value in row.data.items()})
    problem = row.text("question" if "question" in row.data and "problem" not in row.data else "problem")
    given = row.get("answer")
    answer = integer(str(given)) if isinstance(given, (int, str)) and not isinstance(given, bool) else None
    if answer is None or answer > MOST:
        raise row.error(f"the answer must be a whole number from 0 to {MOST}, not {short(given)}")
    name = next((str(row.data[key]) for key in ("id", "problem_idx") if key in row.data), None)
    return Parts(_BEFORE + problem, "", _AFTER, (str(answer),), name)


def _grade(answer: str, example: Example) -> float:
    said = last_boxed(answer)
    return float(said is not None and integer(said) == int(example.references[0]))


TASKS = (Task("aime", NEW_TOKENS, _make, _grade),)
