"""LocksConfig: what is allowed, and that everything else is refused with the value, the rule and the remedy."""

import dataclasses

import numpy as np
import pytest
import torch

from pagelocks import LocksConfig

from .helpers import assert_rejected

WHOLE_NUMBERS = ("budget", "rank", "page_size", "sink_pages", "recent_pages", "dense_below")


def test_defaults_are_the_documented_ones():
    assert dataclasses.asdict(LocksConfig()) == {
        "budget": 2048,
        "rank": 8,
        "page_size": 16,
        "sink_pages": 1,
        "recent_pages": 1,
        "basis_bits": 4,
        "coefficient_bits": 8,
        "dense_below": 0,
    }


def test_is_frozen_and_hashable():
    config = LocksConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.rank = 4
    assert hash(config) == hash(LocksConfig()) and config == LocksConfig() and config != LocksConfig(rank=4)


@pytest.mark.parametrize("page_size", range(8, 65))
def test_page_sizes_8_to_64_with_every_rank_below(page_size):
    for rank in (1, page_size // 2, page_size - 1):
        assert LocksConfig(budget=3 * page_size, rank=rank, page_size=page_size).rank == rank


@pytest.mark.parametrize("basis_bits", [2, 4, 8, None])
@pytest.mark.parametrize("coefficient_bits", [8, None])
def test_every_combination_of_bits(basis_bits, coefficient_bits):
    config = LocksConfig(basis_bits=basis_bits, coefficient_bits=coefficient_bits)
    assert (config.basis_bits, config.coefficient_bits) == (basis_bits, coefficient_bits)


@pytest.mark.parametrize("name", WHOLE_NUMBERS)
@pytest.mark.parametrize(
    "value",
    [True, False, 16.0, 2.5, float("nan"), "16", None, np.int64(16), np.float64(16), np.array([16]), torch.tensor(16)],
    ids=repr,
)
def test_only_whole_numbers(name, value):
    assert_rejected(
        lambda: LocksConfig(**{name: value}),
        f"{name}={value!r} is not allowed",
        "a whole number is needed",
        f"Write {name} as an integer.",
    )


@pytest.mark.parametrize("value", [7, 65, 0, -16, 128])
def test_page_size_out_of_range(value):
    assert_rejected(
        lambda: LocksConfig(page_size=value),
        f"page_size={value} is not allowed",
        "pages hold 8 to 64 tokens",
        "Use 16",
    )


@pytest.mark.parametrize(("rank", "page_size"), [(0, 16), (-1, 16), (16, 16), (17, 16), (8, 8), (64, 64)])
def test_rank_out_of_range(rank, page_size):
    assert_rejected(
        lambda: LocksConfig(rank=rank, page_size=page_size),
        f"rank={rank} is not allowed",
        f"rank runs from 1 to page_size - 1 = {page_size - 1}",
        "Use 8, or 2 or 4",
    )


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [("sink_pages", -1, 0), ("recent_pages", 0, 1), ("recent_pages", -3, 1), ("dense_below", -1, 0)],
)
def test_counts_below_the_least(name, value, least):
    assert_rejected(
        lambda: LocksConfig(**{name: value}),
        f"{name}={value} is not allowed",
        f"the least is {least}",
        f"Use {least} or more.",
    )


@pytest.mark.parametrize(
    "value",
    [0, 1, 3, 16, -4, True, False, 4.0, "4", np.int64(4), np.array([4]), np.array([2, 4]), torch.tensor([2, 4])],
    ids=repr,
)
def test_bits_that_are_not_offered(value):
    start = "basis_bits=" + repr(value)
    assert_rejected(lambda: LocksConfig(basis_bits=value), start, "2, 4, 8 or None (fp32)", "Use 4.")


@pytest.mark.parametrize(
    "value", [0, 2, 4, 16, -8, True, 8.0, "8", np.int64(8), np.array([8, 8]), torch.tensor([8, 8])], ids=repr
)
def test_coefficient_bits_that_are_not_offered(value):
    start = "coefficient_bits=" + repr(value)
    assert_rejected(lambda: LocksConfig(coefficient_bits=value), start, "8 or None (fp32)", "Use 8.")


@pytest.mark.parametrize(
    ("budget", "others", "least", "remedy"),
    [
        (0, {}, 48, 48),
        (-16, {}, 48, 48),
        (32, {}, 48, 48),  # sink and recent alone
        (47, {}, 48, 48),
        (49, {}, 48, 64),
        (100, {}, 48, 112),
        (128, {"sink_pages": 4, "recent_pages": 4}, 144, 144),
        (16, {"sink_pages": 0}, 32, 32),
        (64, {"page_size": 32}, 96, 96),
        (97, {"page_size": 32}, 96, 128),
    ],
)
def test_budget_that_does_not_fit(budget, others, least, remedy):
    page_size = others.get("page_size", 16)
    assert_rejected(
        lambda: LocksConfig(budget=budget, **others),
        f"budget={budget} is not allowed",
        f"multiple of page_size = {page_size}, and at least {least} tokens",
        f"{others.get('sink_pages', 1)} sink and {others.get('recent_pages', 1)} recent pages",
        f"Use {remedy}.",
    )
    assert LocksConfig(budget=remedy, **others).budget_pages == remedy // page_size  # the remedy works


def test_least_budgets_are_allowed():
    assert LocksConfig(budget=48).budget_pages == 3
    assert LocksConfig(budget=32, sink_pages=0).budget_pages == 2
    assert LocksConfig(budget=144, sink_pages=4, recent_pages=4).budget_pages == 9


def test_pages_in_counts_a_partial_page():
    config = LocksConfig()
    assert [config.pages_in(tokens) for tokens in (0, 1, 15, 16, 17, 32, 33)] == [0, 1, 1, 1, 2, 2, 3]
