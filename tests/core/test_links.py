"""Link metrics against plain loops, hand-computed cases, an exact selector and wrong ones."""

import math
from dataclasses import replace

import pytest
import torch

from pagelocks import page_share, select_pages, sparse_attention, summarize
from pagelocks.eval.decode_record import DecodeRecord, DensePages
from pagelocks.eval.links import (
    choose_pages,
    coverage,
    coverage_ratio,
    estimate_log_mass,
    group_coverage_ratio,
    kept_pages,
    log_mass_error,
    logit_error,
    page_mass,
    rank_correlation,
    spearman,
    summarize_heads,
)
from pagelocks.eval.outputs import output_bound, output_error, value_radius
from pagelocks.selectors import SELECTORS, Centroid, Exact, Locks, Quest, Random
from pagelocks.theory import coverage as share_coverage
from pagelocks.theory import exact_log_mass, output_identity

from .helpers import KEY_DTYPES, assert_rejected, assert_same_summary, make_config, normal, plain_config
from .records import make_record, slow_logits

CONFIG = make_config(rank=3, page_size=8, budget_pages=4)
SHAPES = [  # heads, group, length, head_dim, page_size
    (2, 3, 75, 32, 8),  # a partial last page
    (1, 1, 64, 64, 16),  # none
    (3, 2, 9, 32, 8),  # one complete page, one token more
    (2, 4, 129, 32, 64),
]


class Wrong:
    """The opposite of what is so."""

    def log_mass(self, query, pages, scale):
        return -Exact().log_mass(query, pages, scale)


class Outliers:
    """Exact, but some pages are read and some left out whatever the query."""

    def log_mass(self, query, pages, scale):
        mass = Exact().log_mass(query, pages, scale)
        mass[..., 2], mass[..., 5] = math.inf, -math.inf
        return mass


@pytest.fixture(params=SHAPES, ids=str)
def shaped(request):
    """A record of this shape and a configuration for it."""
    heads, group, length, head_dim, page_size = request.param
    record = make_record(sum(request.param), heads, group, length, head_dim, page_size=page_size)
    return record, make_config(rank=3, page_size=page_size, budget_pages=3)


def exact_of(record, config):
    return exact_log_mass(record.query, record.pages(config).keys(), record.scale)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def log_sum_exp(values):
    peak = max(values)
    return peak + math.log(sum(math.exp(v - peak) for v in values))


# The record and its pages


def test_pages_are_the_complete_ones_within_the_length():
    record = make_record(length=75)
    pages = record.pages(CONFIG)
    assert pages.count == 9 and pages.keys().shape == (2, 9, 8, 32)
    for page in range(9):
        assert torch.equal(pages.keys()[:, page], record.keys[:, page * 8 : page * 8 + 8])
    assert_same_summary(pages.summary(), summarize(pages.keys(), CONFIG))
    assert pages.summary() is pages.summary()
    assert record.pages(make_config(rank=2, page_size=8)).summary().config.rank == 2
    batched = DensePages(normal(0, 4, 2, 17, 32), CONFIG)
    assert batched.keys().shape == (4, 2, 2, 8, 32)
    assert make_record(length=7).pages(CONFIG).count == 0


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"query": normal(0, 3, 3, 32)}, ["query.shape", "(kv_heads, G, d)"]),
        ({"query": normal(0, 2, 3, 64)}, ["query.shape"]),
        ({"query": normal(0, 2, 32)}, ["query.shape"]),
        ({"query": normal(0, 2, 0, 32)}, ["query.shape"]),
        ({"values": normal(0, 2, 79, 32)}, ["values.shape", "same tokens"]),
        ({"query": normal(0, 2, 3, 32).double()}, ["query.dtype", "bfloat16"]),
        ({"length": 0}, ["length=0", "1 to 80"]),
        ({"length": 81}, ["length=81", "1 to 80"]),
        ({"length": 76}, ["keys=", "NaN"]),
        ({"query": torch.full((2, 3, 32), math.inf)}, ["query=", "finite"]),
        ({"scale": 0.0}, ["scale=0.0", "positive"]),
        ({"scale": math.nan}, ["scale=nan"]),
        ({"carriers": ((3, 3),)}, ["carriers=(3, 3)", "length = 75"]),
        ({"carriers": ((1, 2), (70, 76))}, ["carriers=(70, 76)"]),
    ],
)
def test_a_record_that_cannot_be_measured_is_refused(change, parts):
    record = make_record(length=75, spare=5)
    assert_rejected(lambda: replace(record, **change), *parts)


# Log-mass and logits


def test_logit_error_is_the_mean_over_the_page_s_tokens(shaped):
    record, config = shaped
    pages = record.pages(config)
    found = logit_error(record.query, pages.keys(), pages.summary().keys(), record.scale)
    tokens = pages.summary().keys().flatten(1, 2)
    other = replace(record, keys=tokens, values=tokens, length=tokens.shape[1])
    exact, estimated = slow_logits(record), slow_logits(other)
    size = config.page_size
    expected = [
        [
            [sum(abs(e[t] - x[t]) for t in range(p * size, p * size + size)) / size for p in range(pages.count)]
            for e, x in zip(*heads, strict=True)
        ]
        for heads in zip(estimated, exact, strict=True)
    ]
    assert found.dtype == torch.float64 and found.shape == (*record.query.shape[:2], pages.count)
    torch.testing.assert_close(found, tensor(expected))
    assert found.min() > 1e-3
    assert logit_error(record.query, pages.keys(), pages.keys().double(), record.scale).max() == 0
    assert_rejected(
        lambda: logit_error(record.query, pages.keys(), pages.keys() * math.nan, record.scale), "reconstructed"
    )
    assert_rejected(
        lambda: logit_error(record.query, pages.keys(), pages.keys()[..., :-1, :], record.scale), "reconstructed.shape"
    )


def test_more_rank_and_bits_make_a_smaller_logit_error():
    record = make_record(length=160, page_size=16)

    def error(config):
        pages = record.pages(config)
        return logit_error(record.query, pages.keys(), pages.summary().keys(), record.scale).mean().item()

    by_bits = [error(make_config(12, basis_bits=bits)) for bits in (2, 4, 8)]
    by_rank = [error(plain_config(rank)) for rank in (1, 4, 8, 15)]
    for ladder in (by_bits, by_rank):
        assert ladder == sorted(ladder, reverse=True) and ladder[0] > 2 * ladder[-1]
    assert by_rank[-1] < 1e-5


def test_log_mass_error_against_loops(shaped):
    record, config = shaped
    exact, estimate = exact_of(record, config), estimate_log_mass(record, Centroid(), config)
    found = log_mass_error(estimate, exact)
    logits, size = slow_logits(record), config.page_size
    for head, group in enumerate(logits):
        for g, row in enumerate(group):
            masses = [log_sum_exp(row[p * size : p * size + size]) for p in range(exact.shape[-1])]
            errors = [abs(e - m) for e, m in zip(estimate[head, g].tolist(), masses, strict=True)]
            total = log_sum_exp(masses)
            weighted = sum(e * math.exp(m - total) for e, m in zip(errors, masses, strict=True))
            torch.testing.assert_close(found.absolute[head, g], tensor(errors))
            torch.testing.assert_close(found.plain[head, g], tensor(sum(errors) / len(errors)))
            torch.testing.assert_close(found.weighted[head, g], tensor(weighted))
            torch.testing.assert_close(found.largest[head, g], tensor(max(errors)))


def test_log_mass_error_by_hand():
    exact = torch.tensor([[0.0, math.log(3.0)]])  # shares 1/4, 3/4
    found = log_mass_error(exact + torch.tensor([[2.0, -1.0]]), exact)
    torch.testing.assert_close(found.plain, tensor([1.5]))
    torch.testing.assert_close(found.weighted, tensor([0.5 + 0.75]))
    torch.testing.assert_close(found.largest, tensor([2.0]))


def test_pages_without_an_estimate_count_in_no_mean():
    exact = torch.tensor([[0.0, math.log(3.0), 5.0], [1.0, 1.0, 1.0]])
    estimate = exact + torch.tensor([[2.0, -1.0, math.inf], [-math.inf] * 3])
    found = log_mass_error(estimate, exact)
    torch.testing.assert_close(found.plain, tensor([1.5, 0.0]))
    torch.testing.assert_close(found.weighted, tensor([1.25, 0.0]))
    assert found.largest.tolist() == [math.inf, math.inf] and found.absolute[0, 2] == math.inf
    assert_rejected(lambda: log_mass_error(estimate * math.nan, exact), "estimate", "NaN")
    assert_rejected(lambda: log_mass_error(exact, estimate), "exact")
    assert_rejected(lambda: log_mass_error(exact[:, :0], exact[:, :0]), "one complete page")
    assert_rejected(lambda: log_mass_error(exact[:1], exact), "estimate.shape")


# Ranks


def slow_spearman(first, second):
    def ranks(values):
        return [sum(w < v for w in values) + (sum(w == v for w in values) + 1) / 2 for v in values]

    a, b = ranks(first), ranks(second)
    mean = sum(a) / len(a)
    covariance = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    variances = sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)
    return covariance / math.sqrt(variances) if variances else 0.0


def test_spearman_by_hand():
    rising = torch.arange(5.0)
    assert spearman(rising, rising.exp()).item() == pytest.approx(1)
    assert spearman(rising, -rising).item() == pytest.approx(-1)
    # 1 - 6 sum d^2 / n (n^2 - 1) without ties: d = 1, 1, 0, 1, 1.
    swapped = torch.tensor([1.0, 0.0, 2.0, 4.0, 3.0])
    assert spearman(rising, swapped).item() == pytest.approx(1 - 6 * 4 / (5 * 24))
    # Ranks 1.5, 1.5, 3 against 1, 2, 3: covariance 1.5, variances 1.5 and 2.
    tied = spearman(torch.tensor([7.0, 7.0, 9.0]), torch.tensor([0.0, 1.0, 2.0]))
    assert tied.item() == pytest.approx(1.5 / math.sqrt(3))
    assert spearman(torch.ones(4), rising[:4]) == 0 and spearman(torch.ones(1), torch.ones(1)) == 0
    top = spearman(torch.tensor([0.0, math.inf, 1.0]), torch.tensor([0.0, 5.0, 1.0]))
    assert top.item() == pytest.approx(1)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("levels", [3, 10, 1000])
def test_spearman_against_loops_with_and_without_ties(seed, levels):
    draw = torch.Generator().manual_seed(seed)
    first = torch.randint(levels, (2, 3, 17), generator=draw).float()
    second = first + torch.randint(levels, (2, 3, 17), generator=draw)
    found = spearman(first, second)
    expected = [[slow_spearman(first[i, j].tolist(), second[i, j].tolist()) for j in range(3)] for i in range(2)]
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, tensor(expected))
    # Of a view that is not contiguous, too.
    torch.testing.assert_close(spearman(first.mT.contiguous().mT, second), found)
    assert_rejected(lambda: spearman(first, second[..., 1:]), "first.shape")
    assert_rejected(lambda: spearman(first * math.nan, second), "NaN")


def test_rank_correlation_is_of_the_group_s_mean_share(shaped):
    record, config = shaped
    exact, estimate = exact_of(record, config), estimate_log_mass(record, Centroid(), config)
    found = rank_correlation(estimate, exact, record.length, config)
    shares = [each.double().softmax(-1).mean(-2).tolist() for each in (estimate, exact)]
    expected = [slow_spearman(*pair) for pair in zip(*shares, strict=True)]
    torch.testing.assert_close(found, tensor(expected))


# Coverage


def slow_page_mass(record, page_size):
    heads = []
    for group in slow_logits(record):
        rows = []
        for row in group:
            total = log_sum_exp(row)
            share = [math.exp(v - total) for v in row]
            rows.append([sum(share[i : i + page_size]) for i in range(0, record.length, page_size)])
        heads.append(rows)
    return tensor(heads)


@pytest.mark.parametrize("dtype", KEY_DTYPES)
def test_page_mass_and_coverage_against_loops(shaped, dtype):
    record, config = shaped
    keys, values, query = (part.to(dtype) for part in (record.keys, record.values, record.query))
    record = replace(record, query=query, keys=keys, values=values)
    mass = page_mass(record, config.page_size)
    expected = slow_page_mass(record, config.page_size)
    assert mass.dtype == torch.float64
    torch.testing.assert_close(mass, expected)
    torch.testing.assert_close(mass.sum(-1), torch.ones_like(mass[..., 0]))
    pages = choose_pages(estimate_log_mass(record, Random(1), config), record.length, config)
    found = coverage(mass, pages)
    for head in range(pages.shape[0]):
        for g in range(query.shape[1]):
            listed = [p for p in pages[head].tolist() if p >= 0]
            assert found[head, g].item() == pytest.approx(sum(expected[head, g, p].item() for p in listed))
    shared = pages.unsqueeze(1).expand(-1, query.shape[1], -1)
    torch.testing.assert_close(found, share_coverage(mass, shared))
    torch.testing.assert_close(found, coverage(mass, shared))


def test_page_mass_by_hand():
    keys = torch.zeros(1, 10, 32)
    keys[0, 9, 0] = math.log(7.0)  # 9 tokens of weight 1, one of 7: 16 in all
    query = torch.zeros(1, 1, 32)
    query[..., 0] = 2.0
    record = DecodeRecord(query, keys, keys, 0.5, 10)
    torch.testing.assert_close(page_mass(record, 8), tensor([[[0.5, 0.5]]]))
    torch.testing.assert_close(coverage(page_mass(record, 8), torch.tensor([[1, -1]])), tensor([[0.5]]))


def test_choose_pages_is_share_then_select():
    record = make_record(5)
    mass, lengths = estimate_log_mass(record, Locks(), CONFIG), torch.tensor([75, 75])
    expected = select_pages(page_share(mass, lengths, CONFIG), lengths, CONFIG)
    assert torch.equal(choose_pages(mass, 75, CONFIG), expected)
    assert expected[:, 0].tolist() == [0, 0] and expected[:, -1].tolist() == [9, 9]  # the sink, the partial page

    def own(log_mass, lengths, config):
        return page_share(log_mass.unsqueeze(-2), lengths, config)

    each = choose_pages(mass, 75, CONFIG, own)
    assert each.shape == (2, 3, 4)
    for g in range(3):
        assert torch.equal(each[:, g], choose_pages(mass[:, g : g + 1], 75, CONFIG))
    weight = page_mass(record, 8)
    exact = exact_of(record, CONFIG)
    assert (coverage(weight, choose_pages(exact, 75, CONFIG, own)) >= coverage(weight, expected) - 1e-12).all()


def test_kept_pages():
    mask = kept_pages(torch.tensor([[2, 0, -1], [1, 1, -1]], dtype=torch.int32), 3)
    assert mask.tolist() == [[True, False, True], [False, True, False]]
    assert kept_pages(torch.tensor([[-1]]), 2).tolist() == [[False, False]]
    assert_rejected(lambda: kept_pages(torch.tensor([[3]]), 3), "pages=", "0 to 2")
    assert_rejected(lambda: kept_pages(torch.tensor([[-2]]), 3), "from -2")
    assert_rejected(lambda: kept_pages(torch.tensor([[1.0]]), 3), "float32")


def test_coverage_ratio_and_its_summary_by_hand():
    ratio = coverage_ratio(tensor([[0.2, 0.9], [0.0, 0.3]]), tensor([[0.4, 0.6], [0.0, 0.3]]))
    torch.testing.assert_close(ratio, tensor([[0.5, 1.5], [1.0, 1.0]]))
    found = summarize_heads(ratio)
    assert found.mean == pytest.approx(1.0) and found.worst_head == pytest.approx(0.75)
    assert found.least == pytest.approx(0.5) and found.heads == 4
    assert found.percentile_5 == pytest.approx(0.5 + 0.15 * 0.5)  # 0.05 of the way through three gaps
    group = group_coverage_ratio(tensor([[0.2, 0.9], [0.0, 0.0]]), tensor([[0.4, 0.8], [0.0, 0.0]]))
    torch.testing.assert_close(group, tensor([1.1 / 1.2, 1.0]))
    assert_rejected(lambda: coverage_ratio(ratio, ratio[:1]), "chosen.shape")
    assert_rejected(lambda: summarize_heads(ratio * math.nan), "finite")
    assert_rejected(lambda: summarize_heads(ratio[:0]), "at least one")


def test_summary_against_sorting():
    values = normal(3, 7, 5, 4).abs()
    found = summarize_heads(values)
    ordered = sorted(values.flatten().tolist())
    place = 0.05 * (len(ordered) - 1)
    low = ordered[int(place)] + (place - int(place)) * (ordered[int(place) + 1] - ordered[int(place)])
    assert found.percentile_5 == pytest.approx(low) and found.least == ordered[0]
    groups = values.flatten(0, 1).tolist()
    assert found.worst_head == pytest.approx(sum(map(min, groups)) / 35)
    assert found.mean == pytest.approx(sum(ordered) / 140)


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
