"""Rounding: exact powers of two, scales rounded up, codes within half a step, nibbles in the documented order."""

import math

import numpy as np
import pytest
import torch

from pagelocks.quantize import half_rounded_up, pack_codes, power_of_two, quantize, unpack_codes

from .helpers import normal


def every_half():
    """All finite non-negative fp16 numbers, ascending, as float64."""
    return torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).double()


def test_power_of_two_is_exact_over_the_whole_range():
    exponents = range(-1022, 1024)
    found = power_of_two(torch.tensor(list(exponents), dtype=torch.int32))
    assert found.dtype == torch.float64
    assert found.tolist() == [math.ldexp(1.0, exponent) for exponent in exponents]


def test_power_of_two_clamps_rather_than_overflows():
    assert power_of_two(torch.tensor([-32768, -1023, 1024, 2**31])).tolist() == [
        2.0**-1022,
        2.0**-1022,
        2.0**1023,
        2.0**1023,
    ]


def test_halves_stay_themselves():
    assert torch.equal(half_rounded_up(every_half()).double(), every_half())


def test_anything_between_two_halves_goes_to_the_upper_one():
    halves = every_half()
    below, above = halves[:-1], halves[1:]
    smallest_step = torch.nextafter(below, above)
    for value in (smallest_step, below + (above - below) * 0.25, (below + above) / 2, torch.nextafter(above, below)):
        assert torch.equal(half_rounded_up(value).double(), above)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("size", [1e-9, 1e-7, 1e-5, 1e-3, 1.0, 30.0])
def test_no_code_is_more_than_half_a_step_off(bits, size):
    """Also where the scale is a subnormal half, whose relative error is largest."""
    values = normal(bits, 200, 64, dtype=torch.float64) * size
    codes, scale = quantize(values, bits, -1)
    step = scale.double().unsqueeze(-1)
    assert codes.dtype == torch.int8 and scale.dtype == torch.float16 and scale.shape == (200,)
    assert codes.abs().max() <= 2 ** (bits - 1) - 1
    assert ((codes.double() * step - values).abs() <= step / 2 * (1 + 1e-12)).all()
    exact = values.abs().amax(-1) / (2 ** (bits - 1) - 1)
    assert (scale.double() >= exact).all()
    halves = every_half()
    assert torch.equal(scale.double(), halves[torch.searchsorted(halves, exact)])  # and no larger than needed


def test_a_scale_rounded_to_nearest_would_overflow_here():
    """The largest value is 1.4 of the smallest half per code: to nearest, code 127 would have to be 178."""
    values = torch.tensor([[127 * 1.4 * 2.0**-24, 0.0, -3e-6]], dtype=torch.float64)
    codes, scale = quantize(values, 8, -1)
    assert scale.item() == 2.0**-23
    assert codes.tolist() == [[89, 0, -25]]


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zeros_and_their_neighbours(bits):
    values = normal(0, 3, 16, dtype=torch.float64)
    values[1] = 0
    codes, scale = quantize(values, bits, -1)
    assert scale[1] == 0 and not codes[1].any()
    alone, alone_scale = quantize(values[2:], bits, -1)
    assert torch.equal(codes[2:], alone) and torch.equal(scale[2:], alone_scale)


def test_the_scale_runs_along_the_dimension_that_is_named():
    values = normal(0, 5, 4, 6, dtype=torch.float64)
    codes, scale = quantize(values, 8, -2)
    assert scale.shape == (5, 6)
    turned, turned_scale = quantize(values.mT, 8, -1)
    assert torch.equal(codes, turned.mT) and torch.equal(scale, turned_scale)


def test_lowest_bits_first():
    assert pack_codes(torch.tensor([-8, 7, 0, -1], dtype=torch.int8), 4).tolist() == [0xF0, 0x78]
    assert pack_codes(torch.tensor([-2, -1, 0, 1], dtype=torch.int8), 2).tolist() == [0b11_10_01_00]
    assert pack_codes(torch.tensor([-128, -1, 0, 127], dtype=torch.int8), 8).tolist() == [128, 255, 0, 127]


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_every_byte_survives_unpack_and_pack(bits):
    packed = torch.arange(256, dtype=torch.uint8).reshape(2, 128)
    codes = unpack_codes(packed, bits)
    assert codes.shape == (2, 128 * 8 // bits) and codes.dtype == torch.int8
    assert (codes.min(), codes.max()) == (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    assert torch.equal(pack_codes(codes, bits), packed)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_every_code_survives_pack_and_unpack(bits):
    rng = np.random.default_rng()
    codes = torch.from_numpy(rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (7, 3, 64)).astype(np.int8))
    assert torch.equal(unpack_codes(pack_codes(codes, bits), bits), codes)
