"""A mean and a slope along series, against a fit written out, and intervals against noise that is known."""

import pytest
import torch

from pagelocks.eval.trend import trend

from .helpers import assert_rejected


def test_the_estimates_are_least_squares_with_a_level_for_each_series():
    series = [(torch.arange(70.0), torch.randn(70)), (torch.arange(5.0, 105.0), 3 + torch.randn(100))]
    mean, slope = trend(series, block=16)
    at, values = (torch.cat([each[n] for each in series]).double() for n in (0, 1))
    design = torch.zeros(170, 3, dtype=torch.float64)
    design[:70, 0] = design[70:, 1] = 1
    design[:, 2] = at
    fit = torch.linalg.lstsq(design, values.unsqueeze(-1)).solution
    assert slope.estimate == pytest.approx(float(fit[2]), rel=1e-6)
    assert mean.estimate == pytest.approx(float(values.mean()), rel=1e-6)
    assert slope.low < slope.estimate < slope.high and mean.low < mean.estimate < mean.high
    assert (slope.confidence, trend(series, block=16)) == (0.95, (mean, slope))


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    """Noise whose neighbours have correlation 0.8: single tokens drawn would give intervals far too narrow."""
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)
    held = alone = 0
    for _ in range(60):
        shocks, noise = torch.randn(2, 256, generator=generator), torch.zeros(2, 256)
        for at in range(1, 256):
            noise[:, at] = 0.8 * noise[:, at - 1] + shocks[:, at]
        series = [(torch.arange(256.0), 0.01 * torch.arange(256.0) + each) for each in noise]
        slopes = [trend(series, block, draws=200)[1] for block in (32, 1)]
        held += slopes[0].low < 0.01 < slopes[0].high
        alone += slopes[1].low < 0.01 < slopes[1].high
    assert held >= 44 and held > alone + 8  # of 60, about 54 and 27


def test_series_without_any_noise_and_series_that_will_not_do():
    line = torch.arange(64.0)
    mean, slope = trend([(line, 2 * line + 1)], block=8)
    assert slope.low == pytest.approx(2) and slope.high == pytest.approx(2) and mean.estimate == 64
    mean, slope = trend([(line, torch.zeros(64))])
    assert (mean.low, mean.high, slope.low, slope.high) == (0, 0, 0, 0)
    assert_rejected(lambda: trend([(line[:63], line[:63])]), "series=[63]", "64 positions or more")
    assert_rejected(lambda: trend([]), "series=[]", "two blocks")
