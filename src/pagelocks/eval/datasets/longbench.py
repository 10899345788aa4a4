"""LongBench (the first, of 2023): 21 tasks, a file each, scored as published; the prompts are our own words.

Format, metrics, lengths of answers, which answers count by their first line, and which tasks go without a chat
template are those of THUDM/LongBench (README.md, eval.py, metrics.py, pred.py, config/), commit 2e00731.  Files of
LongBench-E have the same form and are read too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from .base import Example, Parts, Task
from .files import Row, short
from .metrics import edit_similarity, f1, f1_of_segments, rouge_l, rouge_l_of_segments
from .prompts import LONGBENCH

_NUMBER = re.compile(r"\d+")
_NO_CODE = "`", "#", "//"


def share_of_numbers(answer: str, reference: str) -> float:
    """How many of the numbers in the answer are the reference's."""
    wanted, numbers = _NUMBER.findall(reference)[0], _NUMBER.findall(answer)
    return numbers.count(wanted) / len(numbers) if numbers else 0.0


def share_of_classes(answer: str, reference: str, classes: tuple[str, ...]) -> float:
    """1 over the classes that the answer names, if the right one is among them.

    A class that is part of the right one's name is not held against an answer that gives the latter.  LongBench skips
    a class in its list whenever it strikes the one before; where two such parts stand side by side its score is lower.
    """
    named = [name for name in classes if name in answer]
    named = [name for name in named if name == reference or name not in reference]
    return 1 / len(named) if reference in named else 0.0


def next_line(answer: str, reference: str) -> float:
    """Edit similarity of the answer's first line without a code fence or a comment."""
    lines = answer.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in _NO_CODE)), "")
    return edit_similarity(line, reference)


Metric = Callable[[str, str], float]


@dataclass(frozen=True)
class Kind:
    """What sets the tasks apart: the score (None: by classes), tokens of an answer, chat template, first line alone."""

    metric: Metric | None
    new_tokens: int
    chat: bool = True
    first_line: bool = False


KINDS = {
    "narrativeqa": Kind(f1, 128),
    "qasper": Kind(f1, 128),
    "multifieldqa_en": Kind(f1, 64),
    "multifieldqa_zh": Kind(f1_of_segments, 64),
    "hotpotqa": Kind(f1, 32),
    "2wikimqa": Kind(f1, 32),
    "musique": Kind(f1, 32),
    "dureader": Kind(rouge_l_of_segments, 128),
    "gov_report": Kind(rouge_l, 512),
    "qmsum": Kind(rouge_l, 512),
    "multi_news": Kind(rouge_l, 512),
    "vcsum": Kind(rouge_l_of_segments, 512),
    "trec": Kind(None, 64, chat=False, first_line=True),
    "triviaqa": Kind(f1, 32, chat=False, first_line=True),
    "samsum": Kind(rouge_l, 128, chat=False, first_line=True),
    "lsht": Kind(None, 64, chat=False, first_line=True),
    "passage_count": Kind(share_of_numbers, 32),
    "passage_retrieval_en": Kind(share_of_numbers, 32),
    "passage_retrieval_zh": Kind(share_of_numbers, 32),
    "lcc": Kind(next_line, 64, chat=False),
    "repobench-p": Kind(next_line, 64, chat=False),
}
"""Name of a task, without "longbench/" -> its kind."""


def _make(name: str, kind: Kind, row: Row) -> Parts:
    given = row.data.get("dataset", name)
    if given not in (name, f"{name}_e"):
        raise row.error(f"rows of the dataset {name!r} are needed, not {given!r}")
    references = row.texts("answers")
    if kind.metric is share_of_numbers and not all(map(_NUMBER.search, references)):
        raise row.error(f"an answer must hold a number, unlike {short(references)}")
    meta: dict[str, Any] = {field: row.data[field] for field in ("length", "language") if field in row.data}
    if kind.metric is None:
        meta["classes"] = row.texts("all_classes")
    before, after = LONGBENCH[name]
    after = after.format(input=row.text("input", empty=True))
    identity = str(row.data["_id"]) if "_id" in row.data else None
    return Parts(before, row.text("context"), after, references, identity, meta)


def _grade(kind: Kind, answer: str, example: Example) -> float:
    if kind.first_line:
        answer = answer.lstrip("\n").split("\n")[0]
    metric = kind.metric or partial(share_of_classes, classes=example.meta["classes"])
    return max(metric(answer, reference) for reference in example.references)


_NEEDS: dict[Metric, tuple[str, ...]] = {
    f1_of_segments: ("jieba",),
    rouge_l: ("rouge",),
    rouge_l_of_segments: ("jieba", "rouge"),
    next_line: ("rapidfuzz.fuzz",),
}

TASKS = tuple(
    Task(
        f"longbench/{name}",
        kind.new_tokens,
        partial(_make, name, kind),
        partial(_grade, kind),
        _NEEDS.get(kind.metric, ()) if kind.metric else (),
        kind.chat,
    )
    for name, kind in KINDS.items()
)
