"""`pagelocks eval drift`: what sparse steps write, read by later ones; on small models with random weights."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_hf import generate, make_model, prompt

import pagelocks.hf as hf
from pagelocks import LocksConfig
from pagelocks.cli import main
from pagelocks.eval import drift, drift_run
from pagelocks.eval.drift import Drift, Forced, Free, Sampler, Script, measure
from pagelocks.eval.drift_run import drift_table, first_difference, repetition, summarize
from pagelocks.eval.runner import Method

LONG = Script((prompt(150),), 16)
CHAT = Script((prompt(150), prompt(30, 1), prompt(41, 2)), 6)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


@pytest.mark.parametrize("script", [LONG, CHAT])
def test_nothing_drifts_where_every_page_is_read_and_random_pages_do(model: Any, script: Script) -> None:
    methods = [Method("locks", 512), Method("h2o", 512), Method("random", 64), Method("exact", 64), Method("h2o", 64)]
    found = measure(model, script, methods, Sampler(5, 0.8))
    entries = len(script.turns) * script.new_tokens - 1
    for method in methods[:2]:
        forced = found.forced[method]
        assert forced.kl == forced.keys == forced.values == forced.nll_difference == [0.0] * entries, method
        assert forced.agreement == [1.0] * entries and forced.position == list(range(1, entries + 1))
        assert found.free[method].tokens == found.dense and found.free[method].pages_skipped == 0
    random, exact, learns = (found.forced[method] for method in methods[2:])
    for forced in (random, exact, learns):
        assert min(forced.keys) > 0 and min(forced.values) > 0 and sum(forced.agreement) < entries
    assert sum(random.kl) > sum(exact.kl) > 0 and sum(random.keys) > sum(exact.keys)
    assert found.free[methods[2]].tokens != found.dense and found.free[methods[2]].pages_skipped > 0
    assert len(exact.kl_fresh) == entries and learns.kl_fresh == []
    # The first sparse step reads what dense attention wrote: it is the fresh step.
    assert exact.kl_fresh[0] == pytest.approx(exact.kl[0], abs=1e-9) and exact.kl_fresh[5:] != exact.kl[5:]
    assert exact.turn == [place // script.new_tokens for place in exact.position]


def test_greedy_answers_are_those_of_generate(model: Any) -> None:
    methods = [Method("locks", 64), Method("quest", 64)]
    found = measure(model, LONG, methods, Sampler())
    assert found.dense == generate(model, LONG.turns[0], 16)[0].tolist()
    for method in methods:
        hf.attach(model, LocksConfig(budget=64, dense_below=0), method.selector)
        assert found.free[method].tokens == generate(model, LONG.turns[0], 16)[0].tolist(), method
    hf.detach(model)


def test_forced_numbers_against_a_loop_without_the_module(model: Any) -> None:
    """The same tokens through hf.attach alone: logits, keys and values of every step, and of the step on dense's."""
    from transformers import DynamicCache

    method, sampler = Method("exact", 64), Sampler(3, 1.0)
    found = measure(model, CHAT, [method], sampler)
    fed = [CHAT.turns[0]]
    for number in range(3):
        said = found.dense[6 * number : 6 * number + 6]
        fed += [torch.tensor([[token]]) for token in said[:-1]]
        if number < 2:
            fed.append(torch.cat([torch.tensor([[said[-1]]]), CHAT.turns[number + 1]], 1))

    def through(config: LocksConfig) -> tuple[list[torch.Tensor], Any, list[Any]]:
        hf.attach(model, config, "exact")
        cache, logits, before = DynamicCache(config=model.config), [], []
        for ids in fed:
            before.append(copy.deepcopy(cache))
            logits.append(model(ids, past_key_values=cache).logits[0, -1])
        return logits, cache, before

    with torch.inference_mode():
        dense, dense_cache, before = through(LocksConfig(budget=4096))
        sparse, cache, _ = through(method.config)
        hf.attach(model, method.config, "exact")
        fresh = [model(ids, past_key_values=past).logits[0, -1] for ids, past in zip(fed, before, strict=True)]
    hf.detach(model)
    forced, place = found.forced[method], fed[0].shape[1]
    for step, ids in enumerate(fed[1:]):
        p, q, r = (each[step + 1].double().softmax(-1) for each in (dense, sparse, fresh))
        assert forced.kl[step] == pytest.approx(float((p * (p / q).log()).sum()), abs=1e-5)
        assert forced.kl_fresh[step] == pytest.approx(float((p * (p / r).log()).sum()), abs=1e-5)
        token = found.dense[step + 1]
        assert forced.nll_difference[step] == pytest.approx(float(p[token].log() - q[token].log()), abs=1e-5)
        assert forced.agreement[step] == float(p.argmax() == q.argmax())
        for name in ("keys", "values"):
            ours, theirs = (
                torch.stack([getattr(layer, name)[0, :, place : place + ids.shape[1]] for layer in each.layers])
                for each in (dense_cache, cache)
            )
            expected = float((theirs - ours).norm() / ours.norm())
            assert getattr(forced, name)[step] == pytest.approx(expected, rel=1e-4)
        place += ids.shape[1]


def test_dense_attention_judges_what_was_answered(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "JUDGED", 50)
    methods = [Method("locks", 64), Method("exact", 4096)]
    found = measure(model, CHAT, methods, Sampler(5, 1.0), free_only=True)
    assert found.forced == {} and list(found.free) == methods
    assert found.free[methods[0]].tokens != found.dense == found.free[methods[1]].tokens
    assert found.free[methods[1]].nll == found.nll
    for said, nll in [(found.dense, found.nll), (found.free[methods[0]].tokens, found.free[methods[0]].nll)]:
        ids, at = [], []
        for number, turn in enumerate(CHAT.turns):
            ids += turn[0].tolist()
            at += range(len(ids), len(ids) + CHAT.new_tokens)
            ids += said[number * CHAT.new_tokens : (number + 1) * CHAT.new_tokens]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        assert len(nll) == len(said) - 1
        assert nll == pytest.approx([-float(logits[place - 1, ids[place]]) for place in at[1:]], rel=1e-3, abs=1e-4)
    led = measure(model, CHAT, methods[:1], Sampler(5, 1.0))
    assert led.free[methods[0]] == found.free[methods[0]] and led.nll == found.nll
    method = methods[0]
    long = Drift(found.dense * 4, {}, {method: Free(found.dense * 4, 1, 3, found.nll * 4)}, found.nll * 4)
    (cell,) = summarize([long], [method], 1, 64)
    assert "kl" not in cell and cell["nll"] == cell["nll_dense"] and len(cell["parts"]) == 8
    assert cell["parts"][0]["nll"] == pytest.approx(sum(found.nll[:7]) / 7, rel=1e-4)
    assert drift_table([cell]).row_count == 1
    half = Drift(found.dense * 4, {}, {}, [100.0] * len(long.nll))  # its method has not answered yet
    (cells,) = summarize([long, half], [method], 1, 64)
    assert cells["free_n"] == 1 and cells["nll_dense"] == cell["nll_dense"]


def test_a_draw_is_a_draw_from_the_softmax_and_the_same_for_equal_logits() -> None:
    logits = torch.tensor([1.0, 0.0, 2.0, 5.0])
    sampler = Sampler(9, 0.5, (3,))
    draws = [sampler.pick(logits, place) for place in range(4000)]
    expected = (logits[:3] / 0.5).softmax(-1)
    counts = torch.bincount(torch.tensor(draws), minlength=3)
    assert counts.shape == (3,)
    torch.testing.assert_close(counts / 4000, expected, rtol=0, atol=0.03)
    assert draws[:50] == [sampler.pick(logits + 1e-9, place) for place in range(50)]
    assert draws[:50] != [Sampler(10, 0.5, (3,)).pick(logits, place) for place in range(50)]
    assert Sampler(9, 0, (3,)).pick(logits, 0) == 2 and logits[3] == 5


def test_layers_that_slide_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = ["full_attention", "sliding_attention", "full_attention"]
    gemma = make_model("Gemma3Text", layer_types=layers, sliding_window=124)
    monkeypatch.setattr(drift, "REPORT", 3)  # the window is not full then, and is at the end
    method, seen = Method("locks", 64), []
    script = Script((prompt(120),), 6)
    found = measure(gemma, script, [method], Sampler(), report=lambda so_far: seen.append(copy.deepcopy(so_far)))
    forced = found.forced[method]
    assert forced.kl_fresh == [] and len(forced.kl) == 5 and min(forced.kl) > 0
    assert min(forced.keys) > 0 and seen[0].forced[method].keys == forced.keys[:2]


def test_a_summary_of_runs() -> None:
    methods, runs = [Method("random", 64), Method("h2o", 64)], []
    names = ("kl", "agreement", "nll_difference", "kl_fresh", "agreement_fresh", "keys", "values")
    for _ in range(2):
        said = torch.randint(9, (128,)).tolist()
        place, turn = list(range(1, 128)), [0] * 127
        drawn = Forced(place, turn, **{name: torch.rand(127).tolist() for name in names})
        zero = Forced(place, turn, *([0.0] * 127 for _ in range(3)), [], [], [0.0] * 127, [0.0] * 127)
        free = {methods[0]: Free([said[0], 9, *said[2:]], 20, 60), methods[1]: Free(said, 0, 0)}
        runs.append(Drift(said, dict(zip(methods, (drawn, zero), strict=True)), free))
    random, learns = summarize(runs, methods, 1, 128)
    assert (random["n"], random["tokens"], random["pages_read_share"], learns["pages_read_share"]) == (
        2,
        128,
        0.25,
        None,
    )
    assert [(part["first"], part["after"]) for part in random["parts"]] == [(at, at + 16) for at in range(0, 128, 16)]
    kl = [torch.tensor(run.forced[methods[0]].kl) for run in runs]
    assert random["parts"][1]["kl"] == pytest.approx(float(torch.cat([each[15:31] for each in kl]).mean()), rel=1e-4)
    assert random["kl"]["mean"] == pytest.approx(float(torch.cat(kl).mean()), rel=1e-4)
    assert random["kl"]["low"] < random["kl"]["mean"] < random["kl"]["high"]
    at = torch.arange(1, 128) - 64.0
    slope = 1000 * float(sum((at * each).sum() for each in kl) / (2 * at.square().sum()))
    assert random["kl_per_1000"]["mean"] == pytest.approx(slope, rel=1e-3, abs=1e-5)
    assert random["kl_per_1000"]["low"] < slope < random["kl_per_1000"]["high"]
    fresh = torch.cat([torch.tensor(run.forced[methods[0]].kl_fresh) for run in runs])
    assert random["kl_carried"]["mean"] == pytest.approx(float((torch.cat(kl) - fresh).mean()), rel=1e-3, abs=1e-5)
    assert random["first_difference"] == [1, 1] and random["equal_share"] == pytest.approx(127 / 128, rel=1e-4)
    assert learns["first_difference"] == [None, None] and learns["equal_share"] == 1
    assert learns["repetition"] == learns["repetition_dense"] == random["repetition_dense"]
    assert learns["kl"] == learns["kl_per_1000"] == learns["keys"] == {"mean": 0, "low": 0, "high": 0}
    assert "kl_fresh" not in learns and "kl_carried_per_1000" not in learns
    assert drift_table([random, learns]).row_count == 2
    turns = summarize(runs, methods, 4, 128)[0]
    assert [part["first"] for part in turns["parts"]] == [0, 32, 64, 96] and turns["kl"] == random["kl"]


def test_what_is_reported_on_the_way_is_the_beginning_of_the_whole(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "REPORT", 7)
    methods, seen = [Method("locks", 64), Method("random", 64)], []
    found = measure(model, CHAT, methods, Sampler(2, 0.7), report=lambda so_far: seen.append(copy.deepcopy(so_far)))
    assert [(len(each.dense), len(each.free)) for each in seen] == [(7, 0), (14, 0), (18, 0), (18, 1), (18, 2)]
    for each in seen:
        count = len(each.dense)
        assert each.dense == found.dense[:count] and all(found.free[key] == free for key, free in each.free.items())
        for method, whole in found.forced.items():
            for name, values in vars(each.forced[method]).items():
                assert values == getattr(whole, name)[: count - 1] and len(values) == count - 1, name


def test_a_summary_of_a_run_that_goes_on() -> None:
    method, names = Method("locks", 64), ("kl", "agreement", "nll_difference", "keys", "values")
    runs = []
    for count in (192, 80):
        said = torch.randint(9, (count,)).tolist()
        numbers = {name: torch.rand(count - 1).tolist() for name in names}
        runs.append(Drift(said, {method: Forced(list(range(1, count)), [0] * (count - 1), **numbers)}, {}))
    (alone,) = summarize(runs[1:], [method], 1, 192)
    assert [part["first"] for part in alone["parts"]] == [0, 24, 48, 72] and alone["tokens"] == 192
    assert (
        alone["answered"] == [80] and alone["free_n"] == 0 and "equal_share" not in alone and "repetition" not in alone
    )
    assert alone["repetition_dense"] == pytest.approx(repetition(runs[1].dense), rel=1e-4)
    assert alone["parts"][3]["kl"] == pytest.approx(sum(runs[1].forced[method].kl[71:]) / 8, rel=1e-4)
    runs[0].free[method] = Free([*runs[0].dense[:-1], 9], 1, 3)
    (both,) = summarize(runs, [method], 1, 192)
    assert (
        both["answered"] == [192, 80] and both["free_n"] == 1 and both["n"] == 2 and both["first_difference"] == [191]
    )
    assert both["equal_share"] == pytest.approx(191 / 192, rel=1e-4) and both["pages_read_share"] == 0.25
    mean = (repetition(runs[0].dense) + repetition(runs[1].dense)) / 2
    assert both["repetition_dense"] == pytest.approx(mean, rel=1e-4)
    later = torch.tensor(runs[0].forced[method].kl[95:119])
    assert len(both["parts"]) == 8 and both["parts"][4]["kl"] == pytest.approx(float(later.mean()), rel=1e-4)


def test_first_differences_and_repetition() -> None:
    assert first_difference([4, 5, 6], [4, 5, 6]) is None and first_difference([4, 5, 6], [4, 7, 6]) == 1
    assert repetition(list(range(40))) == 0 and repetition([1, 2] * 20) == 1 - 2 / 37 and repetition([1]) == 0


def test_scripts_and_options_that_will_not_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"turns=\[\(1, 1\)\] is not allowed"):
        Script((prompt(1),), 5)
    with pytest.raises(ValueError, match="new_tokens=1 is not allowed"):
        Script((prompt(5),), 1)
    common = ["eval", "drift", "--model", "none", "--output", str(tmp_path / "f")]
    for more, said in [
        (["--budget", "2048"], "--budget=2048 is not allowed: at most --prompt-tokens less 64, 1984"),
        (["--budget", "100"], "budget=100 is not allowed"),
        (["--new-tokens", "100"], "--turns and --new-tokens='1 and 100' is not allowed"),
        (["--turns", "0"], "--turns and --new-tokens='0 and 512' is not allowed"),
        (["--temperature", "-1"], "--temperature=-1.0 is not allowed"),
        (["--prompts", "0"], "--prompts=0 is not allowed: 1 or more"),
        (["--output", str(tmp_path)], "a file, and this is a folder"),
    ]:
        assert main([*common, *more]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.model
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from pagelocks.eval.loading import load_tokenizer

    tokenizer = load_tokenizer("SmolLM2-135M-Instruct")[1]
    make_model(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    capsys.readouterr()
    monkeypatch.setattr(drift_run, "BLOCK", 8)
    options = ["--prompt-tokens", "200", "--new-tokens", "32", "--turns", "4", "--turn-tokens", "80", "--prompts", "1"]
    options += ["--selector", "locks", "--budget", "64", "--device", "cpu", "--output", str(tmp_path / "f.json")]
    assert main(["eval", "drift", "--model", str(tmp_path / "tiny"), *options]) == 0
    assert [path.name for path in tmp_path.glob("f.json*")] == ["f.json"]
    assert "turns" in capsys.readouterr().out
    result = json.loads((tmp_path / "f.json").read_text())
    assert (result["seed"], result["temperature"], result["model"]) == (0, 0.0, "tiny") and "torch" in result[
        "versions"
    ]
    (cell,) = result["cells"]
    assert [part["first"] for part in cell["parts"]] == [0, 8, 16, 24] and cell["kl"]["mean"] > 0
    assert 0 < cell["pages_read_share"] < 0.5
    long = ["--prompt-tokens", "2000", *options[2:]]
    assert main(["eval", "drift", "--model", str(tmp_path / "tiny"), *long]) == 2
    assert (
        "--prompt-tokens and --new-tokens='2272 in all' is not allowed: the model has 2048" in capsys.readouterr().err
    )
