"""The eviction methods written out in loops over tokens, and how their tests show them a sequence."""

import cmath
import math

import torch

from pagelocks import page_share, select_pages
from pagelocks.selectors import (
    H2O,
    RKV,
    KVzip,
    LazyEviction,
    SnapKV,
    TriAttention,
)
from pagelocks.selectors.triattention import rope_frequencies

from .helpers import make_config, normal

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


def decode(selector, query, keys, prompt, config=CONFIG):
    """A prompt, then sparse steps; each step's (pages chosen, log-mass), with what the driver does."""
    return go_on(show(selector, query, keys, prompt), query, keys, prompt, config)


def go_on(selector, query, keys, prompt, config=CONFIG):
    """As `decode`, of a selector that has seen the prompt."""
    steps = []
    for token in range(prompt, keys.shape[-2]):
        mass = selector.log_mass(query[..., token, :], Pages(token + 1), SCALE)
        length = torch.tensor(token + 1)
        steps.append((select_pages(page_share(mass, length, config), length, config), mass))
        selector.observe(query[..., token : token + 1, :], keys[..., : token + 1, :], SCALE)
    return steps


def restless(tokens=150, lead=(2,), seed=3):
    """A sequence whose queries turn from page to page, so that no page stays the best."""
    query, keys = sequence(tokens, lead, seed=seed)
    turn = torch.arange(tokens).div(9, rounding_mode="floor") * 11 % 60
    return query + 3 * keys[..., turn, :].unsqueeze(-3), keys
