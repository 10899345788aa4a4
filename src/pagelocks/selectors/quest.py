"""Quest: a page is the smallest box, channel by channel, that holds its keys (Tang et al., arXiv 2406.10774)."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import PageSource, described, log_size


class Quest:
    """s_g(j) = sum_d max(q_d min_i k_id, q_d max_i k_id) * scale + log B: no page has more log-mass.

    Reads 2 d numbers a page, 4 d bytes in bf16.  The original ranks pages for each query head by the bound alone and
    leaves the first two layers dense; here heads of a group share their pages by the softmax of their bounds, as with
    every selector, and all layers are sparse.
    """

    def log_mass(self, query: Tensor, pages: PageSource, scale: float) -> Tensor:
        """query (..., G, d) -> fp32 (..., G, P); +inf where a page holds NaN or infinity."""
        low, high, tokens = box_of(pages)
        query = query.to(torch.float32)
        bound = query.clamp(min=0) @ high.mT + query.clamp(max=0) @ low.mT
        mass = bound * scale + tokens.unsqueeze(-2)
        # Least and largest are NaN where a key is.
        finite = (low.isfinite() & high.isfinite()).all(-1).unsqueeze(-2) & mass.isfinite()
        return torch.where(finite, mass, torch.inf)

    def page_bytes(self, head_dim: int, page_size: int = 16, itemsize: int = 2, group: int = 1) -> float:
        """The least and the largest of every channel."""
        return 2 * head_dim * itemsize


def box_of(pages: PageSource) -> tuple[Tensor, Tensor, Tensor]:
    """The least and the largest of every channel, fp32 (..., P, d), NaN where a key is; log B, fp32 (..., P)."""

    def describe(keys: Tensor) -> tuple[Tensor, ...]:
        return *torch.aminmax(keys, dim=-2), log_size(keys)

    low, high, size = described(pages, "box", describe)
    return low.to(torch.float32), high.to(torch.float32), size
