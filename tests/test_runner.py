"""One prefill, many decodes: each method answers as it would by itself, and links are of dense attention's queries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_hf import generate, make_model, prompt
from test_quality import NOBODY

import pagelocks.hf as hf
from pagelocks import LocksConfig
from pagelocks.eval import runner
from pagelocks.eval.probe import Probe
from pagelocks.eval.prompt import Prompt
from pagelocks.eval.runner import Method, Runner

NAMES = ["locks", "quest", "snapkv", "rkv", "rocketkv"]


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


@pytest.mark.parametrize("chunk", [64, 4096])
def test_each_method_answers_as_generate_does(model: Any, chunk: int) -> None:
    """From one prefill, in parts or whole; selectors that learn have learnt what they learn in a run of their own."""
    ids = prompt(150)
    expected = {}
    for name in NAMES:
        hf.attach(model, LocksConfig(budget=64, dense_below=0), name)
        expected[name] = generate(model, ids, 8)[0].tolist()
    hf.detach(model)
    dense = generate(model, ids, 8)[0].tolist()
    for names in (NAMES, NAMES[::-1]):
        found = Runner(model, [Method(name, 64) for name in names], [], chunk=chunk).run(ids, 8)
        assert found[Method("dense")].tokens == [dense]
        for name in names:
            answers = found[Method(name, 64)]
            assert answers.tokens == [expected[name]], name
            # 7 sparse steps of 3 layers and 2 KV heads, 4 pages each, of 10 pages.
            assert answers.pages_read == [7 * 3 * 2 * 4] and answers.pages_skipped == [7 * 3 * 2 * 6]


@pytest.mark.parametrize("probe", [True, False])
def test_budgets_that_learn_together_answer_as_alone(model: Any, probe: bool) -> None:
    """What is learnt once for several budgets, and no longer than somebody looks, changes no answer and no link."""
    ids = torch.cat([prompt(150), prompt(150, 1)])
    names = ["h2o", "snapkv", "rkv", "lazyeviction", "kvzip-prompt", "kvzip", "rocketkv", "shadowkv"]
    methods = [Method(name, budget) for name in names for budget in (48, 96)]
    prompts = [Prompt(NOBODY, (), ((40, 43), (90, 91)))] * 2
    look = Probe(prompts, 2) if probe else None
    together = Runner(model, methods, [], chunk=64, request=[7, 8]).run(ids, 7, look, probe_steps=2)
    for method in methods:
        alone = Probe(prompts, 2) if probe else None
        answers = Runner(model, [method], [], chunk=64, request=[7, 8]).run(ids, 7, alone)
        assert answers[method] == together[method], method
        assert answers[Method("dense")] == together[Method("dense")]
        for row in (0, 1) if look and alone else ():
            assert look.links(row, method, 7) == alone.links(row, method, 7), method


def test_rows_of_a_batch_answer_as_alone_and_stop_one_by_one(model: Any) -> None:
    rows = [prompt(120, seed) for seed in range(3)]
    methods = [Method("locks", 64), Method("quest", 64, "per-head")]
    alone = [Runner(model, methods, []).run(row, 6) for row in rows]
    together = Runner(model, methods, []).run(torch.cat(rows), 6)
    for method, answers in together.items():
        assert answers.tokens == [run[method].tokens[0] for run in alone], method
    stop = together[methods[0]].tokens[1][2]
    stopped = Runner(model, methods, [stop]).run(torch.cat(rows), 6)
    assert len({len(ids) for ids in stopped[methods[0]].tokens}) > 1
    for method, answers in stopped.items():
        whole = [run[method].tokens[0] for run in alone]
        assert answers.tokens == [ids[: ids.index(stop)] if stop in ids else ids for ids in whole]
        # What a row reads once its answer has ended is nobody's.
        one_by_one = [Runner(model, methods, [stop]).run(row, 6)[method] for row in rows]
        for name in ("pages_read", "pages_skipped", "sparse_share"):
            assert getattr(answers, name) == [getattr(each, name)[0] for each in one_by_one], name


@pytest.mark.parametrize("prefilled", [1, 250, 1000])
def test_rows_that_are_prefilled_a_few_at_a_time(model: Any, prefilled: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answers and the same reads, and the cache is whole: each row's own."""
    ids, methods = torch.cat([prompt(120, seed) for seed in range(5)]), [Method("locks", 64), Method("exact", 48)]
    together = Runner(model, methods, []).run(ids, 6)
    monkeypatch.setattr(runner, "PREFILLED", prefilled)
    seen: list[tuple[int, ...]] = []
    real = model.forward
    monkeypatch.setattr(model, "forward", lambda ids, **more: seen.append(tuple(ids.shape)) or real(ids, **more))
    assert Runner(model, methods, []).run(ids, 6) == together
    rows = max(1, prefilled // 120)
    prefills = [shape for shape in seen if shape[1] > 1]
    assert prefills == [(min(rows, 5 - first), 120) for first in range(0, 5, rows)]


def test_selectors_that_learn_see_all_rows_a_chunk_at_a_time(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    real = model.forward
    monkeypatch.setattr(model, "forward", lambda ids, **more: seen.append(tuple(ids.shape)) or real(ids, **more))
    monkeypatch.setattr(runner, "PREFILLED", 120)
    Runner(model, [Method("h2o", 64)], [], chunk=50).run(torch.cat([prompt(120), prompt(120, 1)]), 3)
    assert [shape for shape in seen if shape[1] > 1] == [(2, 50), (2, 50), (2, 20)]


@pytest.mark.parametrize("name", ["Gemma3Text", "Lfm2"])
def test_windows_and_other_states_are_prefilled_in_chunks_of_all_rows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ["sliding_attention", "full_attention"] if name == "Gemma3Text" else ["conv", "full_attention"]
    mixed = make_model(name, layer_types=[*kinds, kinds[0]], sliding_window=32)
    ids, methods = torch.cat([prompt(120), prompt(120, 1)]), [Method("locks", 64)]
    seen: list[tuple[int, ...]] = []
    real = mixed.forward
    monkeypatch.setattr(mixed, "forward", lambda ids, **more: seen.append(tuple(ids.shape)) or real(ids, **more))
    monkeypatch.setattr(runner, "PREFILLED", 1)
    answers = Runner(mixed, methods, [], chunk=50).run(ids, 4)
    assert [shape for shape in seen if shape[1] > 1] == [(2, 50), (2, 50), (2, 20)]
    assert all(len(tokens) == 4 for tokens in answers[methods[0]].tokens)


def test_a_model_with_windows_can_be_measured() -> None:
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    gemma = make_model("Gemma3Text", layer_types=layers, sliding_window=32)
    answers = Runner(gemma, [Method("locks", 64)], []).run(prompt(120), 5)
    hf.attach(gemma, LocksConfig(budget=64, dense_below=0))
    assert answers[Method("locks", 64)].tokens == generate(gemma, prompt(120), 5).tolist()
    hf.detach(gemma)
    assert answers[Method("dense")].tokens == generate(gemma, prompt(120), 5).tolist()


def test_what_cannot_be_measured_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match=r"selector='dense' is not allowed: a selector's name. Leave it out"):
        Runner(model, [Method("dense")], [])
    with pytest.raises(ValueError, match=r"group_rule='mean'"):
        Method("locks", 64, "mean")
    with pytest.raises(
        ValueError, match=r"budget=256 is not allowed: less than the prompts; there were \d+ dense rows"
    ):
        Runner(model, [Method("locks", 256)], []).run(prompt(100), 4)


@pytest.mark.parametrize("chunk", [4096, 64])  # the second leaves a single token to the last part
def test_links_are_measured_before_a_selector_learns_from_the_query(model: Any, chunk: int) -> None:
    seen: list[tuple[int, int]] = []

    def probe(step: hf.SparseStep, selectors: dict[Method, Any]) -> None:
        (learner,) = selectors.values()
        seen.append((step.keys.shape[-2], learner._tokens))

    Runner(model, [Method("h2o", 64)], [], chunk=chunk).run(prompt(129), 4, probe)
    assert seen == [(130, 129)] * 3 + [(131, 130)] * 3 + [(132, 131)] * 3


def test_links_are_of_dense_queries_and_the_oracle_has_all_of_them(model: Any) -> None:
    prompts = [Prompt(NOBODY, (), ((40, 43), (90, 91)))] * 2
    methods = [Method("exact", 64), Method("locks", 64), Method("random", 64), Method("locks", 64, "per-head")]
    methods.append(Method("h2o", 64))
    probe = Probe(prompts, 2)
    Runner(model, methods, []).run(torch.cat([prompt(200), prompt(200, 1)]), 5, probe)
    for row in (0, 1):
        exact, locks, random = (probe.links(row, method, 5) for method in methods[:3])
        assert exact and locks and random
        assert exact["coverage_ratio"] == exact["worst"] == exact["p5"] == exact["retention"] == 1
        assert exact["carriers_kept"] == exact["carriers_kept_by_oracle"] > 0
        assert 1 > locks["coverage_ratio"] > random["coverage_ratio"] and locks["retention"] > random["retention"]
        assert max(locks["worst"], locks["p5"]) < locks["coverage_ratio"]
    assert probe.links(0, Method("quest", 64), 5) is None and probe.links(0, methods[3], 5) is None
    alone = Probe(prompts[:1], 2)
    Runner(model, methods[:2], []).run(prompt(200, 1), 5, alone)
    assert alone.links(0, methods[1], 5) == pytest.approx(probe.links(1, methods[1], 5), abs=1e-4)
    one, two = (probe.links(0, methods[1], tokens) for tokens in (1, 2))
    assert probe.links(0, methods[1], 0) is None and one != two == probe.links(0, methods[1], 5)
