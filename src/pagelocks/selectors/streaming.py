"""Streaming: the sink and the most recent pages, whatever the query (Xiao et al., arXiv 2309.17453)."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import PageSource

SPAN = 64.0
"""Log-mass from the first page to the last: enough that no two shares are alike, not so much that any is 0."""


class Streaming:
    """s_g(j) rises with j: the budget goes to the sink pages and a window at the end.  Reads nothing.

    The original keeps four sink tokens and numbers positions within the window anew; here the sink is
    `LocksConfig.sink_pages` and positions stay as they were, since prefill was dense.
    """

    def log_mass(self, query: Tensor, pages: PageSource, scale: float) -> Tensor:
        """query (..., G, d) -> fp32 (..., G, P)."""
        rise = torch.linspace(0, SPAN, pages.count, dtype=torch.float32, device=query.device)
        return rise.expand(*query.shape[:-1], pages.count)

    def page_bytes(self, head_dim: int, page_size: int = 16, itemsize: int = 2, group: int = 1) -> float:
        """None."""
        return 0
