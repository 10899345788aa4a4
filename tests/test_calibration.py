"""Calibrated selectors and the repetition in `pagelocks eval run`, on small models with random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_hf import make_model, prompt

from pagelocks import LocksConfig
from pagelocks.eval import calibration, runner
from pagelocks.eval.calibration import calibration_text, measure, repetition_request, rope_of
from pagelocks.eval.chat import first_turn, next_turn
from pagelocks.eval.runner import Method, Runner
from pagelocks.selectors import KVzip, LocksCentred, Loki, TriAttention, make_selector
from pagelocks.selectors.loki import calibrate


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


def test_a_calibration_is_of_the_keys_and_queries_of_its_text(model: Any) -> None:
    from transformers import DynamicCache

    texts = [prompt(90, 11), prompt(60, 12)]
    found = measure(model, [text[0].tolist() for text in texts])
    caches = [DynamicCache(config=model.config) for _ in texts]
    upright: list[list[torch.Tensor]] = [[], [], []]
    hooks = []
    for layer, module in enumerate(model.model.layers):
        hook = module.self_attn.q_proj.register_forward_hook(lambda _, __, out, at=layer: upright[at].append(out[0]))
        hooks.append(hook)
    with torch.inference_mode():
        for text, cache in zip(texts, caches, strict=True):
            model(text, past_key_values=cache)
    for hook in hooks:
        hook.remove()
    for layer in range(3):
        keys = torch.cat([cache.layers[layer].keys[0] for cache in caches], -2)
        torch.testing.assert_close(found.bases[layer].abs(), calibrate(keys).abs(), rtol=0, atol=2e-3)
        torch.testing.assert_close(found.mean_keys[layer], keys.mean(-2), rtol=1e-4, atol=1e-5)
        # Queries before RoPE, (tokens, 6 heads of size 32), first half real: no rotation to be undone here.
        plain = torch.cat(upright[layer]).unflatten(-1, (2, 3, 32)).double()
        number = torch.complex(plain[..., :16], plain[..., 16:])
        torch.testing.assert_close(found.means[layer][0], number.mean(0), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.means[layer][1], number.abs().mean(0), rtol=1e-4, atol=1e-4)
    assert model.config._attn_implementation == "sdpa"  # detached again
    loki, other = (found.selector("loki", layer, LocksConfig()) for layer in (0, 1))
    assert isinstance(loki, Loki) and not torch.equal(loki._components, other._components)
    centred = found.selector("locks-centred", 1, LocksConfig())
    assert isinstance(centred, LocksCentred) and centred._mean is found.mean_keys[1]
    assert isinstance(found.selector("triattention", 2, LocksConfig(budget=64)), TriAttention)
    with pytest.raises(ValueError, match=r"layer=7 is not allowed: it was calibrated for \[0, 1, 2\]"):
        found.selector("loki", 7, LocksConfig())


def test_frequencies_are_the_models_or_none() -> None:
    tiny = make_model()
    expected = torch.tensor([10_000.0 ** (-2 * f / 32) for f in range(16)], dtype=torch.float64)
    torch.testing.assert_close(rope_of(tiny), expected, rtol=1e-5, atol=0)
    scaled = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 512}
    yarn = make_model(rope_parameters=scaled)
    assert rope_of(yarn) is None
    with pytest.raises(ValueError, match=r"selector='triattention' is not allowed: RoPE over the whole head"):
        measure(yarn, [prompt(40)[0].tolist()]).selector("triattention", 0, LocksConfig())


def test_selectors_that_need_more_are_refused_without_it(model: Any) -> None:
    for name, said in (("loki", "measured beforehand"), ("kvzip", "must be repeated to it")):
        with pytest.raises(ValueError, match=f"selector='{name}' is not allowed: .*{said}"):
            make_selector(name, LocksConfig())
    with pytest.raises(ValueError, match="selector='triattention' is not allowed: it takes what was measured"):
        Runner(model, [Method("triattention", 64)], [])
    with pytest.raises(ValueError, match="kvzip takes a request of two tokens or more"):
        Runner(model, [Method("kvzip", 64)], [], request=[3])


@pytest.mark.parametrize("repeated", [2048, 64])
def test_kvzip_sees_the_attention_of_the_prompts_repetition(
    model: Any, repeated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against attention weights of Transformers' own: prompt, request and repetition in one sequence, part by part."""
    monkeypatch.setattr(runner, "REPEATED", repeated)
    ids, request, tokens = torch.cat([prompt(150), prompt(150, 1)]), [7, 8, 9], 150
    methods = [Method("kvzip", 64), Method("kvzip-prompt", 64), Method("kvzip", 96)]
    importances: dict[tuple[str, int], torch.Tensor] = {}

    def probe(step: Any, selectors: dict[Method, Any]) -> None:
        for method, member in selectors.items():
            key = (f"{method.selector} {method.budget}", step.layer)
            importances.setdefault(key, member._importance[..., 0, :tokens].clone())

    answers = Runner(model, methods, [], request=request).run(ids, 4, probe)
    assert answers[Method("dense")].tokens == Runner(model, [], []).run(ids, 4)[Method("dense")].tokens
    model.set_attn_implementation("eager")
    most = torch.zeros(3, 2, 2, tokens)
    with torch.inference_mode():
        for start in range(0, tokens, repeated):
            part = ids[:, max(0, start - runner.RESUMED) : start + repeated]
            whole = torch.cat([ids, torch.tensor([request] * 2), part], 1)
            for layer, weights in enumerate(model(whole, output_attentions=True).attentions):
                seen = weights[:, :, tokens:, :tokens].unflatten(1, (2, 3)).amax((2, 3))
                most[layer] = most[layer].maximum(seen)
    model.set_attn_implementation("sdpa")
    for layer in range(3):
        for budget in (64, 96):
            found = importances[f"kvzip {budget}", layer]
            torch.testing.assert_close(found, most[layer], rtol=1e-3, atol=1e-5)
        assert not torch.allclose(importances["kvzip-prompt 64", layer], most[layer], rtol=1e-2)


def test_calibrated_and_repeating_selectors_answer_in_a_batch_as_alone(model: Any) -> None:
    rows = [prompt(120, seed) for seed in (4, 5)]
    methods = [Method(name, 64) for name in ("loki", "triattention", "kvzip")]
    made = Runner(model, methods, [], calibration=measure(model, [prompt(200, 9)[0].tolist()]), request=[3, 4])
    together, alone = made.run(torch.cat(rows), 5), [made.run(row, 5) for row in rows]
    for method in methods:
        assert together[method].tokens == [each[method].tokens[0] for each in alone], method
        assert together[method].pages_skipped == [each[method].pages_skipped[0] for each in alone]
        assert min(together[method].pages_skipped) > 0 and isinstance(
            made.selector(method, 1), (Loki, KVzip, TriAttention)
        )


def test_the_text_is_not_the_runs_own_and_is_the_same_each_time() -> None:
    class Letters:
        def encode(self, text: str) -> list[int]:
            return [ord(letter) for letter in text]

    texts = [calibration_text(Letters(), seed, 3000) for seed in (5, 5, 6)]
    assert texts[0] == texts[1] and texts[0].about["digest"] != texts[2].about["digest"]
    assert texts[0].about["seed"] == 5 + calibration.SEED_OFFSET and len(texts[0].sequences) == len(calibration.TASKS)
    assert all(1000 < len(ids) <= 3000 for ids in texts[0].sequences)
    assert sum(map(len, texts[0].sequences)) == texts[0].about["tokens"]


@pytest.mark.model
def test_a_repetition_is_asked_for_in_a_turn_of_its_own() -> None:
    from pagelocks.eval.loading import load_tokenizer

    _, tokenizer = load_tokenizer("SmolLM2-135M-Instruct")
    text = tokenizer.decode(repetition_request(tokenizer))
    assert text.startswith("<|im_end|>\n<|im_start|>user\nRepeat") and text.endswith("<|im_start|>assistant\n")
    turns = first_turn(tokenizer, "One.") + "Two." + next_turn(tokenizer, "Three.")
    said = [{"role": "user", "content": "One."}, {"role": "assistant", "content": "Two."}]
    said += [{"role": "user", "content": "Three."}]
    assert turns == tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    tokenizer.chat_template = None
    assert tokenizer.decode(repetition_request(tokenizer)).startswith("\n\nRepeat")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}{% endfor %}"
    with pytest.raises(ValueError, match="chat_template='0 times' is not allowed"):
        next_turn(tokenizer, "Three.")
