"""Counter files: what is written is read, by another process too, and what a killed process left is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pagelocks.vllm import counters, metrics
from pagelocks.vllm.counters import FIELDS, PAGES_READ, ROWS_SPARSE, CounterFile, family, read_all, remove_stale

WRITER = """
import os, signal
from pagelocks.vllm.counters import CounterFile
file = CounterFile("engine")
file.describe({"instance": "engine", "layers": ["a", "b"]})
file.values[0] = 1, 2, 3, 4, 5, 6, 7
file.values[1] = 1, 2, 3, 40, 50, 60, 70
print("written", flush=True)
signal.pause()
"""


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(counters.tempfile, "tempdir", None)


@pytest.fixture
def writer() -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", WRITER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "written\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_another_process_reads_them(writer: subprocess.Popen[str]) -> None:
    (found,) = read_all(family())
    assert (found.pid, found.header["instance"]) == (writer.pid, "engine")
    assert found.totals() == dict(zip(FIELDS, (1, 2, 3, 44, 55, 66, 77), strict=True))
    assert found.by_layer["b"]["pages_read"] == 40
    assert read_all({1}) == []


def test_the_file_of_a_killed_process_is_not_read_and_then_removed(writer: subprocess.Popen[str]) -> None:
    (path,) = counters.directory().glob("*.counters")
    writer.kill()
    writer.wait()
    assert read_all() == [] and path.exists()
    remove_stale()
    assert not path.exists()


def test_a_pid_that_another_process_has_by_now_is_not_taken_for_it(writer: subprocess.Popen[str]) -> None:
    (path,) = counters.directory().glob("*.counters")
    pid, _, rest = path.name.split("-", 2)
    path.rename(path.with_name(f"{pid}-1-{rest}"))
    assert read_all() == []


def test_other_files_are_passed_over() -> None:
    counters.directory().mkdir()
    (counters.directory() / "x.counters").write_text("no counters")
    file = CounterFile("mine")
    assert [found.header["instance"] for found in read_all()] == ["mine"]
    assert file.values.shape[1] == len(FIELDS)


def test_the_collector_yields_what_was_written_and_nothing_without_an_engine() -> None:
    assert list(metrics.Collector().collect()) == []
    file = CounterFile("mine")
    file.describe({"instance": "mine", "layers": ["a"]})
    file.values[0, ROWS_SPARSE], file.values[0, PAGES_READ] = 5, 70
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family_ in metrics.Collector().collect()
        for sample in family_.samples
    }
    assert samples["pagelocks_rows_total", "mine", "sparse"] == 5
    assert samples["pagelocks_pages_total", "mine", "read"] == 70


def test_registering_collects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from prometheus_client import CollectorRegistry

    monkeypatch.setattr(metrics, "read_all", lambda pids: pytest.fail("collected"))
    CollectorRegistry(auto_describe=True).register(metrics.Collector())
