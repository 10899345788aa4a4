"""Complete pages of the keys in Transformers' cache; summaries are kept, and checked at every step unless told not."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from ..config import LocksConfig, reject
from ..summary import PageSummary, summarize

SUMMARIZED = 1 << 23
"""Numbers of keys that are summarized at a time, which takes some hundred bytes for each: runs may share a card."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class CachedPages:
    """The `PageSource` of one layer and of rows that are alike in length.

    Transformers may reorder, cut or reuse a cache at any time and tells attention nothing of it.  So each step compares
    the keys with those of the step before, bit by bit, and what differs is summarized again; but for `only_grows`.

    Parameters
    ----------
    config : LocksConfig
    keys : (rows, kv_heads, tokens, head_dim)
        Of the first step; for its heads, head size and type.
    only_grows : bool
        The caller's word that tokens are appended and nothing else ever happens to the cache: then nothing is compared.

    Attributes
    ----------
    rebuilt : int
        Pages, in every head and row, summarized again because some of their keys had changed.
    """

    def __init__(self, config: LocksConfig, keys: Tensor, only_grows: bool = False) -> None:
        self._config, self._only_grows = config, only_grows
        self._keys = torch.unflatten(keys[..., :0, :], -2, (0, config.page_size)).clone()
        self._stale = torch.zeros(0, dtype=torch.bool, device=keys.device)
        self._records = summarize(self._keys, config).pack()
        self._summary: PageSummary | None = None
        self._described: tuple[Hashable, tuple[Tensor, ...]] = None, ()
        self.rebuilt = 0

    @property
    def count(self) -> int:
        """Complete pages."""
        return int(self._keys.shape[-3])

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return int(self._keys.shape[0])

    def update(self, keys: Tensor) -> None:
        """Take a step's keys, as in the constructor."""
        complete, size = keys.shape[-2] // self._config.page_size, self._config.page_size
        now = torch.unflatten(keys[..., : complete * size, :], -2, (complete, size))
        if self._only_grows:
            if complete < self.count:
                found = f"{complete} complete pages after {self.count}"
                raise reject("keys", found, "a cache that only grows", "Leave only_grows out.")
            if complete > self.count:
                self._stale = torch.cat([self._stale, self._stale.new_ones(complete - self.count)])
                self._summary = None
            self._keys = now  # the cache's own
            return
        known = min(self.count, complete)
        changed = _differ(self._keys[..., :known, :, :], now[..., :known, :, :])
        if bool(changed.any()) or known != self.count or complete > known:
            self.rebuilt += int((changed & ~self._stale[:known]).sum())
            new = torch.ones(complete - known, dtype=torch.bool, device=keys.device)
            self._stale = torch.cat([self._stale[:known] | changed, new])
            self._keys, self._summary, self._described = now.clone(), None, (None, ())

    def keys(self) -> Tensor:
        """(rows, kv_heads, P, page_size, head_dim)."""
        return self._keys

    def summary(self) -> PageSummary:
        """Summaries of the (rows, kv_heads, P) complete pages."""
        if self._summary is None:
            records = self._records.new_zeros(*self._keys.shape[:3], self._records.shape[-1])
            known = min(records.shape[2], self._records.shape[2])
            records[:, :, :known] = self._records[:, :, :known]
            for stale in torch.split(self._stale.nonzero().squeeze(-1), self._at_once()):
                records[:, :, stale] = summarize(self._keys[:, :, stale], self._config).pack()
            self._records, self._stale = records, torch.zeros_like(self._stale)
            self._summary = PageSummary.unpack(records, self._keys.shape[-1], self._config)
        return self._summary

    def described(self, name: Hashable, describe: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """As `selectors.base.described`; the last description is kept, by its name."""
        tensors = self._described[1] if self._described[0] == name else ()
        known = tensors[0].shape[2] if tensors else 0
        if known < self.count or not tensors:
            parts = [describe(part) for part in torch.split(self._keys[:, :, known:], self._at_once(), 2)]
            if known:
                parts.insert(0, tensors)
            tensors = tuple(torch.cat(each, 2) for each in zip(*parts, strict=True))
            self._described = name, tensors
        return tensors

    def _at_once(self) -> int:
        """Pages that are summarized or described at a time."""
        return max(1, SUMMARIZED // max(1, self._keys[:, :, :1].numel()))


def same_bits(before: Tensor, now: Tensor) -> bool:
    """Whether two tensors of one type are the same bit by bit, so that NaN equals itself."""
    return before.shape == now.shape and not bool(_unlike(before, now).any())


def _unlike(before: Tensor, now: Tensor) -> Tensor:
    bits = _BITS[now.element_size()]
    unlike: Tensor = before.contiguous().view(bits) != now.contiguous().view(bits)
    return unlike


def _differ(before: Tensor, now: Tensor) -> Tensor:
    """bool (P,): pages of which any row's or head's keys differ."""
    return _unlike(before, now).flatten(3).any(-1).flatten(0, 1).any(0)
