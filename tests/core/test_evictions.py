"""The eviction methods as selectors, against their definitions written out in loops over tokens."""

import cmath
import math

import pytest
import torch

from pagelocks import page_share, select_pages
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
    observes,
)
from pagelocks.selectors.triattention import rope_frequencies

from .helpers import assert_rejected, make_config, normal

INF = float("inf")
SCALE, DIM, SIZE = 0.3, 16, 8
FREQUENCIES = rope_frequencies(100.0, DIM)
CONFIG = make_config(4, SIZE, budget_pages=4)

MAKE = {
    "h2o": H2O,
    "snapkv": lambda config=None, **options: SnapKV(config, window=5, kernel=3, **options),
    "kvzip": KVzip,
    "rkv": lambda config=None, **options: RKV(config, window=5, kernel=3, threshold=0.2, **options),
    "triattention": lambda config=None, **options: TriAttention(FREQUENCIES, config, horizon=9, **options),
    "lazyeviction": lambda config=None, **options: LazyEviction(config, threshold=0.02, window=5, **options),
}


class Pages:
    """The complete pages of so many tokens, none of which may be read."""

    def __init__(self, tokens, size=SIZE):
        self.count = tokens // size


def show(selector, query, keys, *parts):
    """Observe the first sum(parts) tokens, in parts."""
    stop = 0
    for part in parts:
        stop += part
        selector.observe(query[..., stop - part : stop, :], keys[..., :stop, :], SCALE)
    return selector


def mass_of(selector, query, tokens):
    return selector.log_mass(query[..., 0, :], Pages(tokens), SCALE)


def rows(query, keys):
    """Each sequence's (index, query (G, T, d), keys (T, d)), in double precision."""
    lead = keys.shape[:-2]
    for index in torch.cartesian_prod(*(torch.arange(n) for n in lead)).reshape(-1, len(lead)).tolist():
        yield tuple(index), query[tuple(index)].double(), keys[tuple(index)].double()


def dot(left, right):
    return sum(a * b for a, b in zip(left.tolist(), right.tolist(), strict=True))


def attention(query, keys, position, hidden=()):
    """[weight of each token up to position], for one query."""
    logits = [-INF if i in hidden else dot(query, keys[i]) * SCALE for i in range(position + 1)]
    top = max(logits)
    weights = [math.exp(logit - top) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def paged(importance, count):
    return [sum(importance[j * SIZE : (j + 1) * SIZE]) for j in range(count)]


def first_come(mass, first, count):
    """Pages from `first` on before all others, the later the earlier."""
    return mass[:first] + [max(mass[:first], default=0) + 1 + j / count for j in range(first, count)]


def logs(values):
    return [math.log(value) for value in values]


def slow_h2o(query, keys, hidden=()):
    tokens, result = len(keys), []
    for head in query:
        total = [0.0] * tokens
        for position in range(tokens):
            for i, weight in enumerate(attention(head[position], keys, position, hidden)):
                total[i] += weight
        # Two of CONFIG's four pages are for the most recent, the one in progress among them.
        result.append(first_come(logs(paged(total, tokens // SIZE)), tokens // SIZE - 1, tokens // SIZE))
    return result


def slow_snapkv(query, keys):
    tokens, result = len(keys), []
    before = tokens - 5
    for head in query:
        votes = [0.0] * before
        for position in range(before, tokens):
            for i, weight in enumerate(attention(head[position], keys, position)[:before]):
                votes[i] += weight
        pooled = [sum(votes[k] for k in (i - 1, i, i + 1) if 0 <= k < before) / 3 for i in range(before)]
        result.append(first_come(logs(paged(pooled, before // SIZE)), before // SIZE, tokens // SIZE))
    return result


def slow_kvzip(query, keys):
    tokens = len(keys)
    most = [0.0] * tokens
    for head in query:
        for position in range(tokens):
            for i, weight in enumerate(attention(head[position], keys, position)):
                most[i] = max(most[i], weight)
    return [first_come(logs(paged(most, tokens // SIZE)), tokens // SIZE, tokens // SIZE)]


def softmax(values):
    weights = [math.exp(value - max(values)) for value in values]
    return [weight / sum(weights) for weight in weights]


def slow_redundancy(keys, threshold):
    tokens = len(keys)
    unit = [key / key.norm() for key in keys]
    mean = [0.0] * tokens
    for row in range(tokens):
        cosines = [0 if i == row else dot(unit[row], unit[i]) for i in range(tokens)]
        like = [i for i in range(tokens) if cosines[i] > threshold]
        if like:
            cosines[like[-1]] = 0
        mean = [total + cosine / tokens for total, cosine in zip(mean, cosines, strict=True)]
    return softmax(mean)


def slow_merit(query, keys):
    """Z of the tokens before the window."""
    before = len(keys) - 5
    importance = [0.0] * before
    for position in range(before, len(keys)):
        logits = [max(dot(head[position], keys[i]) for head in query) * SCALE for i in range(before)]
        importance = [total + weight / 5 for total, weight in zip(importance, softmax(logits), strict=True)]
    pooled = [max(importance[max(0, i - 1) : i + 2]) for i in range(before)]
    redundancy = slow_redundancy(keys, 0.2)
    return [0.1 * a - 0.9 * b for a, b in zip(pooled, redundancy, strict=False)]


def slow_rkv(query, keys):
    scored = (len(keys) - 5) // SIZE
    mass = [total / SIZE for total in paged(slow_merit(query, keys), scored)]
    mean = sum(mass) / scored
    deviation = math.sqrt(sum((value - mean) ** 2 for value in mass) / scored)
    return [first_come([(value - mean) / deviation for value in mass], scored, len(keys) // SIZE)]


def slow_triattention(query, keys):
    tokens, half = len(keys), DIM // 2
    best = [-INF] * tokens
    for head in query:
        upright = [
            [complex(q[f], q[f + half]) * cmath.exp(-1j * FREQUENCIES[f].item() * p) for f in range(half)]
            for p, q in enumerate(head.tolist())
        ]
        centre = [sum(q[f] for q in upright) / tokens for f in range(half)]
        norm = [sum(abs(q[f]) for q in upright) / tokens for f in range(half)]
        scores = []
        for key in keys.tolist():
            k = [complex(key[f], key[f + half]) for f in range(half)]
            score = sum((norm[f] - abs(centre[f])) * abs(k[f]) for f in range(half))
            for ahead in (1, 2, 4, 8):
                for f in range(half):
                    turned = centre[f] * cmath.exp(1j * FREQUENCIES[f].item() * (tokens - 1 + ahead))
                    score += (turned * k[f].conjugate()).real / 4
            scores.append(score)
        mean = sum(scores) / tokens
        deviation = math.sqrt(sum((score - mean) ** 2 for score in scores) / tokens)
        best = [max(old, (score - mean) / deviation) for old, score in zip(best, scores, strict=True)]
    return [[total / SIZE for total in paged(best, tokens // SIZE)]]


def slow_lazyeviction(query, keys):
    tokens, result = len(keys), []
    for head in query:
        last, gap = list(range(tokens)), [0] * tokens
        for step in range(tokens):
            for i, weight in enumerate(attention(head[step], keys, step)):
                if weight >= 0.02:
                    gap[i], last[i] = max(gap[i], step - last[i]), step
        importance = [
            2 / (1 + math.exp((tokens - 1 - last[i]) / gap[i])) + 2 / (1 + math.exp(gap[i] - 1)) if gap[i] else 0
            for i in range(tokens)
        ]
        first = (tokens - 5) // SIZE
        mass = logs([max(value, 1e-30) for value in paged(importance, tokens // SIZE)])
        result.append(first_come(mass, first, tokens // SIZE))
    return result


SLOW = {
    "h2o": slow_h2o,
    "snapkv": slow_snapkv,
    "kvzip": slow_kvzip,
    "rkv": slow_rkv,
    "triattention": slow_triattention,
    "lazyeviction": slow_lazyeviction,
}


def sequence(tokens=43, lead=(2, 2), group=3, seed=0):
    """Keys around a few directions, so that some are alike, and queries that prefer some of them."""
    directions = normal(seed, 5, DIM)
    choice = torch.randint(5, (*lead, tokens), generator=torch.Generator().manual_seed(seed))
    keys = directions[choice] + 0.7 * normal(seed + 1, *lead, tokens, DIM)
    return normal(seed + 2, *lead, group, tokens, DIM) + directions[0], keys


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
    for module in ("history", "rkv"):
        monkeypatch.setattr(f"pagelocks.selectors.{module}.CHUNK", chunk)
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


# Eviction


def decode(selector, query, keys, prompt, config=CONFIG):
    """A prompt, then sparse steps; each step's (pages chosen, log-mass), with what the driver does."""
    steps = [show(selector, query, keys, prompt) and None]
    for token in range(prompt, keys.shape[-2]):
        mass = selector.log_mass(query[..., token, :], Pages(token + 1), SCALE)
        length = torch.tensor(token + 1)
        steps.append((select_pages(page_share(mass, length, config), length, config), mass))
        selector.observe(query[..., token : token + 1, :], keys[..., : token + 1, :], SCALE)
    return steps[1:]


def restless(tokens=150, lead=(2,), seed=3):
    """A sequence whose queries turn from page to page, so that no page stays the best."""
    query, keys = sequence(tokens, lead, seed=seed)
    turn = torch.arange(tokens).div(9, rounding_mode="floor") * 11 % 60
    return query + 3 * keys[..., turn, :].unsqueeze(-3), keys


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


# What each method is about


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
