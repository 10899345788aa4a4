"""The last links, to the output, and the whole chain, for an exact selector, wrong ones and real keys."""

import math

import pytest
import torch

from pagelocks import sparse_attention
from pagelocks.eval.decode_record import DecodeRecord
from pagelocks.eval.links import (
    choose_pages,
    coverage,
    coverage_ratio,
    estimate_log_mass,
    group_coverage_ratio,
    kept_pages,
    log_mass_error,
    page_mass,
    rank_correlation,
)
from pagelocks.eval.outputs import output_bound, output_error, value_radius
from pagelocks.selectors import SELECTORS, Centroid, Exact, Locks, Quest, Random
from pagelocks.theory import output_identity

from .helpers import KEY_DTYPES, make_config, normal
from .link_helpers import CONFIG, Outliers, Wrong, exact_of
from .records import make_record

# The output


def test_output_error_against_sparse_attention(shaped):
    record, config = shaped
    pages = choose_pages(estimate_log_mass(record, Random(2), config), record.length, config)
    found = output_error(record, pages, config.page_size)
    keys, values = record.keys[:, : record.length].double(), record.values[:, : record.length].double()
    lengths = torch.tensor(record.length)
    every = torch.arange(config.pages_in(record.length)).expand(pages.shape[0], -1)
    outputs = [
        sparse_attention(record.query.double(), keys, values, each, lengths, record.scale, config.page_size)
        for each in (pages, every)
    ]
    torch.testing.assert_close(found.error, (outputs[0] - outputs[1]).norm(dim=-1))
    assert (found.error <= found.mass_bound + 1e-12).all()
    assert found.identity_gap.max() < 1e-13
    whole = config.budget_pages >= config.pages_in(record.length)
    assert (found.error.max() < 1e-13) if whole else (found.error.min() > 1e-3)
    assert found.error.dtype == found.mass_bound.dtype == torch.float64
    if not whole:
        kept = kept_pages(pages, every.shape[-1]).repeat_interleave(config.page_size, -1)[:, : record.length]
        left, right = output_identity(record.query, keys, values, kept, record.scale)
        torch.testing.assert_close(found.error, left.norm(dim=-1))
        torch.testing.assert_close(found.error, right.norm(dim=-1))


def test_output_error_by_hand():
    values = torch.zeros(1, 16, 32)
    values[0, :8, 0], values[0, 8:, 0] = 1.0, -3.0
    record = DecodeRecord(torch.ones(1, 1, 32), torch.zeros_like(values), values, 1.0, 16)
    found = output_error(record, torch.tensor([[0, -1]]), 8)  # dense -1, kept 1; half the mass dropped; R = 3
    assert found.error.item() == pytest.approx(2) and found.mass_bound.item() == pytest.approx(3)
    assert value_radius(record).tolist() == [3.0]


def test_the_identity_gap_sees_an_output_that_is_not_a_mixture(monkeypatch):
    from pagelocks.eval import outputs

    record = make_record(1)
    exact, seeds = outputs.attend, iter(range(3))  # noise alike in all three outputs would cancel
    monkeypatch.setattr(outputs, "attend", lambda *given: exact(*given) + 1e-6 * normal(next(seeds), 2, 3, 32))
    found = output_error(record, torch.tensor([[0, 3, 9]]).expand(2, -1), 8)
    assert found.identity_gap.min() > 1e-7


def test_masses_that_vanish_leave_no_nan():
    keys = torch.zeros(1, 24, 32)
    keys[0, :8, 0] = 1e4  # all of the mass, to float64
    record = DecodeRecord(torch.ones(1, 2, 32), keys, normal(0, 1, 24, 32), 1.0, 24)
    for listed in ([0], [1, 2], [0, 1, 2], [-1]):
        pages = torch.tensor([listed])
        found = output_error(record, pages, 8)
        assert all(part.isfinite().all() for part in (found.error, found.mass_bound, found.identity_gap))
        assert found.identity_gap.max() < 1e-12 and (found.error <= found.mass_bound + 1e-12).all()
        assert (found.error.max() < 1e-12) == (0 in listed)
    nothing = coverage(page_mass(record, 8), torch.tensor([[1, 2]]))
    assert nothing.max() == 0 and coverage_ratio(nothing, nothing).tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("name", SELECTORS)
def test_theorem_1_bounds_any_selector_s_output(shaped, name):
    record, config = shaped
    exact, estimate = exact_of(record, config), estimate_log_mass(record, SELECTORS[name](), config)
    eta = log_mass_error(estimate, exact).largest.amax(-1)
    error = output_error(record, choose_pages(estimate, record.length, config), config.page_size).error.mean(-1)
    bound = output_bound(record, exact, eta, config)
    assert bound.shape == error.shape and (error <= bound + 1e-6).all()
    # The formula, from its parts.
    share = exact.softmax(-1).mean(-2)
    best = choose_pages(exact, record.length, config)
    share = torch.nn.functional.pad(share, (0, config.pages_in(record.length) - share.shape[-1]))
    gamma = (share * kept_pages(best, share.shape[-1])).sum(-1)
    radius = record.values[:, : record.length].double().norm(dim=-1).amax(-1)
    torch.testing.assert_close(bound, 2 * radius * (1 - (-4 * eta).exp() * gamma), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output_bound(record, exact, torch.full_like(eta, math.inf), config), 2 * radius)


# The chain


def measured(record, selector, config):
    """Every link's figures of one selector, by name."""
    exact, estimate = exact_of(record, config), estimate_log_mass(record, selector, config)
    errors, mass = log_mass_error(estimate, exact), page_mass(record, config.page_size)
    chosen = choose_pages(estimate, record.length, config)
    best = choose_pages(estimate_log_mass(record, Exact(), config), record.length, config)
    held, possible = coverage(mass, chosen), coverage(mass, best)
    return {
        "plain": errors.plain,
        "weighted": errors.weighted,
        "correlation": rank_correlation(estimate, exact, record.length, config),
        "ratio": group_coverage_ratio(held, possible),
        "heads": coverage_ratio(held, possible),
        "output": output_error(record, chosen, config.page_size).error,
    }


@pytest.mark.parametrize("dtype", KEY_DTYPES)
@pytest.mark.parametrize("name", SELECTORS)
def test_every_metric_is_finite_for_every_selector_and_dtype(name, dtype):
    for length in (75, 80, 8, 17):
        for found in measured(make_record(1, length=length, dtype=dtype), SELECTORS[name](), CONFIG).values():
            assert found.dtype == torch.float64 and found.isfinite().all()
    for found in measured(make_record(2, dtype=dtype), Outliers(), CONFIG).values():
        assert found.isfinite().all()


@pytest.mark.parametrize("dtype", KEY_DTYPES)
def test_the_exact_selector_has_no_error_and_wrong_ones_do(dtype):
    record, config = make_record(7, heads=4, length=45 * 8, dtype=dtype), make_config(6, 8, budget_pages=12)
    exact = measured(record, Exact(), config)
    assert exact["plain"].max() < 1e-5 and exact["weighted"].max() < 1e-5
    assert (exact["correlation"] > 1 - 1e-3).all() and (exact["heads"] == 1).all()
    for selector in (Wrong(), Random(3)):
        wrong = measured(record, selector, config)
        assert wrong["plain"].min() > 0.5 and wrong["weighted"].min() > 0.5
        assert wrong["correlation"].max() < 0.6 and wrong["ratio"].mean() < 0.6
        assert wrong["output"].mean() > 1.3 * exact["output"].mean()
    assert measured(record, Wrong(), config)["correlation"].max() < -0.3
    locks = measured(record, Locks(), config)
    assert 1e-3 < locks["plain"].mean() < 0.2 and locks["correlation"].mean() > 0.95
    assert locks["ratio"].mean() > 0.95 and locks["ratio"].max() <= 1 + 1e-6


def test_no_shared_choice_is_above_the_oracle_s_in_a_sequence_of_complete_pages():
    ratios = []
    for seed in range(8):
        record = make_record(seed, heads=4, length=24 * 8)
        ratios += [measured(record, name(), CONFIG)["ratio"] for name in (Locks, Centroid, Quest, Random)]
        ratios.append(measured(record, Wrong(), CONFIG)["ratio"])
    assert torch.cat(ratios).max() <= 1 + 1e-6 and torch.cat(ratios).min() < 0.5


def test_a_budget_for_everything_covers_everything():
    record, config = make_record(4), make_config(rank=3, page_size=8, budget_pages=10)
    chosen = choose_pages(estimate_log_mass(record, Wrong(), config), 75, config)
    torch.testing.assert_close(coverage(page_mass(record, 8), chosen), torch.ones(2, 3, dtype=torch.float64))
    found = output_error(record, chosen, 8)
    assert found.error.max() < 1e-13 and found.mass_bound.max() == 0


@pytest.mark.model
def test_on_real_keys_locks_is_near_the_oracle_and_quest_is_not(real_layers):
    config, means = make_config(budget_pages=6), {}
    for selector in (Locks(), Centroid(), Quest(), Random()):
        found = []
        for layer in real_layers.values():
            for back in range(3, 90, 11):
                length = layer.keys.shape[1] - back
                record = DecodeRecord(layer.query[:, :, length - 1], layer.keys, layer.values, layer.scale, length)
                found.append(measured(record, selector, config))
        means[type(selector)] = {key: torch.cat([each[key] for each in found]).mean().item() for key in found[0]}
    locks = means.pop(Locks)
    assert locks["ratio"] > 0.97 and locks["correlation"] > 0.95 and locks["weighted"] < 0.4
    for other in means.values():
        assert other["ratio"] < 0.965 and other["correlation"] < 0.9 and other["weighted"] > 1
        assert other["output"] > locks["output"]
    assert means[Random]["ratio"] < 0.8
