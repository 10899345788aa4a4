"""`pagelocks eval figure`: arguments, the file and the picture, and figures that need no model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_hf import make_model
from test_quality import HEADER, line

from pagelocks import theory
from pagelocks.cli import main
from pagelocks.eval import EvalFailure
from pagelocks.eval.figures import bytes as bytes_figure
from pagelocks.eval.figures import cli as figure_cli

Capsys = pytest.CaptureFixture[str]


def result_of(capsys: Capsys) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_bytes_by_hand(tmp_path: Path, capsys: Capsys) -> None:
    path = tmp_path / "new" / "bytes.json"
    options = ["--context", "1048576", "--budget", "2048", "--head-dim", "128", "--output", str(path)]
    assert main(["eval", "figure", "--json", "bytes", *options]) == 0
    found = result_of(capsys)
    assert json.loads(path.read_text()) == found and path.with_suffix(".png").stat().st_size > 4000
    rows = {row["selector"]: row for row in found["rows"] if "selector" in row}
    dense = 1048576 * 512
    assert rows["locks"]["bytes"] == 65536 * 832 + 2048 * 512 and rows["locks"]["dense_bytes"] == dense
    assert rows["locks"]["summary_share"] == pytest.approx(0.1016, abs=1e-4)
    assert rows["exact"]["summary_bytes"] == dense / 2 and rows["quest"]["page_bytes"] == 512
    assert rows["streaming"]["bytes"] == 2048 * 512
    records = {(row["page_size"], row["rank"]): row for row in found["rows"] if "record_bytes" in row}
    assert records[16, 8]["record_bytes"] == 832 and (8, 8) not in records
    assert main(["eval", "figure", "bytes", *options, "--picture", str(tmp_path / "b.svg")]) == 0
    assert "<svg" in (tmp_path / "b.svg").read_text() and "832" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"head_dim=63 is not allowed"):
        bytes_figure.rows(head_dims=[63])


def run_file(path: Path, model: str = "tiny", **more: Any) -> Path:
    scores = {"dense": [1, 1, 1, 0], "exact": [1, 1, 0, 0], "locks": [1, 0, 0, 0]}
    lines = [line(name, index, score) for name, row in scores.items() for index, score in enumerate(row)]
    lines += [line("locks", index, 1, budget=128) for index in range(4)]
    header = {**HEADER, "model": model, "versions": {}, "device": "cpu", **more}
    path.write_text("".join(json.dumps(each) + "\n" for each in [header, *lines]))
    return path


def test_scores_come_from_files_of_runs(tmp_path: Path, capsys: Capsys) -> None:
    run, out = run_file(tmp_path / "run.jsonl"), str(tmp_path / "score.json")
    assert main(["eval", "figure", "score", "--runs", str(run), "--output", out, "--json"]) == 0
    found = result_of(capsys)
    scores = {(row["selector"], row["budget"]): row["score"] for row in found["rows"]}
    assert scores == {("dense", 0): 75, ("exact", 64): 50, ("locks", 64): 25, ("locks", 128): 100}
    assert found["model"] == "tiny" and (tmp_path / "score.png").stat().st_size > 4000
    table, again = tmp_path / "table.json", str(tmp_path / "again.json")
    assert main(["eval", "table", str(run), "--output", str(table), "--json"]) == 0
    assert main(["eval", "figure", "score", "--runs", str(table), "--output", again, "--json"]) == 0
    assert [row["score"] for row in result_of(capsys)["rows"]] == [row["score"] for row in found["rows"]]
    other = run_file(tmp_path / "other.jsonl", "other")
    only_dense = tmp_path / "dense.jsonl"
    only_dense.write_text("".join(run.read_text().splitlines(keepends=True)[:5]))
    (tmp_path / "bad.jsonl").write_text("{}\n")
    (tmp_path / "bad.json").write_text('[{"model": "tiny"}]')
    for runs, said in [
        ([run, other], "files of one model with answers"),
        (
            [run, run_file(tmp_path / "seed.jsonl", seed=8)],
            "--runs='seed of 7, 8' is not allowed: files of one setting",
        ),
        ([only_dense], "answers of a selector beside dense's"),
        ([tmp_path / "bad.jsonl"], "a header and lines of a run"),
        ([tmp_path / "bad.json"], "or a table's cells (KeyError('task'))"),
        ([tmp_path / "none.jsonl"], "No such file"),
    ]:
        assert main(["eval", "figure", "score", "--runs", *map(str, runs), "--output", out]) == 2
        assert said in capsys.readouterr().err


def test_bad_arguments_are_refused_before_a_model_is_loaded(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*given: Any) -> None:
        raise AssertionError("a model was looked for")

    monkeypatch.setattr(figure_cli, "load_tokenizer", load)
    for name, more, said in [
        ("scope", ["--rank", "16"], "rank=16 is not allowed"),
        ("ladder", ["--rank", "0"], "rank=0 is not allowed"),
        ("ladder", ["--budget", "100"], "budget=100 is not allowed"),
        ("ladder", ["--budget", "4096"], "--budget=4096 is not allowed: less than --context, 2048"),
        ("groups", ["--context", "100"], "--budget=256 is not allowed: less than --context, 100"),
        ("precision", ["--bits", "4", "3"], "--bits=[4, 3] is not allowed: 16, 8, 4 or 2"),
        ("page-size", ["--page-size", "65"], "page_size=65 is not allowed"),
        ("page-size", ["--page-size", "64", "--budget", "128"], "budget=128 is not allowed"),
        ("tail", ["--steps", "0"], "--steps=0 is not allowed: 1 or more"),
        ("retention", ["--records", "0"], "--records=0 is not allowed: 1 or more"),
        ("theory", ["--calibration", "0"], "--calibration=0 is not allowed: 1 or more"),
        ("tail", ["--context", "63"], "--context=63 is not allowed: 64 or more"),
        ("tail", ["--output", str(tmp_path / "f.txt")], "a name that ends in .json"),
        ("tail", ["--picture", str(tmp_path / "f.gif")], "a name that ends in .png, .svg or .pdf"),
    ]:
        common = ["eval", "figure", name, "--model", "SmolLM2-135M-Instruct", "--output", str(tmp_path / "f.json")]
        if name == "groups":
            more = [*more, "--budget", "256"]
        assert main([*common, *more]) == 2, name
        assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    with pytest.raises(SystemExit):
        main(["eval", "figure", "scope", "--model", "x", "--output", "f.json", "--bits", "4"])


def test_records_that_never_come_are_a_failure() -> None:
    with pytest.raises(EvalFailure, match="answers end with their first token, or every layer has a window"):
        list(figure_cli._shown(iter([]), 2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, and a real tokenizer."""
    from transformers import AutoTokenizer

    from pagelocks.models import fetch

    path, tokenizer = tmp_path_factory.mktemp("tiny"), AutoTokenizer.from_pretrained(fetch("SmolLM2-135M-Instruct"))
    tokenizer.save_pretrained(path)
    make_model(vocab_size=len(tokenizer), max_position_embeddings=1024).save_pretrained(path)
    return path


@pytest.mark.model
@pytest.mark.parametrize("name", ["retention", "page-size", "tail"])  # calibrated, with lists, with one number
def test_a_figure_is_one_command(name: str, folder: Path, tmp_path: Path, capsys: Capsys) -> None:
    out = tmp_path / f"{name}.json"
    common = ["--model", str(folder), "--context", "500", "--records", "1", "--steps", "1", "--dtype", "float32"]
    common += ["--task", "niah_single_1", "--device", "cpu", "--output", str(out)]
    assert main(["eval", "figure", name, *common]) == 0
    found = json.loads(out.read_text())
    assert found["figure"] == name and found["model"] == folder.name and found["rows"]
    assert {row["prompts"] for row in found["rows"]} == {1} and found["versions"]["torch"]
    assert out.with_suffix(".png").stat().st_size > 4000 and capsys.readouterr().out.count("\n") > len(found["rows"])
    if "budgets" in found:
        assert max(found["budgets"]) == {"retention": 256, "page-size": 256}[name]  # 2,048 tokens are too many


@pytest.mark.model
def test_a_broken_bound_is_a_failure_with_a_file(
    folder: Path, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = theory.log_mass_error_bound
    monkeypatch.setattr(theory, "log_mass_error_bound", lambda *given: whole(*given) * 1e-3)
    out = tmp_path / "theory.json"
    common = ["--model", str(folder), "--context", "500", "--records", "1", "--steps", "1", "--rank", "2"]
    common += ["--task", "niah_single_1", "--dtype", "float32", "--output", str(out), "--json"]
    assert main(["eval", "figure", "theory", *common]) == 1
    said = capsys.readouterr()
    assert "cases break theorem-1-i:" in said.err and str(out) in said.err and not said.out
    assert any(row["violated"] for row in json.loads(out.read_text())["rows"])


@pytest.mark.model
def test_the_paper_s_statements_hold_on_a_real_model(tmp_path: Path, capsys: Capsys) -> None:
    common = ["--model", "SmolLM2-135M-Instruct", "--context", "450", "--records", "1", "--steps", "1", "--json"]
    common += ["--task", "niah_single_1", "--calibration", "1", "--dtype", "float32", "--device", "cpu"]
    common += ["--rank", "8", "--budget", "128", "--output", str(tmp_path / "theory.json")]
    assert main(["eval", "figure", "theory", *common]) == 0
    rows = {row["statement"]: row for row in result_of(capsys)["rows"]}
    assert len(rows) == 6 and not any(row["violated"] for row in rows.values())
    assert rows["theorem-1-i"]["checked"] > 5000 and rows["theorem-1-i"]["of_bound_max"] < 1
    blind = rows["proposition-1"]
    assert blind["checked"] == 90 and blind["locks_reads"] > 0.95 and blind["loki_reads"] < 0.3
