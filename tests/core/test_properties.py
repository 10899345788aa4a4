"""What holds for any input, on fresh random ones at each run."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from pagelocks import PageSummary, log_mass, page_share, select_pages, sparse_attention, summarize
from pagelocks.theory import coverage, exact_log_mass, log_mass_error_bound, retention_bound

from .helpers import (
    AWKWARD,
    KEY_DTYPES,
    assert_same_summary,
    awkward_pages,
    fresh,
    generator,
    make_config,
    plain_config,
    same_bits,
)

seeds = st.integers(0, 2**32 - 1)
magnitudes = st.floats(-4, 4).map(lambda power: 10.0**power)


@st.composite
def configs(draw, quantised=None, **others):
    page_size = draw(st.integers(8, 64))
    basis = draw(st.sampled_from([2, 4, 8, None])) if quantised is None else (4 if quantised else None)
    coefficients = draw(st.sampled_from([8, None])) if quantised is None else (8 if quantised else None)
    # No larger than the least head size, so that any head size goes with it.
    rank = draw(st.integers(1, min(page_size - 1, 32)))
    return make_config(rank, page_size, basis, coefficients, **others)


head_dims = st.integers(4, 32).map(lambda eighths: 8 * eighths)
dtypes = st.sampled_from(KEY_DTYPES)


def random_pages(seed, pages, page_size, head_dim, dtype=torch.float32, magnitude=1.0):
    """Random pages around centroids of their own; one in four awkward."""
    draw = generator(seed)
    keys = torch.randn(pages, page_size, head_dim, generator=draw) + torch.randn(pages, 1, head_dim, generator=draw)
    keys = (keys * magnitude).clamp(-6e4, 6e4).to(dtype)
    awkward = awkward_pages(page_size, head_dim, dtype, seed)
    for page in range(pages):
        if torch.rand((), generator=draw) < 0.25:
            keys[page] = awkward[AWKWARD[int(torch.randint(0, len(AWKWARD), (), generator=draw))]]
    return keys


@fresh
@given(seeds, st.integers(1, 8), st.integers(1, 12), head_dims, magnitudes, magnitudes)
def test_rank_15_of_16_unquantised_gives_the_exact_log_mass(seed, group, pages, head_dim, key_size, query_size):
    draw = generator(seed)
    keys = torch.randn(pages, 16, head_dim, generator=draw) * key_size
    query = torch.randn(group, head_dim, generator=draw) * query_size
    scale = head_dim**-0.5
    found = log_mass(query, summarize(keys, plain_config(15)), scale).double()
    largest_logit = query.double().norm(dim=-1).amax() * keys.double().norm(dim=-1).amax() * scale
    assert (found - exact_log_mass(query, keys, scale)).abs().max() <= 2e-6 * (largest_logit + 3)


@fresh
@given(seeds, configs(), head_dims, dtypes, st.integers(2, 6), magnitudes)
def test_a_batch_is_its_pages_one_by_one_to_the_bit(seed, config, head_dim, dtype, pages, magnitude):
    keys = random_pages(seed, pages, config.page_size, head_dim, dtype, magnitude)
    together = summarize(keys, config)
    alone = [summarize(page[None].clone(), config) for page in keys]
    assert torch.equal(together.pack(), torch.cat([summary.pack() for summary in alone]))
    assert same_bits(together.keys(), torch.cat([summary.keys() for summary in alone]))
    assert torch.equal(together.tail, torch.cat([summary.tail for summary in alone]))
    # And reversed, and as a larger batch.
    assert torch.equal(summarize(keys.flip(0), config).pack().flip(0), together.pack())
    assert torch.equal(summarize(keys.expand(3, *keys.shape), config).pack(), together.pack().expand(3, pages, -1))


@fresh
@given(seeds, st.integers(1, 5), st.integers(1, 8), st.integers(3, 20), st.sampled_from([32, 64, 128]))
def test_a_batch_of_sequences_is_its_sequences_one_by_one(seed, batch, group, pages, head_dim):
    config, draw, scale = make_config(budget_pages=6), generator(seed), head_dim**-0.5
    keys = torch.randn(batch, pages, 16, head_dim, generator=draw) * 2
    query = torch.randn(batch, group, head_dim, generator=draw) * 2
    lengths = torch.randint(0, pages * 16 + 1, (batch,), generator=draw)
    mass = log_mass(query, summarize(keys, config), scale)
    share = page_share(mass, lengths, config)
    selected = select_pages(share, lengths, config)
    for row in range(batch):
        mass_alone = log_mass(query[row], summarize(keys[row], config), scale)
        torch.testing.assert_close(mass[row], mass_alone, rtol=2e-6, atol=1e-5)
        share_alone = page_share(mass_alone, lengths[row], config)
        torch.testing.assert_close(share[row], share_alone, rtol=5e-5, atol=1e-7)
        assert torch.equal(selected[row], select_pages(share_alone, lengths[row], config))
        # Nor does a batch of one, with its leading dimension kept, differ.
        one = slice(row, row + 1)
        share_one = page_share(log_mass(query[one], summarize(keys[one], config), scale), lengths[one], config)
        assert torch.equal(select_pages(share_one, lengths[one], config), selected[one])


@fresh
@given(seeds, configs(budget_pages=5), dtypes, st.integers(4, 10))
def test_where_the_blocks_lie_does_not_matter(seed, config, dtype, pages):
    """Keys in physical blocks, in any order, reached through a block table: same records, selection and output."""
    draw = generator(seed)
    size, head_dim = config.page_size, 64
    keys, values = (torch.randn(pages, size, head_dim, generator=draw).to(dtype) for _ in range(2))
    query = torch.randn(3, head_dim, generator=draw)
    length = torch.tensor(int(torch.randint(1, pages * size + 1, (), generator=draw)))

    table = torch.randperm(pages + 7, generator=draw)[:pages]
    key_cache = torch.full((pages + 7, size, head_dim), float("nan"), dtype=dtype)
    value_cache = key_cache.clone()
    key_cache[table], value_cache[table] = keys, values

    records = summarize(keys, config).pack()
    record_cache = summarize(key_cache, config).pack()  # block by block, NaN blocks beside them
    assert torch.equal(record_cache[table], records)
    assert torch.equal(summarize(key_cache[table], config).pack(), records)

    def step(record, its_keys, its_values):
        summary = PageSummary.unpack(record, head_dim, config)
        share = page_share(log_mass(query, summary, 0.125), length, config)
        chosen = select_pages(share, length, config)
        flat = (its_keys.flatten(0, 1), its_values.flatten(0, 1))
        return chosen, sparse_attention(query, *flat, chosen, length, 0.125, size)

    chosen, output = step(records, keys, values)
    chosen_through_table, output_through_table = step(record_cache[table], key_cache[table], value_cache[table])
    assert torch.equal(chosen, chosen_through_table) and torch.equal(output, output_through_table)


@fresh
@given(seeds, configs(), head_dims, dtypes, st.integers(1, 5), st.booleans())
def test_pack_and_unpack_are_each_other_s_inverse(seed, config, head_dim, dtype, pages, poisoned):
    keys = random_pages(seed, pages, config.page_size, head_dim, dtype)
    if poisoned:
        keys[0, -1, 0] = float("nan")
    summary = summarize(keys, config)
    record = summary.pack()
    again = PageSummary.unpack(record, head_dim, config)
    assert_same_summary(again, summary)
    assert torch.equal(again.pack(), record)
    assert same_bits(again.keys(), summary.keys())


@fresh
@given(seeds, configs(), st.integers(1, 9), st.integers(1, 12), magnitudes, dtypes)
def test_shares_of_finite_complete_pages_sum_to_one(seed, config, group, pages, magnitude, dtype):
    draw = generator(seed)
    keys = random_pages(seed, pages, config.page_size, 64, dtype, magnitude)
    query = torch.randn(group, 64, generator=draw) * 10
    length = int(torch.randint(0, pages * config.page_size + 1, (), generator=draw))
    share = page_share(log_mass(query, summarize(keys, config), 0.125), torch.tensor(length), config)
    complete = length // config.page_size
    assert share.isfinite().all() and (share >= 0).all() and not share[complete:].any()
    torch.testing.assert_close(share.sum(), torch.tensor(float(complete > 0)), rtol=0, atol=1e-5)


@fresh
@given(
    seeds,
    st.integers(8, 64),
    st.integers(0, 4),
    st.integers(1, 4),
    st.integers(1, 30),
    st.integers(1, 50),
    st.sampled_from([2, 5, 10**6]),
)
def test_every_row_selects_distinct_pages_with_sink_and_recent(seed, page_size, sink, recent, more, columns, levels):
    budget_pages = sink + recent + more
    config = make_config(4, page_size, budget_pages=budget_pages, sink_pages=sink, recent_pages=recent)
    draw = generator(seed)
    lengths = torch.randint(0, 60 * page_size, (8,), generator=draw)
    share = torch.randint(0, levels, (8, columns), generator=draw) / levels
    share[torch.rand(share.shape, generator=draw) < 0.1] = float("inf")
    for row, chosen in enumerate(select_pages(share, lengths, config).tolist()):
        pages = config.pages_in(int(lengths[row]))
        kept = [page for page in chosen if page >= 0]
        assert len(chosen) == budget_pages and len(kept) == len(set(kept)) == min(budget_pages, pages)
        assert chosen == sorted(kept) + [-1] * (budget_pages - len(kept))
        assert all(page < pages for page in kept)
        always = {*range(min(sink, pages)), *range(max(pages - recent, 0), pages)}
        assert always <= set(kept)
        # No page left out has a better claim: a larger share, or the same and a lower id.
        value = [share[row, page].item() if page < columns else 0.0 for page in range(pages)]
        free = [page for page in kept if page not in always]
        left = [page for page in range(pages) if page not in kept]
        if free and left:
            assert min((value[page], -page) for page in free) > max((value[page], -page) for page in left)


@fresh
@given(seeds, st.integers(1, 15), st.integers(1, 8), st.integers(4, 20), st.floats(-1.5, 1), st.integers(3, 8))
def test_the_bounds_of_theorem_1_hold(seed, rank, group, pages, power, budget_pages):
    draw = generator(seed)
    keys = torch.randn(pages, 16, 64, generator=draw) * torch.rand(64, generator=draw) ** 3
    query = torch.randn(group, 64, generator=draw) * 10**power
    config, lengths = plain_config(rank, budget_pages=budget_pages), torch.tensor(pages * 16)
    exact, estimate = exact_log_mass(query, keys, 0.125), log_mass(query, summarize(keys, config), 0.125)
    error = (estimate.double() - exact).abs()
    slack = 3e-6 * query.norm(dim=-1).amax() * keys.norm(dim=-1).amax() * 0.125 + 2e-6
    assert (error <= log_mass_error_bound(query, keys, rank, 0.125) + slack).all()
    share = page_share(exact, lengths, config)
    oracle = coverage(share, select_pages(share, lengths, config))
    kept = coverage(share, select_pages(page_share(estimate, lengths, config), lengths, config))
    assert kept <= oracle + 1e-5
    assert kept >= retention_bound(error.max()) * oracle - 1e-5
