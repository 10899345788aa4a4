"""With a budget that covers the sequence, LOCKS is dense attention; with a smaller one, it is the torch core."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from harness import Shadow, counters_of, engine, in_child

pytestmark = [pytest.mark.model, pytest.mark.engine]

TOPICS = (
    "The tide tables of the northern harbours",
    "def merge(left, right):\n    result = []\n",
    "Ingredients: two onions, one leek, 400 g of potatoes.",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "Dear Sir or Madam, I write to you about the bicycle",
)


def prompts(count: int = 20) -> list[str]:
    """Varied prompts of 40 to about 900 tokens."""
    made = []
    for index in range(count):
        topic = TOPICS[index % len(TOPICS)]
        middle = " ".join(
            f"Entry {n}: the {n * (index + 3) % 97} is near the {n * n % 89}." for n in range(2 + 3 * index)
        )
        made.append(f"{topic} {middle} In short,")
    return made


def difference(found: Any, expected: Any) -> float:
    """The largest |found - expected| / max(1, |expected|): a bf16 number above 1 has no more than 8 bits."""
    found, expected = found.float(), expected.float()
    return float(((found - expected).abs() / expected.abs().clamp(min=1)).max())


def generate(llm: Any, texts: list[str], tokens: int) -> list[Any]:
    """Token ids and, for each, the two best log-probabilities, one prompt after the other."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, logprobs=2, ignore_eos=True)
    results = []
    for text in texts:
        output = llm.generate([text], params, use_tqdm=False)[0].outputs[0]
        best = [sorted((entry.logprob for entry in step.values()), reverse=True)[:2] for step in output.logprobs]
        results.append((list(output.token_ids), best))
    return results


def stock_tokens(model: str, dtype: str) -> Any:
    """Greedy tokens of stock vLLM."""
    return generate(engine(model, dtype=dtype), prompts(), 12)


def locks_tokens(model: str, dtype: str) -> Any:
    """Greedy tokens with every page listed, and the largest difference of a layer's output from stock attention's."""
    import torch
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from pagelocks.vllm.cpu import LocksCPUImpl

    llm = engine(model, {"budget": 4096, "dense_below": 0}, dtype=dtype)
    worst = {"difference": 0.0, "rows": 0}
    forward = LocksCPUImpl.forward

    def compared(
        impl: Any, layer: Any, q: Any, k: Any, v: Any, cache: Any, metadata: Any, output: Any, **kw: Any
    ) -> Any:
        forward(impl, layer, q, k, v, cache, metadata, output, **kw)
        if metadata is not None and metadata.step.sparse:
            stock = torch.full_like(output, float("nan"))
            CPUAttentionBackendImpl.forward(impl, layer, q, k, v, cache, metadata, stock, **kw)
            worst["difference"] = max(worst["difference"], difference(output, stock))
            worst["rows"] += len(metadata.step.sparse)
        return output

    with patch.object(LocksCPUImpl, "forward", compared):
        results = generate(llm, prompts(), 12)
    return results, worst, counters_of(llm)


@pytest.mark.parametrize(("dtype", "tolerance", "noise"), [("bfloat16", 1e-2, 0.25), ("float32", 1e-5, 1e-3)])
def test_a_budget_that_covers_the_sequence_is_dense_attention(
    smollm2: str, dtype: str, tolerance: float, noise: float
) -> None:
    """Layer outputs within the dtype's tolerance; tokens equal, or first different where the two best are that close.

    In bf16 a logit of 16 to 32 is a multiple of 0.125, so `noise` is two such steps.
    """
    stock = in_child(stock_tokens, smollm2, dtype)
    locks, worst, counters = in_child(locks_tokens, smollm2, dtype)
    assert worst["rows"] == 30 * counters["rows_sparse"] and counters["rows_sparse"] == 20 * 11
    assert counters["pages_skipped"] == 0 and counters["pages_read"] > 0 and counters["records_read"] == 0
    assert worst["difference"] <= tolerance
    for (expected, best), (found, _) in zip(stock, locks, strict=True):
        first = next((at for at, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b), None)
        if first is not None:
            assert best[first][0] - best[first][1] <= noise, f"token {first} differs: {expected} {found}"


def served_path(model: str) -> Any:
    """Compare what the plugin selects and returns with the torch core on the K and V handed to the cache."""
    import torch

    from pagelocks import (
        LocksConfig,
        PageSummary,
        log_mass,
        page_share,
        select_pages,
        sparse_attention,
        summarize,
    )
    from pagelocks.vllm.cpu import LocksCPUImpl

    shadow = Shadow()
    config = LocksConfig(budget=128)
    llm = engine(model, {"budget": 128, "dense_below": 0})
    seen = {"rows": 0, "same_pages": 0, "difference": 0.0, "skipped": 0}
    attend_row = LocksCPUImpl._attend_row

    def checked(impl: Any, query: Any, row: Any) -> Any:
        pages, output = attend_row(impl, query, row)
        block_size = llm.llm_engine.vllm_config.cache_config.block_size
        keys, values = shadow.sequence(impl.layer_name, row.blocks, row.length, block_size)
        assert not keys.isnan().any()
        grouped = query.view(impl.num_kv_heads, -1, impl.head_size)
        length = torch.tensor(row.length)
        complete = row.length // 16
        paged = keys[:, : complete * 16].unflatten(1, (complete, 16))
        summary = PageSummary.unpack(summarize(paged, config).pack(), impl.head_size, config)
        share = page_share(log_mass(grouped, summary, impl.scale), length, config)
        expected = select_pages(share, length, config)
        attended = sparse_attention(grouped.float(), keys.float(), values.float(), expected, length, impl.scale)
        seen["rows"] += 1
        seen["same_pages"] += int(torch.equal(expected, pages.to(torch.int32)))
        seen["skipped"] += -(-row.length // 16) - config.budget_pages
        seen["difference"] = max(seen["difference"], difference(output, attended.flatten(0, 1)))
        return pages, output

    with shadow, patch.object(LocksCPUImpl, "_attend_row", checked):
        generate(llm, prompts()[8:20:3], 8)
    return seen, counters_of(llm)


def test_the_served_path_is_the_definition(smollm2: str) -> None:
    """Pages as the core selects them, output as it attends, from K and V recorded on their way into the cache."""
    seen, counters = in_child(served_path, smollm2)
    assert seen["rows"] == 30 * 4 * 7 == 30 * counters["rows_sparse"]
    assert counters["pages_skipped"] == 3 * seen["skipped"] > 0
    assert seen["same_pages"] == seen["rows"]
    assert seen["difference"] <= 1e-2
