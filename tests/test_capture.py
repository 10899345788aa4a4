"""Decode records of a model with random weights: they are what dense attention saw, and what it made of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_hf import generate, make_model, prompt
from test_quality import NOBODY

from pagelocks.attend import attend
from pagelocks.eval.capture import capture, captured_keys
from pagelocks.eval.prompt import Prompt

LAYERS = 3


def prompt_of(tokens: int, seed: int, carriers: tuple[tuple[int, int], ...] = ()) -> Prompt:
    return Prompt(NOBODY, tuple(prompt(tokens, seed)[0].tolist()), carriers)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


@pytest.mark.parametrize("chunk", [64, 4096])  # the first leaves a single token to the last part of the second prompt
@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
def test_a_record_s_attention_is_the_model_s_own(kind: str, chunk: int) -> None:
    model, seed = make_model(kind), 11
    outputs: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, given: outputs.append(given[0][0]))
    prompts = [prompt_of(150, seed, ((40, 44), (90, 91))), prompt_of(129, seed + 1)]
    found = list(capture(model, prompts, 3, chunk=chunk))
    assert [(s.prompt, s.step, s.layer) for s in found] == [
        (p, step, layer) for p in range(2) for step in (1, 2, 3) for layer in range(LAYERS)
    ]
    decoded = [output[0] for output in outputs if len(output) == 1]
    if chunk == 64:  # without the prompt's own single token
        del decoded[3 * LAYERS : 4 * LAYERS]
    assert len(decoded) == len(found)
    for seen, output in zip(found, decoded, strict=True):
        record, tokens = seen.record, (150, 129)[seen.prompt]
        assert (
            record.length == tokens + seen.step == record.keys.shape[1]
            and record.carriers == prompts[seen.prompt].carriers
        )
        assert record.query.shape == (2, 3, 32) and record.scale == pytest.approx(32**-0.5)
        every = torch.ones(2, record.length, dtype=torch.bool)
        own = attend(record.query.double(), record.keys.double(), record.values.double(), every, record.scale)
        torch.testing.assert_close(own.flatten().float(), output, rtol=1e-4, atol=1e-5)


def test_the_answer_is_dense_attention_s_and_ends_where_it_ends(model: Any) -> None:
    ids = prompt(100, 7)
    answer = generate(model, ids, 5)[0].tolist()
    fed: list[int] = []
    hook = model.model.embed_tokens.register_forward_hook(lambda _, given, out: fed.append(given[0][0].tolist()))
    one = prompt_of(100, 7)
    steps = [s.step for s in capture(model, [one], 4) if s.layer == 0]
    assert steps == [1, 2, 3, 4] and fed[1:] == [[token] for token in answer[:4]]
    hook.remove()
    last = answer.index(answer[2])  # where that token comes first
    assert {s.step for s in capture(model, [one], 4, stop={answer[2]})} == set(range(1, last + 1))


def test_a_model_is_dense_again_afterwards_and_when_stopped_early(model: Any) -> None:
    stream = capture(model, [prompt_of(100, 1), prompt_of(90, 2)], 2)
    next(stream)
    assert model.config._attn_implementation == "locks" and not torch.is_inference_mode_enabled()
    stream.close()
    assert model.config._attn_implementation == "sdpa"
    keys = captured_keys(model, [prompt_of(100, 1), prompt_of(90, 2)])
    assert model.config._attn_implementation == "sdpa" and sorted(keys) == list(range(LAYERS))
    assert [tuple(each.shape) for each in keys[2]] == [(2, 101, 32), (2, 91, 32)]
    with torch.no_grad():
        cache = model(prompt(100, 1), use_cache=True).past_key_values
    torch.testing.assert_close(keys[2][0][:, :100], cache.layers[2].keys[0], rtol=1e-4, atol=1e-4)


def test_what_cannot_be_captured_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match=r"steps=0 is not allowed: 1 or more"):
        next(capture(model, [prompt_of(100, 1)], 0))
    with pytest.raises(ValueError, match=r"prompts\[1\]='48 tokens' is not allowed: 49 or more"):
        next(capture(model, [prompt_of(100, 1), prompt_of(48, 1)], 1))
    assert len(list(capture(model, [prompt_of(49, 1)], 1))) == LAYERS
