"""The record: where each part of a packed page summary lies, byte by byte.

A record summarises one page of one KV head.  Little-endian throughout; r = rank, B = page size, d = head size.

    offset  bytes            what
    0       2                exponent e, unsigned, biased by 32768: page units are 2**e; 0 means "no summary here"
    2       2                centroid scale, fp16                                    (0 bytes if coefficients are fp32)
    4       4                spectral tail in page units squared, fp32
    8       2 r              basis scales, fp16, one a column                        (0 bytes if the basis is fp32)
    .       2 B              coefficient scales, fp16, one a token                   (0 bytes if coefficients are fp32)
    .       to 16            zeros up to a multiple of 16
    .       d (4 d)          centroid, int8 (fp32)
    .       to 16            zeros up to a multiple of 16
    .       r columns        in order of energy, the first the largest; each column, padded with zeros to 16 bytes:
                             d basis codes (bits / 8 bytes each, lowest bits first, biased by 2**(bits - 1);
                             int8 is unbiased; fp32 if unquantised), zeros up to a multiple of 4, then B
                             coefficients (int8 or fp32)
    .       to 32            zeros up to a multiple of 32

So the first c columns and the header are one contiguous prefix, enough to score at rank c.  At r = 8, B = 16, d = 128,
int4 / int8 the header takes 64 bytes, the centroid 128 and a column 80: 832 bytes in all, beside 8,192 of K and V in
bf16.  A record of zeros, which is what a fresh cache holds, reads as "no summary".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .config import LocksConfig, reject

ALIGNMENT = 32
PART_ALIGNMENT = 16
MIN_HEAD_DIM, MAX_HEAD_DIM, HEAD_DIM_STEP = 32, 256, 8


def align(size: int, to: int) -> int:
    """`size` rounded up to a multiple of `to`."""
    return -(-size // to) * to


def check_head_dim(head_dim: int, config: LocksConfig) -> None:
    """Raise ValueError unless summaries of this head size are possible with this rank."""
    if type(head_dim) is not int or not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM or head_dim % HEAD_DIM_STEP:
        allowed = f"head sizes are multiples of {HEAD_DIM_STEP} from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
        raise reject("head_dim", head_dim, allowed, "Serve this model without LOCKS.")
    if config.rank > head_dim:
        raise reject("rank", config.rank, f"at most the head size, {head_dim}", f"Use rank {min(8, head_dim)}.")


@dataclass(frozen=True)
class RecordLayout:
    """Byte offsets within a record, and of `coefficients` within a column; make one with `record_layout`."""

    centroid_scale: int
    tail: int
    basis_scale: int
    coefficient_scale: int
    centroid: int
    columns: int
    column_bytes: int
    basis_bytes: int
    coefficients: int
    record_bytes: int


@lru_cache(maxsize=64, typed=True)
def record_layout(head_dim: int, config: LocksConfig) -> RecordLayout:
    """The layout of a record for heads of `head_dim` under `config`.

    Raises
    ------
    ValueError
        If the head size is not supported, or smaller than the rank.
    """
    check_head_dim(head_dim, config)
    entry_bytes = 4 if config.coefficient_bits is None else 1
    basis_bytes = head_dim * (32 if config.basis_bits is None else config.basis_bits) // 8
    basis_scale = 8
    coefficient_scale = basis_scale + (0 if config.basis_bits is None else 2 * config.rank)
    header = coefficient_scale + (0 if config.coefficient_bits is None else 2 * config.page_size)
    centroid = align(header, PART_ALIGNMENT)
    columns = align(centroid + head_dim * entry_bytes, PART_ALIGNMENT)
    coefficients = align(basis_bytes, 4)
    column_bytes = align(coefficients + config.page_size * entry_bytes, PART_ALIGNMENT)
    return RecordLayout(
        centroid_scale=2,
        tail=4,
        basis_scale=basis_scale,
        coefficient_scale=coefficient_scale,
        centroid=centroid,
        columns=columns,
        column_bytes=column_bytes,
        basis_bytes=basis_bytes,
        coefficients=coefficients,
        record_bytes=align(columns + config.rank * column_bytes, ALIGNMENT),
    )
