"""Whether something grows along a sequence: a mean and a slope of series whose neighbours are alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..config import reject
from .statistics import Interval

BLOCK = 32
"""Positions that stay together when resampled: neighbouring tokens have much in common."""


def trend(
    series: Sequence[tuple[Tensor, Tensor]],
    block: int = BLOCK,
    confidence: float = 0.95,
    draws: int = 4_000,
    seed: int = 0,
) -> tuple[Interval, Interval]:
    """Mean and least-squares slope of several series with one slope and a level of its own each.

    Series are cut into blocks of neighbours, and each series' blocks are drawn with replacement (a block bootstrap,
    percentile intervals): what is estimated is the trend of these prompts, and the intervals hold what their tokens
    scatter, not how other prompts differ.  Few blocks make them too narrow: with two series of eight blocks, neighbours
    correlated by 0.8, those of 95% held the true slope 90 times of 100; single positions drawn alone, 45.

    Parameters
    ----------
    series : sequence of (positions, values), float (n,) each
        At least one, each with two blocks or more.
    block : int
        Positions.
    confidence : float
    draws : int
    seed : int

    Returns
    -------
    mean, slope : Interval
        In units of the values, and of the values per position.
    """
    if not series or any(len(at) != len(values) or len(at) < 2 * block for at, values in series):
        found = [len(at) for at, _ in series]
        raise reject("series", found, f"series of {2 * block} positions or more: two blocks", "Generate more tokens.")
    generator = torch.Generator().manual_seed(seed)
    tail = torch.tensor([(1 - confidence) / 2, (1 + confidence) / 2], dtype=torch.float64)
    number = covariance = variance = total = torch.zeros(draws + 1, dtype=torch.float64)
    for at, values in series:
        # As sums over each block, so that any draw of blocks is a sum of sums; the last block takes the rest.
        count = len(at) // block
        owner = (torch.arange(len(at)) // block).clamp(max=count - 1)
        x, y = at.double() - at.double().mean(), values.double()
        sums = torch.zeros(5, count, dtype=torch.float64)
        sums.index_add_(1, owner, torch.stack([torch.ones_like(x), x, y, x * x, x * y]))
        weights = torch.ones(draws + 1, count, dtype=torch.float64)  # the first row is the estimate
        drawn = torch.randint(count, (draws, count), generator=generator)
        weights[1:] = torch.zeros(draws, count, dtype=torch.float64).scatter_add_(
            1, drawn, torch.ones_like(drawn, dtype=torch.float64)
        )
        n, sx, sy, sxx, sxy = (weights @ sums.T).unbind(-1)
        number, total = number + n, total + sy
        covariance, variance = covariance + sxy - sx * sy / n, variance + sxx - sx * sx / n
    means, slopes = total / number, covariance / torch.where(variance > 0, variance, 1)
    intervals = []
    for each in (means, slopes):
        low, high = each[1:].quantile(tail).tolist()
        intervals.append(Interval(float(each[0]), low, high, confidence))
    return intervals[0], intervals[1]
