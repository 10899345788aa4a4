"""LOCKS: log-mass from each page's own low-rank summary (arXiv 2607.24555)."""

from __future__ import annotations

from torch import Tensor

from ..score import log_mass
from .base import PageSource


class Locks:
    """Reads one record a page; `pagelocks.score.log_mass` is its definition."""

    def log_mass(self, query: Tensor, pages: PageSource, scale: float) -> Tensor:
        """query (..., G, d) -> fp32 (..., G, P)."""
        return log_mass(query, pages.summary(), scale)
