"""The two ways to run LOCKS, in vLLM and in Transformers, say the same."""

from __future__ import annotations

from typing import Any

import pytest
from harness import counters_of, engine, in_child

pytestmark = [pytest.mark.model, pytest.mark.engine]

BUDGET, TOKENS = 128, 12
NOISE = 1e-3
"""Of logits in fp32, between two implementations of the same model."""


def token_ids(model: str) -> list[list[int]]:
    """Two needles in 1,024 tokens, and prose."""
    from transformers import AutoTokenizer

    from pagelocks.prompts import needle_prompt

    tokenizer = AutoTokenizer.from_pretrained(model)
    needles = [list(needle_prompt(tokenizer, 1024, seed, "noise").token_ids) for seed in (0, 1)]
    prose = " ".join(f"On day {n} the {n * 7 % 31} boats of the fleet took {n * n % 97} barrels." for n in range(40))
    return [*needles, tokenizer(f"{prose} In short,").input_ids]


def served(model: str) -> Any:
    """vLLM's tokens."""
    from vllm import SamplingParams

    options = {"budget": BUDGET, "dense_below": 0}
    llm = engine(model, options, dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    results = [llm.generate([ids], params, use_tqdm=False)[0].outputs[0].token_ids for ids in token_ids(model)]
    return [list(ids) for ids in results], counters_of(llm)


def in_transformers(model: str) -> Any:
    """Transformers' tokens, and how far apart its two best logits were at each."""
    import torch
    from transformers import AutoModelForCausalLM

    import pagelocks.hf
    from pagelocks import LocksConfig

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    session = pagelocks.hf.attach(loaded, LocksConfig(budget=BUDGET, dense_below=0))
    loaded.generation_config.eos_token_id = None
    results = []
    for ids in token_ids(model):
        given = torch.tensor([ids])
        how: dict[str, Any] = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
        out = loaded.generate(
            given, attention_mask=torch.ones_like(given), output_logits=True, return_dict_in_generate=True, **how
        )
        best = torch.cat(out.logits).topk(2).values
        results.append((out.sequences[0, len(ids) :].tolist(), (best[:, 0] - best[:, 1]).tolist()))
    return results, session.statistics()


def test_vllm_and_transformers_give_the_same_tokens(smollm2: str) -> None:
    theirs, counters = in_child(served, smollm2)
    ours, counts = in_child(in_transformers, smollm2)
    compared = 0
    for expected, (found, gaps) in zip(theirs, ours, strict=True):
        first = next((at for at, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b), TOKENS)
        assert first == TOKENS or gaps[first] <= NOISE, f"token {first} differs: {expected} {found}, gap {gaps[first]}"
        compared += first
    assert compared >= 2 * TOKENS
    assert counts.rows_sparse == 3 * (TOKENS - 1) * 30 and counters["rows_sparse"] == 3 * (TOKENS - 1)
    # Which pages are read may differ with a token; how many may not.
    assert (counts.pages_read, counts.pages_skipped) == (counters["pages_read"], counters["pages_skipped"])
