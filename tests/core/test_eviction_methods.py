"""What each eviction method is about, one case for each of its ideas."""

import math

import pytest
import torch

from pagelocks.selectors import (
    H2O,
    RKV,
    KVzip,
    LazyEviction,
    TriAttention,
)

from .evictions import (
    CONFIG,
    DIM,
    FREQUENCIES,
    MAKE,
    SCALE,
    SIZE,
    Pages,
    attention,
    decode,
    logs,
    mass_of,
    paged,
    restless,
    rows,
    sequence,
    show,
)
from .helpers import make_config, normal


def test_h2o_without_a_budget_goes_by_attention_alone():
    query, keys = sequence(32, ())
    mass = show(H2O(), query, keys, 32).log_mass(query[:, 0], Pages(32, 16), SCALE)
    # All the attention there is, one for each query.
    torch.testing.assert_close(mass.logsumexp(-1), torch.full((3,), math.log(32)))
    assert (mass[:, 0] > mass[:, 1]).all()


def test_h2o_keeps_heavy_hitters_and_as_many_recent_pages():
    config = make_config(4, SIZE, budget_pages=6)
    query, keys = sequence(96, ())
    keys[40:48] += 3 * query.mean((0, 1))
    chosen, _ = decode(H2O(config), query, keys, 95, config)[-1]
    assert 5 in chosen.tolist() and {9, 10, 11} <= set(chosen.tolist())


@pytest.mark.parametrize("name", ["snapkv", "kvzip"])
def test_the_prompt_alone_decides_and_what_is_generated_comes_first(name):
    query, keys = restless(120, ())
    selector = MAKE[name](CONFIG, permanent=False)
    steps = decode(selector, query, keys, 80)
    prompt = 75 // SIZE if name == "snapkv" else 80 // SIZE
    for _, mass in steps:
        assert torch.equal(mass[:, :prompt], steps[0][1][:, :prompt])
        later = mass[:, prompt:]
        assert (later > mass[:, :prompt].amax()).all() and (later.diff() > 0).all()


def test_kvzip_from_a_reconstruction():
    query, keys = sequence(60, (2,))
    selector = show(KVzip(CONFIG, permanent=False), query, keys, 20, 20)
    # The repetition in two parts, each after the context; then 3 tokens of a question.
    for start, stop in ((40, 47), (47, 60)):
        part = torch.cat([keys[:, :40], keys[:, start:stop]], 1)
        selector.reconstruct(query[:, :, start:stop], part, SCALE)
    question = torch.cat([keys[:, :40], keys[:, 20:23]], 1)
    selector.observe(query[:, :, 20:23], question, SCALE)
    mass = selector.log_mass(query[:, :, 0], Pages(43), SCALE)
    for index, head_query, head_keys in rows(query, keys):
        most = [0.0] * 40
        for start, stop in ((40, 47), (47, 60)):
            part = torch.cat([head_keys[:40], head_keys[start:stop]])
            for head in head_query:
                for number in range(stop - start):
                    weights = attention(head[start + number], part, 40 + number)
                    most = [max(old, weight) for old, weight in zip(most, weights, strict=False)]
        expected = torch.tensor(logs(paged(most, 5)), dtype=torch.float32).expand(3, 5)
        torch.testing.assert_close(mass[index], expected, rtol=1e-4, atol=1e-4)


def test_kvzip_keeps_the_question_after_a_reconstruction():
    query, keys = sequence(60, ())
    selector = show(KVzip(CONFIG, permanent=False), query, keys, 30)
    selector.reconstruct(query[:, :9], keys[:39], SCALE)
    selector.observe(query[:, 30:60], keys, SCALE)
    mass = mass_of(selector, query, 60)
    assert (mass[:, 3:] > mass[:, :3].amax()).all()  # page 3 holds tokens 24 to 31


def test_rkv_drops_what_is_said_again():
    """Two pages say the same and are attended alike: the older one is redundant, a page of its own is not."""
    keys = normal(0, 72, DIM)
    keys[8:16] = keys[40:48]
    query = torch.zeros(1, 72, DIM)
    selector = show(RKV(CONFIG, permanent=False), query, keys, 72)
    mass = mass_of(selector, query, 72)[0]
    assert mass[1] < mass[5] and mass[1] == mass[:8].amin()


def test_triattention_scores_are_the_mean_logits_of_a_constant_query():
    """Where all queries are the same before RoPE, S is the mean of logits from ahead; here with RoPE in reals."""
    tokens, half = 40, DIM // 2
    pure, keys = normal(0, DIM).double(), normal(1, tokens, DIM).double()

    def rope(vector, position):
        turned = vector.clone()
        for f in range(half):
            c, s = math.cos(FREQUENCIES[f] * position), math.sin(FREQUENCIES[f] * position)
            turned[f] = vector[f] * c - vector[f + half] * s
            turned[f + half] = vector[f + half] * c + vector[f] * s
        return turned

    query = torch.stack([rope(pure, p) for p in range(tokens)])[None]
    selector = show(TriAttention(FREQUENCIES, CONFIG, permanent=False, horizon=4), query.float(), keys.float(), tokens)
    ahead = torch.stack([rope(pure, tokens - 1 + o) for o in (1, 2, 4)]).mean(0)
    logits = keys @ ahead
    expected = ((logits - logits.mean()) / logits.std(correction=0)).unflatten(0, (5, SIZE)).mean(-1)
    mass = mass_of(selector, query.float(), tokens)
    torch.testing.assert_close(mass[0], expected.float(), rtol=1e-4, atol=1e-4)


def test_lazyeviction_of_a_schedule():
    """Page p has one key that is ever attended, at the steps below; all other queries look at token 0."""
    schedule = {1: range(12, 61, 4), 2: (18, 39, 62), 3: (25,), 4: (50,), 5: ()}
    keys, query = torch.zeros(64, DIM), torch.zeros(1, 64, DIM)
    keys[0, 0] = 30.0
    for page in schedule:
        keys[page * SIZE, page] = 30.0
    for token in range(64):
        query[0, token, next((page for page in schedule if token in schedule[page]), 0)] = 3.0
    mass = mass_of(show(LazyEviction(CONFIG, threshold=0.5, window=0, permanent=False), query, keys, 64), query, 64)[0]
    for page, idle, gap in ((1, 3, 4), (2, 1, 23), (3, 38, 1), (4, 13, 18)):
        expected = math.log(2 / (1 + math.exp(idle / gap)) + 2 / (1 + math.exp(gap - 1)))
        assert mass[page].item() == pytest.approx(expected, abs=1e-5)
    assert (mass[5:] < mass[:5].amin() - 50).all()


def test_lazyeviction_protects_its_window():
    query, keys = sequence(64, ())
    mass = mass_of(show(LazyEviction(CONFIG, window=20, permanent=False), query, keys, 64), query, 64)
    assert (mass[:, 5:] > mass[:, :5].amax()).all() and (mass[:, 5:].diff() > 0).all()
