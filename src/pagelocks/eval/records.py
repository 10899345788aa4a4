"""Whether a served engine's records are the summaries of the keys in its cache: what is looked at, and the look itself.

`eval.engines` hands the functions that take a worker to the engine's process.
"""

from __future__ import annotations

from typing import Any

from ..vllm.options import PAGE_SIZE


def complete_pages(scheduler: Any, pages_a_block: int) -> list[int]:
    """Physical pages, block * pages a block + page within it, whose keys are complete: of running and cached blocks.

    With async scheduling the computed tokens are those of the step that was launched last.
    """
    manager, pages = scheduler.kv_cache_manager, set[int]()
    for request in scheduler.running:
        (blocks,) = manager.get_block_ids(request.request_id)
        complete = range(request.num_computed_tokens // PAGE_SIZE)
        pages |= {blocks[page // pages_a_block] * pages_a_block + page % pages_a_block for page in complete}
    for block in manager.block_pool.blocks:
        # A hash may also stand for the beginning of a block alone.
        if block.block_hash is not None and (block.block_hash_num_tokens or 0) % (pages_a_block * PAGE_SIZE) == 0:
            pages |= set(range(block.block_id * pages_a_block, (block.block_id + 1) * pages_a_block))
    return sorted(pages)


def flush(worker: Any) -> None:
    """In a GPU's worker: build what the last step completed, which otherwise waits for the next one."""
    from ..vllm.gpu import builder_in

    builder_in(worker).flush()


def check_gpu(worker: Any, pages: list[int]) -> tuple[int, int, list[list[int]]]:
    """In the worker: records of these pages that are not what the build kernel makes of their keys, to the byte.

    A page that the last step completed waits for the next one: its record must be marked as missing.

    Returns
    -------
    wrong, waiting : int
        Records over all layers and KV heads, and pages.
    first : list of [layer, index in `pages`, KV head]
        The first wrong ones.
    """
    import torch

    from ..kernels import Caches
    from ..vllm.gpu import builder_in

    torch.cuda.synchronize()
    builder = builder_in(worker)
    caches, pipeline, pending = builder.caches(), builder.pipeline, builder._pending
    physical = torch.tensor(pages, dtype=torch.int32, device="cuda")
    plan, completed = pipeline.plan_of_step, 0 if pending is None else pending.count
    waits = torch.isin(physical, plan.completed[: int(plan.completed_start[completed])]).unsqueeze(-1)
    scratch = [torch.zeros(each.shape, dtype=torch.uint8, device="cuda") for each in caches.records]
    count = torch.tensor([len(pages)], dtype=torch.int32, device="cuda")
    stream = int(torch.cuda.current_stream().cuda_stream)
    pipeline.build_pages(stream, Caches(caches.keys, scratch), physical, count, len(pages))
    per = scratch[0].shape[1]
    where = physical.long() // per, physical.long() % per
    layers = []
    for each, expected in zip(caches.records, scratch, strict=True):
        found = each[where]  # (pages, kv heads, bytes)
        missing = (found[..., :2] == 0).all(-1)
        same = (found == expected[where]).all(-1) & ~missing
        layers.append(torch.where(waits, ~missing, ~same))
    wrong = torch.stack(layers)
    return int(wrong.sum()), int(waits.sum()), wrong.nonzero()[:5].tolist()


def check_cpu(worker: Any, pages: list[int]) -> tuple[int, int, list[list[int]]]:
    """The same on the CPU backend, where no page waits."""
    import torch

    from ..summary import summarize

    layers = []
    for layer in locks_layers(worker):
        records, config = layer.impl.summaries.records(), layer.impl.options.config
        block, page = torch.tensor(pages) // records.shape[2], torch.tensor(pages) % records.shape[2]
        expected = summarize(layer.impl._paged.keys(block, page), config).pack()
        layers.append((records[block, :, page].transpose(0, 1) != expected).any(-1).T)
    wrong = torch.stack(layers)
    return int(wrong.sum()), 0, wrong.nonzero()[:5].tolist()


def locks_layers(worker: Any) -> list[Any]:
    """In the worker: the attention layers that run LOCKS."""
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    return [layer for layer in layers if getattr(getattr(layer, "impl", None), "summaries", None) is not None]


def spoil(worker: Any, page: int, cuda: bool) -> None:
    """In the worker: flip a bit of the last layer's record of this page."""
    summaries = locks_layers(worker)[-1].impl.summaries
    records = summaries.records_by_page() if cuda else summaries.records().transpose(1, 2)
    records[page // records.shape[1], page % records.shape[1], 0, 5] ^= 1
