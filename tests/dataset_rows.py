"""Rows of every dataset task, invented."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OPTIONS = ["the mill", "the barn", "B. the well", "the inn"]
CLASSES = ["City", "Other City", "State", "Plant"]
PROBLEM = "How many {apples} are left?"


def longbench(name: str, **changes: Any) -> dict[str, Any]:
    answers = {"passage_count": ["7"], "passage_retrieval_en": ["Paragraph 12"], "passage_retrieval_zh": ["段落12"]}
    row = {
        "input": "Which {one} is it?",
        "context": "Ada keeps {bees}.\nBob does not.",
        "answers": answers.get(name, ["Ada"]),
        "length": 9,
        "dataset": name,
        "language": "en",
        "all_classes": CLASSES if name in ("trec", "lsht") else None,
        "_id": "f00d",
    }
    return row | changes


def infinitebench(name: str, **changes: Any) -> dict[str, Any]:
    answers: dict[str, Any] = {
        "passkey": ["71432"], "number_string": ["3000077442"], "math_find": [48.0], "math_calc": [[7, 3]],
        "code_run": [-4], "code_debug": ["the barn"], "longbook_choice_eng": ["the barn"],
    }  # fmt: skip
    row = {
        "id": 3,
        "context": "Ada keeps {bees}.\nBob does not.",
        "input": "What does func_12(-3) give?",
        "answer": answers.get(name, ["Ada"]),
        "options": OPTIONS if name in ("code_debug", "longbook_choice_eng") else [],
    }
    return row | changes


def row_of(name: str, **changes: Any) -> dict[str, Any]:
    """A row that is right for this task."""
    if name == "aime":
        return {"problem_idx": 5, "problem": PROBLEM, "answer": 42} | changes
    if name == "math500":
        known = {"solution": "So \\boxed{42}.", "subject": "Algebra", "level": 2, "unique_id": "test/algebra/1.json"}
        return {"problem": PROBLEM, "answer": "42", **known} | changes
    family, task = name.split("/")
    return (longbench if family == "longbench" else infinitebench)(task, **changes)


def written(path: Path, *rows: Any) -> Path:
    file = path / "rows.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return file
