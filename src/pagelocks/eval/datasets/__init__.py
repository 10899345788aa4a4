"""Public benchmarks from a file: LongBench, InfiniteBench, AIME, MATH-500.

    examples = load("longbench/hotpotqa", "hotpotqa.jsonl", limit=20)
    example = fit(examples[0], tokenizer, window - examples[0].new_tokens)
    score(answer, example)

Formats and scores are the benchmarks'; the prompts are our own words, so a score is not to be set beside a published
one without saying so.
"""

from __future__ import annotations

from pathlib import Path

from ...config import reject
from . import aime, infinitebench, longbench, math500
from .base import Example, Task, fit, whole
from .files import read_rows
from .metrics import package

__all__ = ["DATASETS", "Example", "Task", "dataset", "fit", "load", "score"]

DATASETS: dict[str, Task] = {
    task.name: task for module in (longbench, infinitebench, aime, math500) for task in module.TASKS
}
"""Name of a task -> the task."""


def dataset(name: str) -> Task:
    """The task of this name; ValueError if there is none."""
    if name not in DATASETS:
        raise reject("dataset", name, f"one of {', '.join(DATASETS)}", "Use longbench/hotpotqa, say.")
    return DATASETS[name]


def load(name: str, path: str | Path, limit: int | None = None) -> list[Example]:
    """The examples of a file, in its order.

    Parameters
    ----------
    name : str
        A key of `DATASETS`.
    path : path
        The task's file as published, JSON with an object a line.
    limit : int, optional
        Take the first so many.

    Raises
    ------
    ValueError
        For an unknown name, or a file that is missing or of another format, with the line.
    ImportError
        If a package that the score takes is missing.
    """
    task = dataset(name)
    if limit is not None:
        whole("limit", limit, 1)
    for module in task.needs:
        package(module)
    examples = list[Example]()
    for index, row in enumerate(read_rows(path, name, limit)):
        parts = task.make(row)
        examples.append(
            Example(
                task=name,
                index=index,
                id=str(index) if parts.id is None else parts.id,
                before=parts.before,
                context=parts.context,
                after=parts.after,
                references=parts.references,
                new_tokens=task.new_tokens,
                chat=task.chat,
                meta=parts.meta,
            )
        )
    return examples


def score(answer: str, example: Example) -> float:
    """From 0 to 1, as the example's benchmark scores this answer."""
    if not isinstance(answer, str):
        raise reject("answer", answer, "a string is needed", "Give the text that follows the prompt.")
    return dataset(example.task).grade(answer, example)
