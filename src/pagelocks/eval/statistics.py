"""How sure a score is, and whether two differ: intervals and paired tests, without SciPy.

Selectors answer the same prompts, so their scores are compared in pairs: what a prompt's difficulty adds to both
cancels.  Every test is two-sided.  Prompts are taken as independent; answers that share a prompt are not, and are to be
averaged first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import torch
from torch import Tensor

from ..config import reject

Scores = Sequence[float] | Sequence[bool] | Tensor

EXACT_FLIPS = 16
"""Up to this many differences, `permutation_test` goes through all 2**n signs."""
_AT_ONCE = 1 << 22  # numbers of a resampling held at a time: 32 MB
_KEPT = 1 << 23  # numbers of a resampling, at most, that stay for the next scores of as many prompts: 64 MB, twice


@dataclass(frozen=True)
class Interval:
    """An estimate and the two ends of its confidence interval."""

    estimate: float
    low: float
    high: float
    confidence: float


def wilson_interval(right: int, asked: int, confidence: float = 0.95) -> Interval:
    """Wilson's interval for a share of right answers (Wilson, 1927): honest at 0, at `asked` and for few questions.

        (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n),  p = right / asked, n = asked

    Those are the shares pi at which |p - pi| = z sqrt(pi (1 - pi) / n), z the normal quantile of the confidence.
    """
    for name, value, least in (("asked", asked, 1), ("right", right, 0)):
        if type(value) is not int or value < least:
            raise reject(name, value, f"a whole number, {least} or more", "Count answers, not percent.")
    if right > asked:
        raise reject("right", right, f"at most asked = {asked}", "Count answers, not percent.")
    z = _normal_quantile(confidence)
    share = right / asked
    middle = share + z * z / (2 * asked)
    half = z * math.sqrt(share * (1 - share) / asked + (z / (2 * asked)) ** 2)
    whole = 1 + z * z / asked
    # At the ends one root is 0 or 1; rounding would leave it beside.
    low = 0.0 if right == 0 else (middle - half) / whole
    high = 1.0 if right == asked else (middle + half) / whole
    return Interval(share, low, high, confidence)


def bootstrap_mean(scores: Scores, confidence: float = 0.95, draws: int = 10_000, seed: int = 0) -> Interval:
    """Percentile bootstrap of a mean (Efron, 1979): quantiles of the means of `draws` samples with replacement.

    Parameters
    ----------
    scores : n numbers
        At least 2.  With fewer than about 20 the interval is too narrow; of right and wrong answers use
        `wilson_interval`, as the bootstrap of n right answers has no width.
    confidence : float
    draws : int
    seed : int
        The same seed gives the same interval.

    Returns
    -------
    Interval
        In units of the scores.
    """
    values = _scores("scores", scores)
    _check_draws(draws)
    tail = (1 - _confidence(confidence)) / 2
    count = values.numel()
    samples = _kept_samples if draws * count <= _KEPT else _samples
    mean = values.mean()
    means = torch.cat([mean + times @ (values - mean) / count for times in samples(count, draws, seed)])
    ends = means.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64))
    return Interval(float(mean), float(ends[0]), float(ends[1]), confidence)


def bootstrap_difference(
    first: Scores, second: Scores, confidence: float = 0.95, draws: int = 10_000, seed: int = 0
) -> Interval:
    """Percentile bootstrap of mean(first - second), resampling prompts, so that pairs stay together."""
    return bootstrap_mean(_differences(first, second), confidence, draws, seed)


@dataclass(frozen=True)
class PermutationTest:
    """The mean of first - second, its two-sided p-value, and whether all signs were tried (`exact`) or some drawn."""

    difference: float
    p_value: float
    exact: bool


def permutation_test(first: Scores, second: Scores, draws: int = 20_000, seed: int = 0) -> PermutationTest:
    """Paired permutation test of the mean difference (Fisher, 1935).

    If neither is better, a pair could as well have come in the other order, so every difference could have had the
    other sign: p is the share of the 2^n sign patterns whose |sum| reaches the one seen.  Up to `EXACT_FLIPS`
    differences that are not 0 (those change no sum) all patterns count; beyond, p = (1 + those that reach it) /
    (1 + draws) of random ones, which never is 0 and keeps the test valid.  Of right and wrong answers, as 1 and 0, the
    exact one is McNemar's (1947).

    Parameters
    ----------
    first, second : n numbers each
    draws : int
    seed : int
        The same seed gives the same p-value.
    """
    _check_draws(draws)
    difference = _differences(first, second)
    moving = difference[difference != 0]
    # Sums of the same numbers in another order may differ by rounding, and must count as equal.
    reached = moving.sum().abs() - 1e-12 * moving.abs().sum()
    count, exact = moving.numel(), moving.numel() <= EXACT_FLIPS
    hits = 0
    generator = torch.Generator().manual_seed(seed)
    total = 2**count if exact else draws
    patterns = torch.arange(total) if exact else None
    done = 0
    for size in _chunks(total, max(1, count)):
        if patterns is not None:
            bits = (patterns[done : done + size, None] >> torch.arange(count)) & 1
        else:
            bits = torch.randint(2, (size, count), generator=generator)
        hits += int(((bits * 2 - 1).double() @ moving).abs().ge(reached).sum())
        done += size
    p_value = hits / total if exact else (1 + hits) / (1 + total)
    return PermutationTest(float(difference.mean()), p_value, exact)


def _scores(name: str, scores: Scores, least: int = 2) -> Tensor:
    values = torch.as_tensor(scores, dtype=torch.float64, device="cpu")
    if values.dim() != 1 or values.numel() < least:
        allowed = f"a list of {least} scores or more"
        raise reject(f"{name}.shape", tuple(values.shape), allowed, "Give one score a prompt.")
    if not bool(values.isfinite().all()):
        raise reject(name, "NaN or infinity", "finite scores", "Score a failed prompt 0, or leave it out of all.")
    return values


def _differences(first: Scores, second: Scores) -> Tensor:
    left, right = _scores("first", first, least=1), _scores("second", second, least=1)
    if left.shape != right.shape:
        allowed = f"as many scores as second, {right.numel()}"
        raise reject("first", f"{left.numel()} scores", allowed, "Score both on the same prompts, in one order.")
    return left - right


def _samples(count: int, draws: int, seed: int) -> Iterator[Tensor]:
    """How often each of `count` prompts is in each of `draws` samples with replacement: float64 (some, count)."""
    generator = torch.Generator().manual_seed(seed)
    for size in _chunks(draws, count):
        drawn = torch.randint(count, (size, count), generator=generator)
        ones = torch.ones_like(drawn, dtype=torch.float64)
        yield torch.zeros_like(ones).scatter_add_(1, drawn, ones)


@lru_cache(maxsize=2)
def _kept_samples(count: int, draws: int, seed: int) -> list[Tensor]:
    return list(_samples(count, draws, seed))


def _chunks(total: int, width: int) -> list[int]:
    """`total` rows of `width` numbers, in parts that fit in memory."""
    size = max(1, _AT_ONCE // width)
    return [min(size, total - start) for start in range(0, total, size)]


def _check_draws(draws: int) -> None:
    if type(draws) is not int or draws < 100:
        raise reject("draws", draws, "a whole number, 100 or more", "Use 10000.")


def _confidence(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise reject("confidence", confidence, "a probability between 0 and 1", "Use 0.95.")
    return confidence


def _normal_quantile(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + _confidence(confidence)) / 2)
