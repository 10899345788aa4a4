"""The eviction methods as selectors, against their definitions written out in loops over tokens."""

import copy
import math

import pytest
import torch

from pagelocks import LocksConfig
from pagelocks.selectors import (
    CALIBRATED_SELECTORS,
    H2O,
    RKV,
    SEQUENCE_SELECTORS,
    KVzip,
    LazyEviction,
    SnapKV,
    TriAttention,
    history,
    make_selector,
    observes,
)
from pagelocks.selectors.history import observe_together
from pagelocks.selectors.triattention import rope_frequencies

from .evictions import (
    CONFIG,
    DIM,
    FREQUENCIES,
    INF,
    MAKE,
    SCALE,
    SIZE,
    SLOW,
    Pages,
    attention,
    decode,
    go_on,
    mass_of,
    paged,
    restless,
    rows,
    sequence,
    show,
    slow_h2o,
    slow_redundancy,
)
from .helpers import assert_rejected, make_config, normal

# Definitions


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("tokens", [40, 43])
def test_against_the_definition_written_out(name, tokens):
    query, keys = sequence(tokens)
    selector = show(MAKE[name](CONFIG, permanent=False), query, keys, tokens)
    mass = mass_of(selector, query, tokens)
    for index, head_query, head_keys in rows(query, keys):
        expected = torch.tensor(SLOW[name](head_query, head_keys), dtype=torch.float32).expand(3, tokens // SIZE)
        torch.testing.assert_close(mass[index], expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("parts", [(43,), (1, 30, 7, 5), (3, 1, 1, 38)])
@pytest.mark.parametrize("chunk", [1, 900, history.CHUNK])
def test_a_prompt_in_parts_is_a_prompt(name, parts, chunk, monkeypatch):
    query, keys = sequence(43)
    whole = mass_of(show(MAKE[name](CONFIG, permanent=False), query, keys, 43), query, 43)
    monkeypatch.setattr("pagelocks.selectors.history.CHUNK", chunk)
    mass = mass_of(show(MAKE[name](CONFIG, permanent=False), query, keys, *parts), query, 43)
    torch.testing.assert_close(mass, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("lead", "group"), [((), 1), ((2,), 7), ((1, 2), 3)])
def test_shapes_types_and_fewer_pages(name, dtype, lead, group):
    query, keys = sequence(37, lead, group)
    # One dtype's rounding for both, so that only the selector's own arithmetic could differ.
    query, keys = query.to(dtype), keys.to(dtype)
    exact = mass_of(show(MAKE[name](CONFIG, permanent=False), query.float(), keys.float(), 37), query.float(), 37)
    selector = show(MAKE[name](CONFIG, permanent=False), query, keys, 37)
    mass = mass_of(selector, query, 37)
    assert mass.shape == (*lead, group, 4) and mass.dtype == torch.float32 and mass.isfinite().all()
    torch.testing.assert_close(mass, exact, rtol=1e-4, atol=1e-4)
    assert mass_of(selector, query, 7).shape == (*lead, group, 0)
    assert mass_of(selector, query, 16).shape == (*lead, group, 2)


@pytest.mark.parametrize("name", MAKE)
def test_a_page_that_the_step_itself_completes_has_a_score(name):
    query, keys = sequence(39)
    mass = mass_of(show(MAKE[name](CONFIG, permanent=False), query, keys, 39), query, 40)
    assert mass.shape[-1] == 5 and mass.isfinite().all()


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("poison", [float("nan"), INF, -INF])
def test_a_poisoned_page_is_infinite_and_spoils_no_other(name, poison):
    query, keys = sequence(43, (2,))
    keys[0, 19, 4] = poison
    mass = mass_of(show(MAKE[name](CONFIG, permanent=False), query, keys, 20, 23), query, 43)
    assert (mass[0, :, 2] == INF).all()
    assert mass[0][:, [0, 1, 3, 4]].isfinite().all() and mass[1].isfinite().all()
    clean = keys.clone()
    clean[0] = normal(7, 43, DIM)
    other = mass_of(show(MAKE[name](CONFIG, permanent=False), query, clean, 20, 23), query, 43)
    torch.testing.assert_close(mass[1], other[1], rtol=1e-4, atol=1e-4)
    if name == "h2o":  # the bad token gets no attention, and all others do as if it were not there
        expected = torch.tensor(slow_h2o(query[0].double(), keys[0].double(), hidden={19})).float()
        torch.testing.assert_close(mass[0][:, [0, 1, 3]], expected[:, [0, 1, 3]], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MAKE)
def test_a_key_as_large_as_can_be_spoils_no_other_page(name):
    query, keys = sequence(43, ())
    keys[19] = torch.finfo(torch.float32).max
    mass = mass_of(show(MAKE[name](CONFIG, permanent=False), query, keys, 43), query, 43)
    assert not mass.isnan().any() and mass[:, [0, 1, 3, 4]].isfinite().all()


def test_a_first_key_of_nan_leaves_its_query_without_attention():
    query, keys = sequence(24, ())
    keys[0] = float("nan")
    mass = mass_of(show(H2O(CONFIG, permanent=False), query, keys, 24), query, 24)
    assert (mass[:, 0] == INF).all() and mass[:, 1:].isfinite().all()


# What budgets share


@pytest.mark.parametrize("name", MAKE)
def test_budgets_that_share_a_prompt_choose_as_each_by_itself(name):
    """And none learns what another does: each answers as a selector that saw the prompt with its own budget."""
    query, keys = restless()
    configs = [make_config(4, SIZE, budget_pages=pages) for pages in (4, 6, 9)]
    first = show(MAKE[name](configs[0]), query, keys, 60, 20)
    members = [first, *(first.for_budget(config) for config in configs[1:])]
    for selector, config in reversed(list(zip(members, configs, strict=True))):
        alone = decode(MAKE[name](config), query, keys, 80, config)
        for (pages, mass), (alone_pages, alone_mass) in zip(
            go_on(selector, query, keys, 80, config), alone, strict=True
        ):
            assert torch.equal(pages, alone_pages)
            torch.testing.assert_close(mass, alone_mass, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="before the first selection, with page_size=8"):
        first.for_budget(configs[1])
    with pytest.raises(ValueError, match="config="):
        show(MAKE[name](configs[0]), query, keys, 80).for_budget(make_config(4, 16, budget_pages=4))


@pytest.mark.parametrize("permanent", [True, False])
def test_a_budget_given_later_evicts_as_one_given_at_first(permanent):
    query, keys = restless()
    config = make_config(4, 16, budget_pages=3)  # pages of 16, as without a configuration
    without = show(H2O(permanent=permanent), query, keys, 80).for_budget(config)
    pages = [Pages(tokens + 1, 16) for tokens in range(80, 150)]
    for number, token in enumerate(range(80, 150)):
        mass = without.log_mass(query[..., token, :], pages[number], SCALE)
        without.observe(query[..., token : token + 1, :], keys[..., : token + 1, :], SCALE)
    assert bool((mass == -INF).any()) is permanent


@pytest.mark.parametrize("name", MAKE)
def test_a_copy_goes_its_own_way(name):
    query, keys = restless()
    selector = show(MAKE[name](CONFIG), query, keys, 80)
    kept, whole = copy.copy(selector), copy.deepcopy(selector)
    go_on(selector, query, keys, 80)
    other = query.flip(-2)
    for (pages, mass), (expected, expected_mass) in zip(
        go_on(kept, other, keys, 80), go_on(whole, other, keys, 80), strict=True
    ):
        assert torch.equal(pages, expected) and torch.equal(mass, expected_mass)


def test_together_is_one_by_one():
    query, keys = sequence(60)
    keys[0, 0, 31, 2] = float("nan")
    members, alone = ({name: make(CONFIG) for name, make in MAKE.items()} for _ in range(2))
    for start, stop in ((0, 25), (25, 60)):
        step = query[..., start:stop, :], keys[..., :stop, :], SCALE
        observe_together(list(members.values()), *step)
        for selector in alone.values():
            selector.observe(*step)
    for name, selector in members.items():
        assert torch.equal(mass_of(selector, query, 60), mass_of(alone[name], query, 60)), name
    observe_together([], *step)
    with pytest.raises(ValueError, match="in order"):
        observe_together([members["snapkv"]], *step)


# Eviction


RETURNS = [name for name in MAKE if name not in ("snapkv", "kvzip")]
"""Methods whose scores change after the prompt, so that a page left out may become the best."""


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("budget_pages", [4, 7])
@pytest.mark.parametrize(("sink", "recent"), [(1, 1), (0, 2)])
def test_what_is_left_out_stays_out(name, budget_pages, sink, recent):
    config = make_config(4, SIZE, budget_pages=budget_pages, sink_pages=sink, recent_pages=recent)
    query, keys = restless()
    gone = [set(), set()]
    for number, (chosen, mass) in enumerate(decode(MAKE[name](config), query, keys, 80, config)):
        complete = (81 + number) // SIZE
        for row in range(2):
            pages = {page for page in chosen[row].tolist() if page >= 0}
            assert len(pages) == budget_pages and not pages & gone[row]
            gone[row] |= set(range(complete)) - pages
            assert {j for j in range(complete) if (mass[row, :, j] == -INF).all()} == gone[row]
            assert mass[row, :, sorted(set(range(complete)) - gone[row])].isfinite().all()
    assert gone[0] and (name in ("snapkv", "kvzip") or budget_pages > 4 or sink == 0 or gone[0] != gone[1])


@pytest.mark.parametrize("name", RETURNS)
@pytest.mark.parametrize("permanent", [True, False])
def test_without_eviction_pages_do_come_back(name, permanent):
    query, keys = restless()
    steps = decode(MAKE[name](CONFIG, permanent=permanent), query, keys, 80)
    back = 0
    for row in range(2):
        gone = set()
        for chosen, _ in steps:
            pages = set(chosen[row].tolist())
            back += len(pages & gone)
            gone |= set(range(max(pages) + 1)) - pages
    assert (back == 0) == permanent


@pytest.mark.parametrize("name", MAKE)
def test_asking_twice_evicts_no_more(name):
    query, keys = restless(120, (2,))
    selector = show(MAKE[name](CONFIG), query, keys, 120)
    first = mass_of(selector, query, 120)
    assert (first == -INF).any() and torch.equal(mass_of(selector, query, 120), first)


@pytest.mark.parametrize("name", MAKE)
def test_no_configuration_no_eviction(name):
    query, keys = sequence(80)
    selector = show(MAKE[name](), query, keys, 80)
    assert not (selector.log_mass(query[..., 0, :], Pages(80, 16), SCALE) == -INF).any()


def test_evicted_tokens_get_no_attention():
    """H2O's sums after eviction, with the pages that are gone hidden from every later query."""
    query, keys = restless(100, ())
    selector = H2O(CONFIG)
    chosen, mass = decode(selector, query, keys, 80)[-1]
    gone, totals = set(), [[0.0] * 100 for _ in range(3)]
    replay = decode(H2O(CONFIG), query, keys, 80)
    for token in range(100):
        if token >= 80:
            now = replay[token - 80][1]
            gone = {
                i for j in range(now.shape[-1]) if (now[:, j] == -INF).all() for i in range(j * SIZE, (j + 1) * SIZE)
            }
        if token == 99:  # the last step's mass comes before its attention
            break
        for head in range(3):
            for i, weight in enumerate(attention(query[head, token].double(), keys.double(), token, gone)):
                totals[head][i] += weight
    kept = [page for page in chosen.tolist() if 0 <= page < 11 - 1]  # before the recent half
    assert kept and gone
    for head in range(3):
        for page in kept[:1]:
            assert mass[head, page].item() == pytest.approx(math.log(paged(totals[head], 12)[page]), abs=1e-4)


def test_rkv_after_eviction_is_rkv_of_the_tokens_that_are_left():
    query, keys = restless(96, ())
    selector = RKV(CONFIG, window=5, kernel=1, threshold=0.2, balance=0.0)
    steps = decode(selector, query, keys, 90)
    alive = [j for j in range(11) if steps[-1][1][0, j] > -INF]
    left = [i for j in alive for i in range(j * SIZE, (j + 1) * SIZE)] + list(range(88, 96))
    # Observed last: all 96 tokens, of which those of the pages evicted before are gone.
    redundancy = slow_redundancy(keys[left].double(), 0.2)
    merit = -selector._merit[0]
    assert len(left) == 4 * SIZE
    for number, token in enumerate(left):
        if token < 91:
            assert merit[token].item() == pytest.approx(redundancy[number], rel=1e-3)


def test_poisoned_pages_are_kept_before_all_others():
    query, keys = sequence(80, ())
    keys[[20, 41]] = float("nan")
    for name, make in MAKE.items():
        chosen, _ = decode(make(CONFIG), query, keys, 79)[-1]
        assert {2, 5} <= set(chosen.tolist()), name


# Accounts, names, bad input


def test_page_bytes():
    for name in ("h2o", "snapkv", "kvzip"):
        assert MAKE[name]().page_bytes(128) == 64 and MAKE[name]().page_bytes(64, 8) == 32
    assert LazyEviction().page_bytes(128) == 128 and LazyEviction().page_bytes(128, group=4) == 512
    assert [MAKE[name]().page_bytes(128, group=4) for name in ("h2o", "snapkv", "kvzip")] == [256, 256, 64]
    assert RKV().page_bytes(128) == TriAttention(FREQUENCIES).page_bytes(128) == 64 + 16 * 128 * 2 / 128


def test_names():
    for made in (H2O, SnapKV, KVzip, RKV, LazyEviction):
        name = made.__name__.lower().replace("kvzip", "kvzip-prompt")  # nothing repeats the context for it there
        assert SEQUENCE_SELECTORS[name] is made and observes(made(CONFIG))
    assert CALIBRATED_SELECTORS["triattention"] is TriAttention and observes(TriAttention(FREQUENCIES, CONFIG))


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (lambda: SnapKV(window=0), ("window=0", "at least 1", "Use 1")),
        (lambda: SnapKV(kernel=4), ("kernel=4", "odd", "Use 5")),
        (lambda: RKV(kernel=1.5), ("kernel=1.5", "whole number")),
        (lambda: RKV(balance=1.5), ("balance=1.5", "0 to 1", "Use 0.1")),
        (lambda: RKV(threshold=float("nan")), ("threshold=nan", "-1 to 1", "Use 0.5")),
        (lambda: LazyEviction(threshold=0), ("threshold=0", "between 0 and 1", "Use 1e-4")),
        (lambda: LazyEviction(window=-1), ("window=-1", "at least 0")),
        (lambda: TriAttention(FREQUENCIES, horizon=0), ("horizon=0", "at least 1")),
    ],
)
def test_bad_parameters(call, parts):
    assert_rejected(call, *parts)


@pytest.mark.parametrize("name", MAKE)
def test_bad_steps(name):
    query, keys = sequence(43)
    assert_rejected(lambda: mass_of(MAKE[name](CONFIG), query, 8), "pages.count=1", "0 tokens", "Observe every step")
    selector = show(MAKE[name](CONFIG), query, keys, 20)
    late = query[..., 25:30, :]
    assert_rejected(lambda: selector.observe(late, keys[..., :30, :], SCALE), "20 tokens", "Observe every step")
    row = (query[:1, :, :, 20:21], keys[:1, :, :21])
    assert_rejected(lambda: selector.observe(*row, SCALE), "one and the same batch", "one instance a batch")
    flat = query.flatten(1, 2)[..., 20:21, :]
    assert_rejected(lambda: selector.observe(flat, keys[..., :21, :], SCALE), "query.shape", "Group the query heads")
    assert_rejected(lambda: mass_of(selector, query, 24), "pages.count=3", "20 tokens", "8 a page")


def test_bad_frequencies_and_reconstructions():
    query, keys = sequence(43)
    selector = TriAttention(rope_frequencies(1e4, 32))
    assert_rejected(lambda: show(selector, query, keys, 43), "frequencies.shape=(16,)", "size 16", "inv_freq")
    selector = show(KVzip(), query, keys, 30)
    part = query[..., 30:40, :]
    assert_rejected(lambda: selector.reconstruct(part, keys[..., :39, :], SCALE), "keys.shape[-2]=39", "30 tokens")
    selector.log_mass(query[..., 0, :], Pages(30, 16), SCALE)
    assert_rejected(lambda: selector.reconstruct(part, keys[..., :40, :], SCALE), "before any selection")


@pytest.mark.parametrize("name", [name for name in SEQUENCE_SELECTORS if observes(make_selector(name, LocksConfig()))])
def test_nothing_is_kept_of_a_prompt_but_what_is_needed(name: str) -> None:
    """A view of a prompt's queries or keys would keep all of them, in every layer and for every budget."""
    selector = make_selector(name, LocksConfig(budget=64))
    keys = torch.randn(2, 2, 700, DIM)
    for first, last in ((0, 400), (400, 700)):
        selector.observe(torch.randn(2, 2, 3, last - first, DIM), keys[:, :, :last], SCALE)
    held = {**vars(selector), **vars(getattr(selector, "_likeness", object))}  # R-KV's
    states = [state for state in held.values() if isinstance(state, torch.Tensor)]
    assert states
    for state in states:
        assert state.untyped_storage().nbytes() == state.numel() * state.itemsize
