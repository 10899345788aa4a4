"""Addresses of several layers, and what is refused."""

from __future__ import annotations

import pytest
import torch

from pagelocks.kernels import Caches, Rows


def layer(blocks: int = 6, record_bytes: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    keys = torch.zeros(blocks, 16, 2, 128)[..., :64]
    return keys, torch.zeros(blocks, 1, 2, record_bytes, dtype=torch.uint8)


def test_addresses_are_the_layers_own() -> None:
    keys, records = zip(*[layer() for _ in range(3)], strict=True)
    caches = Caches(keys, records)
    assert caches.layers == 3
    assert caches.key_pointers.tolist() == [t.data_ptr() for t in keys]
    assert caches.record_pointers.tolist() == [t.data_ptr() for t in records]
    assert caches.key_strides == (16 * 2 * 128, 2 * 128, 128) and caches.block_bytes == 2 * 512


def test_layers_that_differ_are_refused() -> None:
    (keys, records), (other, _) = layer(), layer()
    with pytest.raises(ValueError, match="the same in all layers"):
        Caches([keys, other.transpose(1, 2).contiguous().transpose(1, 2)], [records, records])


def test_records_must_be_dense_within_a_block() -> None:
    keys, records = layer()
    with pytest.raises(ValueError, match="records dense within a block"):
        Caches([keys], [torch.zeros(6, 1, 2, 600, dtype=torch.uint8)[..., :512]])
    Caches([keys], [records[::2]])  # the first stride may be anything


def test_rows_are_int32() -> None:
    lengths = torch.tensor([5])
    with pytest.raises(ValueError, match=r"dense int32.*contiguous"):
        Rows(lengths, lengths.int(), lengths.int()[None], 1, 1, 1)
