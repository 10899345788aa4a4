"""Keys for timings: nothing is timed on zeros or on noise that a low rank cannot hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def like_real_keys(pages: int, heads: int, head_dim: int, dtype: torch.dtype, generator: Any) -> Tensor:
    """(pages, 16, heads, head_dim) with the within-page spectrum of real keys: singular values that fall 30-fold over a
    page, a large mean in some channels, pages apart from one another."""
    decay = torch.logspace(0, -1.5, 16, device="cuda")
    small = torch.randn(pages, heads, 16, 16, generator=generator, device="cuda") * decay
    keys = small @ torch.randn(pages, heads, 16, head_dim, generator=generator, device="cuda")
    keys += torch.randn(pages, heads, 1, head_dim, generator=generator, device="cuda")
    mean = torch.randn(heads, 1, head_dim, generator=generator, device="cuda")
    mean[..., ::29] *= 10
    return (keys + mean).transpose(1, 2).to(dtype)
