"""Plan: running totals of what a step scores and attends, and the list of pages that it completes; once a step."""

from __future__ import annotations

import torch
from torch import Tensor

from .caches import Caches
from .compiler import Kernel
from .score import LEAST_PAGES
from .shape import KernelShape

THREADS = 1024


class Plan:
    """The totals of one step, on the device, where the other kernels read them.

    Attributes
    ----------
    score_start : int32 (max_rows + 1)
        Running total of the complete pages of the rows that select; a row of none attends everything.
    attend_start : int32 (max_rows + 1)
        Of the pages that a KV head attends.
    lengths : int32 (max_rows)
        The rows' lengths as planned; the other kernels go by these, whatever becomes of the step's own.
    score_parts : int32 (score_parts, 8)
        What each block of score gets, as `ScorePart` in common.cuh has it.
    first_blocks : int32 (score_parts, 32)
        Where its first pages lie.
    completed_start : int32 (max_rows + 1)
        Of the pages that the step completes.
    completed : int32 (max_completed)
        Those pages: block * pages a block + page within it.
    """

    def __init__(
        self,
        shape: KernelShape,
        max_rows: int,
        max_completed: int,
        capacity: int,
        score_parts: int,
        device: torch.device,
    ) -> None:
        self.shape, self.capacity = shape, capacity
        self.score_start, self.attend_start, self.completed_start = (
            torch.zeros(max_rows + 1, dtype=torch.int32, device=device) for _ in range(3)
        )
        self.lengths = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.completed = torch.zeros(max_completed, dtype=torch.int32, device=device)
        self.score_parts = torch.zeros(score_parts, 8, dtype=torch.int32, device=device)
        self.first_blocks = torch.zeros(score_parts, 32, dtype=torch.int32, device=device)
        defines = {"SCORE_PARTS": score_parts, "LEAST_PAGES": LEAST_PAGES}
        self._kernel = Kernel("plan", "plan_step", defines, "PPPPPPPPPPPqqiiiiiiiii", THREADS)
        starts = (self.score_start, self.attend_start, self.lengths, self.completed_start)
        outputs = (*starts, self.score_parts, self.first_blocks, self.completed)
        self._outputs = tuple(tensor.data_ptr() for tensor in outputs)

    def __call__(
        self,
        stream: int,
        lengths: Tensor,
        query_starts: Tensor,
        block_table: Tensor,
        rows: int,
        decode_rows: int,
        dense_below: int,
        mark: Caches | None = None,
    ) -> None:
        """Work out the totals.

        Parameters
        ----------
        stream : int
            The CUDA stream's handle.
        lengths : int32 (rows)
            Tokens of each row after the step; 0 for padding.
        query_starts : int32 (rows + 1)
        block_table : int32 (rows, blocks of a row)
        rows, decode_rows : int
            Rows, and those at the front that have one query token.
        dense_below : int
            Tokens; a row of this many or fewer attends everything.
        mark : Caches, optional
            Where to mark the records of the completed pages as missing, as they will be built after the step.
        """
        self._kernel.launch(
            stream,
            (1, 1),
            lengths.data_ptr(),
            query_starts.data_ptr(),
            block_table.data_ptr(),
            *self._outputs,
            mark.record_pointers.data_ptr() if mark else 0,
            block_table.stride(0),
            mark.block_bytes if mark else 0,
            rows,
            decode_rows,
            self.shape.config.budget_pages,
            dense_below,
            self.capacity,
            self.shape.pages_a_block,
            mark.layers if mark else 0,
            self.shape.kv_heads,
            self.shape.layout.record_bytes,
        )
