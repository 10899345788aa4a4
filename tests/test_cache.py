"""The cache that appends in place: what Transformers' own holds, whatever is done to it."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from test_hf import make_model
from transformers.cache_utils import DynamicLayer

from pagelocks.eval import cache as module
from pagelocks.eval.cache import RoomyLayer, croppable, join, make_cache


def states(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 3, tokens, 8), torch.randn(2, 3, tokens, 8)


@pytest.mark.parametrize("room", [0, 1, 5, 1000])
def test_it_holds_what_a_dynamic_layer_holds(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROOM", room)
    roomy, stock = RoomyLayer(), DynamicLayer()
    for tokens, cut in ((7, 0), (1, 0), (3, 2), (1, 0), (1, 4), (9, 0), (2, 1)):
        new = states(tokens)
        for mine, theirs in zip(roomy.update(*new), stock.update(*new), strict=True):
            assert torch.equal(mine, theirs)
        if cut:
            roomy.crop(-cut)
            stock.crop(-cut)
        assert roomy.get_seq_length() == stock.get_seq_length()
    for layer in (roomy, stock):
        layer.batch_select_indices(torch.tensor([1, 0]))
        layer.update(*(torch.ones_like(each) for each in states(1)))
    assert torch.equal(roomy.keys, stock.keys) and torch.equal(roomy.values, stock.values)
    for layer in (roomy, stock):
        layer.reset()
    new = states(4)
    roomy.update(*new)
    assert torch.equal(roomy.keys, new[0])


def test_steps_are_written_in_place_and_a_copy_has_its_own_room() -> None:
    layer = RoomyLayer()
    layer.update(*states(20))
    where = layer.keys.data_ptr()
    layer.update(*states(1))
    assert layer.keys.data_ptr() == where
    twin: Any = copy.deepcopy(layer)
    kept = layer.keys.clone()
    twin.crop(-1)
    twin.update(*states(1))
    assert torch.equal(layer.keys, kept) and not torch.equal(twin.keys, kept)


def test_keys_that_were_put_there_by_hand_are_kept() -> None:
    layer = RoomyLayer()
    layer.update(*states(5))
    keys, values = states(6)
    layer.keys, layer.values = keys, values
    new = states(1)
    layer.update(*new)
    assert torch.equal(layer.keys, torch.cat([keys, new[0]], -2))
    assert torch.equal(layer.values, torch.cat([values, new[1]], -2))


def test_joined_rows_are_held_once() -> None:
    """By the first cache alone, which goes on in place; neither parts nor their rooms stay in memory."""
    caches, parts = [make_cache(make_model()) for _ in range(3)], []
    for cache in caches:
        parts.append([states(20) for _ in cache.layers])
        for layer, (keys, values) in zip(cache.layers, parts[-1], strict=True):
            layer.update(keys, values)
    held = [weakref.ref(room) for cache in caches for layer in cache.layers for room in layer._rooms]
    whole = join(caches)
    assert whole is caches[0] and not any(each() is not None for each in held)
    for number, layer in enumerate(whole.layers):
        for place, tensor in enumerate((layer.keys, layer.values)):
            assert torch.equal(tensor, torch.cat([part[number][place] for part in parts]))
        assert all(cache.layers[number].keys is None for cache in caches[1:])
        step = torch.randn(6, 3, 1, 8)
        before = layer.keys.clone()
        keys, _ = layer.update(step, step)
        assert torch.equal(keys, torch.cat([before, step], -2))
    assert join([whole]) is whole


def test_layers_with_windows_stay_what_they_are() -> None:
    assert croppable(make_cache(make_model()))
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    mixed = make_cache(make_model("Gemma3Text", layer_types=kinds, sliding_window=32))
    assert [type(layer) is RoomyLayer for layer in mixed.layers] == [False, True, False] and not croppable(mixed)
