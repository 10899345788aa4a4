"""The benchmarks' own arithmetic; what they time is the GPU's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagelocks.bench.decode import Case, joined
from pagelocks.cli import main

RESULTS = Path(__file__).parent.parent / "docs" / "results"


@pytest.mark.parametrize(
    ("text", "contexts", "dense_below", "name"),
    [
        ("131072", (131072,), 0, "131072"),
        ("3x4096", (4096,) * 3, 0, "3x4096"),
        ("1024+2x64@16384", (1024, 64, 64), 16384, "2x64+1024@16384"),
    ],
)
def test_cases(text: str, contexts: tuple[int, ...], dense_below: int, name: str) -> None:
    case = Case.parse(text)
    assert (case.contexts, case.dense_below, case.name) == (contexts, dense_below, name)
    assert sorted(Case.parse(name).contexts) == sorted(contexts)


@pytest.mark.parametrize("text", ["", "x4096", "16", "1024@", "2x", "1024+", "-5", "1024@-1"])
def test_cases_that_mean_nothing(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not allowed.*Write, say"):
        Case.parse(text)


def test_sides_are_joined_by_case() -> None:
    dense = [{"case": "1024", "tpot_ms": [2.0, 4.0, 3.0]}, {"case": "64", "tpot_ms": [1.0]}]
    dense += [{"prefill": 1024, "ttft_s": [0.5, 0.4, 0.6]}]
    locks = [{"case": "1024@4096", "tpot_ms": [1.0, 2.0, 1.5]}, {"case": "1024", "tpot_ms": [6.0]}, {"error": "ended"}]
    found = joined(dense, locks, {"shape": "s"})
    assert [(r["case"], r["dense_below"], r["dense_ms"], r["locks_ms"], r["speedup"]) for r in found] == [
        ("1024", 4096, 3.0, 1.5, 2.0),
        ("1024", 0, 3.0, 6.0, 0.5),
    ]
    assert found[0]["dense_ttft_s"] == 0.5 and found[0]["locks_ttft_s"] is None and found[0]["shape"] == "s"


def test_the_picture_is_of_single_sequences(tmp_path: Path) -> None:
    from pagelocks.bench.picture import draw_decode

    lines = json.loads((RESULTS / "decode-h200.json").read_text())
    draw_decode(lines, tmp_path / "decode.png")
    assert (tmp_path / "decode.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    draw_decode([{**lines[0], "batch": 4}], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_committed_results_have_what_a_reader_needs() -> None:
    decode = json.loads((RESULTS / "decode-h200.json").read_text())
    fields = "shape context batch dense_ms locks_ms dense_ttft_s locks_ttft_s budget dense_below versions commit card"
    assert decode and all(set(fields.split()) <= set(line) for line in decode)
    kernels = json.loads((RESULTS / "kernels-h200.json").read_text())
    fields = "kernel shape context rows us bytes gbps read_gbps peer_us"
    assert kernels and all(set(fields.split()) <= set(line) for line in kernels)


@pytest.mark.parametrize("words", [["bench", "kernels"], ["bench", "decode"]])
def test_without_a_gpu_they_say_so(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 1
    assert "needs a GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["decode", "--case", "12"], "case='12' is not allowed"),
        (["decode", "--repeats", "0"], "--repeats=0 is not allowed: 1 or more"),
        (["decode", "--utilization", "1.5"], "--utilization=1.5 is not allowed"),
        (["decode", "--shape", "llama-3.1-8b", "--case", "200000"], "a context=200000 is not allowed: at most 130944"),
        (["kernels", "--rows", "0"], "--rows=0 is not allowed"),
        (["kernels", "--context", "5"], "--context=5 is not allowed: 32 or more"),
        (["kernels", "--budget", "7"], "budget=7 is not allowed"),
    ],
)
def test_bad_arguments_come_first(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    assert message in capsys.readouterr().err


def test_unknown_shapes_are_refused() -> None:
    with pytest.raises(SystemExit):
        main(["bench", "kernels", "--shape", "no-such"])
