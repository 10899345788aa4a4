"""Link metrics against plain loops, hand-computed cases, an exact selector and wrong ones."""

import math
from dataclasses import replace

import pytest
import torch

from pagelocks import page_share, select_pages, summarize
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
from pagelocks.selectors import Centroid, Locks, Random
from pagelocks.theory import coverage as share_coverage

from .helpers import KEY_DTYPES, assert_rejected, assert_same_summary, make_config, normal, plain_config
from .link_helpers import CONFIG, exact_of, log_sum_exp, tensor
from .records import make_record, slow_logits

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
