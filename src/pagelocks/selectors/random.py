"""Random pages: the floor.  A task that random selection solves says nothing about a selector."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import PageSource


class Random:
    """Independent uniform log-masses, the same for all heads of a group; drawn anew at each call from one seed."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def log_mass(self, query: Tensor, pages: PageSource, scale: float) -> Tensor:
        """query (..., G, d) -> fp32 (..., G, P)."""
        draws = torch.rand((*query.shape[:-2], 1, pages.count), generator=self._generator).to(query.device)
        return draws.expand(*query.shape[:-1], pages.count)

    def page_bytes(self, head_dim: int, page_size: int = 16, itemsize: int = 2, group: int = 1) -> float:
        """None."""
        return 0
