"""ShadowKV: a page is its mean key, and the pages that a mean describes worst are always read (arXiv 2410.21465)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from ..config import LocksConfig, reject
from .base import PageSource, described, log_size


class ShadowKV:
    """s_g(j) = q_g . mean(k_i) * scale + log B, but +inf for the o outliers (Sun et al., arXiv 2410.21465).

    Outliers are the pages of the least min_i cos(k_i, mean(k)), each KV head for itself; they are attended whatever
    the query and stay out of the softmax over the others.  Reads d numbers a page, 2 d bytes in bf16; a cache would
    also hold one cosine a page, read only when a page fills.

    As in the original, landmarks and cosines are of the keys after RoPE.  Otherwise:

    * The original's other half, keys before RoPE as one low-rank product for each sequence (rank 160 for all KV heads
      together), holds the keys that chosen pages are attended with, so that values alone need be fetched.  It does not
      touch the choice.  Here chosen pages are attended with their exact keys, which flatters ShadowKV.
    * Its chunks are 8 tokens, here a page's.  Its outliers, 48 chunks = 384 tokens at a budget of 2,048 (its code for
      the CPU takes 24 chunks per 1,024 tokens), come on top of the budget, and so do a local window of the prompt's
      last 4 chunks and all generated tokens.  Here everything attended is inside the budget, as with every selector:
      outliers are by default the same 3/16 of it, and generated pages have landmarks like the prompt's.
    * It picks outliers once, after prefill, not among the local window; here at each call among all complete pages.
    * It merges a group's heads by the largest of their shares; here by the mean, as with every selector.

    Parameters
    ----------
    config : LocksConfig, optional
        For the budget.
    outliers : int, optional
        Pages a KV head always reads, 0 to the pages of the budget that are neither sink nor recent.
    """

    def __init__(self, config: LocksConfig | None = None, outliers: int | None = None) -> None:
        config = config or LocksConfig()
        most = config.budget_pages - config.sink_pages - config.recent_pages
        outliers = min(3 * config.budget_pages // 16, most) if outliers is None else outliers
        if type(outliers) is not int or not 0 <= outliers <= most:
            allowed = f"0 to {most}, the pages of a budget of {config.budget} that are neither sink nor recent"
            raise reject("outliers", outliers, allowed, "Leave it out for 3/16 of the budget.")
        self.outliers = outliers

    def log_mass(self, query: Tensor, pages: PageSource, scale: float) -> Tensor:
        """query (..., G, d) -> fp32 (..., G, P); +inf for outliers, and where a page holds NaN or infinity."""
        landmark, worst, size = described(pages, "shadowkv", _describe)
        mass = query.to(torch.float32) @ landmark.mT * scale + size.unsqueeze(-2)
        # A page of NaN is read anyway, so it must not take an outlier's place: no cosine is above 1.
        order = torch.where(worst.isfinite(), worst, 2.0).sort(dim=-1, stable=True).indices
        outlier = torch.zeros_like(worst, dtype=torch.bool).scatter(-1, order[..., : self.outliers], True)
        return torch.where(mass.isfinite() & ~outlier.unsqueeze(-2), mass, torch.inf)

    def page_bytes(self, head_dim: int, page_size: int = 16, itemsize: int = 2, group: int = 1) -> float:
        """The landmark."""
        return head_dim * itemsize


def _describe(keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Landmarks (..., P, d), each page's least cosine with its own (..., P), log B."""
    wide = keys.to(torch.float32)
    landmark = wide.mean(-2)
    return landmark, cosine_similarity(wide, landmark.unsqueeze(-2), dim=-1).amin(-1), log_size(keys)
