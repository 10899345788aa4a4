"""The checks of real tokens on a GPU: their own rules, on made-up results."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pagelocks.eval.records import complete_pages
from pagelocks.eval.serving import NOISE, PARTS, exact_prompts, first_difference, judge, main, step_statistics


def best(*others: float) -> list[tuple[int, float]]:
    """Tokens 7, 8, … whose log-probabilities lie this far below the best one's."""
    return [(7 + n, -0.5 - behind) for n, behind in enumerate((0.0, *others))]


def test_the_same_tokens_have_no_first_difference() -> None:
    assert first_difference([7, 7], [best(1.0)] * 2, [7, 7]) is None


@pytest.mark.parametrize(
    ("found", "others", "gap", "behind", "explained"),
    [
        (8, (0.125, 3.0), 0.125, 0.125, True),
        (8, (NOISE, 3.0), NOISE, NOISE, True),
        (8, (0.375, 3.0), 0.375, 0.375, False),
        (9, (0.125, 0.25), 0.125, 0.25, True),
        (9, (0.125, 3.0), 0.125, 3.0, False),  # two best that are close do not excuse a third
        (50, (0.125, 0.25), 0.125, None, False),
    ],
)
def test_a_difference_is_explained_where_noise_may_swap_the_two(
    found: int, others: tuple[float, ...], gap: float, behind: float | None, explained: bool
) -> None:
    difference = first_difference([7, 7, 7], [best(9.0), best(*others), best(9.0)], [7, found, 3])
    assert difference == {
        "at": 1,
        "gap": pytest.approx(gap),
        "behind": None if behind is None else pytest.approx(behind),
        "explained": explained,
    }


def test_statistics_of_steps() -> None:
    taken = [(99.0, 0)] * 3 + [(2.0, 1)] * 197 + [(3.0, 2), (3.01, 0), (8.0, 4)]
    found = step_statistics(taken, warm_up=3)
    assert (found["steps"], found["median_ms"], found["p99_ms"], found["max_ms"]) == (200, 2.0, 3.01, 8.0)
    assert (found["slow"], found["slow_with_pages"]) == (2, 1)
    assert found["slow_steps"] == [{"step": 201, "ms": 3.01, "built": 0}, {"step": 202, "ms": 8.0, "built": 4}]
    assert found["median_ms_by_pages_built"] == {0: 3.01, 1: 2.0, 2: 3.0, 4: 8.0}
    with pytest.raises(ValueError, match=r"steps=3 is not allowed: more than the 3 of the warm-up"):
        step_statistics(taken[:3], warm_up=3)


def results() -> dict[str, dict[str, Any]]:
    """What the engines hand back when nothing is wrong."""
    seen = {"wrong": 0, "pages_checked": 9, "a_flipped_bit_is_seen": True}
    steps = {"lengths": [5], "engine": [(2.0, 0)] * 4, "gpu": [(4.0, 1)] * 4, "build": [(1.0, 1)] * 4}
    exact = [{"ids": [7, 7], "best": [best(1.0)] * 2}]
    found: dict[str, dict[str, Any]] = {
        "dense": {"exact": exact, "cells": [{"context": 9}, {"context": 5}]},
        "covering": {"exact": exact},
        "locks": {"cells": [{"context": 9}, {"context": 5}]},
        "invariant": {"invariant": seen},
        "steps": {"steps": steps},
    }
    return {name: {**each, "seconds": 1.0} for name, each in found.items()}


def test_a_report_without_failures() -> None:
    report = judge(results(), warm_up=1)
    assert report["failures"] == [] and report["exact"]["differences"] == [None]
    assert [cell["context"] for cell in report["cells"]] == [5, 5, 9, 9]
    assert report["steps"]["gpu"]["steps"] == 3 and report["steps"]["build_share"] == 0.25
    json.dumps(report)


def test_what_is_wrong_is_a_failure() -> None:
    found = results()
    found["covering"]["exact"] = [{"ids": [7, 8], "best": []}]
    found["invariant"]["invariant"] = {"wrong": 2, "pages_checked": 9, "a_flipped_bit_is_seen": True}
    found["locks"] = {"error": "the engine locks ended with status 1", "seconds": 1.0}
    exact, records, engine = sorted(judge(found, warm_up=1)["failures"])
    assert exact == "exact: prompts [0] differ by more than noise"
    assert (records, engine) == ("invariant: 2 records are wrong", "the engine locks ended with status 1")
    found = results()
    found["invariant"]["invariant"]["a_flipped_bit_is_seen"] = False
    assert len(judge(found, warm_up=1)["failures"]) == 1
    assert judge({"dense": {"error": "it ended", "seconds": 1.0}})["failures"] == ["it ended"]


def test_complete_pages_are_those_of_running_and_of_cached_blocks() -> None:
    """Blocks of two pages: a row of 50 tokens in blocks 3 and 5, a cached block 7, a hash of half of block 8."""
    hashes = {7: 96, 8: 16}
    blocks = [
        SimpleNamespace(
            block_id=n, block_hash=f"hash {n}" if n in hashes else None, block_hash_num_tokens=hashes.get(n)
        )
        for n in range(10)
    ]
    manager = SimpleNamespace(get_block_ids=lambda name: ([3, 5],), block_pool=SimpleNamespace(blocks=blocks))
    running = [SimpleNamespace(request_id="a", num_computed_tokens=50)]
    assert complete_pages(SimpleNamespace(kv_cache_manager=manager, running=running), 2) == [6, 7, 10, 14, 15]


def test_prompts_for_exactness_differ_in_length_and_words() -> None:
    tokenizer = SimpleNamespace(encode=str.split)
    prompts = exact_prompts(tokenizer, 20)
    lengths = [len(prompt) for prompt in prompts]
    assert lengths == sorted(set(lengths)) and (lengths[0], lengths[-1]) == (30, 2000)
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 20
    assert exact_prompts(tokenizer, 20) == prompts


@pytest.mark.parametrize(
    ("given", "part"),
    [
        (["--prompts", "0"], "prompts=0 is not allowed: 1 or more"),
        (["--steps", "50"], "more than the warm-up's 50"),
        (["--budget", "100"], "budget=100 is not allowed"),
        (["--needle-lengths", "4096", "8192"], "needle_lengths=[8192] is not allowed: above the budget of 1024"),
        (["--needle-lengths", "1024"], "needle_lengths=[1024] is not allowed"),
        (["--tokens", "7000"], "tokens=7000 is not allowed: at most 6192"),
        (["--output", "/nowhere/at/all.json"], "in a folder that exists and is yours"),
        (["--model", "no-such-model"], "neither an existing folder nor a known model"),
    ],
)
def test_bad_arguments_are_named_before_an_engine_starts(
    given: list[str], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 8192}')
    with pytest.raises(SystemExit):
        main(["--model", str(tmp_path), *given])
    assert part in capsys.readouterr().err


def test_every_part_has_engines() -> None:
    from pagelocks.eval.engines import ENGINES

    assert {engine for engines in PARTS.values() for engine in engines} == set(ENGINES)
