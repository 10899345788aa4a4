"""Build: complete pages -> their records; `pagelocks.summary` is the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from .caches import Caches
from .compiler import Kernel
from .shape import KernelShape

WARPS = 4
PAGES_A_WARP = 2


class Build:
    """The build kernel of one shape."""

    def __init__(self, shape: KernelShape, device: torch.device) -> None:
        self.shape = shape
        page = 16 * (shape.head_dim + 4) * 4 + 16 * 17 * 4 + shape.layout.record_bytes
        shared = WARPS * PAGES_A_WARP * page
        defines = shape.defines("HEAD_DIM", "KV_HEADS", "PAGES_A_BLOCK") | shape.record_defines
        defines |= {"WARPS": WARPS, "SHARED_BYTES": shared}
        self._kernel = Kernel("build", "build_pages", defines, "PPPPqqqqi", 32 * WARPS, shared)
        self._blocks = 2 * torch.cuda.get_device_properties(device).multi_processor_count

    def __call__(
        self, stream: int, caches: Caches, layer: int | None, pages: Tensor, count: Tensor, most_pages: int
    ) -> None:
        """Write records.

        Parameters
        ----------
        caches : Caches
        layer : int or None
            The layer to build in; None for all.
        pages : int32 (..)
            Physical pages: block * pages a block + page within it.
        count : int32, one number
            How many of them, on the device.
        most_pages : int
            The most that there may be: it sizes the grid and nothing else.
        """
        layers, first = (caches.layers, 0) if layer is None else (1, layer)
        blocks = -(-most_pages * layers * self.shape.kv_heads // (WARPS * PAGES_A_WARP))
        self._kernel.launch(
            stream,
            (max(1, min(self._blocks, blocks)), 1),
            caches.key_pointers.data_ptr() + 8 * first,
            caches.record_pointers.data_ptr() + 8 * first,
            pages.data_ptr(),
            count.data_ptr(),
            *caches.key_strides,
            caches.block_bytes,
            layers,
        )
