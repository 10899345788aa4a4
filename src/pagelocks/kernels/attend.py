"""Attend: exact attention over chosen pages, or all; `pagelocks.attend` is the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from .compiler import SHARED_MEMORY, Kernel
from .shape import KernelShape

LEAST_PAGES = 8
"""Pages that are worth a block of their own."""


class Attend:
    """The attention kernel of one shape, with its workspace."""

    def __init__(self, shape: KernelShape, max_rows: int, device: torch.device) -> None:
        members = min(16, shape.group)
        tiles = -(-shape.group // members)
        stage = 2 * 16 * shape.head_dim * 2
        # Few blocks leave few partial results to merge: one of eight warps keeps memory as busy as two of four.
        warps = 8 if shape.head_dim <= 128 else 4
        merge = warps * members * shape.head_dim * 4 + warps * 16 * 2 * 4 + 16 * 4 + 16
        stages = next(n for n in (4, 3, 2) if warps * n * stage + merge <= SHARED_MEMORY)
        shared = warps * stages * stage + merge
        blocks = max(1, min(16 // warps, (SHARED_MEMORY + 1024) // (shared + 1024)))
        defines = shape.defines("HEAD_DIM", "GROUP", "KV_HEADS", "PAGES_A_BLOCK")
        defines |= {"WARPS": warps, "STAGES": stages, "SHARED_BYTES": shared, "LEAST_PAGES": LEAST_PAGES}
        self._kernel = Kernel("attend", "attend_pages", defines, "PPPPPPPPPPPPqqqqqqiiif", 32 * warps, shared)
        self.parts = blocks * torch.cuda.get_device_properties(device).multi_processor_count
        # The type is named: vLLM makes layers under a default of the model's own.
        size = (2 * self.parts, members)
        self._partial_output = torch.empty(*size, shape.head_dim, dtype=torch.float32, device=device)
        self._partial_sum = torch.empty(*size, 2, dtype=torch.float32, device=device)
        self._arrived = torch.zeros(max_rows * shape.kv_heads * tiles, dtype=torch.int32, device=device)

    def __call__(
        self,
        stream: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        output: Tensor,
        block_table: Tensor,
        pages: Tensor,
        score_start: Tensor,
        attend_start: Tensor,
        lengths: Tensor,
        rows: int,
        scale: float,
    ) -> None:
        """Attend the rows that `attend_start` counts pages of; other rows, which are padding, get zeros.

        Parameters
        ----------
        query, output : (rows, kv_heads * group, head_dim), rows strided
        keys, values : (blocks, block_size, kv_heads, head_dim), same strides, the last 1
        block_table : int32 (rows, blocks of a row)
        pages : int32 (rows, kv_heads, budget_pages), from `Select`, for rows with pages in `score_start`
        score_start, attend_start : int32 (rows + 1), from `Plan`
        lengths : int32 (rows)
        scale : float
        """
        self._kernel.launch(
            stream,
            (self.parts, 1),
            query.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            output.data_ptr(),
            block_table.data_ptr(),
            pages.data_ptr(),
            score_start.data_ptr(),
            attend_start.data_ptr(),
            lengths.data_ptr(),
            self._partial_output.data_ptr(),
            self._partial_sum.data_ptr(),
            self._arrived.data_ptr(),
            query.stride(0),
            output.stride(0),
            keys.stride(0),
            keys.stride(1),
            keys.stride(2),
            block_table.stride(0),
            rows,
            self.parts,
            pages.shape[-1],
            scale,
        )
