"""The driver of many runs: what its list may hold, and that it answers what `eval run` answers."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "quality_grid.py"
spec = importlib.util.spec_from_file_location("quality_grid", SCRIPT)
assert spec is not None and spec.loader is not None
grid = importlib.util.module_from_spec(spec)
spec.loader.exec_module(grid)
RUN = {"name": "a", "task": "niah_single_1", "context": 512, "budgets": {"locks": [64], "h2o": [64, 128]}}
RUN |= {"new_tokens": 4, "batch": 2, "gib": 2, "records": 2}


def write(folder: Path, *runs: Any) -> Path:
    path = folder / "runs.jsonl"
    path.write_text("".join(json.dumps(run) + "\n" for run in runs))
    return path


def drive(folder: Path, *runs: Any, memory: float = 4) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(write(folder, *runs)), "--model", "SmolLM2-135M-Instruct"]
    command += ["--folder", str(folder / "answers"), "--memory", str(memory), "--device", "cpu", "--workers", "1"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "niah"}, "task='niah': give one of niah_single_1"),
        ({"budgets": {"locks": [64], "loky": [64]}}, "selector 'loky'"),
        ({"budgets": {"locks": [64, 512]}}, "budget 512: give less than context=512"),
        *(({"budgets": budgets}, "give an object as") for budgets in ({"locks": []}, {"locks": 64}, {}, [64])),
        ({"budgets": {"locks": [50]}}, "budget=50 is not allowed"),
        ({"budgets": {"locks": ["64"]}}, "budget='64' is not allowed"),
        ({"gib": "2"}, "gib='2': give a number above 0"),
        ({"gib": float("nan")}, "gib=nan: give a number above 0"),
        ({"batch": True}, "batch=True: give a number above 0"),
        ({"context": 512.0}, "context=512.0: give a number above 0"),
        ({"name": ""}, "name='': give a name"),
        ({"records": 0}, "records=0: give a number above 0"),
        ({"name": "../a"}, "name='../a': give a name"),
    ],
)
def test_a_list_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        grid.read_runs(write(tmp_path, RUN | changes))


def test_names_and_lines(tmp_path: Path) -> None:
    without = {name: RUN[name] for name in RUN if name != "gib"}
    for runs, message in (((), "has no run"), ((5,), "is 5: give one object a line"), ((RUN, RUN), "as another")):
        with pytest.raises(ValueError, match=message):
            grid.read_runs(write(tmp_path, *runs))
    with pytest.raises(ValueError, match="has no gib"):
        grid.read_runs(write(tmp_path, without))
    path = write(tmp_path, RUN)
    path.write_text("\n" + path.read_text() + "\n")
    assert grid.read_runs(path) == [RUN]


def test_it_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    for run, message in ((RUN | {"gib": 5}, "a would take more than --memory 4"), (RUN | {"gib": -1}, "gib=-1")):
        done = drive(tmp_path, run)
        assert done.returncode == 2 and message in done.stderr and not (tmp_path / "answers").exists()


def test_too_little_memory_halves_the_batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    batches: list[int] = []

    def run(arguments: Any, *more: Any) -> list[dict[str, Any]]:
        batches.append(arguments.batch)
        if arguments.batch > least:
            raise torch.OutOfMemoryError("CUDA out of memory") if arguments.batch > 4 else RuntimeError(words)
        return [{"batch": arguments.batch}]

    monkeypatch.setattr("pagelocks.eval.quality.run", run)
    least, words = 2, "CUBLAS_STATUS_ALLOC_FAILED"
    assert grid.answer(RUN | {"batch": 7}, tmp_path, {}, None, None, None) == [{"batch": 2}] and batches == [7, 4, 2]
    least = 0
    with pytest.raises(RuntimeError, match="ALLOC_FAILED"):
        grid.answer(RUN, tmp_path, {}, None, None, None)
    assert batches[3:] == [2, 1]
    words = "something else"
    with pytest.raises(RuntimeError, match="something else"):
        grid.answer(RUN, tmp_path, {}, None, None, None)
    assert batches[5:] == [2]


@pytest.mark.model
def test_it_answers_and_goes_on(tmp_path: Path) -> None:
    """A run that is done is not answered again; one that cannot be fails, is named, and does not stop the next."""
    assert drive(tmp_path, RUN).returncode == 0
    first = (tmp_path / "answers" / "a.jsonl").read_text()
    assert len(first.splitlines()) == 1 + 2 * 4  # a header; dense, LOCKS and H2O twice for each record
    longer = RUN | {"name": "b", "new_tokens": 8000}
    done = drive(tmp_path, longer, RUN, RUN | {"name": "c", "budgets": {"quest": [64]}})
    assert done.returncode == 1 and "failed: ['b']" in done.stderr and "--new-tokens=8000" in done.stderr
    assert (tmp_path / "answers" / "a.jsonl").read_text() == first
    assert len((tmp_path / "answers" / "c.jsonl").read_text().splitlines()) == 1 + 2 * 2
