"""The centroid: a page is its mean key, the smallest page-local summary there is."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import PageSource, described, log_size


class Centroid:
    """s_g(j) = q_g . mean(k_i) * scale + log B: LOCKS at rank 0, unquantised.  2 d bytes a page in bf16."""

    def log_mass(self, query: Tensor, pages: PageSource, scale: float) -> Tensor:
        """query (..., G, d) -> fp32 (..., G, P); +inf where a page holds NaN or infinity."""
        mean, size = described(pages, "centroid", lambda keys: (keys.to(torch.float32).mean(-2), log_size(keys)))
        mass = query.to(torch.float32) @ mean.mT * scale + size.unsqueeze(-2)
        return torch.where(mass.isfinite(), mass, torch.inf)

    def page_bytes(self, head_dim: int, page_size: int = 16, itemsize: int = 2, group: int = 1) -> float:
        """The mean key."""
        return head_dim * itemsize
