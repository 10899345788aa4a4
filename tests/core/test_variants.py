"""Our own variants of LOCKS against their definitions; what holds for every selector is in test_rivals.py."""

import pytest
import torch

from pagelocks import page_share, select_pages
from pagelocks.selectors import Exact, Locks, LocksCentred, LocksReranked
from pagelocks.theory import exact_log_mass

from .helpers import assert_rejected, make_config, normal
from .rivals import INF, SCALE, Pages


@pytest.mark.parametrize("count", [5, 8, 9, 40])
def test_reranked_locks_is_exact_on_its_shortlist(count):
    """Head by head in a loop: two budgets of four pages are looked at, whatever the length."""
    keys, query, config = normal(1, 2, 3, count, 16, 32), 3 * normal(2, 2, 3, 4, 32), make_config(budget_pages=4)
    mass = LocksReranked(config, factor=2).log_mass(query, Pages(keys), SCALE)
    exact, plain = exact_log_mass(query, keys, SCALE).float(), Locks().log_mass(query, Pages(keys), SCALE)
    for row in range(2):
        for head in range(3):
            shares = plain[row, head].softmax(-1).mean(0)
            looked_at = set(shares.sort(descending=True, stable=True).indices[:8].tolist())
            for page in range(count):
                expected = exact if page in looked_at else plain
                got, want = mass[row, head, :, page], expected[row, head, :, page]
                torch.testing.assert_close(got, want, rtol=0, atol=1e-4 if page in looked_at else 0)
    assert count <= 8 or (not mass.equal(plain) and not torch.allclose(mass, exact, atol=1e-4))


def test_reranked_locks_chooses_as_exact_what_is_among_its_shortlist():
    keys, query, config = normal(3, 3, 60, 16, 32), 3 * normal(4, 3, 4, 32), make_config(budget_pages=8)
    length = torch.tensor(60 * 16)
    chosen, best, plain = (
        select_pages(page_share(each.log_mass(query, Pages(keys), SCALE), length, config), length, config)
        for each in (LocksReranked(config, factor=4), Exact(), Locks())
    )
    agree = [(ours.unsqueeze(-1) == best.unsqueeze(-2)).any(-1).sum().item() for ours in (chosen, plain)]
    assert agree[0] > agree[1] and agree[0] >= 0.9 * best.numel()


@pytest.mark.parametrize("factor", [1, 0, -2, 2.0, True])
def test_reranked_locks_needs_more_than_the_budget(factor):
    assert_rejected(lambda: LocksReranked(factor=factor), f"factor={factor!r}", "2 or more", "Use 3")


def test_centred_locks_is_locks_on_keys_less_the_mean():
    """In a loop: the records of the moved keys, and what the mean key adds to all pages' logits."""
    mean = normal(0, 3, 32)
    mean[:, 4] = 200.0
    keys = normal(1, 3, 9, 16, 32) + mean[:, None, None]
    query = normal(2, 3, 4, 32)
    mass = LocksCentred(mean).log_mass(query, Pages(keys), SCALE)
    exact, plain = exact_log_mass(query, keys, SCALE), Locks().log_mass(query, Pages(keys), SCALE)
    for head in range(3):
        moved = Locks().log_mass(query[head], Pages(keys[head] - mean[head]), SCALE)
        expected = moved.double() + (query[head].double() @ mean[head].double())[:, None] * SCALE
        # Deviations are rounded in units of each page's own power of two: alike, not bit by bit.
        torch.testing.assert_close(mass[head].double(), expected, rtol=0, atol=0.05)
    assert (mass - exact).abs().mean() < (plain - exact).abs().mean() / 2


def test_a_mean_key_of_another_layer_is_refused():
    assert_rejected(lambda: LocksCentred(normal(0, 2, 3, 32)), "mean.shape", "(kv_heads, head_dim)")
    assert_rejected(lambda: LocksCentred(torch.full((3, 32), INF)), "mean", "finite keys")
    query = normal(1, 2, 4, 32)
    assert_rejected(
        lambda: LocksCentred(normal(0, 3, 32)).log_mass(query, Pages(normal(2, 2, 5, 16, 32)), 1.0), "query.shape"
    )
