"""The measured order of vLLM's CPU cache gives back exactly what vLLM's own operation wrote."""

from __future__ import annotations

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from pagelocks.vllm.cpu import PagedKeysAndValues


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("block_size", [32, 64, 128])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128, 256])
def test_pages_come_back_as_written(dtype: torch.dtype, block_size: int, head_dim: int) -> None:
    """Random K and V through shuffled slots; some slots stay unwritten."""
    blocks, heads = 5, 3
    isa = _get_attn_isa(dtype, block_size, head_dim)
    slots = torch.randperm(blocks * block_size)[: blocks * block_size - 7]
    keys, values = (torch.randn(len(slots), heads, head_dim).to(dtype) for _ in range(2))
    cache = torch.zeros(blocks, heads, block_size, 2 * head_dim, dtype=dtype)
    key_cache, value_cache = cache.view(blocks, heads, 2 * block_size, head_dim).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, isa)
    written = torch.zeros(2, blocks * block_size, heads, head_dim, dtype=dtype)
    written[0, slots], written[1, slots] = keys, values
    pages_a_block = block_size // 16
    pages = written.view(2, blocks, pages_a_block, 16, heads, head_dim).permute(0, 4, 1, 2, 3, 5)

    paged = PagedKeysAndValues(cache, isa)
    block = torch.randint(blocks, (9,))
    page = torch.randint(pages_a_block, (9,))
    assert torch.equal(paged.keys(block, page), pages[0][:, block, page])
    block, page = torch.randint(blocks, (heads, 4)), torch.randint(pages_a_block, (heads, 4))
    head = torch.arange(heads).unsqueeze(-1)
    found_keys, found_values = paged.selected(block, page)
    assert torch.equal(found_keys, pages[0][head, block, page])
    assert torch.equal(found_values, pages[1][head, block, page])
