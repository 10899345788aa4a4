"""The needle evaluation: its rules on made-up answers, then a small part of it for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from pagelocks.eval.needle import MAX_MODEL_LEN, Cell, Engine, counting, main, report_text, show, verdicts
from pagelocks.prompts import NeedlePrompt
from pagelocks.vllm.counters import FIELDS


def cell(context: int, selector: str, budget: int | None, right: int, asked: int = 20) -> Cell:
    return Cell(context, selector, budget, ["7"] * asked, [number < right for number in range(asked)], 10, 90)


def cells(dense: int, locks: int, random: int, budget: int, context: int = 1024) -> list[Cell]:
    return [
        cell(context, "dense", None, dense),
        cell(context, "locks", budget, locks),
        cell(context, "random", budget, random),
    ]


@pytest.mark.parametrize(
    ("dense", "random", "counts"), [(16, 4, True), (15, 4, False), (16, 5, False), (20, 0, True), (0, 0, False)]
)
def test_a_cell_counts_where_dense_answers_and_random_does_not(dense: int, random: int, counts: bool) -> None:
    assert counting(cells(dense, 10, random, 128), 1024, 128) is counts


def test_a_cell_without_random_or_dense_does_not_count() -> None:
    full = cells(20, 20, 0, 128)
    assert not counting(full[:2], 1024, 128) and not counting(full[1:], 1024, 128)
    assert not counting(full, 1024, 512) and not counting(full, 2048, 128)


@pytest.mark.parametrize(
    ("budget", "dense", "locks", "met"),
    [(512, 20, 19, True), (512, 20, 18, False), (512, 16, 20, True), (128, 20, 18, True), (128, 20, 17, False)],
)
def test_the_goals(budget: int, dense: int, locks: int, met: bool) -> None:
    (verdict,) = verdicts(cells(dense, locks, 0, budget))
    assert verdict["met"] is met
    assert (verdict["passed"], verdict["failed"]) == (([1024], []) if met else ([], [1024]))


def test_one_failed_context_fails_the_goal_and_one_that_does_not_count_is_named() -> None:
    mixed = cells(20, 20, 0, 512) + cells(20, 3, 0, 512, 2048) + cells(20, 3, 9, 512, 4096)
    (verdict,) = verdicts(mixed)
    assert verdict["met"] is False
    assert (verdict["passed"], verdict["failed"], verdict["not_counting"]) == ([1024], [2048], [4096])
    (verdict,) = verdicts(cells(3, 3, 0, 512))
    assert verdict["met"] is None


def test_the_report_is_json_and_the_table_says_what_counts() -> None:
    run = cells(20, 19, 9, 128)
    report = json.loads(report_text({"model": "toy"}, run))
    assert report["model"] == "toy" and len(report["cells"]) == 3
    assert [row["score"] for row in report["cells"]] == [20, 19, 9]
    assert report["cells"][1]["right"].count(True) == 19 and report["cells"][1]["pages_skipped"] == 90
    text = StringIO()
    show(run, Console(file=text, width=120))
    assert "19 of 20" in text.getvalue() and "10.0%" in text.getvalue() and "no cell counts" in text.getvalue()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contexts", "512"], "above the largest budget"),
        (["--contexts", "8192"], "at or below 8182"),
        (["--budgets", "100"], "budget=100 is not allowed"),
        (["--prompts", "0"], "give 1 or more"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--selectors", "best"], "invalid choice"),
    ],
)
def test_bad_arguments_stop_before_the_engine(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


class FakeEngine(Engine):
    """Everything but vLLM: each prompt is answered by its first token's id, in 9 tokens; the counters grow as told."""

    def __init__(self, **added: int) -> None:
        counters = SimpleNamespace(values=np.zeros((4, len(FIELDS)), int))
        self.state: Any = SimpleNamespace(counters=counters, layers=["a", "b"])
        self.llm: Any = SimpleNamespace(generate=self.generate)
        self.sampling: Any = None
        self.added = added

    def generate(self, prompts: list[list[int]], sampling: object, use_tqdm: bool) -> list[SimpleNamespace]:
        for name, value in self.added.items():
            self.state.counters.values[:2, FIELDS.index(name)] += value
        return [SimpleNamespace(outputs=[SimpleNamespace(text=f" {p[0]}", token_ids=[0] * 9)]) for p in prompts]


PROMPTS = [NeedlePrompt("", "1234567", (1234567,), "key", 0.5, "noise", 0), NeedlePrompt("", "7", (8,), "", 0, "", 1)]


def test_answers_and_pages_are_added_up_over_batches() -> None:
    engine, asked = FakeEngine(rows_sparse=16, pages_read=5, pages_skipped=7), Cell(1024, "exact", 128)
    engine.answer(asked, PROMPTS)
    engine.answer(asked, PROMPTS)
    assert asked.right == [True, False] * 2 and asked.answers == [" 1234567", " 8"] * 2
    assert (asked.pages_read, asked.pages_skipped) == (20, 28)
    assert (engine.state.options.selector, engine.state.options.config.budget) == ("exact", 128)
    engine = FakeEngine(rows_dense=16)
    engine.answer(Cell(1024, "dense", None), PROMPTS)
    assert engine.state.options.config.dense_below > MAX_MODEL_LEN


@pytest.mark.parametrize(
    ("selector", "budget", "added"),
    [
        ("dense", None, {"rows_sparse": 1}),
        ("locks", 128, {"rows_dense": 16}),
        ("locks", 128, {"rows_sparse": 15, "pages_read": 5, "pages_skipped": 7}),  # of 2 answers' 8 steps each
        ("locks", 128, {"rows_sparse": 16, "pages_read": 5}),
    ],
)
def test_a_run_that_was_not_what_was_asked_for_stops_it(
    selector: str, budget: int | None, added: dict[str, int]
) -> None:
    with pytest.raises(RuntimeError, match="sparse"):
        FakeEngine(**added).answer(Cell(1024, selector, budget), PROMPTS)


@pytest.mark.model
@pytest.mark.engine
def test_locks_finds_what_dense_finds_and_random_does_not(tmp_path: Path) -> None:
    output = tmp_path / "needle.json"
    # A process of its own: an engine's state does not leave it.
    command = [sys.executable, "-m", "pagelocks.eval.needle", "--contexts", "1024", "2048", "--prompts", "5"]
    command += ["--budgets", "128", "--selectors", "locks", "random", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(output.read_text())
    assert report["seeds"] == [0, 1, 2, 3, 4]
    scores = {(row["context"], row["selector"]): row["score"] for row in report["cells"]}
    assert all(len(row["answers"]) == 5 for row in report["cells"])
    for context in (1024, 2048):
        # 5 of 5, or nothing can be said of LOCKS.
        assert scores[context, "dense"] == 5
        assert scores[context, "locks"] >= 4
        assert scores[context, "random"] <= 1
    for row in report["cells"]:
        pages = row["pages_read"] + row["pages_skipped"]
        # 8 pages a step of the 64 or 128 there are; dense reads no page through LOCKS.
        share = row["pages_read"] / pages if pages else None
        assert share == (None if row["selector"] == "dense" else pytest.approx(128 / row["context"], rel=0.05))
