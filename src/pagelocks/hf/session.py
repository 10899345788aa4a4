"""What a model's LOCKS layers share in Transformers: the options, each layer's rows, what they read."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..attend import sparse_attention
from ..config import LocksConfig, reject
from ..select import select_pages
from ..selectors import SELECTORS, SEQUENCE_SELECTORS
from ..selectors.base import PageSource, Selector, observes
from ..selectors.groups import group_rule
from .pages import CachedPages

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


class _Layer:
    """One layer's selector and rows."""

    def __init__(self, selector: Selector, observed: int = 0) -> None:
        self.selector = selector
        self.observed = observed  # tokens of a row that the selector has learnt from
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
    layers : layer -> its counts
    """

    config: LocksConfig
    selector: SelectorFactory
    group_rule: str = "share"
    on_step: Callable[[SparseStep], None] | None = None
    attend_all: bool = False
    layers: dict[int, LayerStatistics] = field(default_factory=dict)

    def __post_init__(self) -> None:
        group_rule(self.group_rule)
        self._state: dict[int, _Layer] = {}

    def statistics(self) -> LayerStatistics:
        """All layers together."""
        total = LayerStatistics()
        for layer in self.layers.values():
            for name in vars(total):
                setattr(total, name, getattr(total, name) + getattr(layer, name))
        return total

    def reset(self) -> None:
        """Forget counts, rows and what selectors have learnt."""
        self.layers.clear()
        self._state.clear()

    def counts(self, layer: int) -> LayerStatistics:
        """Those of one layer."""
        return self.layers.setdefault(layer, LayerStatistics())

    def selectors(self) -> dict[int, tuple[Selector, int]]:
        """Layer -> its selector of this batch, and the tokens that it has learnt from."""
        return {layer: (state.selector, state.observed) for layer, state in self._state.items()}

    def go_on_with(self, selectors: dict[int, tuple[Selector, int]]) -> None:
        """Take selectors that have learnt from the tokens in the cache, as `selectors` gives them."""
        self._state = {layer: _Layer(selector, observed) for layer, (selector, observed) in selectors.items()}

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
        name, before = type(state.selector).__name__, keys.shape[-2] - query.shape[-2]
        if state.observed != before:
            allowed = f"it learns from every token, and has seen {state.observed} of {before} before this step"
            remedy = "Prefill whole prompts of the same length, without a cache from elsewhere or assisted generation."
            raise reject("selector", name, allowed, remedy)
        state.selector.observe(query, keys, scale)
        state.observed = keys.shape[-2]

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
        counts, state = self.counts(layer), self._layer(layer)
        if rows not in state.pages:
            state.pages[rows] = CachedPages(config, keys)
        pages = state.pages[rows]
        if not pages.update(keys) and observes(state.selector):
            allowed = "it has learnt from keys that are no longer there"
            raise reject("selector", type(state.selector).__name__, allowed, "Generate without beams.")
        if tokens <= max(config.budget, config.dense_below):
            self.observe(layer, query.unsqueeze(-2), keys, scale)
            counts.rows_dense += len(rows)
            return None
        length = torch.tensor(tokens, device=keys.device)
        mass = state.selector.log_mass(query, pages, scale)
        self.observe(layer, query.unsqueeze(-2), keys, scale)
        share = group_rule(self.group_rule)(mass, length, config)
        chosen = select_pages(share, length, config)
        if self.on_step is not None:
            self.on_step(SparseStep(layer, rows, query, keys, values, pages, share, chosen, scale))
        if self.attend_all:
            counts.rows_dense += len(rows)
            return None
        counts.rows_sparse += len(rows)
        read = sum(len(set(head.flatten().tolist()) - {-1}) for head in chosen.flatten(0, 1))
        counts.pages_read += read
        counts.pages_skipped += config.pages_in(tokens) * len(rows) * keys.shape[1] - read
        if share.ndim == 3:
            return sparse_attention(query, keys, values, chosen, length, scale, config.page_size)
        keys, values = (x.unsqueeze(2).expand(*query.shape[:3], *x.shape[2:]) for x in (keys, values))
        return sparse_attention(query.unsqueeze(3), keys, values, chosen, length, scale, config.page_size).squeeze(3)

    def _layer(self, layer: int) -> _Layer:
        if layer not in self._state:
            self.begin(layer)
        return self._state[layer]


_SESSIONS: dict[int, Session] = {}
"""Identity of a model's configuration, which its attention modules share -> its session, while the model lives."""


def attach(
    model: nn.Module,
    config: LocksConfig | None = None,
    selector: str | SelectorFactory = "locks",
    group_rule: str = "share",
    on_step: Callable[[SparseStep], None] | None = None,
    attend_all: bool = False,
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
    on_step, attend_all
        As in `Session`.

    Returns
    -------
    Session; a model has one, the last.
    """
    config = config or LocksConfig()
    session = Session(config, _factory(selector, config), group_rule, on_step, attend_all)
    set_implementation: Any = getattr(model, "set_attn_implementation", None)
    if set_implementation is None:
        raise reject(
            "model", type(model).__name__, "a Transformers model is needed", "Load it with AutoModelForCausalLM."
        )
    set_implementation("locks")
    for key in _configurations(model):
        if key not in _SESSIONS:
            weakref.finalize(model, _SESSIONS.pop, key, None)
        _SESSIONS[key] = session
    return session


def _factory(selector: str | SelectorFactory, config: LocksConfig) -> SelectorFactory:
    if not isinstance(selector, str):
        return selector
    if selector in SELECTORS:
        return lambda layer: SELECTORS[selector]()
    if selector in SEQUENCE_SELECTORS:
        return lambda layer: SEQUENCE_SELECTORS[selector](config)
    known = ", ".join([*SELECTORS, *SEQUENCE_SELECTORS])
    remedy = "Give a function from a layer to a selector for one that was calibrated, or of your own."
    raise reject("selector", selector, f"one of {known}, or a function", remedy)


def detach(model: nn.Module, implementation: str = "sdpa") -> None:
    """Give a model dense attention again."""
    for key in _configurations(model):
        _SESSIONS.pop(key, None)
    model.set_attn_implementation(implementation)  # type: ignore[operator]


def session_of(module: nn.Module) -> Session:
    """An attention module's session; one with LOCKS' defaults where `attach` was not called."""
    key = id(module.config)
    if key not in _SESSIONS:
        _SESSIONS[key] = Session(LocksConfig(), lambda layer: SELECTORS["locks"]())
        weakref.finalize(module, _SESSIONS.pop, key, None)
    return _SESSIONS[key]


def _configurations(model: nn.Module) -> set[int]:
    return {id(module.config) for module in model.modules() if hasattr(module, "config")}
