"""The second-moment family: a page is its keys' mean and covariance (COBS, arXiv 2607.09052; SPLA, 2601.22379)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..config import reject
from .base import PageSource, described, log_size
from .exact import finite_pages


class SecondMoment:
    """s_g(j) = q_g . mu * scale + v / 2 + log B,  v = scale^2 q_g^T Sigma q_g: the log-mass to second order.

    mu and Sigma are the mean and covariance of a page's B keys, so v is the variance of its logits; the estimate is
    exact where they are normally distributed and B is large, and off by their third cumulant / 6 where they are small.
    It knows nothing of a single key that stands out: of two pages with one mu and Sigma it cannot tell which holds it.

    Sigma is stored as sum_k w_k w_k^T + diag(e): its r first eigenvectors, each as long as the root of its eigenvalue,
    and the diagonal of what they leave.  Reads (2 + r) d numbers a page, 2 (2 + r) d bytes in bf16: 768 for the default
    r = 1 at d = 128, beside 832 of LOCKS.  At r = B - 1 Sigma is whole, and costs more than the keys.

    The family, not one method: COBS expands a block's log-mass in cumulants and SPLA its mass in a Taylor series, as
    `taylor` does: s = q_g . mu * scale + log(1 + v / 2) + log B.  Both stem from trained models (COBS from NSA, with
    selection before rotary positions; SPLA from continued training, with linear attention over what is not selected)
    and compress Sigma in ways of their own; this is training-free, on keys after RoPE, drops what is not selected, and
    merges heads as every selector here does.  What is said of the two is from their abstracts and others' accounts.

    Parameters
    ----------
    rank : int
        Eigenvectors of Sigma, 0 or more; those past B - 1 do not exist.
    diagonal : bool
        Whether the rest of Sigma is kept as its diagonal, or dropped.
    taylor : bool
        SPLA's form instead of COBS's.
    """

    def __init__(self, rank: int = 1, diagonal: bool = True, taylor: bool = False) -> None:
        if type(rank) is not int or rank < 0:
            raise reject("rank", rank, "a whole number, 0 or more", "Use 1, which reads about as much as LOCKS.")
        self.rank, self.diagonal, self.taylor = rank, diagonal, taylor

    def log_mass(self, query: Tensor, pages: PageSource, scale: float) -> Tensor:
        """query (..., G, d) -> fp32 (..., G, P); +inf where a page holds NaN or infinity."""
        mean, vectors, rest, finite, size = described(pages, (SecondMoment, self.rank, self.diagonal), self._describe)
        query = query.to(torch.float64)
        along = torch.unflatten(query @ vectors.flatten(-3, -2).mT, -1, vectors.shape[-3:-1])  # (..., G, P, r)
        variance = (along.square().sum(-1) + query.square() @ rest.mT) * scale**2
        spread = (variance / 2).log1p() if self.taylor else variance / 2
        mass = (query @ mean.mT * scale + spread + size.unsqueeze(-2)).to(torch.float32)
        return torch.where(finite.unsqueeze(-2) & mass.isfinite(), mass, torch.inf)

    def _describe(self, keys: Tensor) -> tuple[Tensor, ...]:
        """Mean (..., P, d), covariance in its two parts, bool (..., P) where all keys are finite, log B."""
        finite = finite_pages(keys)
        # float64: squares of large keys would not fit fp32, and the eigensolver refuses infinity.
        wide = torch.where(finite[..., None, None], keys, 0).to(torch.float64)
        mean = wide.mean(-2)
        return mean, *self._covariance(wide - mean.unsqueeze(-2)), finite, log_size(keys)

    def _covariance(self, deviations: Tensor) -> tuple[Tensor, Tensor]:
        """Sigma of centred pages (..., P, B, d), as rows w_k (..., P, r, d) and a diagonal e (..., P, d)."""
        size = deviations.shape[-2]
        rank = min(self.rank, size - 1)
        deviations = deviations / math.sqrt(size)
        vectors = deviations[..., :0, :]
        if rank:
            # Through the (B, B) Gram matrix, which is smaller than Sigma: with unit u, D^T u is w, length and all.
            tokens = torch.linalg.eigh(deviations @ deviations.mT).eigenvectors[..., -rank:]  # ascending
            vectors = tokens.mT @ deviations
        rest = deviations.square().sum(-2) - vectors.square().sum(-2)
        return vectors, rest.clamp(min=0) if self.diagonal else torch.zeros_like(rest)

    def page_bytes(self, head_dim: int, page_size: int = 16, itemsize: int = 2, group: int = 1) -> float:
        """The mean, the eigenvectors and the diagonal."""
        return (1 + min(self.rank, page_size - 1) + self.diagonal) * head_dim * itemsize
