"""What the GPU backend decides on the host, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from harness import in_child

from pagelocks.vllm.options import GPU_DENSE_BELOW, Options
from pagelocks.vllm.support import Unsupported, refuse_gpu


@pytest.mark.parametrize("capability", [(8, 6), (10, 0), (12, 0)])
def test_other_cards_are_refused(capability: tuple[int, int]) -> None:
    refuse_gpu(Options(), (9, 0))
    found = ".".join(map(str, capability))
    with pytest.raises(Unsupported, match=rf"compute capability {found}: the kernels are .* 9\.0\. Use a Hopper"):
        refuse_gpu(Options(), capability)


def test_what_only_the_cpu_backend_has_is_refused() -> None:
    with pytest.raises(Unsupported, match="the selector 'exact' on a GPU"):
        refuse_gpu(Options(selector="exact"), (9, 0))
    with pytest.raises(Unsupported, match="a trace on a GPU"):
        refuse_gpu(Options(trace="pages.jsonl"), (9, 0))


def default_of(given: Any, cuda: bool) -> int:
    from unittest.mock import patch

    from vllm.platforms import current_platform

    from pagelocks.vllm.options import options_of

    config: Any = SimpleNamespace(additional_config={} if given is None else {"locks": given})
    with patch.object(type(current_platform), "is_cuda", lambda self: cuda):
        return options_of(config).config.dense_below


@pytest.mark.parametrize(
    ("given", "cuda", "wanted"),
    [
        (None, False, 0),
        (None, True, GPU_DENSE_BELOW),
        ({"budget": 512}, True, GPU_DENSE_BELOW),
        ({"dense_below": 0}, True, 0),
        ({"dense_below": 77}, True, 77),
        ({"dense_below": 77}, False, 77),
    ],
)
def test_the_default_of_dense_below_is_the_devices(given: Any, cuda: bool, wanted: int) -> None:
    assert in_child(default_of, given, cuda) == wanted


def split(queries: list[int], padded: int) -> tuple[int, list[int], list[int], int]:
    """How a step is split, and what the rows after the decode rows become."""
    import torch
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from pagelocks.vllm.gpu import decode_rows, rows_from

    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    starts = torch.cat([starts, starts[-1:].expand(padded)])
    rows = len(queries) + padded
    lengths = torch.tensor([100 + n for n in queries] + [0] * padded, dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        num_reqs=rows,
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(queries),
        max_seq_len=int(lengths.max()),
        block_table_tensor=torch.arange(rows * 3, dtype=torch.int32).view(rows, 3),
        slot_mapping=torch.arange(int(starts[-1])),
        seq_lens_cpu_upper_bound=lengths,
    )
    first = decode_rows(common)
    if first == rows:
        return first, [], [], 0
    rest = rows_from(common, first)
    assert rest.block_table_tensor.equal(common.block_table_tensor[first:])
    assert rest.slot_mapping.tolist() == list(range(first, common.num_actual_tokens))
    assert rest.num_reqs == len(rest.seq_lens) == rows - first
    return first, rest.query_start_loc.tolist(), rest.seq_lens.tolist(), rest.num_actual_tokens


@pytest.mark.parametrize(
    ("queries", "padded", "wanted"),
    [
        ([1, 1, 1], 0, (3, [], [], 0)),
        ([1, 1], 2, (4, [], [], 0)),  # padding of a decode graph
        ([1, 1, 5, 9], 0, (2, [0, 5, 14], [105, 109], 14)),
        ([7], 0, (0, [0, 7], [107], 7)),
        ([1, 4, 1], 0, (1, [0, 4, 5], [104, 101], 5)),  # a row of one token further back stays with the others
    ],
)
def test_a_step_is_split_after_its_leading_decode_rows(queries: list[int], padded: int, wanted: Any) -> None:
    assert in_child(split, queries, padded) == wanted


def records_of(order: str) -> Any:
    """Bytes of a cache of two blocks of 32 tokens and three heads, as pages of records, for a layout of vLLM's."""
    import torch

    from pagelocks.vllm.summary_cache import SummaryCache

    blocks, heads, tokens, width = 2, 3, 32, 4
    raw = torch.arange(blocks * heads * tokens * width).to(torch.uint8)
    if order == "heads outside":
        cache = raw.view(blocks, heads, tokens, width)
    elif order == "tokens outside":
        cache = raw.view(blocks, tokens, heads, width).transpose(1, 2)
    elif order == "blocks apart":
        wide = torch.zeros(blocks, 1000, dtype=torch.uint8)
        wide[:, : heads * tokens * width] = raw.view(blocks, -1)
        cache = wide.as_strided((blocks, heads, tokens, width), (1000, tokens * width, width, 1))
    else:  # heads outside blocks
        cache = raw.view(heads, blocks, tokens, width).transpose(0, 1)
    state: Any = SimpleNamespace(caches=0, allocated=lambda name, size: None)
    summaries = SummaryCache("locks.summaries.0", heads, width * 16, state)
    summaries.bind_kv_cache(cache)
    records = summaries.records_by_page()
    assert records.shape == (blocks, 2, heads, width * 16)
    return bool((records.reshape(blocks, -1) == raw.view(blocks, -1)).all())


@pytest.mark.parametrize("order", ["heads outside", "tokens outside", "blocks apart"])
def test_records_fill_a_block_whatever_its_layout(order: str) -> None:
    assert in_child(records_of, order)


def test_a_layout_that_scatters_a_block_is_refused() -> None:
    from harness import ChildError

    with pytest.raises(ChildError, match="a block's summaries are not one piece of memory"):
        in_child(records_of, "heads outside blocks")


def replaced(changes: dict[str, Any]) -> None:
    """Options of an engine with GPU kernels, replaced between steps."""
    from dataclasses import replace

    from pagelocks.vllm.state import LocksState

    state: Any = LocksState.__new__(LocksState)
    state._options, state.pipelines = Options(), {"a shape": "its kernels"}
    state.options = replace(state.options, config=replace(state.options.config, **changes))
    assert state.options.config.dense_below == 99


def test_what_the_kernels_were_made_for_cannot_be_replaced() -> None:
    from harness import ChildError

    in_child(replaced, {"dense_below": 99})
    for name, value in (("budget", 512), ("sink_pages", 2), ("recent_pages", 3)):
        with pytest.raises(ChildError, match=rf"{name}={value} is not allowed: the GPU kernels were made for"):
            in_child(replaced, {name: value})
