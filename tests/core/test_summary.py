"""PageSummary against an independent SVD, on ordinary and on awkward pages, and what poison does."""

import pytest
import torch

from pagelocks import PageSummary, summarize
from pagelocks.layout import record_layout
from pagelocks.summary import UNSCORABLE

from .helpers import (
    AWKWARD,
    KEY_DTYPES,
    SUMMARY_FIELDS,
    assert_rejected,
    assert_same_summary,
    awkward_pages,
    make_config,
    normal,
    plain_config,
    same_bits,
)

SHAPES = [(16, 64, 8), (16, 128, 15), (8, 32, 1), (64, 256, 20), (11, 40, 10), (64, 32, 32)]
NAN, INF = float("nan"), float("inf")


FP32 = 2.0**-23


def page_units(summary):
    """The keys (P, B, d) divided by 2**exponent, in float64: near its limits fp32 itself would round them."""
    deviations = summary.coefficients_in_page_units().double().mT @ summary.basis_in_page_units().double()
    return summary.centroid_in_page_units().double().unsqueeze(-2) + deviations


def real_units(summary):
    """centroid (P, d), basis (P, r, d), coefficients (P, r, B) in float64, in the keys' own units."""
    unit = 2.0 ** summary.exponent.double()[:, None]
    return (
        summary.centroid_in_page_units().double() * unit,
        summary.basis_in_page_units().double(),
        summary.coefficients_in_page_units().double() * unit[..., None],
    )


@pytest.mark.parametrize("dtype", KEY_DTYPES)
@pytest.mark.parametrize(("page_size", "head_dim", "rank"), SHAPES)
def test_agrees_with_an_svd(page_size, head_dim, rank, dtype):
    keys = (normal(rank, 6, page_size, head_dim) * 3 + normal(1, 6, 1, head_dim)).to(dtype)
    summary = summarize(keys, plain_config(rank, page_size))
    centroid, basis, coefficients = real_units(summary)
    wide = keys.double()
    mean = wide.mean(-2)
    u, s, vt = torch.linalg.svd(wide - mean.unsqueeze(-2), full_matrices=False)
    torch.testing.assert_close(centroid, mean, rtol=1e-6, atol=1e-6)
    # Energy by column, in order, and what is left out.
    torch.testing.assert_close(coefficients.square().sum(-1), s[:, :rank].square(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(summary.tail, s[:, rank:].square().sum(-1), rtol=1e-5, atol=1e-4)
    # Orthonormal columns, which span what the SVD's first r do.
    kept = s[:, :rank] > 1e-6 * s[:, :1]
    gram = basis @ basis.mT
    torch.testing.assert_close(gram, torch.diag_embed(kept.double()), rtol=0, atol=2e-5)
    best = (u[..., :rank] * s[:, None, :rank]) @ vt[:, :rank]
    torch.testing.assert_close(coefficients.mT @ basis, best, rtol=0, atol=3e-4)
    torch.testing.assert_close(summary.keys().double(), mean.unsqueeze(-2) + best, rtol=0, atol=3e-4)


@pytest.mark.parametrize(("basis_bits", "coefficient_bits"), [(2, 8), (4, 8), (8, 8), (None, 8), (4, None)])
@pytest.mark.parametrize("dtype", KEY_DTYPES)
@pytest.mark.parametrize("name", AWKWARD)
def test_quantised_parts_are_within_half_a_step(name, dtype, basis_bits, coefficient_bits):
    """Every part, and with them the keys: no worse than half a step of each scale allows."""
    page = awkward_pages(16, 64, dtype)[name][None]
    summary = summarize(page, make_config(8, 16, basis_bits, coefficient_bits))
    plain = summarize(page, plain_config(8))
    steps = {}
    for part, scale, bits, along in (
        ("centroid", summary.centroid_scale, coefficient_bits, -1),
        ("basis", summary.basis_scale, basis_bits, -1),
        ("coefficients", summary.coefficient_scale, coefficient_bits, -2),
    ):
        found = getattr(summary, f"{part}_in_page_units")().double()
        exact = getattr(plain, f"{part}_in_page_units")().double()
        if bits is None:
            assert torch.equal(found, exact), part
            steps[part] = torch.zeros((), dtype=torch.float64)
            continue
        step = steps[part] = scale.double().unsqueeze(along)
        assert ((found - exact).abs() <= step / 2 + FP32 * exact.abs()).all(), part
        # The least half that gives the largest value a code: rounded up, by one ulp at most.
        needed = exact.abs().amax(along, keepdim=True) / (2 ** (bits - 1) - 1)
        assert (step >= needed * (1 - FP32)).all() and (step <= needed * (1 + 2.0**-10) + 2.0**-24).all(), part

    basis = summary.basis_in_page_units().double().abs()
    coefficients = summary.coefficients_in_page_units().double().abs()
    bound = basis.mT @ (steps["coefficients"] / 2).expand_as(coefficients)
    bound = bound + (steps["basis"] / 2).expand_as(basis).mT @ (coefficients + steps["coefficients"] / 2)
    bound = bound.mT + steps["centroid"].unsqueeze(-1) / 2
    missed = page_units(summary) - page_units(plain)
    assert (missed.abs() <= bound + 1e-6).all()
    if (basis_bits, coefficient_bits) == (8, 8):
        assert missed.abs().max() < 0.05  # the bound is not an empty one


@pytest.mark.parametrize("dtype", KEY_DTYPES)
@pytest.mark.parametrize("name", AWKWARD)
@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 64), (8, 32), (11, 40)])
def test_full_rank_gives_the_keys_back(name, dtype, page_size, head_dim):
    """Rank B - 1 holds any page, to fp32 rounding of its largest key."""
    page = awkward_pages(page_size, head_dim, dtype)[name][None]
    summary = summarize(page, plain_config(page_size - 1, page_size))
    largest = page.double().abs().amax()
    assert (summary.keys().double() - page.double()).abs().max() <= 2e-6 * largest
    assert summary.tail <= (2e-6 * largest) ** 2 * page.numel()


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("true_rank", [0, 1, 2, 5])
def test_a_page_of_low_rank_needs_no_more_than_its_rank(true_rank, scale):
    keys = (normal(0, 4, 16, true_rank) @ normal(1, 4, true_rank, 64) + normal(2, 4, 1, 64)) * scale
    for rank in {max(true_rank, 1), true_rank + 1, 15}:
        summary = summarize(keys, plain_config(rank))
        largest = keys.abs().amax((-2, -1))[:, None, None]
        assert ((summary.keys() - keys).abs() <= 2e-6 * largest).all()
    if true_rank < 8:  # columns that nothing needs are zeros, not noise
        summary = summarize(keys, make_config())
        assert not summary.basis[:, true_rank:].any() and not summary.coefficients[:, true_rank:].any()
        assert not summary.basis_scale[:, true_rank:].any()
        assert summary.basis[:, :true_rank].any(-1).all()


def test_full_rank_keeps_small_differences_beside_a_huge_key():
    keys = normal(0, 1, 16, 64) * 0.05
    keys[0, 0] *= 2e5
    summary = summarize(keys, plain_config(15))
    assert (summary.keys() - keys).abs().max() <= 1e-6 * keys.abs().max()


def test_what_is_dropped_as_noise_is_at_most_two_to_the_minus_22_and_is_in_the_tail():
    keys = torch.zeros(1, 16, 64)
    keys[0, 0, 0], keys[0, 1, 1] = 1.0, 2e-7
    summary = summarize(keys, plain_config(15))
    error = (summary.keys().double() - keys.double()).square().sum()
    assert 0 < error.sqrt() <= 2.0**-22
    torch.testing.assert_close(summary.tail[0], error, rtol=0.1, atol=0)


@pytest.mark.parametrize("dtype", KEY_DTYPES)
@pytest.mark.parametrize("name", AWKWARD)
@pytest.mark.parametrize(("basis_bits", "coefficient_bits"), [(4, 8), (2, 8), (8, None), (None, None)])
def test_finite_pages_give_finite_summaries(name, dtype, basis_bits, coefficient_bits):
    for rank, page_size, head_dim in ((1, 8, 32), (8, 16, 64), (15, 16, 64), (39, 64, 40)):
        page = awkward_pages(page_size, head_dim, dtype)[name][None]
        summary = summarize(page, make_config(rank, page_size, basis_bits, coefficient_bits))
        assert summary.scorable.all()
        for field in SUMMARY_FIELDS:
            part = getattr(summary, field)
            assert part is None or part.isfinite().all(), field
        assert summary.keys().isfinite().all() and summary.tail.isfinite().all() and (summary.tail >= 0).all()


@pytest.mark.parametrize("power", [-120, -40, -1, 1, 40, 110])
@pytest.mark.parametrize(("basis_bits", "coefficient_bits"), [(4, 8), (None, None)])
def test_magnitude_lives_in_the_exponent_alone(power, basis_bits, coefficient_bits):
    config = make_config(8, 16, basis_bits, coefficient_bits)
    keys = normal(0, 4, 16, 64) + 1
    summary, moved = summarize(keys, config), summarize(keys * 2.0**power, config)
    assert torch.equal(moved.exponent, summary.exponent + power)
    for field in SUMMARY_FIELDS[1:]:
        mine, yours = getattr(summary, field), getattr(moved, field)
        assert mine is None or torch.equal(mine, yours), field
    torch.testing.assert_close(moved.keys(), summary.keys() * 2.0**power, rtol=0, atol=0)
    torch.testing.assert_close(moved.tail, summary.tail * 4.0**power, rtol=0, atol=0)


@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 1e4, 3e38])
def test_relative_error_does_not_depend_on_magnitude(magnitude):
    base = normal(0, 8, 16, 64).clamp(-1, 1)
    keys = (base * magnitude).bfloat16()
    summary = summarize(keys, make_config(15))
    missed = (summary.keys().double() - keys.double()).norm() / keys.double().norm()
    assert 0.01 < missed < 0.12  # int4's error, whatever the unit


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", KEY_DTYPES)
@pytest.mark.parametrize(("basis_bits", "coefficient_bits"), [(4, 8), (None, None)])
def test_a_poisoned_page_spoils_no_other(poison, dtype, basis_bits, coefficient_bits):
    config = make_config(8, 16, basis_bits, coefficient_bits)
    keys = normal(3, 2, 5, 16, 64).to(dtype)
    clean = summarize(keys, config)
    spoilt = keys.clone()
    spoilt[1, 2, 7, 9] = poison
    summary = summarize(spoilt, config)
    scorable = torch.ones(2, 5, dtype=torch.bool)
    scorable[1, 2] = False
    assert torch.equal(summary.scorable, scorable) and summary.exponent[1, 2] == UNSCORABLE
    assert torch.equal(summary.pack()[scorable], clean.pack()[scorable])
    assert summary.pack()[1, 2, :2].tolist() == [0, 0]  # "no summary here"
    assert torch.equal(summary.tail.isinf(), ~scorable) and not summary.tail.isnan().any()
    assert torch.equal(summary.keys().isnan().all((-2, -1)), ~scorable)
    assert torch.equal(summary.keys().isnan().any((-2, -1)), ~scorable)


def test_a_page_of_nothing_but_nan():
    summary = summarize(torch.full((1, 16, 64), NAN), make_config())
    assert not summary.scorable.any() and (summary.pack()[0, :2] == 0).all()


@pytest.mark.parametrize(("basis_bits", "coefficient_bits"), [(4, 8), (2, 8), (8, 8), (None, None)])
def test_a_record_of_zeros_was_never_built(basis_bits, coefficient_bits):
    config = make_config(8, 16, basis_bits, coefficient_bits)
    record = torch.zeros(3, record_layout(64, config).record_bytes, dtype=torch.uint8)
    summary = PageSummary.unpack(record, 64, config)
    assert not summary.scorable.any() and (summary.exponent == UNSCORABLE).all()
    assert (summary.tail == INF).all() and summary.keys().isnan().all()


def test_a_page_of_zeros_was_built():
    summary = summarize(torch.zeros(1, 16, 64), make_config())
    assert summary.scorable.all() and not summary.keys().any() and summary.tail == 0
    assert summary.pack()[0, :2].tolist() == [0, 128]  # exponent 0, biased


@pytest.mark.parametrize(("basis_bits", "coefficient_bits"), [(b, c) for b in (2, 4, 8, None) for c in (8, None)])
def test_unpack_undoes_pack(basis_bits, coefficient_bits):
    config = make_config(5, 11, basis_bits, coefficient_bits)
    keys = torch.stack(list(awkward_pages(11, 40, torch.float32).values()))
    keys[1, 0, 0] = NAN
    summary = summarize(keys, config)
    record = summary.pack()
    again = PageSummary.unpack(record, 40, config)
    assert_same_summary(again, summary)
    assert torch.equal(again.pack(), record)


def test_unpack_reads_a_slice_of_a_larger_cache():
    """As an engine holds them: records side by side with something else."""
    config = make_config()
    summary = summarize(normal(0, 4, 16, 64), config)
    cache = torch.full((4, 3, 700), 255, dtype=torch.uint8)
    cache[:, 1, 64:576] = summary.pack()
    assert_same_summary(PageSummary.unpack(cache[:, 1, 64:576], 64, config), summary)


@pytest.mark.parametrize(("basis_bits", "coefficient_bits"), [(2, None), (4, 8), (None, None)])
@pytest.mark.parametrize("offset", [0, 1, 2, 6])
def test_unpack_reads_records_at_any_address(offset, basis_bits, coefficient_bits):
    """One page alone is a contiguous slice; 40 codes of 2 bits put its fp32 coefficients on no multiple of 4."""
    config = make_config(1, 8, basis_bits, coefficient_bits)
    summary = summarize(normal(0, 1, 8, 40), config)
    record = summary.pack()
    cache = torch.zeros(1, record.shape[-1] + 8, dtype=torch.uint8)
    cache[:, offset : offset + record.shape[-1]] = record
    assert_same_summary(PageSummary.unpack(cache[:, offset : offset + record.shape[-1]], 40, config), summary)


def test_strides_and_leading_dimensions_do_not_matter():
    config = make_config()
    keys = normal(0, 2, 3, 5, 16, 64)
    record = summarize(keys, config).pack()
    assert record.shape == (2, 3, 5, 512)
    assert torch.equal(summarize(keys.flatten(0, 2), config).pack(), record.flatten(0, 2))
    assert torch.equal(summarize(keys.transpose(0, 2), config).pack(), record.transpose(0, 2))
    # Tokens first and heads inside, as a K cache often is.
    token_major = keys.permute(2, 3, 0, 1, 4).contiguous().permute(2, 3, 0, 1, 4)
    assert torch.equal(summarize(token_major, config).pack(), record)


def test_threads_do_not_matter():
    keys, config, threads = normal(0, 40, 16, 128), plain_config(), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = summarize(keys, config).pack()
        torch.set_num_threads(2)
        two = summarize(keys, config).pack()
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one, two)


def test_wider_copies_of_the_same_keys_give_the_same_record():
    for dtype in (torch.bfloat16, torch.float16):
        keys = normal(0, 5, 16, 64).to(dtype)
        assert torch.equal(summarize(keys, make_config()).pack(), summarize(keys.float(), make_config()).pack())


def test_the_largest_entry_of_a_column_is_positive():
    """So that a record does not hang on an eigensolver's choice of sign."""
    summary = summarize(normal(0, 50, 16, 64), plain_config(15))
    largest = summary.basis.gather(-1, summary.basis.abs().argmax(-1, keepdim=True))
    assert (largest > 0).all()


def test_keys_are_not_written_to():
    keys = normal(0, 3, 16, 64)
    before = keys.clone()
    summarize(keys, make_config()).pack()
    assert same_bits(keys, before)


def test_no_pages_give_no_records():
    summary = summarize(torch.zeros(2, 0, 16, 64), make_config())
    assert summary.pack().shape == (2, 0, 512) and summary.keys().shape == (2, 0, 16, 64)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int8, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64]
)
def test_other_dtypes_are_refused(dtype):
    assert_rejected(
        lambda: summarize(torch.zeros(1, 16, 64).to(dtype), make_config()),
        f"keys.dtype={dtype} is not allowed",
        "float32, bfloat16 or float16",
        "Convert them",
    )


@pytest.mark.parametrize("shape", [(16, 64), (3, 8, 64), (3, 17, 64), (64, 16), (3, 0, 64)])
def test_other_page_shapes_are_refused(shape):
    assert_rejected(
        lambda: summarize(torch.zeros(shape), make_config()),
        f"keys.shape={shape} is not allowed",
        "(..., pages, page_size, head_dim) with page_size=16",
        "Reshape the keys into whole pages first.",
    )


@pytest.mark.parametrize("head_dim", [0, 24, 60, 264])
def test_other_head_sizes_are_refused(head_dim):
    assert_rejected(
        lambda: summarize(torch.zeros(1, 16, head_dim), make_config()), f"head_dim={head_dim}", "32 to 256", "Serve"
    )


def test_a_rank_above_the_head_size_is_refused():
    assert_rejected(
        lambda: summarize(torch.zeros(1, 64, 32), make_config(rank=40, page_size=64)), "rank=40", "32", "Use rank 8."
    )
