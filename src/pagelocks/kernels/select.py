"""Select: log-mass -> the pages to attend; `pagelocks.score.page_share` and `pagelocks.select` are the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from .compiler import Kernel
from .score import LEAST_PAGES, Score
from .shape import KernelShape

KEYS = 8192
"""Pages of a block whose shares fit its shared memory; others stay in global memory."""
BINS = 2048


class Select:
    """The select kernel of one shape, with its outputs.

    Attributes
    ----------
    pages : int32 (max_rows, kv_heads, budget_pages)
        Physical pages, block * pages a block + page within it, in the order of the sequence; of rows that select.
    logical : int32, the same shape, or None
        The same as page numbers of the sequence, where asked for.
    """

    def __init__(self, shape: KernelShape, score: Score, max_rows: int, logical: bool, device: torch.device) -> None:
        self.shape, self.score = shape, score
        self._kernels: dict[int, Kernel] = {}
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.keys = torch.empty(shape.kv_heads, score.capacity, dtype=torch.int32, device=device)
        size = (max_rows, shape.kv_heads, shape.config.budget_pages)
        self.pages = torch.zeros(size, dtype=torch.int32, device=device)
        self.logical = torch.zeros(size, dtype=torch.int32, device=device) if logical else None

    def cluster(self, rows: int) -> int:
        """Blocks that share one row and head: as many as keep the processors busy, 16 at most."""
        blocks = 16
        while blocks > 1 and blocks * rows * self.shape.kv_heads > self._processors:
            blocks //= 2
        return blocks

    def warm_up(self, rows: int) -> None:
        """Compile what `rows` rows need."""
        cluster = self.cluster(rows)
        threads = 1024 if cluster >= 8 else 512  # two blocks a processor where there are many
        if cluster not in self._kernels:
            defines = self.shape.defines("GROUP", "KV_HEADS", "PAGES_A_BLOCK")
            defines |= {"SUBS": self.score.subs, "THREADS": threads, "KEYS": KEYS}
            group = self.shape.group
            pieces = 8 * group * max(1, threads // 32 // group)
            fixed = 4 * BINS * 4 + 16 * 2 * 4 + threads // 32 * 12 + pieces + 8 * group + 64
            shared = -(-fixed // 16) * 16 + KEYS * 4
            defines["SHARED_BYTES"] = shared
            kernel = Kernel("select", "select_pages", defines, "PPPPPPPPqqqiiiiii", threads, shared, cluster)
            self._kernels[cluster] = kernel

    def __call__(self, stream: int, block_table: Tensor, start: Tensor, lengths: Tensor, rows: int) -> None:
        """Select pages of the rows that `start` counts pages of.

        Parameters
        ----------
        block_table : int32 (rows, blocks of a row)
        start : int32 (rows + 1), from `Plan.score_start`
        lengths : int32 (rows)
        """
        self.warm_up(rows)
        cluster = self.cluster(rows)
        config = self.shape.config
        self._kernels[cluster].launch(
            stream,
            (cluster * rows * self.shape.kv_heads, 1),
            self.score.log_mass.data_ptr(),
            self.score.partial.data_ptr(),
            start.data_ptr(),
            lengths.data_ptr(),
            block_table.data_ptr(),
            self.pages.data_ptr(),
            0 if self.logical is None else self.logical.data_ptr(),
            self.keys.data_ptr(),
            block_table.stride(0),
            self.score.capacity,
            self.score.slots,
            rows,
            self.score.parts,
            LEAST_PAGES,
            config.budget_pages,
            config.sink_pages,
            config.recent_pages,
        )
