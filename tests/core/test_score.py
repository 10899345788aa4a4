"""Log-mass against a direct log-sum-exp, and shares against a loop."""

import math

import pytest
import torch

from pagelocks import PageSummary, log_mass, page_share, select_pages, summarize
from pagelocks.layout import record_layout

from .helpers import AWKWARD, KEY_DTYPES, assert_rejected, awkward_pages, make_config, normal, plain_config

NAN, INF = float("nan"), float("inf")


def direct_log_mass(query, keys, scale):
    """query (..., G, d), keys (..., P, B, d) -> (..., G, P), in float64."""
    logits = (query.double().unsqueeze(-3) @ keys.double().mT) * scale  # (..., P, G, B)
    return logits.logsumexp(-1).transpose(-1, -2)


def rounding(query, keys, scale):
    """What fp32 may lose of a logit."""
    return 1e-6 * query.double().norm(dim=-1).amax() * keys.double().norm(dim=-1).amax() * abs(scale) + 2e-6


@pytest.mark.parametrize(("basis_bits", "coefficient_bits"), [(4, 8), (2, 8), (8, None), (None, None)])
@pytest.mark.parametrize(
    ("group", "pages", "page_size", "head_dim", "rank"),
    [(1, 1, 16, 64, 8), (3, 20, 16, 64, 8), (8, 7, 16, 128, 15), (16, 5, 64, 256, 30), (5, 9, 8, 32, 1)],
)
def test_is_the_log_sum_exp_of_the_reconstructed_logits(
    group, pages, page_size, head_dim, rank, basis_bits, coefficient_bits
):
    config = make_config(rank, page_size, basis_bits, coefficient_bits)
    summary = summarize(normal(1, pages, page_size, head_dim), config)
    query = normal(2, group, head_dim) * 2
    for scale in (head_dim**-0.5, 1.0, 0.01, -0.3):
        found = log_mass(query, summary, scale)
        assert found.dtype == torch.float32 and found.shape == (group, pages)
        keys = summary.keys()
        expected = direct_log_mass(query, keys, scale)
        assert (found.double() - expected).abs().max() <= rounding(query, keys, scale)


@pytest.mark.parametrize("name", AWKWARD)
@pytest.mark.parametrize("dtype", KEY_DTYPES)
def test_awkward_pages_too(name, dtype):
    page = awkward_pages(16, 64, dtype)[name][None]
    summary, query = summarize(page, make_config()), normal(0, 3, 64)
    # Not summary.keys(): fp32 cannot hold what rounding adds to its largest number, nor half of its smallest.
    unit = 2.0 ** summary.exponent.double()[:, None, None]
    keys = summary.coefficients_in_page_units().double().mT @ summary.basis_in_page_units().double()
    keys = (keys + summary.centroid_in_page_units().double().unsqueeze(-2)) * unit
    found, expected = log_mass(query, summary, 0.125), direct_log_mass(query, keys, 0.125)
    expected = expected.clamp(-1e38, 1e38)  # as documented
    assert (found.double() - expected).abs().max() <= rounding(query, keys, 0.125)


@pytest.mark.parametrize("name", AWKWARD)
@pytest.mark.parametrize("dtype", KEY_DTYPES)
def test_finite_input_gives_finite_log_mass_and_shares(name, dtype):
    """Queries up to the largest float, pages up to the largest key, and any ordinary page beside them."""
    for config in (make_config(), plain_config(15)):
        keys = torch.stack([awkward_pages(16, 64, dtype)[name], normal(0, 16, 64).to(dtype)])
        summary = summarize(keys, config)
        direction = normal(1, 3, 64).clamp(-1, 1)
        largest = torch.finfo(torch.float32).max
        for query in (0 * direction, 1e-40 * direction, direction, 1e4 * direction, largest * direction):
            for scale in (0.125, 1.0, 1e4):
                mass = log_mass(query, summary, scale)
                assert mass.isfinite().all()
                share = page_share(mass, torch.tensor(32), config)
                assert share.isfinite().all()
                torch.testing.assert_close(share.sum(), torch.tensor(1.0))


def test_huge_logits_keep_their_sign_and_their_order():
    config = make_config()
    keys = torch.stack([torch.full((16, 64), value) for value in (3e38, -3e38, 1e30, 0.0)]).bfloat16()
    mass = log_mass(torch.full((1, 64), 1e30), summarize(keys, config), 1.0)[0]
    assert mass[0] > 1e37 and mass[1] < -1e37 and mass[0] >= mass[2] > mass[3] > mass[1]
    assert mass[3].item() == pytest.approx(math.log(16))


def test_a_query_of_zeros_sees_every_page_alike():
    mass = log_mass(torch.zeros(2, 64), summarize(normal(0, 4, 16, 64), make_config()), 1.0)
    torch.testing.assert_close(mass, torch.full((2, 4), math.log(16)))


def test_half_precision_queries_are_widened_first():
    summary = summarize(normal(0, 4, 16, 64), make_config())
    for dtype in (torch.bfloat16, torch.float16):
        query = (normal(1, 2, 64) * 100).to(dtype)
        assert torch.equal(log_mass(query, summary, 0.125), log_mass(query.float(), summary, 0.125))


def test_leading_dimensions_are_independent():
    config = make_config()
    keys, query = normal(0, 2, 3, 6, 16, 64), normal(1, 2, 3, 4, 64)
    found = log_mass(query, summarize(keys, config), 0.125)
    assert found.shape == (2, 3, 4, 6)
    for batch in range(2):
        for head in range(3):
            alone = log_mass(query[batch, head], summarize(keys[batch, head], config), 0.125)
            torch.testing.assert_close(found[batch, head], alone, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_a_page_that_cannot_be_scored_is_infinite_and_spoils_no_other(poison):
    config = make_config()
    keys = normal(0, 6, 16, 64)
    clean = log_mass(normal(1, 3, 64), summarize(keys, config), 0.125)
    keys[2, 0, 0] = poison
    mass = log_mass(normal(1, 3, 64), summarize(keys, config), 0.125)
    assert (mass[:, 2] == INF).all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(mass[:, others], clean[:, others])


def test_a_record_never_built_is_infinite_too():
    config = make_config()
    record = summarize(normal(0, 4, 16, 64), config).pack()
    record[1] = 0
    mass = log_mass(normal(1, 3, 64), PageSummary.unpack(record, 64, config), 0.125)
    assert torch.equal(mass == INF, torch.tensor([False, True, False, False]).expand(3, 4))
    only_zeros = torch.zeros(2, record_layout(64, config).record_bytes, dtype=torch.uint8)
    assert (log_mass(normal(1, 3, 64), PageSummary.unpack(only_zeros, 64, config), 0.125) == INF).all()


def test_a_query_of_another_head_size_is_refused():
    summary = summarize(normal(0, 2, 16, 64), make_config())
    assert_rejected(
        lambda: log_mass(normal(0, 2, 128), summary, 1.0),
        "query.shape[-1]=128 is not allowed",
        "the summaries hold keys of size 64",
        "Score with the summaries of the same layer.",
    )


def loop_share(mass, length, page_size):
    """page_share for one row, mass (G, P), in plain Python."""
    group, pages = mass.shape
    complete = [page for page in range(pages) if (page + 1) * page_size <= length]
    unknown = [page for page in complete if any(math.isnan(x) or x == INF for x in mass[:, page].tolist())]
    scored = [page for page in complete if page not in unknown]
    share = [0.0] * pages
    for page in unknown:
        share[page] = INF
    for head in range(group):
        row = mass[head].double().tolist()
        peak = max((row[page] for page in scored), default=0.0)
        total = sum(math.exp(row[page] - peak) for page in scored)
        for page in scored:
            share[page] += math.exp(row[page] - peak) / total / group
    return share


@pytest.mark.parametrize("page_size", [8, 16, 24])
@pytest.mark.parametrize("group", [1, 4, 9])
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_shares_agree_with_a_loop(page_size, group, spread):
    config = make_config(4, page_size)
    pages = 12
    lengths = torch.tensor([0, 1, page_size - 1, page_size, page_size + 1, 5 * page_size + 3, 12 * page_size, 10**6])
    mass = normal(group, len(lengths), group, pages) * spread
    mass[3, 0, 0] = INF  # the only complete page of that row
    mass[5, group - 1, 2] = NAN  # one head is enough
    mass[5, 0, 7] = INF  # not complete: of no account
    mass[6, 0, 0] = mass[6, 0, 11] = INF
    share = page_share(mass, lengths, config)
    assert share.dtype == torch.float32 and share.shape == (len(lengths), pages)
    for row, length in enumerate(lengths.tolist()):
        expected = torch.tensor(loop_share(mass[row], length, page_size))
        torch.testing.assert_close(share[row], expected, rtol=2e-5, atol=1e-7)
        assert not share[row, length // page_size :].any()  # exactly 0 past the complete pages


def test_the_sink_is_in_the_denominator():
    config = make_config()
    share = page_share(torch.tensor([[math.log(6.0), math.log(3.0), 0.0]]), torch.tensor(48), config)
    torch.testing.assert_close(share, torch.tensor([0.6, 0.3, 0.1]))


def test_the_recent_page_counts_when_it_is_complete_and_only_then():
    config = make_config()
    mass = torch.zeros(1, 3)
    torch.testing.assert_close(page_share(mass, torch.tensor(48), config), torch.full((3,), 1 / 3))
    torch.testing.assert_close(page_share(mass, torch.tensor(47), config), torch.tensor([0.5, 0.5, 0.0]))


def test_heads_are_averaged_after_their_own_softmax():
    """A diffuse head and a sure one count the same: a sum of masses, or a peak-normalised sum, would not give this."""
    share = page_share(torch.tensor([[100.0, 0.0, 0.0], [0.0, 0.0, 0.0]]), torch.tensor(48), make_config())
    torch.testing.assert_close(share, torch.tensor([2 / 3, 1 / 6, 1 / 6]))


def test_an_unknown_page_leaves_the_denominator_of_every_head():
    mass = torch.tensor([[0.0, INF, 0.0], [0.0, 5.0, math.log(3.0)]])
    share = page_share(mass, torch.tensor(48), make_config())
    torch.testing.assert_close(share, torch.tensor([3 / 8, INF, 5 / 8]))


def test_nothing_known_gives_infinities_and_zeros_but_no_nan():
    mass = torch.full((2, 4), INF)
    assert page_share(mass, torch.tensor(40), make_config()).tolist() == [INF, INF, 0.0, 0.0]


def test_masked_pages_may_hold_anything():
    mass = torch.tensor([[0.0, 1.0, NAN, INF, -INF]])
    share = page_share(mass, torch.tensor(32), make_config())
    assert torch.equal(share, page_share(torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0]]), torch.tensor(32), make_config()))


def test_huge_log_masses_do_not_overflow():
    mass = torch.tensor([[1e38, -1e38, 1e38], [3e38, 3e38, -3e38]])
    torch.testing.assert_close(page_share(mass, torch.tensor(48), make_config()), torch.tensor([0.5, 0.25, 0.25]))


def test_a_sequence_without_a_complete_page():
    config = make_config()
    mass = log_mass(normal(0, 2, 3, 64), summarize(torch.zeros(2, 0, 16, 64), config), 1.0)
    assert mass.shape == (2, 3, 0)
    assert page_share(mass, torch.tensor([0, 5]), config).shape == (2, 0)


def test_lengths_need_the_leading_dimensions():
    """Lengths of a batch must not be taken for lengths of KV heads, which numpy-style broadcasting would do."""
    mass = normal(0, 2, 2, 4, 6)  # batch, KV heads, group, pages
    config = make_config()
    for lengths in (torch.tensor(96), torch.tensor([[96], [20]])):
        assert page_share(mass, lengths, config).shape == (2, 2, 6)
    assert_rejected(lambda: page_share(mass, torch.tensor([96, 20]), config), "lengths.shape", "(2, 2)", "unsqueeze")
    share = page_share(mass, torch.tensor(96), config)
    assert_rejected(lambda: select_pages(share, torch.tensor([96, 20]), config), "lengths.shape", "(2, 2)", "unsqueeze")


def test_a_query_beyond_fp32_is_scaled_before_it_is_narrowed():
    config = make_config()
    mass = log_mass(normal(0, 3, 64).double() * 1e300, summarize(normal(1, 5, 16, 64), config), 0.125)
    assert mass.isfinite().all()
