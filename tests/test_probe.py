"""Coverage of the heads that look for the answer, apart from the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_hf import make_model, prompt
from test_quality import NOBODY, line

from pagelocks.eval import tables
from pagelocks.eval.probe import LEAST_MASS, Probe
from pagelocks.eval.prompt import Prompt
from pagelocks.eval.runner import Method, Runner


def test_retrieval_heads_are_those_whose_attention_is_on_the_answer() -> None:
    """By a loop over layers and heads: which look, and what the choice holds of what the oracle's holds for them."""
    model, methods = make_model(), [Method("exact", 64), Method("locks", 64), Method("random", 64)]
    spans = ((40, 43), (90, 91))
    probe = Probe([Prompt(NOBODY, (), spans)], 2)
    steps: list[Any] = []

    def watch(step: Any, selectors: dict[Method, Any]) -> None:
        probe(step, selectors)
        if step.keys.shape[-2] <= 202:
            steps.append((step.layer, step.query[0].double(), step.keys[0].double(), step.scale))

    Runner(model, methods, []).run(prompt(200), 5, watch)
    links = {method.selector: probe.links(0, method, 5) for method in methods}
    looks = torch.zeros(3, 2, 3, dtype=torch.float64)
    for layer, query, keys, scale in steps:
        for head in range(2):
            weights = (query[head] @ keys[head].T * scale).softmax(-1)
            looks[layer, head] += weights[:, 32:48].sum(-1) / 2 + weights[:, 80:96].sum(-1) / 2
    share = float((looks >= LEAST_MASS).double().mean())
    assert 0 < share < 1
    for found in links.values():
        assert found and found["retrieval_heads"] == pytest.approx(share, abs=1e-6)
    exact, locks, random = links["exact"], links["locks"], links["random"]
    assert exact and locks and random
    assert exact["coverage_ratio_retrieval"] == exact["coverage_ratio_rest"] == 1
    for kind in ("retrieval", "rest"):
        assert locks[f"coverage_ratio_{kind}"] > random[f"coverage_ratio_{kind}"]
    # Both together are all heads: no ratio of sums leaves the range that the two span.
    both = probe._coverage[0]
    held, possible = torch.stack([each for step in (1, 2) for each in both[step, methods[1]]]).sum((0, 2, 3))
    ends = sorted([locks["coverage_ratio_retrieval"], locks["coverage_ratio_rest"]])
    assert ends[0] < float(held / possible) < ends[1]
    mask = (looks >= LEAST_MASS).repeat(2, 1, 1)
    ours, best = torch.stack([each for step in (1, 2) for each in both[step, methods[1]]]).unbind(1)
    assert locks["coverage_ratio_retrieval"] == pytest.approx(float(ours[mask].sum() / best[mask].sum()), abs=1e-5)


def test_records_that_do_not_say_where_the_answer_is_have_no_such_heads() -> None:
    probe = Probe([Prompt(NOBODY, (), ())], 1)
    Runner(make_model(), [Method("locks", 64)], []).run(prompt(150), 3, probe)
    links = probe.links(0, Method("locks", 64), 3)
    assert links and set(links) == {"coverage_ratio", "worst", "p5"}


def test_the_table_shows_them_where_they_are() -> None:
    links = {"coverage_ratio": 0.9, "worst": 0.1, "p5": 0.2}
    lines = [line("locks", 0, 1, links=links), line("locks", 1, 0, links=links)]
    assert "retrieval heads" not in [column.header for column in tables.summary_table(lines).columns]
    lines[1]["links"] = links | {"coverage_ratio_retrieval": 0.75, "retrieval_heads": 0.25}
    assert tables.summaries(lines)[0]["coverage_ratio_retrieval"] == 0.75
    table = tables.summary_table(lines)
    shown = {column.header: list(column.cells) for column in table.columns}
    assert (shown["coverage"], shown["retrieval heads"], shown["the rest"]) == (["0.900"], ["0.750"], [""])
