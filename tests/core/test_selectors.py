"""The selectors behind one interface: what each reads, what it answers, and how they compare."""

import pytest
import torch

from pagelocks import log_mass, page_share, select_pages, summarize
from pagelocks.selectors import SELECTORS, Centroid, Exact, Locks, Quest, Random, Streaming
from pagelocks.theory import coverage, exact_log_mass

from .helpers import make_config, normal, plain_config

INF = float("inf")


class Pages:
    """A PageSource that counts what is read."""

    def __init__(self, keys, config):
        self._keys, self._config, self.reads = keys, config, []

    @property
    def count(self):
        return self._keys.shape[-3]

    def summary(self):
        self.reads.append("summary")
        return summarize(self._keys, self._config)

    def keys(self):
        self.reads.append("keys")
        return self._keys


def test_registry():
    for selector in (Locks, Exact, Centroid, Quest, Streaming, Random):
        assert SELECTORS[selector.__name__.lower()] is selector


READS = {
    "locks": ["summary"],
    "exact": ["keys"],
    "centroid": ["keys"],
    "quest": ["keys"],
    "streaming": [],
    "random": [],
}


@pytest.mark.parametrize(("name", "reads"), READS.items())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shape_dtype_and_reads(name, reads, dtype):
    pages = Pages(normal(0, 2, 7, 16, 64).to(dtype), make_config())
    mass = SELECTORS[name]().log_mass(normal(1, 2, 3, 64).to(dtype), pages, 0.125)
    assert mass.shape == (2, 3, 7) and mass.dtype == torch.float32 and mass.isfinite().all()
    assert pages.reads == reads


def test_locks_is_log_mass_of_the_summaries():
    keys, query, config = normal(0, 7, 16, 64), normal(1, 3, 64), make_config()
    assert torch.equal(
        Locks().log_mass(query, Pages(keys, config), 0.125), log_mass(query, summarize(keys, config), 0.125)
    )


@pytest.mark.parametrize("page_size", [8, 16, 64])
def test_exact_is_the_log_sum_exp_of_the_keys(page_size):
    keys, query = normal(0, 2, 7, page_size, 64) * 2, normal(1, 2, 3, 64)
    mass = Exact().log_mass(query, Pages(keys, make_config(4, page_size)), 0.125)
    torch.testing.assert_close(mass.double(), exact_log_mass(query, keys, 0.125), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("page_size", [8, 16, 64])
def test_centroid_is_the_mass_of_a_page_of_mean_keys(page_size):
    keys, query = normal(0, 2, 7, page_size, 64), normal(1, 2, 3, 64)
    mass = Centroid().log_mass(query, Pages(keys, make_config(4, page_size)), 0.125)
    flat = keys.double().mean(-2, keepdim=True).expand_as(keys)
    torch.testing.assert_close(mass.double(), exact_log_mass(query, flat, 0.125), rtol=1e-6, atol=1e-5)


def test_centroid_never_overestimates_and_misses_what_cancels():
    """Jensen: the mean key's mass is a lower bound, and two opposite keys are invisible to it."""
    keys, query = normal(0, 30, 16, 64), normal(1, 4, 64) * 3
    pages = Pages(keys, make_config())
    exact = Exact().log_mass(query, pages, 0.125)
    assert (Centroid().log_mass(query, pages, 0.125) <= exact + 1e-5).all()
    keys[5, 0] += 20 * query[0]
    keys[5, 1] -= 20 * query[0]
    pages = Pages(keys, make_config())
    assert Exact().log_mass(query, pages, 0.125)[0].argmax() == 5
    assert Locks().log_mass(query, pages, 0.125)[0].argmax() == 5
    assert Centroid().log_mass(query, pages, 0.125)[0, 5] < 10 < Locks().log_mass(query, pages, 0.125)[0, 5]


@pytest.mark.parametrize("name", ["locks", "exact", "centroid", "quest"])
@pytest.mark.parametrize("poison", [float("nan"), INF, -INF])
def test_a_poisoned_page_is_infinite_and_spoils_no_other(name, poison):
    keys, query = normal(0, 6, 16, 64), normal(1, 3, 64)
    clean = SELECTORS[name]().log_mass(query, Pages(keys, make_config()), 0.125)
    keys[2, 4, 7] = poison
    mass = SELECTORS[name]().log_mass(query, Pages(keys, make_config()), 0.125)
    assert (mass[:, 2] == INF).all()
    others = [0, 1, 3, 4, 5]
    torch.testing.assert_close(mass[:, others], clean[:, others])


@pytest.mark.parametrize("page_size", [8, 16, 64])
def test_quest_bounds_every_logit_and_so_the_mass(page_size):
    keys, query = normal(0, 2, 30, page_size, 64), normal(1, 2, 3, 64) * 3
    pages = Pages(keys, make_config(4, page_size))
    assert (Exact().log_mass(query, pages, 0.125) <= Quest().log_mass(query, pages, 0.125) + 1e-4).all()
    # A page of equal keys is a box of no size: the bound is the mass.
    pages = Pages(keys[..., :1, :].expand_as(keys), make_config(4, page_size))
    torch.testing.assert_close(
        Quest().log_mass(query, pages, 0.125), Exact().log_mass(query, pages, 0.125), rtol=1e-5, atol=1e-5
    )


def test_quest_against_the_sum_over_channels_written_out():
    keys, query = normal(0, 5, 16, 8), normal(1, 2, 8)
    mass = Quest().log_mass(query, Pages(keys, make_config()), 0.5)
    for head in range(2):
        for page in range(5):
            bound = sum(max(query[head, d] * key for key in keys[page, :, d]) for d in range(8))
            assert mass[head, page].item() == pytest.approx(bound.item() * 0.5 + 2.772589, abs=1e-4)


@pytest.mark.parametrize("count", [1, 9, 200, 62_500])
def test_streaming_takes_the_sink_and_the_last_pages(count):
    config = make_config(budget_pages=8)
    mass = Streaming().log_mass(normal(1, 3, 64), Pages(torch.empty(count, 16, 1), config), 0.125)
    lengths = torch.tensor(16 * count)
    chosen = select_pages(page_share(mass, lengths, config), lengths, config)
    held = sorted({0, *range(max(0, count - 7), count)})
    assert [page for page in chosen.tolist() if page >= 0] == held


def test_random_is_reproducible_the_same_for_a_group_and_new_at_each_call():
    pages, query = Pages(normal(0, 2, 50, 16, 64), make_config()), normal(1, 2, 3, 64)
    selector = Random(7)
    first, second = selector.log_mass(query, pages, 0.125), selector.log_mass(query, pages, 0.125)
    assert torch.equal(first[:, :1].expand(2, 3, 50), first)
    assert not torch.equal(first, second) and not torch.equal(first[0], first[1])
    again = Random(7)
    assert torch.equal(again.log_mass(query, pages, 0.125), first)
    assert torch.equal(again.log_mass(query, pages, 0.125), second)
    assert not torch.equal(Random(8).log_mass(query, pages, 0.125), first)


def test_random_is_uniform():
    """Each of 50 pages is chosen by some of 200 draws, and none by very many."""
    config = make_config(budget_pages=12)
    pages, query = Pages(normal(0, 50, 16, 64), config), normal(1, 3, 64)
    selector, times = Random(), torch.zeros(50)
    lengths = torch.tensor(800)
    for _ in range(200):
        chosen = select_pages(page_share(selector.log_mass(query, pages, 0.125), lengths, config), lengths, config)
        times[chosen.long()] += 1
    assert times[0] == times[49] == 200
    assert times[1:49].min() >= 15 and times[1:49].max() <= 75  # 41.7 expected


@pytest.mark.model
def test_on_real_keys_the_order_is_exact_locks_centroid_random(real_layers):
    config, totals = make_config(budget_pages=6), dict.fromkeys(SELECTORS, 0.0)
    for layer in real_layers.values():
        keys = layer.pages()
        lengths = torch.tensor(keys.shape[1] * 16)
        # The last positions one by one, as decode steps.
        for step in range(1, 9):
            query = layer.query[:, :, -step]
            exact = page_share(exact_log_mass(query, keys, layer.scale), lengths, config)
            for name, selector in SELECTORS.items():
                share = page_share(selector().log_mass(query, Pages(keys, config), layer.scale), lengths, config)
                totals[name] += coverage(exact, select_pages(share, lengths, config)).mean().item()
    assert totals["exact"] >= totals["locks"] > totals["centroid"] > totals["random"]
    assert totals["locks"] > max(totals["quest"], totals["streaming"])
    assert totals["locks"] > 0.98 * totals["exact"]


def test_unquantised_full_rank_locks_is_exact():
    pages = Pages(normal(0, 20, 16, 64), plain_config(15))
    query = normal(1, 3, 64)
    torch.testing.assert_close(
        Locks().log_mass(query, pages, 0.125), Exact().log_mass(query, pages, 0.125), rtol=1e-6, atol=1e-5
    )
