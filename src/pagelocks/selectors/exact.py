"""The oracle: exact log-mass, at the price of reading every key."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import KeepingSource, PageSource


def log_mass_of(query: Tensor, keys: Tensor, scale: float, readable: Tensor | None = None) -> Tensor:
    """query (..., G, d), keys (..., P, B, d) -> fp32 (..., G, P); +inf where a page holds NaN or infinity.

    `readable`, if that is known, is False for such pages, bool (..., P).
    """
    count, size, _ = keys.shape[-3:]
    flat = keys.flatten(-3, -2).to(torch.float32)
    logits = torch.unflatten(query.to(torch.float32) @ flat.mT * scale, -1, (count, size))
    mass = logits.logsumexp(-1)
    # An infinite key may have a logit of -inf, which would go unnoticed in the sum.
    readable = finite_pages(keys) if readable is None else readable
    finite = readable.unsqueeze(-2) & mass.isfinite()
    return torch.where(finite, mass, torch.inf)


def finite_pages(keys: Tensor) -> Tensor:
    """keys (..., P, B, d) -> bool (..., P): neither NaN nor infinity among them."""
    return keys.isfinite().flatten(-2).all(-1)


class Exact:
    """s_g(j) = logsumexp_i(q_g . k_i * scale) over the page's keys; what every estimate is measured against."""

    def log_mass(self, query: Tensor, pages: PageSource, scale: float) -> Tensor:
        """query (..., G, d) -> fp32 (..., G, P); +inf where a page holds NaN or infinity."""
        if not isinstance(pages, KeepingSource):  # it would be read twice
            return log_mass_of(query, pages.keys(), scale)
        (readable,) = pages.described("finite", lambda keys: (finite_pages(keys),))
        return log_mass_of(query, pages.keys(), scale, readable)

    def page_bytes(self, head_dim: int, page_size: int = 16, itemsize: int = 2, group: int = 1) -> float:
        """Every key."""
        return page_size * head_dim * itemsize
