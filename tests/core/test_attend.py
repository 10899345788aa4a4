"""Sparse attention against torch's own dense attention, with and without a mask."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from pagelocks import sparse_attention

from .helpers import assert_rejected, normal

NAN, INF = float("nan"), float("inf")


def dense(query, keys, values, scale, mask=None):
    """scaled_dot_product_attention in float64; mask (..., T) or None."""
    mask = None if mask is None else mask.unsqueeze(-2).expand(*query.shape[:-1], keys.shape[-2])
    return scaled_dot_product_attention(query.double(), keys.double(), values.double(), mask, scale=scale)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 80, 91, 96])
@pytest.mark.parametrize("page_size", [8, 16, 32])
def test_every_page_listed_is_dense_attention(length, page_size):
    query, keys, values = normal(0, 2, 5, 64), normal(1, 2, 96, 64), normal(2, 2, 96, 64)
    pages = torch.arange(96 // page_size).expand(2, -1)
    found = sparse_attention(query, keys, values, pages, torch.tensor([length, length]), 0.125, page_size)
    expected = dense(query, keys[:, :length], values[:, :length], 0.125)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_some_pages_are_attention_under_a_mask():
    query, keys, values = normal(0, 3, 4, 64), normal(1, 3, 100, 64), normal(2, 3, 100, 64)
    lengths = torch.tensor([100, 64, 33])
    pages = torch.tensor([[0, 6, 3, -1], [3, 1, 0, 2], [2, -1, 0, -1]])  # in any order, with gaps
    found = sparse_attention(query, keys, values, pages, lengths, 0.125)
    mask = torch.zeros(3, 100, dtype=torch.bool)
    for row in range(3):
        for page in pages[row].tolist():
            if page >= 0:
                mask[row, page * 16 : min(page * 16 + 16, int(lengths[row]))] = True
    torch.testing.assert_close(found.double(), dense(query, keys, values, 0.125, mask), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_what_is_not_selected_or_past_the_length_cannot_leak(poison):
    query, keys, values = normal(0, 4, 64), normal(1, 80, 64), normal(2, 80, 64)
    pages, lengths = torch.tensor([1, 3, 4, -1, -1]), torch.tensor(70)
    clean = sparse_attention(query, keys, values, pages, lengths, 0.125)
    read = torch.zeros(80, dtype=torch.bool)
    read[16:32] = read[48:70] = True
    for spoilt_keys, spoilt_values in (
        (keys.masked_fill(~read[:, None], poison), values),
        (keys, values.masked_fill(~read[:, None], poison)),
        (keys.masked_fill(~read[:, None], poison), values.masked_fill(~read[:, None], poison)),
    ):
        found = sparse_attention(query, spoilt_keys, spoilt_values, pages, lengths, 0.125)
        assert torch.equal(found, clean)


def test_poison_that_is_selected_is_read_exactly():
    """It shows, as it would in dense attention."""
    query, keys, values = normal(0, 4, 64), normal(1, 48, 64), normal(2, 48, 64)
    values[20, 5] = NAN
    found = sparse_attention(query, keys, values, torch.tensor([0, 1, 2]), torch.tensor(48), 0.125)
    assert found[:, 5].isnan().all() and not found[:, :5].isnan().any() and not found[:, 6:].isnan().any()


def test_nothing_attended_gives_zeros():
    query, keys, values = normal(0, 2, 4, 64), normal(1, 2, 32, 64), normal(2, 2, 32, 64)
    found = sparse_attention(query, keys, values, torch.tensor([[-1, -1], [0, 1]]), torch.tensor([32, 0]), 0.125)
    assert torch.equal(found, torch.zeros(2, 4, 64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_answer_has_the_query_s_dtype_and_its_precision(dtype):
    query, keys, values = (normal(seed, 48, 64, dtype=torch.float64).to(dtype) for seed in range(3))
    found = sparse_attention(query[:4], keys, values, torch.tensor([0, 1, 2]), torch.tensor(48), 0.125)
    assert found.dtype == dtype
    expected = dense(query[:4], keys, values, 0.125)
    # One rounding at the end; the arithmetic before it is fp32, or float64 for float64.
    arithmetic = 1e-14 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(found.double(), expected, rtol=torch.finfo(dtype).eps, atol=arithmetic)


def test_large_logits_do_not_overflow():
    query, keys, values = normal(0, 4, 64) * 1e3, normal(1, 48, 64) * 1e3, normal(2, 48, 64)
    found = sparse_attention(query, keys, values, torch.tensor([0, 1, 2]), torch.tensor(48), 1.0)
    torch.testing.assert_close(found.double(), dense(query, keys, values, 1.0), rtol=1e-4, atol=1e-4)


def test_values_of_another_shape_are_refused():
    assert_rejected(
        lambda: sparse_attention(
            normal(0, 4, 64), normal(1, 48, 64), normal(2, 32, 64), torch.tensor([0]), torch.tensor(32), 1.0
        ),
        "values.shape=(32, 64) is not allowed",
        "the keys' shape, (48, 64)",
        "Pass the K and V of the same tokens.",
    )


def test_a_page_past_the_tokens_is_refused():
    assert_rejected(
        lambda: sparse_attention(
            normal(0, 4, 64), normal(1, 48, 64), normal(2, 48, 64), torch.tensor([0, 3]), torch.tensor(64), 1.0
        ),
        "lengths=64 is not allowed",
        "page 3 is listed, but 48 tokens were given",
        "Pass every token of the sequence, and its length.",
    )


def test_a_page_past_the_length_is_nothing_to_attend():
    query, keys, values = normal(0, 4, 64), normal(1, 48, 64), normal(2, 48, 64)
    both = sparse_attention(query, keys, values, torch.tensor([0, 3]), torch.tensor(48), 0.125)
    assert torch.equal(both, sparse_attention(query, keys, values, torch.tensor([0, -1]), torch.tensor(48), 0.125))
