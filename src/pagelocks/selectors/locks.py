"""LOCKS: log-mass from each page's own low-rank summary (arXiv 2607.24555)."""

from __future__ import annotations

from torch import Tensor

from ..config import LocksConfig
from ..layout import record_layout
from ..score import log_mass
from .base import PageSource


class Locks:
    """Reads one record a page; `pagelocks.score.log_mass` is its definition."""

    def log_mass(self, query: Tensor, pages: PageSource, scale: float) -> Tensor:
        """query (..., G, d) -> fp32 (..., G, P)."""
        return log_mass(query, pages.summary(), scale)

    def page_bytes(self, head_dim: int, page_size: int = 16, itemsize: int = 2, group: int = 1) -> float:
        """One record of the default configuration; its size does not depend on `itemsize`."""
        # The least budget, and a rank that small pages allow: neither refuses a page size, and records know no budget.
        rank = min(LocksConfig.rank, page_size - 1)
        config = LocksConfig(budget=3 * page_size, rank=rank, page_size=page_size)
        return record_layout(head_dim, config).record_bytes
