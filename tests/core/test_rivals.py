"""Loki, ShadowKV and the second-moment family, against their definitions written out in loops; all rivals' accounts."""

import math

import numpy
import pytest
import torch

from pagelocks import LocksConfig, page_share, select_pages, summarize
from pagelocks.layout import record_layout
from pagelocks.selectors import (
    CALIBRATED_SELECTORS,
    SELECTORS,
    SEQUENCE_SELECTORS,
    Centroid,
    Exact,
    Locks,
    LocksCentred,
    LocksReranked,
    Loki,
    Quest,
    Random,
    RocketKV,
    SecondMoment,
    ShadowKV,
    Streaming,
    observes,
)
from pagelocks.selectors.loki import calibrate
from pagelocks.theory import exact_log_mass

from .helpers import assert_rejected, make_config, normal
from .rivals import INF, SCALE, Pages, basis_of, log_sum_exp, observed, rows

# Each with an instance for 3 KV heads of size 32 and pages of 16.
RIVALS = {
    "locks-centred": lambda: LocksCentred(normal(8, 3, 32)),
    "locks-reranked": lambda: LocksReranked(make_config()),
    "loki": lambda: Loki(basis_of(9, 3, 32), 8),
    "shadowkv": lambda: ShadowKV(make_config(budget_pages=16)),
    "rocketkv": lambda: RocketKV(make_config()),
    "second-moment": SecondMoment,
    "second-moment, taylor": lambda: SecondMoment(2, False, taylor=True),
}


# All of them


@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_shape_and_dtype(name, dtype, count):
    pages = Pages(normal(0, 2, 3, count, 16, 32).to(dtype))
    mass = RIVALS[name]().log_mass(normal(1, 2, 3, 4, 32).to(dtype), pages, SCALE)
    assert mass.shape == (2, 3, 4, count) and mass.dtype == torch.float32
    assert not mass.isnan().any() and (mass > -INF).all()


@pytest.mark.parametrize("name", RIVALS)
def test_a_row_is_the_same_in_a_batch(name):
    keys, query = normal(0, 2, 3, 7, 16, 32), normal(1, 2, 3, 4, 32)
    both = RIVALS[name]().log_mass(query, Pages(keys), SCALE)
    for row in range(2):
        torch.testing.assert_close(RIVALS[name]().log_mass(query[row], Pages(keys[row]), SCALE), both[row])


@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize("poison", [float("nan"), INF, -INF])
def test_a_poisoned_page_is_infinite_and_spoils_no_other(name, poison):
    keys, query = normal(0, 3, 7, 16, 32), normal(1, 3, 4, 32)
    clean = RIVALS[name]().log_mass(query, Pages(keys), SCALE)
    keys[1, 2, 4, 7] = poison
    mass = RIVALS[name]().log_mass(query, Pages(keys), SCALE)
    assert (mass[1, :, 2] == INF).all()
    clean[1, :, 2] = INF
    if name == "shadowkv":  # where page 2 was an outlier, another takes its place
        assert ((mass[1] == INF).sum(-1) == 4).all()
        mass[1], clean[1] = mass[1].nan_to_num(posinf=0), mass[1].nan_to_num(posinf=0)
    torch.testing.assert_close(mass, clean)


@pytest.mark.parametrize("name", RIVALS)
def test_the_largest_keys_break_nothing(name):
    keys, query = normal(0, 3, 7, 16, 32), normal(1, 3, 4, 32)
    clean = RIVALS[name]().log_mass(query, Pages(keys), SCALE)
    keys[:, 5] = torch.where(keys[:, 5] > 0, 3e38, -3e38)
    mass = RIVALS[name]().log_mass(query, Pages(keys), SCALE)
    assert not mass.isnan().any()
    if name != "shadowkv":
        others = [0, 1, 2, 3, 4, 6]
        torch.testing.assert_close(mass[..., others], clean[..., others])


def test_registries():
    assert SELECTORS["second-moment"] is SecondMoment
    assert SEQUENCE_SELECTORS["shadowkv"] is ShadowKV and SEQUENCE_SELECTORS["rocketkv"] is RocketKV
    assert CALIBRATED_SELECTORS["loki"] is Loki and CALIBRATED_SELECTORS["locks-centred"] is LocksCentred
    assert not set(SELECTORS) & (set(SEQUENCE_SELECTORS) | set(CALIBRATED_SELECTORS))
    assert SEQUENCE_SELECTORS["shadowkv"](make_config(budget_pages=32)).outliers == 6
    assert observes(RocketKV()) and not observes(ShadowKV()) and not observes(Locks())


BYTES = {
    Locks: 832,
    Exact: 4096,
    Centroid: 256,
    Quest: 512,
    Streaming: 0,
    Random: 0,
    ShadowKV: 256,
    RocketKV: 128,
    SecondMoment: 768,
}


def test_page_bytes():
    for selector, expected in BYTES.items():
        assert selector().page_bytes(128) == expected, selector
    assert Exact().page_bytes(64, 32, 4) == 64 * 32 * 4 and Quest().page_bytes(64, 32, 4) == 512
    assert Centroid().page_bytes(64, 32, 4) == ShadowKV().page_bytes(64, 32, 4) == 256
    assert LocksCentred(normal(0, 2, 128)).page_bytes(128) == LocksReranked().page_bytes(128) == 832
    assert Loki(basis_of(0, 2, 128)).page_bytes(128) == 32 * 16 * 2
    assert Loki(basis_of(0, 2, 64), 26).page_bytes(64, 8, 4) == 26 * 8 * 4
    assert RocketKV(channels=48).page_bytes(128, 16, 4) == 192 and RocketKV(channels=48).page_bytes(32) == 64
    assert SecondMoment(0).page_bytes(128) == 512 and SecondMoment(2, False).page_bytes(128) == 768
    assert SecondMoment(99).page_bytes(64, 8, 1) == (2 + 7) * 64


@pytest.mark.parametrize("page_size", [8, 16, 24, 64])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_locks_page_bytes_are_its_records(page_size, head_dim):
    config = make_config(min(8, page_size - 1), page_size)
    record = summarize(normal(0, 1, page_size, head_dim), config).pack()
    assert Locks().page_bytes(head_dim, page_size) == record.shape[-1] == record_layout(head_dim, config).record_bytes


# Loki


@pytest.mark.parametrize("rank", [1, 8, 31])
def test_loki_written_out(rank):
    basis = basis_of(5, 3, 32)
    keys, query = normal(0, 2, 3, 5, 16, 32), normal(1, 2, 3, 4, 32) * 4
    mass = Loki(basis, rank).log_mass(query, Pages(keys), SCALE)
    for key, q, b, found in rows(keys, query, basis.expand(2, 3, 32, 32), mass):
        for g in range(4):
            for j in range(5):
                logits = [sum((b[:, c] @ q[g]) * (b[:, c] @ key[j, i]) for c in range(rank)) * SCALE for i in range(16)]
                assert found[g, j] == pytest.approx(log_sum_exp(logits), abs=1e-4)


def test_loki_of_full_rank_is_exact_and_of_less_is_not():
    keys, query = normal(0, 2, 3, 7, 16, 32), normal(1, 2, 3, 4, 32) * 4
    exact = Exact().log_mass(query, Pages(keys), SCALE)
    basis = calibrate(normal(2, 3, 500, 32))
    torch.testing.assert_close(Loki(basis, 32).log_mass(query, Pages(keys), SCALE), exact, rtol=1e-5, atol=1e-4)
    assert (Loki(basis, 31).log_mass(query, Pages(keys), SCALE) - exact).abs().max() > 0.01
    assert Loki(basis).rank == 8


def test_loki_is_exact_on_keys_in_its_subspace():
    basis = basis_of(5, 3, 32)
    keys = (normal(0, 3, 7 * 16, 6) @ basis[..., :6].mT).unflatten(1, (7, 16))
    query = normal(1, 3, 4, 32) * 4
    exact = Exact().log_mass(query, Pages(keys), SCALE)
    torch.testing.assert_close(Loki(basis, 6).log_mass(query, Pages(keys), SCALE), exact, rtol=1e-5, atol=1e-4)


def test_calibration_finds_the_directions_of_most_variance_around_the_mean():
    planted = basis_of(3, 2, 16)
    spread = 2.0 ** -torch.arange(16)
    keys = (normal(0, 2, 4000, 16) * spread) @ planted.mT + 50 * planted[..., 15].unsqueeze(-2)
    basis = calibrate(keys)
    along = (planted * basis).sum(-2).abs()
    assert (along[:, :6] > 0.98).all()  # the offset along the least direction is no component
    torch.testing.assert_close(basis.mT @ basis, torch.eye(16).expand(2, 16, 16), rtol=0, atol=1e-5)
    assert (along[0] - (planted[1] * basis[0]).sum(-2).abs()).max() > 0.5  # heads have their own


def test_calibration_joins_leading_dimensions():
    keys = normal(0, 2, 5, 3, 40, 8)
    joined = torch.cat([keys[i, j] for i in range(2) for j in range(5)], dim=-2)
    one, other = calibrate(keys), calibrate(joined)
    torch.testing.assert_close((one * other).sum(-2).abs(), torch.ones(3, 8), rtol=0, atol=1e-5)


def test_loki_bad_input():
    basis = basis_of(0, 2, 8)
    assert_rejected(lambda: Loki(basis[0]), "basis.shape=(8, 8)", "(kv_heads, head_dim, head_dim)", "calibrate")
    assert_rejected(lambda: Loki(basis[..., :4]), "basis.shape=(2, 8, 4)")
    assert_rejected(lambda: Loki(basis * 2), "orthonormal", "calibrate")
    assert_rejected(lambda: Loki(basis * float("nan")), "orthonormal")
    for rank in (0, 9, 2.0, True):
        assert_rejected(lambda rank=rank: Loki(basis, rank), f"rank={rank}", "1 to the head size, 8", "Use 2.")
    loki, pages = Loki(basis), Pages(normal(0, 3, 5, 16, 8))
    assert_rejected(lambda: loki.log_mass(normal(1, 3, 4, 8), pages, 1.0), "(3, 4, 8)", "2 KV heads of size 8", "layer")
    assert_rejected(lambda: calibrate(normal(0, 8, 8)), "keys.shape=(8, 8)", "two keys", "text")
    assert_rejected(lambda: calibrate(normal(0, 2, 1, 8)), "keys.shape=(2, 1, 8)")
    assert_rejected(lambda: calibrate(torch.full((2, 9, 8), INF)), "NaN or infinity", "finite", "Leave out")


# ShadowKV


@pytest.mark.parametrize("outliers", [0, 1, 3])
def test_shadowkv_written_out(outliers):
    keys, query = normal(0, 2, 3, 9, 16, 32) + 1, normal(1, 2, 3, 4, 32)
    mass = ShadowKV(make_config(budget_pages=8), outliers).log_mass(query, Pages(keys), SCALE)
    chosen = set()
    for key, q, found in rows(keys, query, mass):
        mean = [sum(page) / 16 for page in key]
        norm = numpy.linalg.norm
        worst = [min(k @ m / norm(k) / norm(m) for k in page) for page, m in zip(key, mean, strict=True)]
        out = sorted(range(9), key=lambda j: worst[j])[:outliers]
        chosen.add(tuple(out))
        for g in range(4):
            for j in range(9):
                expected = INF if j in out else q[g] @ mean[j] * SCALE + math.log(16)
                assert found[g, j] == pytest.approx(expected, abs=1e-4)
    assert outliers == 0 or len(chosen) > 1  # each head has outliers of its own


def test_shadowkv_without_outliers_is_the_centroid():
    keys, query = normal(0, 2, 3, 9, 16, 32), normal(1, 2, 3, 4, 32)
    none = ShadowKV(outliers=0).log_mass(query, Pages(keys), SCALE)
    assert torch.equal(none, Centroid().log_mass(query, Pages(keys), SCALE))


def test_shadowkv_outliers_are_chosen_whatever_the_query():
    config, lengths = make_config(budget_pages=6), torch.tensor(20 * 16)
    keys = normal(0, 20, 16, 32) * 0.1 + 3
    keys[7, 3] *= -1
    keys[12, 9] *= -1
    for seed in range(5):
        query = normal(seed, 4, 32)
        query[0] = keys[7, 0]  # not even one that both would score least for
        without = ShadowKV(config, 0).log_mass(query, Pages(keys), SCALE)
        mass = ShadowKV(config, 2).log_mass(query, Pages(keys), SCALE)
        assert {7, 12} <= set(select_pages(page_share(mass, lengths, config), lengths, config).tolist())
        keep = [j for j in range(20) if j not in (7, 12)]
        assert torch.equal(mass[:, keep], without[:, keep])


def test_a_page_of_nan_takes_no_outliers_place():
    keys, query = normal(0, 9, 16, 32) + 2, normal(1, 4, 32)
    keys[4, 3] *= -1
    keys[6, 0, 0] = float("nan")
    mass = ShadowKV(make_config(budget_pages=8), 1).log_mass(query, Pages(keys), SCALE)
    assert (mass == INF)[0].nonzero().flatten().tolist() == [4, 6]


def test_shadowkv_default_is_the_papers_share_of_the_budget():
    assert ShadowKV().outliers * 16 == 48 * 8  # at its budget of 2,048
    assert [ShadowKV(make_config(budget_pages=n)).outliers for n in (3, 5, 6, 8, 64)] == [0, 0, 1, 1, 12]
    many = ShadowKV().log_mass(normal(1, 4, 32), Pages(normal(0, 9, 16, 32)), SCALE)
    assert (many == INF).all()  # fewer pages than outliers


def test_shadowkv_bad_input():
    for outliers in (-1, 3, 1.0, True):
        assert_rejected(
            lambda n=outliers: ShadowKV(make_config(budget_pages=4), n),
            f"outliers={outliers}",
            "0 to 2",
            "64",
            "Leave it out",
        )


# Second moment


@pytest.mark.parametrize("rank", [0, 1, 4, 15, 40])
@pytest.mark.parametrize("diagonal", [True, False])
@pytest.mark.parametrize("taylor", [True, False])
@pytest.mark.parametrize("head_dim", [8, 32])
def test_second_moment_written_out(rank, diagonal, taylor, head_dim):
    keys, query = normal(0, 1, 2, 5, 16, head_dim) * 2, normal(1, 1, 2, 3, head_dim)
    mass = SecondMoment(rank, diagonal, taylor).log_mass(query, Pages(keys), 0.3)
    for key, q, found in rows(keys, query, mass):
        for j in range(5):
            mean = sum(key[j]) / 16
            sigma = sum(numpy.outer(k - mean, k - mean) for k in key[j]) / 16
            values, vectors = numpy.linalg.eigh(sigma)
            stored = numpy.zeros_like(sigma)
            for k in range(head_dim - 1, max(-1, head_dim - 1 - rank), -1):
                stored += values[k] * numpy.outer(vectors[:, k], vectors[:, k])
            if diagonal:
                stored += numpy.diag(numpy.diag(sigma - stored))
            for g in range(3):
                variance = 0.09 * (q[g] @ stored @ q[g])
                spread = math.log(1 + variance / 2) if taylor else variance / 2
                assert found[g, j] == pytest.approx(q[g] @ mean * 0.3 + spread + math.log(16), abs=1e-4)


def test_second_moment_is_exact_to_second_order():
    """Halving small logits divides the error by 8, the centroid's by 4: what is missing starts at the third order."""
    keys, query = normal(0, 40, 16, 32), normal(1, 4, 32)

    def errors(selector, scale):
        exact = exact_log_mass(query.double(), keys.double(), scale)
        return (selector.log_mass(query, Pages(keys), scale).double() - exact).abs().mean()

    for selector, order in ((SecondMoment(15), 3), (SecondMoment(15, taylor=True), 3), (Centroid(), 2)):
        ratio = errors(selector, 0.1) / errors(selector, 0.05)
        assert 2 ** (order - 0.3) < ratio < 2 ** (order + 0.5), selector
    assert errors(SecondMoment(15), 0.05) < errors(SecondMoment(), 0.05) < errors(Centroid(), 0.05) / 2


def test_second_moment_is_exact_for_a_normal_page():
    spread = torch.tensor([0.5, 1.0, 2.0, 4.0])
    keys = normal(0, 1, 100_000, 4) * spread + normal(2, 4)
    query = normal(1, 3, 4)
    query = query / (query * spread).norm(dim=-1, keepdim=True)  # logits of variance 1
    exact = exact_log_mass(query, keys, 1.0).float()
    torch.testing.assert_close(SecondMoment(0).log_mass(query, Pages(keys), 1.0), exact, rtol=0, atol=0.02)
    assert (Centroid().log_mass(query, Pages(keys), 1.0) - exact).abs().min() > 0.4


def test_second_moment_cannot_tell_one_key_from_many():
    """Two pages of one mean and variance along the query: in the first a single key stands out."""
    one = torch.full((16,), -10 / 16)
    one[3] += 10
    many = one.std(correction=0) * (1 - 2 * (torch.arange(16) % 2))
    keys = torch.zeros(2, 16, 8)
    keys[0, :, 2], keys[1, :, 2] = one, many
    query = torch.eye(8)[2:3]
    mass = SecondMoment().log_mass(query, Pages(keys), 1.0)[0]
    torch.testing.assert_close(mass[0], mass[1])
    exact = Exact().log_mass(query, Pages(keys), 1.0)[0]
    assert exact[0] > exact[1] + 4


def test_second_moment_bad_input():
    for rank in (-1, 1.0, True):
        assert_rejected(lambda rank=rank: SecondMoment(rank), f"rank={rank}", "0 or more", "Use 1")


def test_selectors_default_to_the_default_budget():
    assert ShadowKV().outliers == ShadowKV(LocksConfig()).outliers
    keys, query = normal(0, 1, 3000, 32), normal(1, 1, 2, 40, 32)
    assert torch.equal(observed(None, (query, keys)).kept, observed(LocksConfig(), (query, keys)).kept)
