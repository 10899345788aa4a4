"""A cache that appends in place: Transformers' own copies all keys and values of a layer at every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

ROOM = 128
"""Tokens that fit in before everything is copied again."""


class RoomyLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A `DynamicLayer` whose keys and values are the beginning of larger tensors.

    What was cut off is overwritten by what is appended next.
    """

    _rooms: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append; returns all keys and all values, (rows, kv_heads, tokens, head_dim)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        rooms = self._rooms or (None, None)
        self._rooms = _room(rooms[0], self.keys, key_states), _room(rooms[1], self.values, value_states)
        before = self.get_seq_length()
        after = before + key_states.shape[-2]
        for room, new in zip(self._rooms, (key_states, value_states), strict=True):
            room[..., before:after, :] = new
        self.keys, self.values = (room[..., :after, :] for room in self._rooms)
        return self.keys, self.values

    def hold(self, keys: Tensor | None, values: Tensor | None) -> None:
        """Hold these, (rows, kv_heads, tokens, head_dim), and nothing else; None lets go of a layer that was in use."""
        self.keys, self.values, self._rooms = keys, values, None


def _room(room: Tensor | None, held: Tensor, new: Tensor) -> Tensor:
    """One that begins with what is held and has space for what is new."""
    before = held.shape[-2] if held.numel() else 0
    after = before + new.shape[-2]
    fits = room is not None and after <= room.shape[-2]
    if room is not None and fits and room.data_ptr() == held.data_ptr() and room.stride() == held.stride():
        return room
    larger = new.new_empty(*new.shape[:-2], after + ROOM, new.shape[-1])
    if before:
        larger[..., :before, :] = held
    return larger


def make_cache(model: Any) -> Any:
    """An empty cache for a model: layers that would copy everything at each step are roomy ones."""
    cache = DynamicCache(config=model.config)
    make: Any = RoomyLayer
    cache.layers = [make() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def join(caches: Sequence[Any]) -> Any:
    """The first of several caches, now with the rows of all; the others are emptied, layer by layer.

    Caches of `make_cache` that hold equally many tokens, and have roomy layers alone where they are several.
    """
    if len(caches) > 1:
        for layer, *others in zip(*(cache.layers for cache in caches), strict=True):
            layer.hold(*(torch.cat([getattr(each, name) for each in (layer, *others)]) for name in ("keys", "values")))
            for each in others:
                each.hold(None, None)  # nothing is held twice for longer than a layer takes
    return caches[0]


def croppable(cache: Any) -> bool:
    """Whether every layer keeps all keys and values and nothing else, so that the last ones can be taken back."""
    return all(type(layer) in (DynamicLayer, RoomyLayer) for layer in cache.layers)
