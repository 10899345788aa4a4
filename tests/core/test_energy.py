"""Key energy by scope and errors by page property, against plain loops and hand-computed pages."""

import math

import pytest
import torch

from pagelocks.eval.energy import (
    basis_energy,
    error_by_property,
    page_energy,
    page_properties,
    reconstruct,
    shared_basis,
)
from pagelocks.eval.links import logit_error, spearman
from pagelocks.theory import spectral_tail

from .helpers import KEY_DTYPES, assert_rejected, normal
from .records import make_record


def pages_of(seed, heads=2, pages=6, page_size=8, head_dim=32, dtype=torch.float32):
    keys = make_record(seed, heads, 1, pages * page_size, head_dim, dtype, spare=0, page_size=page_size).keys
    return keys.unflatten(1, (pages, page_size))


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def slow_energy(page, basis):
    """Captured and total energy of one page (B, d) by the columns of a basis (d, r), product by product."""
    rows = page.double().tolist()
    mean = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    centred = [[a - m for a, m in zip(row, mean, strict=True)] for row in rows]
    columns = basis.double().mT.tolist()
    captured = sum(sum(a * b for a, b in zip(row, column, strict=True)) ** 2 for row in centred for column in columns)
    return captured, sum(a * a for row in centred for a in row)


@pytest.mark.parametrize("dtype", KEY_DTYPES)
@pytest.mark.parametrize(("page_size", "head_dim", "rank"), [(8, 32, 3), (16, 64, 8), (16, 8, 2), (9, 32, 7)])
def test_a_page_s_own_basis_is_that_of_an_svd(page_size, head_dim, rank, dtype):
    pages = pages_of(rank, 2, 4, page_size, head_dim, dtype)
    found = page_energy(pages, rank)
    assert found.captured.dtype == torch.float64
    for head in range(2):
        for page in range(4):
            keys = pages[head, page].double()
            basis = torch.linalg.svd(keys - keys.mean(0), full_matrices=False).Vh[:rank].mT
            captured, total = slow_energy(keys, basis)
            assert found.captured[head, page].item() == pytest.approx(captured)
            assert found.total[head, page].item() == pytest.approx(total)
        share = found.captured[head].sum() / found.total[head].sum()
        assert found.by_head[head].item() == pytest.approx(share.item())
    if head_dim >= 32:
        tail = spectral_tail(pages, rank)
        torch.testing.assert_close(found.total - found.captured, tail, rtol=1e-4, atol=1e-5)
    assert (found.captured < (1 - 1e-3) * found.total).all()


def test_energy_by_hand():
    page = torch.zeros(1, 2, 8, 32)
    page[0, 0, 0, 0], page[0, 0, 1, 0] = 3.0, -3.0  # 18 along one direction
    page[0, 0, 2, 1], page[0, 0, 3, 1] = 1.0, -1.0  # 2 along another
    page[0, 1] = 5.0  # all keys alike: nothing to capture
    found = page_energy(page, 1)
    torch.testing.assert_close(found.captured, tensor([[18.0, 0.0]]))
    torch.testing.assert_close(found.total, tensor([[20.0, 0.0]]))
    torch.testing.assert_close(found.by_head, tensor([0.9]))
    torch.testing.assert_close(page_energy(page[:, 1:], 1).by_head, tensor([1.0]))
    other = torch.eye(32)[:, 1:2]
    torch.testing.assert_close(basis_energy(page, other).captured, tensor([[2.0, 0.0]]))
    assert page_energy(torch.ones(1, 1, 8, 32), 4).by_head.tolist() == [1.0]


@pytest.mark.parametrize("dtype", KEY_DTYPES)
def test_a_given_basis_against_loops_shared_by_heads_or_not(dtype):
    pages = pages_of(3, dtype=dtype)
    for shape in ((32, 5), (2, 32, 5)):
        basis = torch.linalg.qr(normal(4, *shape)).Q
        found = basis_energy(pages, basis)
        for head in range(2):
            for page in range(6):
                own = basis if basis.ndim == 2 else basis[head]
                captured, total = slow_energy(pages[head, page], own)
                assert found.captured[head, page].item() == pytest.approx(captured)
                assert found.total[head, page].item() == pytest.approx(total)


def test_a_shared_basis_is_the_svd_of_all_centred_keys():
    sequences = [pages_of(1, pages=6), pages_of(2, pages=3)]
    for centre in ("page", "sequence"):
        found = shared_basis(sequences, 4, centre)
        assert found.shape == (2, 32, 4) and found.dtype == torch.float64
        for head in range(2):
            rows = []
            for pages in sequences:
                keys = pages[head].double()
                mean = keys.mean(1, keepdim=True) if centre == "page" else keys.flatten(0, 1).mean(0)
                rows.append((keys - mean).flatten(0, 1))
            expected = torch.linalg.svd(torch.cat(rows), full_matrices=False).Vh[:4]
            cosines = (expected @ found[head]).abs()
            torch.testing.assert_close(cosines, torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-6)


def test_no_other_shared_basis_holds_more_of_the_within_page_energy():
    pages = pages_of(5)
    best = basis_energy(pages, shared_basis([pages], 4)).captured.sum(-1)
    others = [shared_basis([pages], 4, "sequence"), shared_basis([pages_of(6)], 4)]
    others += [torch.linalg.qr(normal(seed, 2, 32, 4)).Q for seed in range(20)]
    for other in others:
        assert (basis_energy(pages, other).captured.sum(-1) < best - 1e-3).all()


def test_scopes_are_in_order_and_are_what_they_are_called():
    pages, elsewhere = pages_of(7, pages=12), [pages_of(8), pages_of(9)]
    own, sequence, calibrated = (
        page_energy(pages, 3),
        *(basis_energy(pages, shared_basis(fitted, 3)) for fitted in ([pages], elsewhere)),
    )
    assert (own.by_head > sequence.by_head + 0.05).all()
    assert (sequence.by_head > calibrated.by_head + 0.01).all()
    for energy in (sequence, calibrated):
        torch.testing.assert_close(energy.total, own.total)
    centred = basis_energy(pages, shared_basis([pages], 3, "sequence"))
    assert (centred.by_head < sequence.by_head).all()
    # One page is its own sequence.
    first = pages[:, :1]
    torch.testing.assert_close(page_energy(first, 3).captured, basis_energy(first, shared_basis([first], 3)).captured)


def test_reconstruction_loses_what_the_basis_does_not_hold():
    pages, query = pages_of(10), normal(11, 2, 3, 32)
    basis = shared_basis([pages], 5)
    found, energy = reconstruct(pages, basis), basis_energy(pages, basis)
    assert found.shape == pages.shape and found.dtype == torch.float64
    torch.testing.assert_close((found - pages).square().sum((-1, -2)), energy.total - energy.captured)
    torch.testing.assert_close(found.mean(-2), pages.double().mean(-2))
    whole = reconstruct(pages, torch.eye(32))
    torch.testing.assert_close(whole, pages.double())
    assert logit_error(query, pages, whole, 0.2).max() < 1e-12 < logit_error(query, pages, found, 0.2).min()


@pytest.mark.parametrize("dtype", KEY_DTYPES)
def test_properties_against_loops(dtype):
    pages = pages_of(12, dtype=dtype)
    found = page_properties(pages, 3)
    for head in range(2):
        for page in range(6):
            rows = pages[head, page].double().tolist()
            entries = [a for row in rows for a in row]
            mean_square = sum(a * a for a in entries) / len(entries)
            assert found.dynamic_range[head, page].item() == pytest.approx(
                max(map(abs, entries)) / math.sqrt(mean_square)
            )
            assert found.norm[head, page].item() == pytest.approx(
                math.sqrt(sum(sum(a * a for a in row) for row in rows) / 8)
            )
    energy = page_energy(pages, 3)
    torch.testing.assert_close(found.tail, energy.total - energy.captured)
    zeros = page_properties(torch.zeros(1, 1, 8, 32), 3)
    assert (zeros.dynamic_range.item(), zeros.tail.item(), zeros.norm.item()) == (1, 0, 0)
    one = torch.zeros(1, 1, 8, 32)
    one[0, 0, 3, 4] = -7.0
    assert page_properties(one, 3).dynamic_range.item() == pytest.approx(16)  # sqrt(8 * 32)


def test_binned_errors_by_hand():
    values = torch.tensor([4.0, 1.0, 2.0, 3.0])
    found = error_by_property(torch.tensor([[8.0, -1.0, 3.0, 5.0]]), values, 2)
    assert found.low.tolist() == [1, 3] and found.high.tolist() == [2, 4]
    assert found.mean.tolist() == [2, 6.5] and found.count.tolist() == [2, 2]
    assert found.correlation == pytest.approx(1)
    # Equal values share a bin, and an empty one is left out.
    tied = error_by_property(torch.tensor([1.0, 2.0, 3.0, 10.0]), torch.tensor([5.0, 5.0, 5.0, 6.0]), 4)
    assert tied.count.tolist() == [3, 1] and tied.mean.tolist() == [2, 10]
    alike = error_by_property(torch.tensor([1.0, 2.0]), torch.tensor([5.0, 5.0]), 10)
    assert alike.count.tolist() == [2] and alike.mean.tolist() == [1.5] and alike.correlation == 0
    assert error_by_property(values, values, 1).mean.tolist() == [2.5]


@pytest.mark.parametrize("bins", [1, 3, 7, 10])
def test_binned_errors_against_sorting(bins):
    values, noise = normal(20, 2, 35).exp(), normal(21, 2, 3, 35)
    error = noise * values.unsqueeze(1)
    found = error_by_property(error, values.unsqueeze(1), bins)
    pairs = sorted(
        (values[h, p].item(), abs(error[h, g, p].item())) for h in range(2) for g in range(3) for p in range(35)
    )
    assert found.count.sum() == len(pairs) == 210
    start = 0
    for k in range(bins):
        part = pairs[start : start + int(found.count[k])]
        start += len(part)
        assert abs(len(part) - 210 / bins) <= 3  # a page's three heads are not torn apart
        assert found.low[k].item() == pytest.approx(part[0][0]) and found.high[k].item() == pytest.approx(part[-1][0])
        assert found.mean[k].item() == pytest.approx(sum(e for _, e in part) / len(part))
    flat = values.unsqueeze(1).expand(-1, 3, -1).flatten()
    assert found.correlation == pytest.approx(spearman(flat, error.abs().flatten()).item())
    assert found.correlation > 0.3 and (bins == 1 or found.mean[-1] > 3 * found.mean[0])


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (lambda pages: page_energy(pages, 0), ["rank=0", "1 to the head size, 32"]),
        (lambda pages: page_energy(pages, 33), ["rank=33"]),
        (lambda pages: page_energy(pages[0], 3), ["pages=", "(kv_heads, P, B, d)"]),
        (lambda pages: page_energy(pages[:, :0], 3), ["pages="]),
        (lambda pages: page_energy(pages * math.nan, 3), ["NaN", "finite"]),
        (lambda pages: shared_basis([], 3), ["sequences=[]"]),
        (lambda pages: shared_basis([pages, pages[:1]], 3), ["sequences=(1, 6, 8, 32)"]),
        (lambda pages: shared_basis([pages], 3, "none"), ["centre='none'", "'page' or 'sequence'"]),
        (lambda pages: basis_energy(pages, torch.eye(16)), ["basis.shape=(16, 16)", "(32, r)"]),
        (lambda pages: basis_energy(pages, torch.eye(32).expand(3, -1, -1)), ["basis.shape=(3, 32, 32)"]),
        (lambda pages: basis_energy(pages, torch.eye(32)[:, :3] * 1.01), ["orthonormal", "qr"]),
        (lambda pages: reconstruct(pages, torch.eye(32) * math.nan), ["orthonormal"]),
        (lambda pages: error_by_property(pages, pages, 0), ["bins=0"]),
        (lambda pages: error_by_property(pages, pages[:, :2]), ["values.shape=(2, 2, 8, 32)", "unsqueeze"]),
        (lambda pages: error_by_property(pages / 0, pages), ["error, values"]),
        (lambda pages: error_by_property(pages[:0], pages[:0]), ["0 pairs"]),
    ],
)
def test_bad_input_is_refused(call, parts):
    assert_rejected(lambda: call(pages_of(0)), *parts)


@pytest.mark.model
def test_on_real_keys_the_smaller_scope_holds_more(real_layers):
    """DESIGN.md, section 5: 92-97% against 55-77% and 47-68% at rank 8."""
    for layer in real_layers.values():
        pages = layer.pages()
        half = pages.shape[1] // 2
        later, bases = pages[:, half:], [shared_basis([part], 8) for part in (pages[:, half:], pages[:, :half])]
        found = [page_energy(later, 8), *(basis_energy(later, basis) for basis in bases)]
        own, sequence, shared = ((energy.captured / energy.total).mean() for energy in found)
        assert own > 0.85 and own > sequence + 0.1 and sequence > shared + 0.01
