"""Carrier retention against hand-made choices and plain loops."""

import math

import pytest
import torch

from pagelocks import LocksConfig
from pagelocks.eval.carriers import carrier_pages, carrier_retention, carriers_kept, retrieval_heads
from pagelocks.eval.decode_record import DecodeRecord
from pagelocks.eval.links import choose_pages, estimate_log_mass
from pagelocks.selectors import Exact, Random

from .helpers import KEY_DTYPES, assert_rejected, normal
from .records import make_record, slow_logits


def test_carrier_pages_hold_a_token_of_a_span():
    spans = ((15, 17), (30, 31), (74, 75))  # across a boundary, one token, the partial page
    record = make_record(length=75, carriers=spans)
    expected = [any(first < p * 8 + 8 and after > p * 8 for first, after in spans) for p in range(10)]
    assert carrier_pages(record, 8).tolist() == expected
    assert expected == [p in (1, 2, 3, 9) for p in range(10)]
    whole = make_record(length=64, carriers=((8, 16),))
    assert carrier_pages(whole, 16).tolist() == [True, False, False, False]
    assert_rejected(lambda: carrier_pages(make_record(), 8), "carriers=()", "one span")


@pytest.mark.parametrize("dtype", KEY_DTYPES)
def test_retention_against_loops(dtype):
    record = make_record(3, length=75, carriers=((15, 17), (40, 41)), dtype=dtype)  # pages 1, 2 and 5
    pages = torch.tensor([[0, 1, 2, 5, 9], [0, 2, 3, 9, -1]], dtype=torch.int32)
    found = carrier_retention(record, pages, 8)
    assert found.every.tolist() == [True, False]
    assert found.fraction.tolist() == pytest.approx([1, 1 / 3])
    for head, group in enumerate(slow_logits(record)):
        for g, row in enumerate(group):
            weight = [math.exp(v - max(row)) for v in row]
            on = sum(w for t, w in enumerate(weight) if t // 8 in (1, 2, 5))
            assert found.mass[head, g].item() == pytest.approx(on / sum(weight))
    assert_rejected(lambda: carrier_retention(record, pages + 1, 8), "pages=")


def test_carriers_kept_are_those_that_the_oracle_keeps():
    record = make_record(length=75, carriers=((15, 17), (40, 41)))  # pages 1, 2 and 5
    best = torch.tensor([[0, 1, 5, -1], [2, 3, 9, -1]])
    ours = torch.tensor([[0, 2, 5, 9], [1, 2, 9, -1]])  # 5 but not 1; 2
    found = carriers_kept(record, ours, best, 8)
    assert found.dtype == torch.float64 and found.tolist() == [0, 1, 1]
    assert carriers_kept(record, ours, torch.tensor([[0, 3], [9, -1]]), 8).shape == (0,)


def needle(seed, strength, position=20):
    """One KV head of three: its query heads look for the carrier with this strength, not at all, and away from it."""
    keys, query = normal(seed, 1, 320, 32) * 0.3, torch.zeros(1, 3, 32)
    keys[..., 0] = 0
    keys[0, position * 8, 0] = 1.0
    query[0, 0, 0], query[0, 2, 0] = strength, -strength
    return DecodeRecord(query, keys, normal(seed + 1, 1, 320, 32), 1.0, 320, ((position * 8, position * 8 + 1),))


def test_retrieval_heads_are_those_that_look_at_the_carrier():
    config = LocksConfig(budget=32, rank=3, page_size=8)
    retentions = [carrier_retention(r, torch.tensor([[0, 20]]), 8) for r in (needle(0, 8.0), needle(2, 8.0))]
    heads = retrieval_heads(retentions, 0.5)
    assert heads.tolist() == [[True, False, False]]
    assert retrieval_heads(retentions, 0.024).tolist() == [[True, True, False]]  # 8 of 320 tokens, looked at alike
    # A head's role is its mean over the records: strong in one, absent in the other.
    mixed = [retentions[0], carrier_retention(needle(4, 0.0), torch.tensor([[0, 20]]), 8)]
    share = sum(each.mass[0, 0].item() for each in mixed) / 2
    assert retrieval_heads(mixed, share - 1e-6)[0, 0] and not retrieval_heads(mixed, share + 1e-6)[0, 0]
    assert not retrieval_heads(mixed[1:], 0.5).any()

    # Of the selectors, the exact one keeps the needle and a random one does not.
    records = [needle(seed, 8.0, 4 + seed) for seed in range(20)]
    kept = {}
    for selector in (Exact(), Random(1)):
        chosen = [choose_pages(estimate_log_mass(r, selector, config), 320, config) for r in records]
        found = [carrier_retention(r, pages, 8) for r, pages in zip(records, chosen, strict=True)]
        kept[type(selector)] = sum(bool(each.every) for each in found)
    assert kept[Exact] == 20 and kept[Random] < 6


def test_bad_input_is_refused():
    kept = carrier_retention(make_record(carriers=((8, 9),)), torch.tensor([[1], [1]]), 8)
    other = carrier_retention(make_record(heads=1, carriers=((8, 9),)), torch.tensor([[1]]), 8)
    assert_rejected(lambda: retrieval_heads([kept], 0.0), "least_mass=0.0", "Use 0.1")
    assert_rejected(lambda: retrieval_heads([kept], 1.5), "least_mass=1.5")
    assert_rejected(lambda: retrieval_heads([], 0.5), "retentions=[]")
    assert_rejected(lambda: retrieval_heads([kept, other], 0.5), "(1, 3), (2, 3)", "each layer by itself")
