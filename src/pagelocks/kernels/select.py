"""Select: log-mass -> the pages to attend; `pagelocks.score.page_share` and `pagelocks.select` are the definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .compiler import Kernel
from .score import LEAST_PAGES, Score
from .shape import KernelShape

THREADS = 512
KEYS = 8192
"""Pages of a block whose shares fit its shared memory; others stay in global memory."""
SCORED = "PPPPPqqqiiii"
"""The fields of select.cuh's `Scored`."""


def selection_defines(shape: KernelShape, score: Score, threads: int, keys: int, cluster: int) -> dict[str, int]:
    """What select.cuh must know when it is compiled."""
    defines = shape.defines("GROUP", "KV_HEADS", "PAGES_A_BLOCK")
    defines |= {"SUBS": score.subs, "SCORE_PARTS": score.parts, "LEAST_PAGES": LEAST_PAGES}
    defines |= {"BUDGET_PAGES": shape.config.budget_pages, "CLUSTER": cluster}
    return defines | {"THREADS": threads, "KEYS": keys}


def selection_bytes(shape: KernelShape, threads: int, keys: int, cluster: int) -> int:
    """Shared memory that holds select.cuh's `Selection`."""
    warps = threads // 32
    histograms, table = 6 * 2048 * 4, 4 * (keys // shape.pages_a_block + 2)
    heads = shape.group * (8 * max(1, warps // shape.group) + 4)
    return 4 * max(1, keys) + table + histograms + heads + 12 * warps + 8 * cluster + 256


def largest_cluster(items: int, processors: int, least: int, kernel: Callable[[int], Kernel]) -> int:
    """Blocks of a cluster, 16 at most, if each of `items` has one and all run at a time; 1 if fewer than `least` would.

    `kernel` gives the kernel for clusters of so many blocks: a cluster needs its processors in one part of the card, so
    that fewer may fit than the card's processors would let.
    """
    blocks = 16
    while blocks >= least:
        if blocks * items <= processors and items <= kernel(blocks).at_once:
            return blocks
        blocks //= 2
    return 1


def scored(shape: KernelShape, score: Score, block_table: Tensor, start: Tensor, keys: Tensor, rows: int) -> list[Any]:
    """The values of `Scored`."""
    config = shape.config
    tensors = (score.log_mass, score.partial, start, block_table, keys)
    strides = (block_table.stride(0), score.capacity, score.slots)
    pages = (config.sink_pages, config.recent_pages)
    return [*(t.data_ptr() for t in tensors), *strides, rows, score.parts, *pages]


class Select:
    """The select kernel of one shape, with its outputs.

    Attributes
    ----------
    pages : int32 (max_rows, kv_heads, budget_pages)
        Physical pages, block * pages a block + page within it, in the order of the sequence; of rows that select.
    logical : int32, the same shape, or None
        The same as page numbers of the sequence, where asked for.
    keys : int32 (kv_heads, capacity)
        Workspace: shares that do not fit shared memory.
    """

    def __init__(self, shape: KernelShape, score: Score, max_rows: int, logical: bool, device: torch.device) -> None:
        self.shape, self.score = shape, score
        self._kernels: dict[int, Kernel] = {}
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.keys = torch.empty(shape.kv_heads, score.capacity, dtype=torch.int32, device=device)
        size = (max_rows, shape.kv_heads, shape.config.budget_pages)
        self.pages = torch.zeros(size, dtype=torch.int32, device=device)
        self.logical = torch.zeros(size, dtype=torch.int32, device=device) if logical else None

    def cluster(self, rows: int) -> int:
        """Blocks that share one row and head."""
        return largest_cluster(rows * self.shape.kv_heads, self.processors, 2, self._kernel)

    def warm_up(self, rows: int) -> None:
        """Compile what `rows` rows need."""
        self._kernel(self.cluster(rows))

    def _kernel(self, cluster: int) -> Kernel:
        if cluster not in self._kernels:
            shared = selection_bytes(self.shape, THREADS, KEYS, cluster)
            defines = selection_defines(self.shape, self.score, THREADS, KEYS, cluster) | {"SHARED_BYTES": shared}
            kernel = Kernel("select", "select_pages", defines, SCORED + "PPP", THREADS, shared, cluster)
            self._kernels[cluster] = kernel
        return self._kernels[cluster]

    def __call__(self, stream: int, block_table: Tensor, start: Tensor, lengths: Tensor, rows: int) -> None:
        """Select pages of the rows that `start` counts pages of.

        Parameters
        ----------
        block_table : int32 (rows, blocks of a row)
        start : int32 (rows + 1), from `Plan.score_start`
        lengths : int32 (rows)
        """
        cluster = self.cluster(rows)
        self._kernel(cluster).launch(
            stream,
            (cluster * rows * self.shape.kv_heads, 1),
            *scored(self.shape, self.score, block_table, start, self.keys, rows),
            lengths.data_ptr(),
            self.pages.data_ptr(),
            0 if self.logical is None else self.logical.data_ptr(),
        )
