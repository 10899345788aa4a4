"""LOCKS in Transformers, on small models with random weights: what is attended, and what generate() may do."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch

from pagelocks import LocksConfig
from pagelocks.selectors import make_selector
from pagelocks.selectors.base import PageSource

transformers = pytest.importorskip("transformers")

import pagelocks.hf as hf  # noqa: E402
import pagelocks.hf.pages as cached_pages  # noqa: E402
import pagelocks.hf.session as sessions  # noqa: E402
from pagelocks.hf.pages import CachedPages  # noqa: E402

VOCABULARY = 300


def make_model(kind: str = "Llama", **changes: Any) -> Any:
    """Three layers, six query heads on two KV heads; weights large enough that attention is not flat."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6}
    sizes |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": VOCABULARY, "max_position_embeddings": 2048}
    config = getattr(transformers, f"{kind}Config")(**{**sizes, "initializer_range": 0.3, **changes})
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


def prompt(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(5, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(seed))


def generate(model: Any, ids: torch.Tensor, tokens: int = 24, **more: Any) -> torch.Tensor:
    mask = more.pop("attention_mask", torch.ones_like(ids))
    out = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, **more)
    return out[:, ids.shape[1] :]


@pytest.fixture
def model() -> Any:
    return make_model()


def test_a_budget_that_covers_all_is_dense(model: Any) -> None:
    ids = prompt(150)
    dense = generate(model, ids)
    session = hf.attach(model, LocksConfig(budget=1024, dense_below=0))
    assert generate(model, ids).equal(dense)
    counts = session.statistics()
    assert counts.rows_dense == 3 * 23 and counts.rows_sparse == counts.pages_skipped == 0
    session = hf.attach(model, LocksConfig(budget=128, dense_below=1024))
    assert generate(model, ids).equal(dense) and session.statistics().rows_sparse == 0


@pytest.mark.parametrize("rule", ["share", "per-head"])
@pytest.mark.parametrize("selector", ["locks", "exact", "quest"])
def test_a_sparse_step_attends_the_pages_it_names_and_no_others(model: Any, selector: str, rule: str) -> None:
    """Each layer's output, from the query, keys and pages that the step reports, by a loop over heads and tokens."""
    seen: list[hf.SparseStep] = []
    outputs: list[torch.Tensor] = []
    session = hf.attach(model, LocksConfig(budget=64, dense_below=0), selector, rule, seen.append)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, given: outputs.append(given[0]))
    tokens = 4
    generate(model, prompt(203), tokens)
    assert len(seen) == 3 * (tokens - 1) and len(outputs) == 3 * tokens
    for step, found in zip(seen, outputs[3:], strict=True):
        (query,), (keys,), (values,), (pages_of,) = step.query, step.keys, step.values, step.pages
        heads, group, size = query.shape
        length = keys.shape[1]
        expected = torch.zeros(heads, group, size)
        for h in range(heads):
            for g in range(group):
                pages = pages_of[h] if rule == "share" else pages_of[h, g]
                chosen = [t for page in pages.tolist() for t in range(16 * page, min(16 * page + 16, length))]
                assert len(set(pages.tolist())) == 4 and 0 in pages and (length - 1) // 16 in pages
                weights = (keys[h, chosen] @ query[h, g] * step.scale).softmax(0)
                expected[h, g] = weights @ values[h, chosen]
        torch.testing.assert_close(found.flatten(), expected.flatten(), rtol=1e-4, atol=1e-5)
    counts = session.statistics()
    assert counts.rows_sparse == len(seen)
    read = sum(len(set(head.flatten().tolist())) for step in seen for head in step.pages[0])
    held = sum(2 * -(-step.keys.shape[2] // 16) for step in seen)
    assert (counts.pages_read, counts.pages_skipped) == (read, held - read) and counts.pages_skipped > 0
    layers = [session.counts(layer) for layer in range(3)]
    for name, total in vars(counts).items():
        assert sum(getattr(each, name) for each in layers) == total and getattr(session.statistics(), name) == total
    layers[0].pages_read += 1  # what is handed out is a copy
    assert session.statistics() == counts and session.counts(3) == hf.LayerStatistics()


def test_left_padding_and_batches_give_each_row_its_own(model: Any) -> None:
    """Rows of 90, 150 and 40 tokens: the first selects from the start, the last never or late, none sees padding."""
    rows = [prompt(n, seed=n) for n in (90, 150, 40)]
    hf.attach(model, LocksConfig(budget=64, dense_below=0))
    alone = [generate(model, row) for row in rows]
    longest = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.nn.functional.pad(row, (longest - row.shape[1], 0)) for row in rows])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(row), (longest - row.shape[1], 0)) for row in rows])
    together = generate(model, ids, attention_mask=mask)
    for n, row in enumerate(alone):
        assert together[n].equal(row[0]), n
    alike = generate(model, torch.cat([rows[1], prompt(150, 9)]))
    assert alike[0].equal(alone[1][0]) and alike[1].equal(generate(model, prompt(150, 9))[0])


def test_a_reused_prefix_changes_nothing(model: Any) -> None:
    hf.attach(model, LocksConfig(budget=64, dense_below=0))
    ids = prompt(170)
    whole = generate(model, ids)
    with torch.no_grad():
        cache = model(ids[:, :100], use_cache=True).past_key_values
    for _ in range(2):  # the second time beside what the first left in the session
        assert generate(model, ids, past_key_values=copy.deepcopy(cache)).equal(whole)


@pytest.mark.parametrize("selector", ["locks", "exact", "snapkv"])
@pytest.mark.parametrize("rule", ["share", "per-head"])
def test_a_cache_that_only_grows_need_not_be_compared(model: Any, selector: str, rule: str) -> None:
    ids, config = torch.cat([prompt(151, 1), prompt(151, 2)]), LocksConfig(budget=64, dense_below=0)
    expected, found = [], []
    for only_grows, seen in ((False, expected), (True, found)):
        session = hf.attach(model, config, selector, rule, lambda step, seen=seen: seen.append(step.pages))
        session.only_grows = only_grows
        seen.append(generate(model, ids, 40))  # two pages and more are completed
        seen.append(session.statistics())
    assert len(expected) == 3 * 39 + 2 and expected[-1] == found[-1]
    assert all(a.equal(b) for a, b in zip(expected[:-1], found[:-1], strict=True))


def test_pages_handed_on_are_not_summarized_again(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = LocksConfig(budget=64, dense_below=0)
    ids = torch.cat([prompt(150, 1), prompt(150, 2)])
    session = hf.attach(model, config)
    with torch.no_grad():
        cache = model(ids[:, :-1], use_cache=True).past_key_values
    expected = generate(model, ids, past_key_values=copy.deepcopy(cache))
    session = hf.attach(model, config)
    session.only_grows = True
    pages = {layer: CachedPages(config, each.keys, only_grows=True) for layer, each in enumerate(cache.layers)}
    for layer, each in pages.items():
        each.update(cache.layers[layer].keys)
        assert each.summary().centroid.shape[2] == 149 // 16
    summarized = list[int]()
    real = cached_pages.summarize
    monkeypatch.setattr(cached_pages, "summarize", lambda k, c: summarized.append(k.shape[2]) or real(k, c))
    for _ in range(2):  # a session adds pages to copies
        summarized.clear()
        session.go_on_with({layer: (make_selector("locks", config), 0) for layer in pages}, pages)
        assert generate(model, ids, past_key_values=copy.deepcopy(cache)).equal(expected)
        assert set(summarized) == {1}  # as they are completed, one at a time
        assert all(each.count == 149 // 16 for each in pages.values())


def test_a_static_cache_changes_nothing(model: Any) -> None:
    hf.attach(model, LocksConfig(budget=64, dense_below=0))
    ids = prompt(150)
    assert generate(model, ids, cache_implementation="static").equal(generate(model, ids))


def test_beams_carry_their_pages_with_them(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beams swap rows between steps; the same as if every page were summarized anew at each step."""
    ids = prompt(140)
    session = hf.attach(model, LocksConfig(budget=64, dense_below=0))
    kept = generate(model, ids, 40, num_beams=4)
    assert any(p.rebuilt for layer in session._state.values() for p in layer.pages.values()), "no beam was swapped"
    attend = sessions.Session.attend

    def forgetful(self: Any, layer: int, rows: Any, *tensors: Any) -> Any:
        self._layer(layer).pages.clear()
        return attend(self, layer, rows, *tensors)

    monkeypatch.setattr(sessions.Session, "attend", forgetful)
    assert generate(model, ids, 40, num_beams=4).equal(kept)


def test_layers_with_a_window_stay_dense() -> None:
    model = make_model("Mistral", sliding_window=32)
    ids = prompt(120)
    dense = generate(model, ids)
    session = hf.attach(model, LocksConfig(budget=64, dense_below=0))
    assert generate(model, ids).equal(dense) and session.statistics() == hf.LayerStatistics()


class Learner:
    """Notes what it is shown; ranks pages by number."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def observe(self, query: torch.Tensor, keys: torch.Tensor, scale: float) -> None:
        assert query.shape[:3] == (keys.shape[0], 2, 3)
        self.seen.append((query.shape[3], keys.shape[2]))

    def log_mass(self, query: torch.Tensor, pages: PageSource, scale: float) -> torch.Tensor:
        return torch.arange(pages.count, dtype=torch.float32).expand(*query.shape[:-1], -1)


def test_a_selector_that_learns_sees_every_token_once(model: Any) -> None:
    made: list[tuple[int, Learner]] = []

    def factory(layer: int) -> Learner:
        made.append((layer, Learner()))
        return made[-1][1]

    hf.attach(model, LocksConfig(budget=64, dense_below=0), factory)
    generate(model, prompt(100), 4)
    assert sorted(layer for layer, _ in made) == [0, 1, 2]
    assert all(learner.seen == [(100, 100), (1, 101), (1, 102), (1, 103)] for _, learner in made)
    generate(model, prompt(90, 1), 3, prefill_chunk_size=64)
    assert len(made) == 6 and all(learner.seen == [(64, 64), (26, 90), (1, 91), (1, 92)] for _, learner in made[3:])


def test_a_selector_that_learns_may_have_a_static_cache(model: Any) -> None:
    made: list[Learner] = []
    hf.attach(model, LocksConfig(budget=64, dense_below=0), lambda layer: made.append(Learner()) or made[-1])
    generate(model, prompt(100), 3, cache_implementation="static")
    assert all(learner.seen == [(100, 100), (1, 101), (1, 102)] for learner in made) and len(made) == 3


def test_a_selector_that_learns_refuses_what_it_cannot_follow(model: Any) -> None:
    hf.attach(model, LocksConfig(budget=64, dense_below=0), lambda layer: Learner())
    two, mask = torch.cat([prompt(80), prompt(80, 1)]), torch.ones(2, 80, dtype=torch.int64)
    assert len(generate(model, two)) == 2
    mask[0, :9] = 0
    with pytest.raises(ValueError, match=r"it learns from every token, and has seen 71 of 0 before this step"):
        generate(model, two, attention_mask=mask)
    with pytest.raises(ValueError, match="it has learnt from keys that are no longer there"):
        generate(model, prompt(140), 40, num_beams=4)
    caches = [model(prompt(100, seed), use_cache=True).past_key_values for seed in (1, 2)]
    with pytest.raises(ValueError, match="it has learnt from keys that are no longer there"):
        model(prompt(1), past_key_values=caches[0])
    cache = make_model()(prompt(64), use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"it learns from every token, and has seen \d+ of 64"):
        generate(model, prompt(80), past_key_values=cache)


def test_attach_says_what_is_wrong(model: Any) -> None:
    with pytest.raises(ValueError, match=r"selector='loki2' is not allowed: one of locks, "):
        hf.attach(model, selector="loki2")
    with pytest.raises(ValueError, match=r"group_rule='mean' is not allowed"):
        hf.attach(model, group_rule="mean")
    with pytest.raises(ValueError, match=r"model='Linear' is not allowed: a Transformers model is needed"):
        hf.attach(torch.nn.Linear(2, 2))


def test_what_would_be_silently_wrong_is_refused(model: Any) -> None:
    hf.attach(model, LocksConfig(budget=64, dense_below=0))
    ids = prompt(100)
    mask = torch.ones_like(ids)
    mask[0, 50] = 0
    with pytest.raises(ValueError, match="a row's tokens must lie together"):
        generate(model, ids, attention_mask=mask)
    gemma = make_model("Gemma2", attn_logit_softcapping=50.0, layer_types=["full_attention"] * 3)
    hf.attach(gemma, LocksConfig(budget=64, dense_below=0))
    with pytest.raises(ValueError, match="softcap"):
        generate(gemma, ids)
    attention, heads = model.model.layers[0].self_attn, torch.zeros(1, 6, 1, 32)
    keys, bias = torch.zeros(1, 2, 100, 32), torch.zeros(1, 1, 1, 100)
    with pytest.raises(ValueError, match="LOCKS takes a mask, not a bias"):
        hf.attention.locks_attention(attention, heads, keys, keys, bias)
    with pytest.raises(ValueError, match="dropout"):
        hf.attention.locks_attention(attention, heads, keys, keys, None, dropout=0.1)


def test_without_attach_it_is_locks_with_its_defaults() -> None:
    model = make_model(attn_implementation="locks")
    generate(model, prompt(60), 3)
    session = sessions.session_of(model.model.layers[0].self_attn)
    assert session.config == LocksConfig() and session.statistics().rows_dense == 2


def test_detach_and_copies(model: Any) -> None:
    ids = prompt(100)
    dense = generate(model, ids)
    session = hf.attach(model, LocksConfig(budget=64, dense_below=0), "streaming")
    sparse = generate(model, ids)
    rows = session.statistics().rows_sparse
    assert not sparse.equal(dense) and rows
    assert generate(copy.deepcopy(model), ids).equal(sparse) and session.statistics().rows_sparse == rows
    hf.detach(model)
    assert generate(model, ids).equal(dense) and session.statistics().rows_sparse == rows


def test_models_of_one_configuration_have_sessions_of_their_own() -> None:
    config, ids = make_model().config, prompt(100)
    first, second = (transformers.LlamaForCausalLM(config).eval() for _ in range(2))
    sparse = hf.attach(first, LocksConfig(budget=64, dense_below=0))
    dense = hf.attach(second, LocksConfig(budget=1024, dense_below=0))
    for each in (first, second):
        generate(each, ids, 4)
    assert (sparse.statistics().rows_sparse, sparse.statistics().rows_dense) == (9, 0)
    assert (dense.statistics().rows_sparse, dense.statistics().rows_dense) == (0, 9)


def test_threads_may_share_a_model(model: Any) -> None:
    hf.attach(model, LocksConfig(budget=64, dense_below=0))
    alone = [generate(model, prompt(120 + seed % 2, seed), 12) for seed in range(4)]
    found: dict[int, torch.Tensor] = {}

    def work(seed: int) -> None:
        for _ in range(2):
            found[seed] = generate(model, prompt(120 + seed % 2, seed), 12)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[seed].equal(alone[seed]) for seed in range(4))


def test_a_model_whose_attention_is_its_own_is_refused() -> None:
    bloom = transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=2)
    )
    with pytest.raises(ValueError, match="model='BloomForCausalLM' is not allowed: its attention does not go through"):
        hf.attach(bloom)


def test_a_mask_is_asked_once_a_pass(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tensor with other numbers in a later pass is asked again."""
    from pagelocks.hf import attention

    asked: list[int] = []
    real = attention._tokens
    monkeypatch.setattr(attention, "_tokens", lambda mask, *more: asked.append(id(mask)) or real(mask, *more))
    session = hf.attach(model, LocksConfig(budget=64, dense_below=0))
    ids = torch.cat([prompt(150, 1), prompt(150, 2)])
    mask = torch.ones_like(ids)
    mask[0, :40] = 0
    alone = generate(model, ids[:1, 40:], 6)
    asked.clear()
    padded = generate(model, ids, 6, attention_mask=mask)
    assert padded[:1].equal(alone) and session.statistics().rows_sparse
    assert len(asked) == 6  # of 3 layers in 6 passes

    layers = model.config.num_hidden_layers
    mask = torch.ones(2, 1, 1, 150, dtype=torch.bool)
    for first in (0, 40, 7):
        mask[0, ..., :first], mask[0, ..., first:] = False, True
        for layer in range(layers):
            assert attention._look(session, layer, mask, 2, 150, 1) == ([(first, 150), (0, 150)], False)


def test_a_mask_for_each_head_is_refused(model: Any) -> None:
    hf.attach(model, LocksConfig(budget=64, dense_below=0))
    attention, heads, keys = model.model.layers[0].self_attn, torch.zeros(1, 6, 1, 32), torch.zeros(1, 2, 100, 32)
    with pytest.raises(ValueError, match="one mask for all heads"):
        hf.attention.locks_attention(attention, heads, keys, keys, torch.ones(1, 6, 1, 100, dtype=torch.bool))


@pytest.mark.parametrize(("query_heads", "tokens", "steps"), [(6, 50, 50), (2, 71, 13), (6, 300, 129)])
def test_causal_attention_is_attention_by_a_mask(query_heads: int, tokens: int, steps: int) -> None:
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    torch.manual_seed(tokens)
    query = torch.randn(2, query_heads, steps, 32, device=device, dtype=dtype)
    key, value = (torch.randn(2, 2, tokens + 9, 32, device=device, dtype=dtype)[:, :, :tokens] for _ in range(2))
    mask = torch.ones(steps, tokens, dtype=torch.bool, device=device).tril(tokens - steps)
    repeated = (x.float().repeat_interleave(query_heads // 2, 1) for x in (key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(query.float(), *repeated, mask, scale=0.3)
    found = hf.attention.causal_attention(query, key, value, 0.3)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(found.float(), expected.transpose(1, 2), **tolerance)


def test_masks_are_read_where_they_hide_more_than_the_future(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU leaves the mask out of later parts of whole prompts, and of nothing else."""
    calls: list[tuple[int, int]] = []
    real = hf.attention.causal_attention
    monkeypatch.setattr(
        hf.attention,
        "causal_attention",
        lambda q, k, *more: calls.append((q.shape[2], k.shape[2])) or real(q, k, *more),
    )
    hf.attach(model, LocksConfig(budget=64, dense_below=0))
    ids = torch.cat([prompt(150, 1), prompt(150, 2)])

    def prefill(device: str, padding: int, hidden: int | None = None) -> torch.Tensor:
        monkeypatch.setattr(hf.attention, "MASKLESS", {device})
        mask = torch.ones_like(ids)
        mask[0, :padding] = 0
        with torch.no_grad():
            first = model(ids[:, :90], attention_mask=mask[:, :90], use_cache=True)
            if hidden is not None:  # by a mask of one's own, in a middle row
                mask = torch.ones(2, 1, 60, 150, dtype=torch.bool).tril(90)
                mask[1, 0, 7, hidden] = False
            last = model(ids[:, 90:], attention_mask=mask, past_key_values=first.past_key_values, use_cache=True)
        return torch.cat([first.logits, last.logits], 1)

    expected = prefill("none", 0)
    assert not calls
    torch.testing.assert_close(prefill("cpu", 0), expected)
    assert calls == [(60, 150)] * model.config.num_hidden_layers
    calls.clear()
    torch.testing.assert_close(prefill("cpu", 40), prefill("none", 40))
    own = prefill("none", 0, 5)
    torch.testing.assert_close(prefill("cpu", 0, 5), own)
    assert not calls and not torch.allclose(own, expected)
