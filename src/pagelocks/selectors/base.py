"""What a selector may look at, and what it must answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from ..summary import PageSummary


class PageSource(Protocol):
    """The complete pages of a sequence, fetched only when asked for, so that a selector's reads are its own."""

    @property
    def count(self) -> int:
        """How many there are, P."""
        ...

    def summary(self) -> PageSummary:
        """Summaries of the (..., P) complete pages."""
        ...

    def keys(self) -> Tensor:
        """Their keys, (..., P, page_size, head_dim)."""
        ...


@runtime_checkable
class KeepingSource(PageSource, Protocol):
    """A source that keeps what was said of its pages while their keys stay the same, for one name at a time."""

    def described(self, name: Hashable, describe: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """As the function `described`."""
        ...


def described(
    pages: PageSource, name: Hashable, describe: Callable[[Tensor], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """What a selector knows of each page, made once where the source can keep it.

    Parameters
    ----------
    pages : PageSource
    name : tells this description from others, of another selector or of other options
    describe : keys (..., P, page_size, d) -> tensors (..., P, ...), each page by itself
    """
    return pages.described(name, describe) if isinstance(pages, KeepingSource) else describe(pages.keys())


def log_size(keys: Tensor) -> Tensor:
    """keys (..., P, page_size, d) -> fp32 (..., P): log of the page size, for descriptions."""
    return torch.full(keys.shape[:-2], math.log(keys.shape[-2]), dtype=torch.float32, device=keys.device)


class Selector(Protocol):
    """Estimates the log-mass of every complete page; shares, budget and ties are the same for all selectors."""

    def log_mass(self, query: Tensor, pages: PageSource, scale: float) -> Tensor:
        """query (..., G, d) -> fp32 (..., G, P), natural log; +inf: to be read exactly, -inf: never to be read."""
        ...

    def page_bytes(self, head_dim: int, page_size: int = 16, itemsize: int = 2, group: int = 1) -> float:
        """Bytes that a decode step reads to score one page of one KV head.

        Keys take `itemsize` bytes a number; `group` is the KV head's query heads.
        """
        ...


class Observer(Selector, Protocol):
    """A selector that learns from the steps before: one instance for one layer of one batch."""

    def observe(self, query: Tensor, keys: Tensor, scale: float) -> None:
        """Look at a step's queries and at all keys so far.

        Called in order, after every dense step (a prompt, or a part of one) and, with n = 1, after every sparse one;
        a step's `log_mass` comes before its `observe`.

        Parameters
        ----------
        query : (..., G, n, d)
            Of the last n tokens.
        keys : (..., T, d)
            Of all tokens up to and including these; query i sees the first T - n + i + 1 of them.
        scale : float
            Logits per unit of q . k.
        """
        ...


def observes(selector: Selector) -> TypeGuard[Observer]:
    """True if the selector must be shown every step."""
    return callable(getattr(selector, "observe", None))
