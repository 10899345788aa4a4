"""LOCKS with a second look: its summaries make a shortlist, the shortlist's own keys decide.  Our own."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import LocksConfig, reject
from ..score import page_share
from .base import PageSource
from .exact import log_mass_of
from .locks import Locks


class LocksReranked:
    """s_g(j) = logsumexp_i(q_g . k_i * scale) for the `factor` budgets' pages of largest estimated share, else LOCKS'.

    A summary errs most where a budget of few pages has to tell look-alikes apart: the right pages are then not first,
    but near the front.  Exact log-masses of a few times the budget's pages put them in order.  How many those are
    depends on the budget, not on the length: at a million tokens and a budget of 2,048, three budgets are 0.6% of the
    keys, where all summaries are 10% of K and V.  Not in the paper.

    Parameters
    ----------
    config : LocksConfig, optional
        For the budget and the page size.
    factor : int
        Pages looked at, in budgets; 2 or more.
    """

    def __init__(self, config: LocksConfig | None = None, factor: int = 3) -> None:
        if type(factor) is not int or factor < 2:
            raise reject("factor", factor, "a whole number, 2 or more", "Use 3; 1 would leave nothing to put in order.")
        self._config, self.factor = config or LocksConfig(), factor

    def log_mass(self, query: Tensor, pages: PageSource, scale: float) -> Tensor:
        """query (..., G, d) -> fp32 (..., G, P); +inf where a page holds NaN or infinity."""
        mass = Locks().log_mass(query, pages, scale)
        count = min(pages.count, self.factor * self._config.budget_pages)
        if not count:
            return mass
        length = torch.tensor(pages.count * self._config.page_size)
        share = page_share(mass, length, self._config)
        best = share.sort(dim=-1, descending=True, stable=True).indices[..., :count]  # (..., C)
        keys = pages.keys()
        where = best[..., None, None].expand(*best.shape, *keys.shape[-2:])
        exact = log_mass_of(query, keys.gather(-3, where), scale)
        return mass.scatter(-1, best.unsqueeze(-2).expand_as(exact), exact)

    def page_bytes(self, head_dim: int, page_size: int = 16, itemsize: int = 2, group: int = 1) -> float:
        """As LOCKS, for every page.

        Not counted: the shortlist's keys, `factor * budget * head_dim * itemsize` bytes a KV head and step.
        """
        return Locks().page_bytes(head_dim, page_size, itemsize, group)
