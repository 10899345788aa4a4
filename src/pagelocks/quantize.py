"""Symmetric rounding with fp16 scales, nibble packing and exact powers of two."""

from __future__ import annotations

import torch
from torch import Tensor


def power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent, exact, as float64; `exponent` is an integer tensor, clamped to -1022 … 1023.

    Built from the bits: `exp2` and `ldexp` may be off by an ulp, or overflow in fp32, on some devices.
    """
    return ((exponent.to(torch.int64).clamp(-1022, 1023) + 1023) << 52).view(torch.float64)


def half_rounded_up(value: Tensor) -> Tensor:
    """The least fp16 number that is no less than `value` (non-negative, at most 65504)."""
    half = value.to(torch.float16)
    below = half.to(value.dtype) < value
    return (half.view(torch.int16) + below.to(torch.int16)).view(torch.float16)


def quantize(values: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor]:
    """Round to signed codes with one fp16 scale along `dim`.

    The scale is rounded up before it is used, so the largest value still gets a code within range and no value is
    more than half a step from its code.

    Returns
    -------
    codes : int8, the shape of `values`
    scale : fp16, the shape of `values` without `dim`
    """
    largest = 2 ** (bits - 1) - 1
    scale = half_rounded_up(values.abs().amax(dim) / largest)
    step = scale.to(values.dtype).unsqueeze(dim)
    codes = torch.where(step > 0, values / torch.where(step > 0, step, torch.ones_like(step)), torch.zeros_like(values))
    return codes.round().to(torch.int8), scale


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """int8 codes (..., n) to bytes (..., n * bits / 8), lowest bits first, biased unless 8 bits wide."""
    if bits == 8:
        return codes.contiguous().view(torch.uint8)
    lanes = 8 // bits
    biased = (codes.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8).unflatten(-1, (-1, lanes))
    packed: Tensor = biased[..., 0]
    for lane in range(1, lanes):
        packed = packed | (biased[..., lane] << (bits * lane))
    return packed


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_codes`: bytes (..., n * bits / 8) to int8 codes (..., n)."""
    if bits == 8:
        return packed.contiguous().view(torch.int8)
    mask = 2**bits - 1
    lanes = [(packed >> (bits * lane)) & mask for lane in range(8 // bits)]
    codes: Tensor = torch.stack(lanes, dim=-1).flatten(-2).view(torch.int8) - 2 ** (bits - 1)
    return codes
