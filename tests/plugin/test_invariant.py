"""After every step of a stress run each complete page's record is the summary of the K in the cache, to the bit."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
from harness import Shadow, counters_of, engine, in_child, layers_of

pytestmark = pytest.mark.engine

BLOCK_SIZE = 32
CHUNKS = (0, 1, 7, 16, 17, 128, 1000)  # 0: the whole prompt in one step


class Stress:
    """An engine that is stepped by hand and checked after each step."""

    def __init__(self, model: str) -> None:
        from pagelocks.vllm.cpu import LocksCPUMetadataBuilder

        self.shadow = Shadow()
        self.llm = engine(
            model,
            {"budget": 64, "dense_below": 0},
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=64,
            max_model_len=1536,
            max_num_seqs=16,
            max_num_batched_tokens=2048,
            enable_prefix_caching=True,
        )
        self.engine = self.llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.scheduler.adaptive_long_prefill_threshold = False
        self.random = random.Random(7)
        self.seen = {
            "steps": 0,
            "pages_checked": 0,
            "preemptions": 0,
            "cached_tokens": 0,
            "mixed_steps": 0,
            "same_step": 0,
            "pages_of_nobody": 0,
        }
        self.queries: set[int] = set()
        self.sent = 0
        plan = LocksCPUMetadataBuilder._plan

        def watched(builder: Any, prefix: int, common: Any, whole: Any) -> Any:
            step = plan(builder, prefix, common, whole)
            lengths = common.seq_lens.tolist()
            queries = common.query_start_loc.diff().tolist()
            self.queries.update(queries)
            self.seen["mixed_steps"] += int(bool(step.sparse) and step.dense is not None)
            self.seen["same_step"] += int({(257, 257), (1, 257)} <= set(zip(queries, lengths, strict=True)))
            return step

        self.patches = ExitStack()
        self.patches.enter_context(self.shadow)
        self.patches.enter_context(patch.object(LocksCPUMetadataBuilder, "_plan", watched))

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(3, 512) for _ in range(count)]

    def send(self, prompt: list[int], max_tokens: int) -> str:
        from vllm import SamplingParams

        self.sent += 1
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self.engine.add_request(str(self.sent), {"prompt_token_ids": prompt}, params)
        return str(self.sent)

    def step(self) -> None:
        for output in self.engine.step():
            if output.finished:
                self.seen["cached_tokens"] += output.num_cached_tokens or 0
        self.seen["steps"] += 1
        self.check()

    def run(self, steps: int = 10_000) -> None:
        while steps and self.engine.has_unfinished_requests():
            self.step()
            steps -= 1

    def chunk(self, tokens: int) -> None:
        self.scheduler.scheduler_config.long_prefill_token_threshold = tokens

    def check(self) -> None:
        """Every complete page of every live or cached block, in every layer."""
        import torch

        from pagelocks import summarize

        pages: set[tuple[int, int]] = set()
        manager = self.scheduler.kv_cache_manager
        a_block = BLOCK_SIZE // 16
        self.seen["preemptions"] = max(
            self.seen["preemptions"], *(r.num_preemptions for r in self.scheduler.requests.values()), 0
        )
        for request in self.scheduler.running:
            (blocks,) = manager.get_block_ids(request.request_id)
            computed = min(request.num_computed_tokens, request.num_tokens)
            pages |= {(blocks[page // a_block], page % a_block) for page in range(computed // 16)}
        cached = set()  # also those that no request holds any more
        for block in manager.block_pool.blocks:
            # A hash may also stand for the beginning of a block alone.
            if block.block_hash is not None and (block.block_hash_num_tokens or 0) % BLOCK_SIZE == 0:
                cached |= {(block.block_id, page) for page in range(a_block)}
        self.seen["pages_of_nobody"] += len(cached - pages)
        pages |= cached
        if not pages:
            return
        block, page = torch.tensor(sorted(pages)).T
        for name, layer in layers_of(self.llm).items():
            keys = layer.impl._paged.keys(block, page)
            slots = (block * BLOCK_SIZE + page * 16).unsqueeze(-1) + torch.arange(16)
            handed = self.shadow.keys[name][slots].permute(2, 0, 1, 3)
            assert torch.equal(keys, handed), f"{name}: the K in the cache is not the K handed to it"
            found = layer.impl.summaries.records()[block, :, page].transpose(0, 1)
            expected = summarize(handed, layer.impl.options.config).pack()
            wrong = (found != expected).any(-1).nonzero().tolist()
            assert not wrong, f"step {self.seen['steps']}, {name}: (head, page) {wrong[:5]} of {len(pages)} are stale"
        self.seen["pages_checked"] += len(pages)


def stress(model: str) -> Any:
    run = Stress(model)
    with run.patches:
        return scenario(run)


def scenario(run: Stress) -> Any:
    # Chunked prefill and decode together: a new request joins every few steps, of each chunk size in turn.
    for chunk in CHUNKS:
        run.chunk(chunk)
        for length in (1100 if chunk in (0, 1000) else 300, run.random.randrange(20, 80)):
            run.send(run.tokens(length if chunk != 1 else length // 4), run.random.randrange(2, 40))
            run.run(steps=run.random.randrange(1, 12))
    run.run()
    # Prefix-cache hits, whole and partial.
    run.chunk(0)
    shared = run.tokens(200)
    for extra in (0, 5, 40, 40):
        run.send(shared + run.tokens(extra), 8)
        run.run(steps=4)
    run.run()
    # Two requests with one prompt in one step: the second reads blocks that the first is filling.
    twin = run.tokens(257)
    run.send(twin, 20)
    run.send(twin, 20)
    run.run()
    # A new request of the length that an old one just had.
    for _ in range(3):
        run.send(run.tokens(97), 1)
        run.run()
    # More than the cache holds: preemption, recomputation and block reuse; some are aborted on the way.
    names = [run.send(run.tokens(run.random.randrange(100, 400)), 300) for _ in range(10)]
    for index in range(120):
        run.step()
        if index % 25 == 24:
            run.engine.abort_request([names.pop(run.random.randrange(len(names)))])
    run.engine.abort_request(names[2:])
    run.run(steps=150)
    return run.seen, sorted(run.queries), counters_of(run.llm)


def test_records_are_the_summaries_of_the_keys_after_every_step(tiny_llama: str) -> None:
    seen, queries, counters = in_child(stress, tiny_llama)
    assert set(CHUNKS[1:]) | {1100} <= set(queries), "every chunk size was scheduled"
    assert seen["preemptions"] > 0 and seen["cached_tokens"] > 200
    assert seen["mixed_steps"] > 20 and seen["same_step"] == 1
    assert seen["steps"] > 300 and seen["pages_checked"] > 10_000 and seen["pages_of_nobody"] > 1000
    assert counters["rows_sparse"] > 0 and counters["rows_dense"] > 0 and counters["pages_skipped"] > 0
    assert counters["summaries_built"] > 0


def forget_one_page(model: str) -> None:
    """The same run with a builder that loses a page now and then."""
    from pagelocks.vllm.cpu import LocksCPUImpl

    build = LocksCPUImpl._build
    calls = 0

    def forgetful(impl: Any, blocks: Any, pages: Any) -> None:
        nonlocal calls
        calls += 1
        keep = len(blocks) if calls % 40 else len(blocks) - 1
        build(impl, blocks[:keep], pages[:keep])

    with patch.object(LocksCPUImpl, "_build", forgetful):
        stress(model)


def test_the_check_catches_a_page_that_was_not_built(tiny_llama: str) -> None:
    with pytest.raises(AssertionError, match="stale"):
        in_child(forget_one_page, tiny_llama)
