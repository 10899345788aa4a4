"""Where the layers' keys and records lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..config import reject


class Caches:
    """Addresses and strides of every layer's keys and records, for kernels that work on several layers at once.

    Parameters
    ----------
    keys : sequence of (blocks, block_size, kv_heads, head_dim)
        One a layer, all of the same strides, the last 1.
    records : sequence of uint8 (blocks, pages a block, kv_heads, record_bytes)
        One a layer, all of the same strides, dense but for the first.

    Raises
    ------
    ValueError
        If layers differ, or records are not dense within a block.
    """

    def __init__(self, keys: Sequence[Tensor], records: Sequence[Tensor]) -> None:
        first, record = keys[0], records[0]
        if {t.stride() for t in keys} != {first.stride()} or {t.stride() for t in records} != {record.stride()}:
            strides = sorted({t.stride() for t in (*keys, *records)})
            raise reject("strides", strides, "the same in all layers", "Give each kind of layer its own caches.")
        heads, size = record.shape[2:]
        if record.stride()[1:] != (heads * size, size, 1) or first.stride(3) != 1:
            allowed = "records dense within a block, and the head dimension of keys dense"
            raise reject("strides", (first.stride(), record.stride()), allowed, "Use another cache layout.")
        self.keys, self.records, self.layers = list(keys), list(records), len(keys)
        self.key_strides, self.block_bytes = first.stride()[:3], record.stride(0)
        pointers = [[t.data_ptr() for t in each] for each in (keys, records)]
        self.key_pointers, self.record_pointers = torch.tensor(pointers, dtype=torch.int64).to(first.device)
