"""What a selector may look at, and what it must answer."""

from __future__ import annotations

from typing import Protocol

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


class Selector(Protocol):
    """Estimates the log-mass of every complete page; shares, budget and ties are the same for all selectors."""

    def log_mass(self, query: Tensor, pages: PageSource, scale: float) -> Tensor:
        """query (..., G, d) -> fp32 (..., G, P), natural log."""
        ...
