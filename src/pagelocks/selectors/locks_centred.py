"""LOCKS with centroids stored less the KV head's mean key: our own, for keys with channels that are always large."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import reject
from ..quantize import power_of_two, quantize
from .base import PageSource
from .locks import Locks


class LocksCentred:
    """s_g(j) = logsumexp_i( (q_g . (m + delta_j) + (V_j^T q_g) . c_i) * scale ),  delta_j = mu_j - m in int8.

    A centroid's int8 step follows its largest channel.  Where a few channels are large in all keys of a head, as in
    models with biased keys, all others are stored coarsely; what pages have in common need not be stored with each.
    q_g . m is the same for all pages and no share depends on it, so it costs a step nothing: records are as large as
    LOCKS', and all else in them is the same.  Not in the paper.

    Parameters
    ----------
    mean : (kv_heads, d)
        m of one layer, from other text.
    """

    def __init__(self, mean: Tensor) -> None:
        if mean.ndim != 2 or 0 in mean.shape:
            allowed = "a mean key is (kv_heads, head_dim)"
            raise reject("mean.shape", tuple(mean.shape), allowed, "Take the mean over a text's tokens.")
        if not bool(mean.isfinite().all()):
            raise reject("mean", "NaN or infinity", "finite keys", "Leave out the sequences that hold it.")
        self._mean = mean

    def log_mass(self, query: Tensor, pages: PageSource, scale: float) -> Tensor:
        """query (..., kv_heads, G, d) -> fp32 (..., kv_heads, G, P); +inf where a page holds NaN or infinity."""
        heads, head_dim = self._mean.shape
        if query.ndim < 3 or query.shape[-3] != heads or query.shape[-1] != head_dim:
            allowed = f"(..., {heads}, G, {head_dim}): the mean key is of {heads} KV heads of size {head_dim}"
            raise reject("query.shape", tuple(query.shape), allowed, "Use the mean key of the same layer.")
        summary, mass = pages.summary(), Locks().log_mass(query, pages, scale)
        unit = power_of_two(torch.where(summary.scorable, summary.exponent, 0)).unsqueeze(-1)
        mean = self._mean.to(query.device, torch.float64).unsqueeze(-2)
        codes, step = quantize((pages.keys().double().mean(-2) - mean) / unit, 8, -1)
        stored = codes.double() * step.double().unsqueeze(-1) * unit + mean
        moved = stored - summary.centroid_in_page_units().double() * unit
        moved = torch.where(summary.scorable.unsqueeze(-1) & moved.isfinite(), moved, 0)
        return mass + (query.double() @ moved.mT * scale).clamp(-1e38, 1e38).float()

    def page_bytes(self, head_dim: int, page_size: int = 16, itemsize: int = 2, group: int = 1) -> float:
        """As LOCKS; the mean key is read once for all pages and not counted."""
        return Locks().page_bytes(head_dim, page_size, itemsize, group)
