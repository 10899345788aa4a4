"""Where vLLM's CPU kernels put each key and value inside a block.

The kernels store K and V in an order that suits the processor (tiles for AMX, transposed vectors for AVX, …), which is
documented nowhere and differs between machines.  So it is measured: numbered tokens are written through vLLM's own
operation into a scratch block, and where each number lands is read back.  What is measured is checked to be a
permutation.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from vllm import _custom_ops as ops

from .options import PAGE_SIZE
from .support import Unsupported

_DIGIT = 128  # every whole number below 256 is exact in bf16


@lru_cache(maxsize=16)
def measure_layout(dtype: torch.dtype, block_size: int, head_dim: int, isa: str) -> tuple[Tensor, Tensor]:
    """Offsets, within one block and KV head's 2 * block_size * head_dim elements, of every key and value entry.

    Returns
    -------
    keys, values : int64 (pages a block, PAGE_SIZE * head_dim)
        For page p of the block, entry t * head_dim + c is where channel c of the page's token t lies.

    Raises
    ------
    Unsupported
        If what was read back is not a permutation of what was written.
    """
    entries = block_size * head_dim
    numbers = torch.arange(entries)
    found = torch.zeros(2, entries, dtype=torch.int64)
    place = 1
    while place < entries:
        digits = (numbers // place % _DIGIT).view(block_size, 1, head_dim).to(dtype)
        cache = torch.zeros(1, 1, 2 * block_size, head_dim, dtype=dtype)
        keys, values = cache.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(digits, digits, keys, values, torch.arange(block_size), isa)
        found += cache.view(2, entries).to(torch.int64) * place
        place *= _DIGIT
    if not torch.equal(found.sort(-1).values, numbers.expand(2, -1)):
        remedy = "Report this processor to pagelocks' issue tracker"
        raise Unsupported(f"the CPU cache layout {isa!r}", "its order could not be measured", remedy)
    places = found.argsort(-1).view(2, block_size // PAGE_SIZE, PAGE_SIZE * head_dim)
    return places[0], places[1] + entries
