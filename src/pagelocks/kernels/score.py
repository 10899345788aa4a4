"""Score: packed records and queries -> log-mass of each page; `pagelocks.score.log_mass` is the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from .compiler import SHARED_MEMORY, Kernel
from .shape import KernelShape

GROUP_PAGES = 8
LEAST_PAGES = 16
"""Pages of a row that are worth a block of their own."""
IN_FLIGHT = 24 << 10
"""Bytes on their way to a block while each team works on a stage: more only crowd the memory's queues."""


def warps_of(shape: KernelShape) -> tuple[int, int, int]:
    """KV heads a block works on at a time, its warps that score, and stages of their ring."""
    group = GROUP_PAGES * shape.layout.record_bytes  # bytes, of one KV head
    # One more copies: 13 warps have 128 registers, 8 have 255, which more than eight query heads need.
    most = min(12 if shape.group <= 8 and shape.head_dim <= 128 else 7, (SHARED_MEMORY - 4096) // (2 * group))
    divisors = [heads for heads in range(1, most + 1) if shape.kv_heads % heads == 0]
    heads = max(divisors, key=lambda heads: (most // heads * heads, heads))
    teams, stage = most // heads, heads * group
    return heads, teams * heads, min(teams + -(-IN_FLIGHT // stage), (SHARED_MEMORY - 4096) // stage)


def parts_of(shape: KernelShape, device: torch.device) -> int:
    """Blocks that share the pages: with one for each set of KV heads, as many as the card has processors."""
    columns = shape.kv_heads // warps_of(shape)[0]
    return max(1, torch.cuda.get_device_properties(device).multi_processor_count // columns)


class Score:
    """The score kernel of one shape, with its outputs.

    Attributes
    ----------
    log_mass : fp32 (kv_heads, capacity, group)
        Natural log; the pages of the rows that select, one row after the other.
    partial : fp32 (kv_heads, group, slots, 2)
        Maximum and sum, in base 2, of what each warp saw of a row.
    """

    def __init__(self, shape: KernelShape, max_rows: int, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        heads, warps, stages = warps_of(shape)
        self.subs = warps // heads
        defines = shape.defines("HEAD_DIM", "GROUP", "KV_HEADS", "PAGES_A_BLOCK") | shape.record_defines
        defines |= {"WARPS": warps, "HEADS_A_BLOCK": heads, "STAGES": stages}
        shared = stages * heads * GROUP_PAGES * shape.layout.record_bytes
        self._kernel = Kernel("score", "score_pages", defines, "PPPPPPPPPqqqqqqf", 32 * (warps + 1), shared)
        self._columns = shape.kv_heads // heads
        self.parts = parts_of(shape, device)
        self.log_mass = torch.empty(shape.kv_heads, capacity, shape.group, dtype=torch.float32, device=device)
        # Rows and blocks both follow the pages, so a block and a row it works on are at a slot of their own, their sum.
        self.slots = (self.parts + max_rows) * self.subs
        size = (shape.kv_heads, shape.group, self.slots, 2)
        self.partial = torch.empty(size, dtype=torch.float32, device=device)

    def __call__(
        self,
        stream: int,
        query: Tensor,
        records: Tensor,
        block_table: Tensor,
        start: Tensor,
        parts: Tensor,
        first_blocks: Tensor,
        keys: Tensor,
        scale: float,
    ) -> None:
        """Score the pages that `start` counts.

        Parameters
        ----------
        query : (rows, kv_heads * group, head_dim), rows strided
        records : uint8 (blocks, pages a block, kv_heads, record_bytes), dense but for the first stride
        block_table : int32 (rows, blocks of a row)
        start, parts, first_blocks
            From `Plan`: `score_start`, `score_parts`, `first_blocks`.
        keys : (blocks, block_size, kv_heads, head_dim)
            Whose pages attention reads next; their addresses are touched ahead.
        scale : float
        """
        self._kernel.launch(
            stream,
            (self.parts, self._columns),
            query.data_ptr(),
            records.data_ptr(),
            block_table.data_ptr(),
            start.data_ptr(),
            parts.data_ptr(),
            first_blocks.data_ptr(),
            self.log_mass.data_ptr(),
            self.partial.data_ptr(),
            keys.data_ptr(),
            query.stride(0),
            records.stride(0),
            keys.stride(0) * keys.element_size(),
            block_table.stride(0),
            self.capacity,
            self.slots,
            scale,
        )
