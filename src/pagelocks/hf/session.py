"""What a model's LOCKS layers share in Transformers: the options, each layer's rows, what they read."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..attend import sparse_attention
from ..config import LocksConfig, reject
from ..select import select_pages
from ..selectors import PageSource, Selector, make_selector, observes
from ..selectors.groups import group_rule
from .pages import CachedPages, same_bits

SelectorFactory = Callable[[int], Selector]
"""Layer -> a selector of its own for a new batch."""


@dataclass
class LayerStatistics:
    """Counts of one layer.  Pages are summed over KV heads; what every head of a group reads counts once."""

    rows_dense: int = 0
    rows_sparse: int = 0
    pages_read: int = 0
    pages_skipped: int = 0


@dataclass(frozen=True)
class SparseStep:
    """Sparse rows of one step in one layer, for `Session.on_step`; tensors are the step's own, not copies.

    Attributes
    ----------
    layer : int
    rows : their numbers in the batch: all of it, or one where rows differ in length
    query : (rows, kv_heads, G, head_dim);  keys, values : (rows, kv_heads, tokens, head_dim)
        Of the rows' own tokens, without padding; the last is the query's.
    source : the complete pages, as selectors see them
    share : fp32 (rows, kv_heads, P), or (rows, kv_heads, G, P) where each query head has pages of its own
    pages : int32 (rows, kv_heads, budget_pages), or (rows, kv_heads, G, budget_pages)
    scale : float
    """

    layer: int
    rows: tuple[int, ...]
    query: Tensor
    keys: Tensor
    values: Tensor
    source: PageSource
    share: Tensor
    pages: Tensor
    scale: float


class SeenMask(NamedTuple):
    """The mask of the layer before.

    Attributes
    ----------
    mask, layer : bool (rows, 1, n, tokens), and that layer
    sizes : rows, tokens and n
    spans : each row's own tokens, (first, one after the last)
    causal : whether the mask hides the future and nothing else; False, unasked, where that makes no difference
    """

    mask: Tensor
    layer: int
    sizes: tuple[int, int, int]
    spans: list[tuple[int, int]]
    causal: bool


class _Layer:
    """One layer's selector and rows."""

    def __init__(self, selector: Selector, observed: int = 0) -> None:
        self.selector = selector
        self.observed = observed  # tokens of a row that the selector has learnt from
        self.keys: Tensor | None = None  # theirs
        self.pages: dict[tuple[int, ...], CachedPages] = {}


@dataclass
class Session:
    """LOCKS, or another selector, in one model; from `attach`.

    Attributes
    ----------
    config : LocksConfig
    selector : the factory;  group_rule : the rule's name
    on_step : called with each `SparseStep`, after its pages are chosen and before they are attended
    attend_all : choose pages and tell `on_step`, but attend everything
    only_grows : the caller's word that each cache is only ever appended to; keys are then not compared step by step
    """

    config: LocksConfig
    selector: SelectorFactory
    group_rule: str = "share"
    on_step: Callable[[SparseStep], None] | None = None
    attend_all: bool = False
    only_grows: bool = False

    def __post_init__(self) -> None:
        group_rule(self.group_rule)
        self._state: dict[int, _Layer] = {}
        self._counts: dict[int, LayerStatistics] = {}
        # Layer -> pages read, a number on the device, and pages there were: of steps that are not in `_counts` yet.
        self._unsettled: dict[int, tuple[Tensor, int]] = {}
        self.mask_seen: SeenMask | None = None

    def statistics(self) -> LayerStatistics:
        """All layers together."""
        total = LayerStatistics()
        for layer in self._counts:
            for name, count in vars(self.counts(layer)).items():
                setattr(total, name, getattr(total, name) + count)
        return total

    def counts(self, layer: int) -> LayerStatistics:
        """Those of one layer, up to now; waits for the GPU."""
        counts = self._counts.get(layer, LayerStatistics())
        if layer in self._unsettled:
            on_device, pages = self._unsettled.pop(layer)
            read = int(on_device)
            counts.pages_read += read
            counts.pages_skipped += pages - read
        return replace(counts)

    def selectors(self) -> dict[int, tuple[Selector, int]]:
        """Layer -> its selector of this batch, and the tokens that it has learnt from."""
        return {layer: (state.selector, state.observed) for layer, state in self._state.items()}

    def go_on_with(
        self, selectors: dict[int, tuple[Selector, int]], pages: dict[int, CachedPages] | None = None
    ) -> None:
        """Take selectors that have learnt from the tokens in the cache, as `selectors` gives them.

        `pages`, layer -> the pages of all rows, saves summarizing them again; the session takes copies.
        """
        self._state = {layer: _Layer(selector, observed) for layer, (selector, observed) in selectors.items()}
        for layer, each in (pages or {}).items():
            self._state[layer].pages[tuple(range(each.rows))] = copy(each)

    def begin(self, layer: int) -> None:
        """A new batch: a selector of its own, and no rows."""
        self._state[layer] = _Layer(self.selector(layer))

    def observe(self, layer: int, query: Tensor, keys: Tensor, scale: float) -> None:
        """Let the selector learn from a step of all rows.

        Parameters
        ----------
        query : (rows, kv_heads, G, n, head_dim);  keys : (rows, kv_heads, tokens, head_dim)
        """
        state = self._layer(layer)
        if not observes(state.selector):
            return
        self._check_learnt(state, keys, keys.shape[-2] - query.shape[-2])
        state.selector.observe(query, keys, scale)
        # A copy: a static cache is written over in place, by another prompt's keys too.
        state.observed, state.keys = keys.shape[-2], None if self.only_grows else keys.clone()

    def attend(
        self, layer: int, rows: tuple[int, ...], query: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> Tensor | None:
        """Attention of rows that are alike in length, for one token each.

        Parameters
        ----------
        rows : their numbers in the batch
        query : (rows, kv_heads, G, head_dim);  keys, values : (rows, kv_heads, tokens, head_dim)

        Returns
        -------
        (rows, kv_heads, G, head_dim), or None where they attend everything
        """
        config, tokens = self.config, keys.shape[-2]
        counts, state = self._counts.setdefault(layer, LayerStatistics()), self._layer(layer)
        if rows not in state.pages:
            state.pages[rows] = CachedPages(config, keys, self.only_grows)
        pages = state.pages[rows]
        pages.update(keys)
        if observes(state.selector):
            self._check_learnt(state, keys, tokens - 1)
        if tokens <= max(config.budget, config.dense_below):
            self.observe(layer, query.unsqueeze(-2), keys, scale)
            counts.rows_dense += len(rows)
            return None
        length = torch.tensor(tokens)
        mass = state.selector.log_mass(query, pages, scale)
        share = group_rule(self.group_rule)(mass, length, config)
        chosen = select_pages(share, length, config)
        if self.on_step is not None:
            self.on_step(SparseStep(layer, rows, query, keys, values, pages, share, chosen, scale))
        self.observe(layer, query.unsqueeze(-2), keys, scale)
        if self.attend_all:
            counts.rows_dense += len(rows)
            return None
        counts.rows_sparse += len(rows)
        held = config.pages_in(tokens) * len(rows) * keys.shape[1]
        read, there_were = self._unsettled.get(layer, (0, 0))
        self._unsettled[layer] = read + distinct_pages(chosen).sum(), there_were + held
        if share.ndim == 3:
            return sparse_attention(query, keys, values, chosen, length, scale, config.page_size)
        keys, values = (x.unsqueeze(2).expand(*query.shape[:3], *x.shape[2:]) for x in (keys, values))
        return sparse_attention(query.unsqueeze(3), keys, values, chosen, length, scale, config.page_size).squeeze(3)

    @staticmethod
    def _check_learnt(state: _Layer, keys: Tensor, before: int) -> None:
        """Raise unless the selector has learnt from the first `before` tokens of these keys and no others."""
        name = type(state.selector).__name__
        remedy = "Prefill whole prompts of one length, and generate from them alone."
        if state.observed != before:
            allowed = f"it learns from every token, and has seen {state.observed} of {before} before this step"
            raise reject("selector", name, allowed, remedy)
        if state.keys is not None and not same_bits(state.keys, keys[..., :before, :]):
            raise reject("selector", name, "it has learnt from keys that are no longer there", remedy)

    def _layer(self, layer: int) -> _Layer:
        if layer not in self._state:
            self.begin(layer)
        return self._state[layer]


def distinct_pages(pages: Tensor) -> Tensor:
    """How many pages a step lists for each row, int64 (rows,): over KV heads, what a group's query heads share once.

    `pages` is as in `SparseStep`.
    """
    if pages.ndim == 3:
        return (pages >= 0).flatten(1).sum(-1)  # a list names a page once
    listed = pages.flatten(2).sort(-1).values
    first = listed != torch.nn.functional.pad(listed, (1, 0), value=-1)[..., :-1]
    return ((listed >= 0) & first).flatten(1).sum(-1)


_SESSION = "_locks_session"  # the attribute of an attention module


def attach(
    model: nn.Module,
    config: LocksConfig | None = None,
    selector: str | SelectorFactory = "locks",
    group_rule: str = "share",
    on_step: Callable[[SparseStep], None] | None = None,
    attend_all: bool = False,
    only_grows: bool = False,
) -> Session:
    """Have a model's single-token steps select pages.

    Parameters
    ----------
    model : a Transformers model
        Its attention becomes "locks", whatever it was.
    config : LocksConfig, optional
    selector : str or callable
        A name in `SELECTORS` or `SEQUENCE_SELECTORS`, or layer -> a selector, called for each new batch.
    group_rule : str
        A name in `GROUP_RULES`.
    on_step, attend_all, only_grows
        As in `Session`.

    Returns
    -------
    Session; a model has one, the last, and a copy of the model a copy of it.
    """
    config = config or LocksConfig()
    if isinstance(selector, str):
        make_selector(selector, config)  # raises if there is none of this name
        name: str = selector
        selector = lambda layer: make_selector(name, config)  # noqa: E731
    session = Session(config, selector, group_rule, on_step, attend_all, only_grows)
    set_implementation: Any = getattr(model, "set_attn_implementation", None)
    if set_implementation is None:
        remedy = "Load it with AutoModelForCausalLM."
        raise reject("model", type(model).__name__, "a Transformers model is needed", remedy)
    set_implementation("locks")
    implementation = model.config.get_text_config()._attn_implementation  # type: ignore[operator, union-attr]
    if implementation != "locks":
        allowed = "its attention does not go through Transformers' AttentionInterface"
        raise reject("model", type(model).__name__, allowed, "Use another model.")
    use(model, session)
    return session


def use(model: nn.Module, session: Session) -> None:
    """Go on with a session that `attach` made for this model: several take turns, each with a cache of its own."""
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            setattr(module, _SESSION, session)


def detach(model: nn.Module, implementation: str = "sdpa") -> None:
    """Give a model dense attention again."""
    for module in model.modules():
        if hasattr(module, _SESSION):
            delattr(module, _SESSION)
    model.set_attn_implementation(implementation)  # type: ignore[operator]


def session_of(module: nn.Module) -> Session:
    """An attention module's session; one of its own, with LOCKS' defaults, where `attach` was not called."""
    session = getattr(module, _SESSION, None)
    if session is None:
        session = Session(LocksConfig(), lambda layer: make_selector("locks", LocksConfig()))
        setattr(module, _SESSION, session)
    assert isinstance(session, Session)
    return session
