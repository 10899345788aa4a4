"""What the eviction methods share: attention of the past, pages' scores from tokens' importances, eviction for good."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..config import LocksConfig, reject
from ..score import page_share
from ..select import select_pages
from .base import PageSource

CHUNK = 2**22
"""Weights held at a time, 16 MiB in fp32: with 14 heads, a 28,000-token prompt goes by 10 queries at a time."""
GPU_CHUNK = 2**27
"""On a GPU, 512 MiB, so that kernels are few and large; not tuned there yet."""

SPAN = 60.0
"""No page's log-mass is further below the best one's, so that a page that was not evicted has a share above 0."""


class Gaps(NamedTuple):
    """When keys were attended, fp32 (..., G, T) each, whole numbers: what `LazyEviction` learns.

    Attributes
    ----------
    threshold : the least weight that counts
    last, longest : the last t with a_g(t, i) >= threshold, and the longest gap between two such
    """

    threshold: float
    last: Tensor
    longest: Tensor


class Columns(NamedTuple):
    """What each key gets from some queries' attention a_g(t, i), fp32 (..., G, T) each.

    Attributes
    ----------
    sums, most : over those queries t
    gaps : continued from those given; None if none were
    """

    sums: Tensor
    most: Tensor
    gaps: Gaps | None


@dataclass(frozen=True)
class Passes:
    """Kernels that learn from a long prompt what PyTorch does here; each answers None of tensors that it is not for.

    Attributes
    ----------
    columns : (query (..., G, n, d), keys (..., T, d), scale, Gaps or None) -> Columns
        Causal attention of the last n of T tokens; all numbers are finite.
    likeness : (keys (..., T, d), inverse fp32 (..., T), threshold, (total, last, cosine)) -> the same of all T tokens
        As `rkv.Likeness` has them, of which those of the first tokens are known; `inverse` is one over each key's norm,
        and 0 for a key that takes no part, whatever it holds.
    """

    columns: Callable[[Tensor, Tensor, float, Gaps | None], Columns | None]
    likeness: Callable[[Tensor, Tensor, float, tuple[Tensor, Tensor, Tensor]], tuple[Tensor, Tensor, Tensor] | None]


passes: Passes | None = None
"""Tried before PyTorch, once `eval.passes.use` was called: this module needs nothing but PyTorch itself."""


class History(ABC):
    """A selector that scores pages by what happened before, whatever the query, and may evict them for good.

    A page that holds NaN or infinity has log-mass +inf, and its bad tokens get no attention.

    With a configuration, eviction is permanent, as published: `log_mass` makes the choice that `page_share` and
    `select_pages` make of its answer, for a sequence of one token more than was observed, and every complete page that
    is left out has log-mass -inf and gets no attention from then on.  That choice is by the group rule "share",
    whatever rule the pages are read by.  Without, every page may come back, which is more than these methods do.
    Observing then reads every key at every step: compare quality, not cost.

    Parameters
    ----------
    config : LocksConfig, optional
        That by which pages are chosen; without one, pages have 16 tokens and none is evicted.
    permanent : bool
        False: evict nothing, in spite of a configuration.
    """

    def __init__(self, config: LocksConfig | None = None, *, permanent: bool = True) -> None:
        self._permanent = permanent
        self._config = config or LocksConfig()
        self._budget = config.budget_pages if config is not None else None
        self._tokens = 0
        self._prompt: int | None = None  # tokens before the first choice of pages
        self._unreadable: Tensor | None = None  # bool (..., T)
        self._evicted: Tensor | None = None  # bool (..., P)

    @abstractmethod
    def _learn(self, query: Tensor, keys: Tensor, scale: float) -> None:
        """Take a step; `self._tokens` are those before it."""

    @abstractmethod
    def _score(self, count: int) -> Tensor:
        """fp32 (..., 1 or G, count): the first pages' log-mass; -inf allowed."""

    def observe(self, query: Tensor, keys: Tensor, scale: float) -> None:
        """query (..., G, n, d) of the last n of T tokens, keys (..., T, d) of all: every step, in order."""
        self._check(query, keys)
        self._learn(query, keys, scale)
        self._tokens = keys.shape[-2]

    def _check(self, query: Tensor, keys: Tensor) -> None:
        lead, steps, tokens = keys.shape[:-2], query.shape[-2], keys.shape[-2]
        if query.shape[:-3] != lead or query.shape[-1] != keys.shape[-1]:
            allowed = f"keys of shape {tuple(keys.shape)} go with queries (*{tuple(lead)}, G, n, {keys.shape[-1]})"
            raise reject("query.shape", tuple(query.shape), allowed, "Group the query heads by KV head.")
        if tokens != self._tokens + steps or (self._unreadable is not None and self._unreadable.shape[:-1] != lead):
            allowed = f"{self._tokens} tokens were observed before these {steps}, in one and the same batch"
            raise reject("keys.shape", tuple(keys.shape), allowed, "Observe every step in order; one instance a batch.")
        new = ~keys[..., self._tokens :, :].isfinite().all(-1)
        self._unreadable = new if self._unreadable is None else torch.cat([self._unreadable, new], -1)

    def for_budget(self, config: LocksConfig) -> Self:
        """One that has learnt the same and chooses by `config`, instead of a new one that is shown the same steps.

        What either learns from then on, the other does not.

        Raises
        ------
        ValueError
            After the first selection, which was by a budget, or for pages of another size.
        """
        if self._prompt is not None or config.page_size != self._config.page_size:
            allowed = f"before the first selection, with page_size={self._config.page_size}"
            raise reject("config", config, allowed, "Make one for each budget once the prompt has been observed.")
        twin = copy.copy(self)  # states are replaced, never changed in place
        twin._config, twin._budget = config, config.budget_pages
        return twin

    def log_mass(self, query: Tensor, pages: PageSource, scale: float) -> Tensor:
        """query (..., G, d), of which only the shape matters -> fp32 (..., G, P); see the class for +inf and -inf."""
        count, size = pages.count, self._config.page_size
        if count * size > self._tokens + 1 or self._unreadable is None:
            allowed = f"{self._tokens} tokens were observed, {size} a page, and the step's own may complete a page"
            raise reject("pages.count", count, allowed, "Observe every step before, and give the pages' size.")
        if self._prompt is None:
            self._prompt = self._tokens
        if not count:
            return torch.zeros(*query.shape[:-1], 0, dtype=torch.float32, device=query.device)
        mass = self._score(count)
        mass = mass.maximum(_peak(mass) - SPAN)
        mass = mass.masked_fill(self._pages(self._unreadable, count).any(-1).unsqueeze(-2), torch.inf)
        if self._permanent and self._budget is not None:
            mass = self._evict(mass)
        return mass.expand(*query.shape[:-1], count)

    def page_bytes(self, head_dim: int, page_size: int = 16, itemsize: int = 2, group: int = 1) -> float:
        """One fp32 score a token and query head."""
        return 4 * page_size * group

    def _evict(self, mass: Tensor) -> Tensor:
        count, length = mass.shape[-1], torch.tensor(self._tokens + 1)
        if self._evicted is None:
            self._evicted = mass.new_zeros((*mass.shape[:-2], 0), dtype=torch.bool)
        evicted = pad(self._evicted, (0, max(0, count - self._evicted.shape[-1])))
        mass = mass.masked_fill(evicted[..., :count].unsqueeze(-2), -torch.inf)
        chosen = select_pages(page_share(mass, length, self._config), length, self._config).to(torch.int64)
        # Pages not counted yet, such as the one in progress, share a column that is thrown away.
        chosen = torch.where((chosen < 0) | (chosen >= count), count, chosen)
        kept = mass.new_zeros((*mass.shape[:-2], count + 1), dtype=torch.bool).scatter(-1, chosen, True)[..., :count]
        evicted[..., :count] |= ~kept
        self._evicted = evicted
        return mass.masked_fill(evicted[..., :count].unsqueeze(-2), -torch.inf)

    def _pages(self, tokens: Tensor, count: int) -> Tensor:
        """(..., T) -> (..., count, page_size): the first pages, a missing last token being 0."""
        size = self._config.page_size
        return torch.unflatten(pad(tokens, (0, count * size - tokens.shape[-1])), -1, (count, size))

    def _gone(self, tokens: int) -> Tensor:
        """bool (..., tokens): of no use to attention, being unreadable or evicted."""
        assert self._unreadable is not None
        gone = self._unreadable[..., :tokens]
        if self._evicted is None:
            return gone
        evicted = self._evicted.repeat_interleave(self._config.page_size, -1)
        return gone | pad(evicted, (0, tokens - evicted.shape[-1]))

    def _attention(
        self, query: Tensor, keys: Tensor, scale: float, plain: bool | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Causal attention of the last n tokens, by chunks of queries; `plain` is `_plain`'s answer, if it was asked.

        Yields
        ------
        (position of the chunk's first query, fp32 (..., G, m, keys that its last query sees))
        """
        group, steps, tokens = query.shape[-3], query.shape[-2], keys.shape[-2]
        rows = max(1, chunk_on(keys) // max(1, query.shape[:-2].numel() * tokens))
        if plain is None:
            plain = self._plain(query, keys, scale)
        keys, gone = keys.to(torch.float32), self._gone(tokens)
        for start in range(0, steps, rows):
            part = query[..., start : start + rows, :].to(torch.float32)
            first = tokens - steps + start
            seen = first + part.shape[-2]
            # Heads and queries as one dimension: broadcasting over heads would copy the keys for each.
            logits = torch.unflatten(part.flatten(-3, -2) @ keys[..., :seen, :].mT, -2, (group, -1)).mul_(scale)
            # In place, for these are most of the time.  No infinity stays that would make a softmax NaN.
            if not plain:
                logits.nan_to_num_(-torch.inf, 1e38, -1e38).masked_fill_(gone[..., None, None, :seen], -torch.inf)
            future = torch.ones(part.shape[-2], part.shape[-2], dtype=torch.bool, device=keys.device).triu(1)
            logits[..., first:].masked_fill_(future, -torch.inf)
            weights = logits.softmax(-1)
            yield first, weights if plain else weights.nan_to_num_(0)  # NaN for a query that sees no key

    def _plain(self, query: Tensor, keys: Tensor, scale: float) -> bool:
        """No key is hidden and no logit can overflow; False, unasked, with fewer queries than channels.

        To ask, a GPU is waited for, and keys are read.  It saves looks at all weights, which are more where queries are
        many.
        """
        if query.shape[-2] < query.shape[-1] or bool(self._gone(keys.shape[-2]).any()):
            return False
        return _largest(query) * _largest(keys) * query.shape[-1] * max(1.0, abs(scale)) < 1e37


class Watching(History):
    """One that learns from all attention there is."""

    @abstractmethod
    def _prepare(self, query: Tensor, tokens: int) -> None:
        """Make room for a step that ends at so many tokens, before its attention comes."""

    @abstractmethod
    def _add_weights(self, first: int, weights: Tensor) -> None:
        """Learn from some queries' attention, as `_attention` yields it; it is not to be changed."""

    @abstractmethod
    def _add_columns(self, columns: Columns) -> None:
        """Learn from what all queries of a step gave to each key, instead."""

    def _gaps(self) -> Gaps | None:
        """Those so far; None for one that does not look at them."""
        return None

    def _learn(self, query: Tensor, keys: Tensor, scale: float) -> None:
        _watch([self], query, keys, scale)


def observe_together(members: Sequence[History], query: Tensor, keys: Tensor, scale: float) -> None:
    """As `observe` of each; the attention that several of them look at is computed once.  None has evicted yet."""
    for member in members:
        member._check(query, keys)
    _watch([member for member in members if isinstance(member, Watching)], query, keys, scale)
    for member in members:
        if not isinstance(member, Watching):
            member._learn(query, keys, scale)
        member._tokens = keys.shape[-2]


def _watch(members: Sequence[Watching], query: Tensor, keys: Tensor, scale: float) -> None:
    """Let all of them learn from one pass over a step's attention."""
    if not members:
        return
    for member in members:
        member._prepare(query, keys.shape[-2])
    plain = members[0]._plain(query, keys, scale)
    gaps = [each for each in (member._gaps() for member in members) if each is not None]
    columns = None
    if passes is not None and plain and len(gaps) < 2:
        columns = passes.columns(query, keys, scale, gaps[0] if gaps else None)
    if columns is not None:
        for member in members:
            member._add_columns(columns)
        return
    for first, weights in members[0]._attention(query, keys, scale, plain):
        for member in members:
            member._add_weights(first, weights)


def chunk_on(tensor: Tensor) -> int:
    """Numbers held at a time on this tensor's device."""
    return CHUNK if tensor.device.type == "cpu" else GPU_CHUNK


def _largest(numbers: Tensor) -> float:
    """The largest magnitude; NaN if there is one."""
    low, high = torch.aminmax(numbers)
    return max(-float(low), float(high))


def grow(state: Tensor | None, like: Tensor, tokens: int) -> Tensor:
    """A state (..., T') with zeros up to `tokens`; if None, fp32 with the leading dimensions of like, (..., n, d)."""
    if state is None:
        state = like.new_zeros((*like.shape[:-2], 0), dtype=torch.float32)
    return pad(state, (0, tokens - state.shape[-1]))


def protect(mass: Tensor, first: int, count: int) -> Tensor:
    """(..., first or more) -> (..., count): pages from `first` on come before all others, the later the earlier."""
    if first >= count:
        return mass[..., :count]
    page = torch.arange(first, count, device=mass.device)
    peak = _peak(mass[..., :first]) if first > 0 else mass.new_zeros((*mass.shape[:-1], 1))
    return torch.cat([mass[..., :first], peak + 1 + page / count], -1)


def check_number(name: str, value: object, least: int, what: str) -> None:
    """ValueError unless a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise reject(name, value, f"a whole number of at least {least}: {what}", f"Use {least} or more.")


def _peak(mass: Tensor) -> Tensor:
    """(..., 1): the largest finite one, or 0."""
    finite = mass.isfinite()
    peak = torch.where(finite, mass, -torch.inf).amax(-1, keepdim=True)
    return torch.where(peak.isfinite(), peak, 0)
