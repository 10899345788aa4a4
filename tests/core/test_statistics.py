"""Intervals and paired tests against closed forms, known values and their own long-run promises."""

import itertools
import math

import pytest
import torch

from pagelocks.eval.statistics import (
    EXACT_FLIPS,
    bootstrap_difference,
    bootstrap_mean,
    permutation_test,
    wilson_interval,
)

from .helpers import assert_rejected, normal

# Wilson


@pytest.mark.parametrize(
    ("right", "asked", "confidence", "low", "high"),
    [  # to the digits of the formula worked out with z = 1.959964 and 1.644854
        (8, 10, 0.95, 0.490162, 0.943318),
        (0, 10, 0.95, 0.0, 0.277533),
        (10, 10, 0.95, 0.722467, 1.0),
        (1, 1, 0.95, 0.206549, 1.0),
        (5, 10, 0.9, 0.269272, 0.730728),
    ],
)
def test_wilson_known_values(right, asked, confidence, low, high):
    found = wilson_interval(right, asked, confidence)
    assert (found.low, found.high) == pytest.approx((low, high), abs=2e-6)
    assert found.estimate == right / asked and found.confidence == confidence


@pytest.mark.parametrize("asked", [1, 2, 7, 40, 1000])
def test_wilson_ends_are_where_the_score_test_turns(asked):
    z = 1.959963984540054
    for right in range(0, asked + 1, max(1, asked // 7)):
        found = wilson_interval(right, asked)
        assert 0 <= found.low <= found.estimate <= found.high <= 1 and found.low < found.high
        for end, closed in ((found.low, right == 0), (found.high, right == asked)):
            if not closed:
                assert abs(found.estimate - end) == pytest.approx(z * math.sqrt(end * (1 - end) / asked))
        mirrored = wilson_interval(asked - right, asked)
        assert (1 - mirrored.high, 1 - mirrored.low) == pytest.approx((found.low, found.high))
        wider = wilson_interval(right, asked, 0.99)
        assert wider.low <= found.low and wider.high >= found.high


def test_wilson_holds_what_it_promises():
    """Summed over all outcomes of 60 questions: about 95% of intervals hold the truth."""
    for truth in (0.3, 0.5, 0.9):
        held = 0.0
        for right in range(61):
            found = wilson_interval(right, 60)
            if found.low <= truth <= found.high:
                held += math.comb(60, right) * truth**right * (1 - truth) ** (60 - right)
        assert 0.93 < held < 0.975


# Bootstrap


def binomial_quantile(count, share, level):
    """The least k with P(X <= k) >= level."""
    total = 0.0
    for k in range(count + 1):
        total += math.comb(count, k) * share**k * (1 - share) ** (count - k)
        if total >= level:
            return k
    return count


@pytest.mark.parametrize(("right", "asked"), [(1, 2), (6, 10), (37, 50)])
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_the_bootstrap_of_right_and_wrong_is_binomial(right, asked, confidence):
    scores = [True] * right + [False] * (asked - right)
    found = bootstrap_mean(scores, confidence, draws=40_000)
    for end, level in ((found.low, (1 - confidence) / 2), (found.high, (1 + confidence) / 2)):
        # The drawn quantile's own level is off by some thousandths.
        among = [binomial_quantile(asked, right / asked, level + off) / asked for off in (-0.006, 0.006)]
        assert among[0] - 1e-9 <= end <= among[1] + 1e-9
    assert found.estimate == pytest.approx(right / asked)


def test_the_bootstrap_of_many_scores_is_near_the_normal_interval():
    scores = normal(0, 400) * 3 + 10
    found = bootstrap_mean(scores)
    spread = 1.96 * scores.std(correction=0).item() / 20
    assert found.estimate == pytest.approx(scores.double().mean().item())
    assert found.low == pytest.approx(found.estimate - spread, abs=0.1 * spread)
    assert found.high == pytest.approx(found.estimate + spread, abs=0.1 * spread)


def test_the_bootstrap_has_the_seed_s_result_and_moves_with_the_scores():
    scores = normal(1, 30).tolist()
    assert bootstrap_mean(scores, seed=5) == bootstrap_mean(scores, seed=5) != bootstrap_mean(scores, seed=6)
    before, after = bootstrap_mean(scores), bootstrap_mean([3 + 2 * s for s in scores])
    assert (after.low, after.high) == pytest.approx((3 + 2 * before.low, 3 + 2 * before.high))
    alike = bootstrap_mean([0.1, 0.1])  # in double precision, to the bit
    assert (alike.low, alike.estimate, alike.high) == (0.1, 0.1, 0.1)
    narrow = bootstrap_mean(scores, 0.5)
    assert before.low < narrow.low < narrow.high < before.high


def test_a_bootstrap_in_parts_is_as_good(monkeypatch):
    from pagelocks.eval import statistics

    scores = normal(2, 50)
    whole = bootstrap_mean(scores)
    monkeypatch.setattr(statistics, "_AT_ONCE", 333)
    parts = bootstrap_mean(scores)
    assert (parts.low, parts.high) == pytest.approx((whole.low, whole.high), abs=0.03)
    first, second = scores[:12], scores[12:24]
    in_parts = permutation_test(first, second)
    monkeypatch.undo()
    assert in_parts == permutation_test(first, second) and in_parts.exact


def test_differences_keep_pairs_together():
    hard = normal(3, 60) * 100  # a prompt's difficulty, the same for both
    first, second = hard + 1 + 0.1 * normal(4, 60), hard
    found = bootstrap_difference(first, second)
    assert 0.9 < found.low < found.estimate < found.high < 1.1
    assert bootstrap_mean(first).high - bootstrap_mean(first).low > 20
    back = bootstrap_difference(second, first)
    assert (-back.high, -back.low) == pytest.approx((found.low, found.high))


# Tests


@pytest.mark.parametrize(
    ("wins", "losses", "p_value"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),
        (5, 0, 0.0625),
        (0, 6, 0.03125),
        (1, 8, 20 / 512),
        (2, 10, 2 * (1 + 12 + 66) / 4096),
        (4, 4, 1.0),
        (5, 4, 1.0),
    ],
)
def test_the_permutation_test_of_right_and_wrong_is_mcnemar_s(wins, losses, p_value):
    both = [True, True, False]
    first = both + [True] * wins + [False] * losses
    second = both + [False] * wins + [True] * losses
    found = permutation_test(first, second)
    assert found.difference == pytest.approx((wins - losses) / len(first))
    assert (
        found.p_value == pytest.approx(p_value, rel=1e-12) and permutation_test(second, first).p_value == found.p_value
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("count", [1, 4, 9])
def test_the_permutation_test_counts_every_pattern(seed, count):
    first, second = normal(seed, count), normal(seed + 50, count) - 0.5
    second[count // 2] = first[count // 2]  # a pair that does not differ
    found = permutation_test(first, second)
    difference = (first.double() - second.double()).tolist()
    seen = abs(sum(difference))
    patterns = itertools.product((1, -1), repeat=count)
    as_far = [abs(sum(s * d for s, d in zip(p, difference, strict=True))) >= seen - 1e-9 for p in patterns]
    assert found.exact and found.p_value == pytest.approx(sum(as_far) / len(as_far))
    assert found.difference == pytest.approx(sum(difference) / count)


def test_permutation_known_values():
    assert permutation_test([1, 1, 1, 1, 1], [0, 0, 0, 0, 0]).p_value == 0.0625
    assert permutation_test([1, 2, 3], [0, 0, 0]).p_value == 0.25
    assert permutation_test([1, 0], [0, 1]).p_value == 1
    assert permutation_test([0.3, 0.7], [0.3, 0.7]) == permutation_test([0.1], [0.1])
    # Tenths: sums that are equal are not so in floating point, and count all the same.
    tenths = [1, 2, 3, 1, 2, 3, 7, -4, 6, -1, 1, -2]
    patterns = itertools.product((1, -1), repeat=12)
    as_far = sum(abs(sum(s * t for s, t in zip(p, tenths, strict=True))) >= sum(tenths) for p in patterns)
    assert permutation_test([t / 10 for t in tenths], [0.0] * 12).p_value == as_far / 4096


def test_drawn_signs_come_near_all_signs():
    values = normal(9, EXACT_FLIPS + 2) + 0.7
    found = permutation_test(values, torch.zeros_like(values))
    assert not found.exact
    bits = (torch.arange(2 ** values.numel())[:, None] >> torch.arange(values.numel())) & 1
    sums = ((bits * 2 - 1).double() @ values.double()).abs()
    expected = (sums >= values.double().sum().abs() - 1e-9).double().mean().item()
    assert 0.005 < expected < 0.5
    assert found.p_value == pytest.approx(expected, abs=4 * math.sqrt(expected / 20_000))
    assert found == permutation_test(values, torch.zeros_like(values))
    assert permutation_test(values, torch.zeros_like(values), seed=1).p_value != found.p_value
    sure = permutation_test(torch.ones(60), torch.zeros(60), draws=1000)
    assert sure.p_value == 1 / 1001


def test_no_difference_is_seldom_significant():
    """Over 200 pairs of samples of one distribution, about 5% of p-values are below 0.05, and not none."""
    low = sum(permutation_test(normal(seed, 14), normal(seed + 1000, 14)).p_value < 0.05 for seed in range(200))
    assert 1 <= low <= 20
    found = sum(permutation_test(normal(seed, 14) + 1.5, normal(seed + 1000, 14)).p_value < 0.05 for seed in range(50))
    assert found >= 40


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (lambda: wilson_interval(1, 0), ["asked=0", "1 or more"]),
        (lambda: wilson_interval(-1, 3), ["right=-1"]),
        (lambda: wilson_interval(4, 3), ["right=4", "at most asked = 3"]),
        (lambda: wilson_interval(0.5, 3), ["right=0.5", "whole number"]),
        (lambda: wilson_interval(1, 3, 95), ["confidence=95", "0.95"]),
        (lambda: bootstrap_mean([1.0]), ["scores.shape=(1,)", "2 scores"]),
        (lambda: bootstrap_mean([[1.0, 2.0]]), ["scores.shape=(1, 2)"]),
        (lambda: bootstrap_mean([1.0, math.nan]), ["scores='NaN"]),
        (lambda: bootstrap_mean([1.0, 2.0], 0.0), ["confidence=0.0"]),
        (lambda: bootstrap_mean([1.0, 2.0], draws=10), ["draws=10", "100 or more"]),
        (lambda: bootstrap_difference([1.0, 2.0], [1.0]), ["2 scores", "second, 1"]),
        (lambda: permutation_test([], []), ["first.shape=(0,)"]),
        (lambda: permutation_test([1.0], [math.inf]), ["second='NaN or infinity'"]),
        (lambda: permutation_test([1.0], [0.0], draws=0), ["draws=0"]),
    ],
)
def test_bad_input_is_refused(call, parts):
    assert_rejected(call, *parts)
