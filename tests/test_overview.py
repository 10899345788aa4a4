"""`pagelocks eval overview`: means over tasks and budget floors, from lines written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_quality import HEADER, line

from pagelocks.cli import main
from pagelocks.eval.overview import floors, floors_table, means, means_table


def cell(task: str, selector: str, budget: int, scores: list[float], **more: Any) -> list[dict[str, Any]]:
    return [line(selector, at, score, task=task, budget=budget, **more) for at, score in enumerate(scores)]


LINES = [
    *cell("a", "dense", 0, [1, 1, 1, 1]),
    *cell("b", "dense", 0, [1, 1, 1, 0]),
    *cell("hard", "dense", 0, [1, 0, 0, 0]),
    *cell("a", "exact", 64, [1, 1, 1, 0], links={"coverage_ratio": 1.0}),
    *cell("b", "exact", 64, [1, 1, 1, 0]),
    *cell("a", "exact", 128, [1, 1, 1, 1]),
    *cell("b", "exact", 128, [1, 1, 1, 0]),
    *cell("a", "locks", 64, [1, 1, 0, 0], links={"coverage_ratio": 0.9, "retention": 0.5}),
    *cell("b", "locks", 64, [1, 1, 1, 0], links={"coverage_ratio": 0.8}),
    *cell("hard", "locks", 64, [0, 0, 0, 0]),
    *cell("a", "locks", 128, [1, 1, 1, 1]),
    *cell("b", "locks", 128, [1, 0, 0, 0]),
    *cell("a", "quest", 64, [0, 0, 0, 0]),  # of one task alone
]


def test_means_are_over_the_tasks_that_dense_attention_solves() -> None:
    found = {(row["selector"], row["budget"]): row for row in means(LINES)}
    assert set(found) == {("dense", 0), ("exact", 64), ("exact", 128), ("locks", 64), ("locks", 128)}
    assert all(row["tasks"] == ["a", "b"] and row["n"] == 8 for row in found.values())
    locks = found["locks", 64]
    assert (locks["score"], locks["coverage_ratio"], locks["retention"]) == (62.5, 0.85, 0.5)
    assert locks["against_dense"]["difference"] == -25 and locks["against_exact"]["difference"] == -12.5
    assert found["locks", 128]["against_exact"]["difference"] == -25 and "against_dense" not in found["dense", 0]
    assert found["exact", 64]["against_locks"]["difference"] == 12.5 and locks["against_locks"]["difference"] == 0
    assert {row["selector"] for row in means(LINES, solved=90)} == {"dense", "exact", "locks", "quest"}
    table = means_table(list(found.values()))
    shown = [list(column.cells)[list(found).index(("exact", 64))] for column in table.columns]
    assert shown[2:4] == ["exact", "64"] and shown[6] == "" and shown[7].startswith("+12.5 (")
    assert table.row_count == 5


def test_a_method_that_lacks_records_is_left_out() -> None:
    lines = [*cell("a", "dense", 0, [1, 1, 0, 0]), *cell("a", "locks", 64, [1]), *cell("a", "exact", 64, [1, 1, 0, 1])]
    assert [row["selector"] for row in means(lines, solved=50)] == ["dense", "exact"]
    assert floors(lines, solved=50)[0]["floors"] == {"exact": 64}


def test_a_floor_holds_at_all_larger_budgets() -> None:
    a, b = floors(LINES)
    assert (a["task"], a["dense"], a["n"]) == ("a", 100, 4)
    assert a["floors"] == {"exact": 128, "locks": 128, "quest": None}
    assert b["floors"] == {"exact": 64, "locks": None}  # enough at 64 and not at 128
    assert floors(LINES, within=50)[1]["floors"]["locks"] == 64
    table = floors_table([a, b])
    assert [list(column.cells)[1] for column in table.columns] == ["600", "b", "4", "75.0", "64", "-", ""]


def test_the_command_joins_files_of_one_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, some in (("one", LINES[:20]), ("two", LINES[20:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in [HEADER, *some]))
    files = [str(tmp_path / "one.jsonl"), str(tmp_path / "two.jsonl")]
    assert main(["eval", "overview", *files, "--json", "--output", str(tmp_path / "out.json")]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["means"] == means(LINES) and result["floors"] == floors(LINES) and result["model"] == HEADER["model"]
    assert json.loads((tmp_path / "out.json").read_text()) == [result]
    assert main(["eval", "overview", *files]) == 0
    assert "budget floors" in capsys.readouterr().out
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(each) + "\n" for each in [HEADER | {"seed": 8}, *LINES[:12]]))
    assert main(["eval", "overview", *files, str(other), "--json"]) == 0
    apart = json.loads(capsys.readouterr().out)
    assert [each["seed"] for each in apart] == [7, 8] and apart[0] == result
    assert main(["eval", "overview", *files, "--within", "-1"]) != 0
    assert "--within=-1.0 is not allowed: points, 0 to 100" in capsys.readouterr().err
