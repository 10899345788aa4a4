"""RULER's thirteen tasks: their structure and scoring, all words our own, without a model.

    record = TASKS["niah_single_2"].make(tokenizer, 4096, seed=42, index=0)
    score(answer, record)

Where RULER takes essays, SQuAD or HotpotQA, `source` names such a file; without one the text is generated and the
record says `substitute`.  A score on a substitute is never to be set beside a published one.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

from ...config import reject
from . import needles, questions, tracing, words
from .base import Record, Task
from .text import Span

__all__ = ["TASKS", "Record", "Task", "fact_tokens", "score", "score_task", "task"]

TASKS: dict[str, Task] = {
    made.name: made
    for made in (
        *(
            Task(name, 128, needles.draft, "a text file" if kind.haystack == "essay" else None)
            for name, kind in needles.KINDS.items()
        ),
        Task("vt", 30, tracing.draft),
        Task("cwe", 120, words.common_draft),
        Task("fwe", 50, words.frequent_draft),
        Task("qa_1", 32, questions.draft, questions.SQUAD, best=True),
        Task("qa_2", 32, questions.draft, questions.HOTPOT, best=True),
    )
}
"""Name of a task -> the task."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def task(name: str) -> Task:
    """The task of this name; ValueError if there is none."""
    if name not in TASKS:
        raise reject("task", name, f"one of {', '.join(TASKS)}", "Use niah_single_1, the easiest one.")
    return TASKS[name]


def score(answer: str, record: Record) -> float:
    """From 0 to 1: the share of the references that occur in the answer; for the QA tasks, 1 if any of them does.

    Case does not matter, and control characters are taken out of the answer first.
    """
    if not isinstance(answer, str):
        raise reject("answer", answer, "a string is needed", "Give the text that follows the prompt.")
    said = _CONTROL.sub("", answer).lower()
    found = [reference.lower() in said for reference in record.references]
    return float(any(found)) if task(record.task).best else sum(found) / len(found)


def score_task(answers: Sequence[str], records: Sequence[Record]) -> float:
    """The mean score of these answers, from 0 to 100."""
    if not records or len(answers) != len(records) or len({record.task for record in records}) > 1:
        given = (len(answers), sorted({record.task for record in records}))
        allowed = f"one answer for each record, and records of one task, are needed; there are {len(records)} records"
        raise reject("(answers, tasks)", given, allowed, "Score the tasks one by one.")
    return 100 * sum(score(answer, record) for answer, record in zip(answers, records, strict=True)) / len(records)


def fact_tokens(tokenizer: Any, record: Record, text: str | None = None, add_special_tokens: bool = True) -> list[Span]:
    """The tokens (first, one after the last) of each of a record's facts.

    Parameters
    ----------
    tokenizer
        A fast Transformers tokenizer.
    record : Record
    text : str, optional
        What is encoded, if not `record.prompt`: any text that holds `record.context`, such as a chat template's.
    add_special_tokens : bool
        As it is encoded; False for the text of a chat template that has them.
    """
    text = record.prompt if text is None else text
    shift = text.find(record.context)
    if shift < 0:
        raise reject("text", text[:40] + "...", "it must hold the record's context", "Wrap record.request as it is.")
    encoding = tokenizer(text, return_offsets_mapping=True, add_special_tokens=add_special_tokens)
    kept = [(number, *span) for number, span in enumerate(encoding["offset_mapping"]) if span[1] > span[0]]
    starts, ends = [start for _, start, _ in kept], [end for _, _, end in kept]
    found = list[Span]()
    for start, end in record.facts:
        first, last = bisect_right(ends, start + shift), bisect_left(starts, end + shift) - 1
        found.append((kept[first][0], kept[last][0] + 1))
    return found
