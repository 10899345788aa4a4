"""RocketKV, against its definition written out in loops."""

import math

import pytest
import torch

from pagelocks import page_share, select_pages
from pagelocks.selectors import (
    Quest,
    RocketKV,
)

from .helpers import assert_rejected, make_config, normal
from .rivals import INF, SCALE, Pages, log_sum_exp, observed, rows


@pytest.mark.parametrize("channels", [1, 5, 16, None, 32, 99])
def test_rocketkv_second_stage_written_out(channels):
    keys, query = normal(0, 2, 3, 7, 16, 32), normal(1, 2, 3, 4, 32) * 3
    mass = RocketKV(channels=channels).log_mass(query, Pages(keys), SCALE)
    n = 16 if channels is None else min(channels, 32)
    for key, q, found in rows(keys, query, mass):
        weight = [sum(abs(q[g, c]) for g in range(4)) for c in range(32)]
        picked = sorted(range(32), key=lambda c: -weight[c])[:n]
        for g in range(4):
            covered = sum(abs(q[g, c]) for c in picked) / sum(abs(q[g, c]) for c in range(32))
            for j in range(7):
                score = 0
                for c in picked:
                    column = [key[j, i, c] for i in range(16)]
                    score += q[g, c] * (max(column) if sum(q[:, c]) >= 0 else min(column))
                assert found[g, j] == pytest.approx(score * SCALE / math.sqrt(covered) + math.log(16), abs=1e-4)


def test_rocketkv_of_one_head_and_all_channels_is_quest():
    keys, query = normal(0, 2, 3, 7, 16, 32), normal(1, 2, 3, 1, 32)
    mass = RocketKV(channels=32).log_mass(query, Pages(keys), SCALE)
    torch.testing.assert_close(mass, Quest().log_mass(query, Pages(keys), SCALE))
    fewer = RocketKV(channels=20).log_mass(query, Pages(keys), SCALE)
    assert not torch.allclose(fewer, mass, atol=0.01)


def test_rocketkv_of_queries_of_zero():
    keys, query = normal(0, 7, 16, 32), normal(1, 4, 32)
    query[1:3] = 0
    mass = RocketKV().log_mass(query, Pages(keys), SCALE)
    torch.testing.assert_close(mass[1:3], torch.full((2, 7), math.log(16)))
    torch.testing.assert_close(RocketKV().log_mass(query * 0, Pages(keys), SCALE), torch.full((4, 7), math.log(16)))


def slow_kept(query, keys, page_size, budget, window, kernel):
    """Pages that stage 1 keeps of one KV head's prompt: query (G, n, d), keys (T, d)."""
    heads, steps, _ = query.shape
    total, window = len(keys), min(window, steps)
    votes = [0.0] * (total - window)
    for g in range(heads):
        for back in range(window):
            seen = total - back
            logits = [query[g, steps - 1 - back] @ keys[i] * SCALE for i in range(seen)]
            whole = log_sum_exp(logits)
            for i in range(total - window):
                votes[i] += math.exp(logits[i] - whole)
    pooled = [max(votes[max(0, i - kernel // 2) : i + kernel // 2 + 1]) for i in range(len(votes))]
    pages = [sum(pooled[j * page_size : (j + 1) * page_size]) for j in range(len(votes) // page_size)]
    ratio = total / budget
    tokens = total / ratio ** min(0.2 + 0.06 * math.log2(ratio), 0.8) if ratio > 1 else total
    room = math.ceil(tokens / page_size) - (math.ceil(total / page_size) - len(pages))
    order = sorted(range(len(pages)), key=lambda j: -pages[j])
    return [j in order[: max(0, room)] for j in range(len(pages))]


@pytest.mark.parametrize(
    ("total", "page_size", "budget_pages", "window", "kernel"),
    [
        (250, 8, 4, 8, 5),
        (211, 8, 3, 32, 1),
        (256, 16, 3, 5, 63),
        (400, 8, 3, 9, 21),
        (97, 8, 8, 8, 5),
        (40, 8, 3, 32, 5),
    ],
)
def test_rocketkv_first_stage_written_out(total, page_size, budget_pages, window, kernel):
    config = make_config(4, page_size, budget_pages=budget_pages)
    keys, query = normal(0, 2, 3, total, 32), normal(1, 2, 3, 2, 40, 32) * 3
    selector = RocketKV(config, window=window, kernel=kernel)
    selector.observe(query, keys, SCALE)
    for key, q, kept in rows(keys, query, selector.kept):
        assert kept.astype(bool).tolist() == slow_kept(q, key, page_size, config.budget, window, kernel)
    if total > 200:
        assert not selector.kept.all() and selector.kept.any()


def test_rocketkv_with_everything_kept_is_its_second_stage():
    keys, query = normal(0, 3, 7 * 16, 32), normal(1, 3, 4, 32)
    pages = Pages(keys.unflatten(1, (7, 16)))
    stage_two = RocketKV().log_mass(query, pages, SCALE)
    enough = observed(make_config(budget_pages=7), (normal(2, 3, 4, 40, 32), keys))
    assert enough.kept.all() and torch.equal(enough.log_mass(query, pages, SCALE), stage_two)
    less = observed(make_config(budget_pages=3), (normal(2, 3, 4, 40, 32), keys)).log_mass(query, pages, SCALE)
    out = less == -INF
    assert out.any(-1).all() and (out == out[:, :1]).all()  # a group loses the same pages
    assert torch.equal(less[~out], stage_two[~out])


def test_rocketkv_keeps_what_the_prompts_end_attends_and_all_that_follows():
    config = make_config(budget_pages=4)
    keys = normal(0, 40 * 16 + 5, 32)
    prompt = normal(1, 4, 400, 32)
    prompt[:, -8:] = keys[15 * 16 + 3] * 3
    pages = Pages(keys[: 40 * 16].unflatten(0, (40, 16)))
    # 36 pages, the last of them with the window, were the prompt; 4 pages and 5 tokens came since.
    selector = observed(config, (prompt, keys[: 36 * 16]), window=8, kernel=5)
    lost = int((~selector.kept[1:]).nonzero()[0]) + 1
    now = (keys[lost * 16 + 1] * 3).expand(4, 32)  # what the prompt's end did not care for
    mass = selector.log_mass(now, pages, SCALE)
    assert (mass[:, 15] > -INF).all() and (mass[:, lost] == -INF).all() and (mass[:, 35:] > -INF).all()
    lengths = torch.tensor(len(keys))
    chosen = set(select_pages(page_share(mass, lengths, config), lengths, config).tolist())
    evicted = {j for j in range(1, 40) if mass[0, j] == -INF}
    assert lost in evicted and not chosen & evicted and -1 not in chosen
    free = RocketKV(config).log_mass(now, pages, SCALE)
    assert lost in select_pages(page_share(free, lengths, config), lengths, config).tolist()


def test_rocketkv_sees_a_prompt_in_chunks_as_one_and_ignores_single_tokens():
    config, keys, query = make_config(budget_pages=3), normal(0, 3, 330, 32), normal(1, 3, 4, 330, 32) * 3
    whole = observed(config, (query, keys)).kept
    for ends in ([300, 330], [100, 310, 323, 330], [298, 330]):
        steps, start = [], 0
        for end in ends:
            steps.append((query[:, :, start:end], keys[:, :end]))
            start = end
        assert torch.equal(observed(config, *steps).kept, whole)
    assert not torch.equal(observed(config, (query[:, :, 300:], keys), window=8).kept, whole)
    selector, lost = observed(config, (query, keys)), int((~whole[0]).nonzero()[0])
    for step in range(1, 33):  # each generated token attends a page that is lost
        keys = torch.cat([keys, normal(step, 3, 1, 32)], 1)
        selector.observe(keys[:, None, [lost * 16]].expand(3, 4, 1, 32) * 5, keys, SCALE)
    assert torch.equal(selector.kept, whole)


def test_rocketkv_thins_anew_at_a_further_prompt_whose_window_is_its_own():
    config, keys, query = make_config(budget_pages=3), normal(0, 3, 400, 32), normal(1, 3, 4, 400, 32) * 3
    # Tokens 330 to 339 were generated.
    turns = observed(config, (query[:, :, :330], keys[:, :330]), (query[:, :, 340:350], keys[:, :350]))
    assert torch.equal(turns.kept, observed(config, (query[:, :, 340:350], keys[:, :350])).kept)


def test_rocketkv_keeps_a_poisoned_page_and_it_gets_no_votes():
    config, keys, query = make_config(budget_pages=4), normal(0, 20 * 16, 32), normal(1, 4, 40, 32) * 3
    clean = observed(config, (query, keys)).kept
    page = int((~clean).nonzero()[0])
    for poison in (float("nan"), INF):
        bad = keys.clone()
        bad[page * 16 + 4, 7] = poison
        selector = observed(config, (query, bad))
        assert selector.kept[page] and selector.kept.sum() == clean.sum()
        assert (selector.kept & ~clean).sum() == 1  # it took a place, and the others' order stayed
        mass = selector.log_mass(normal(2, 4, 32), Pages(bad.unflatten(0, (20, 16))), SCALE)
        assert (mass[:, page] == INF).all() and not mass.isnan().any()


def test_rocketkv_keeps_poisoned_pages_though_there_is_no_room():
    config, keys = make_config(budget_pages=3), normal(0, 400, 32)
    # The window alone is more than the tokens to keep.
    selector = observed(config, (normal(1, 4, 300, 32), keys), window=300)
    assert selector.kept.shape == (6,) and not selector.kept.any()
    keys = normal(0, 800, 32)
    selector = observed(config, (normal(1, 4, 400, 32), keys), window=400)
    assert selector.kept.shape == (25,) and not selector.kept.any()
    keys[70] = float("nan")
    selector = observed(config, (normal(1, 4, 400, 32), keys), window=400)
    assert selector.kept.nonzero().tolist() == [[4]]


@pytest.mark.parametrize("total", [2, 20, 32, 47])
def test_rocketkv_of_a_prompt_no_longer_than_its_window_and_a_page(total):
    keys = normal(0, 3, 64, 32)
    selector = observed(make_config(budget_pages=3), (normal(1, 3, 4, total, 32), keys[:, :total]))
    assert selector.kept.shape == (3, 0)
    assert selector.log_mass(normal(2, 3, 4, 32), Pages(keys.unflatten(1, (4, 16))), SCALE).isfinite().all()


def test_rocketkv_bad_input():
    for name, value in (("channels", 0), ("channels", 2.0), ("window", 0), ("window", True), ("kernel", 4)):
        assert_rejected(lambda n=name, v=value: RocketKV(**{n: v}), f"{name}={value}", "1 or more")
    selector = observed(make_config(budget_pages=3), (normal(1, 3, 4, 40, 32), normal(0, 3, 320, 32)))
    for shape in ((2, 20, 16, 32), (3, 40, 8, 32)):
        pages, query = Pages(normal(0, *shape)), normal(1, shape[0], 4, 32)
        assert_rejected(
            lambda pages=pages, query=query: selector.log_mass(query, pages, SCALE),
            str(shape),
            "(3,)",
            "16",
            "instance",
        )
