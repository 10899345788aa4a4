"""Loki: keys seen through the first principal components of a calibrated basis (Singhania et al., arXiv 2406.02542)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import reject
from .base import PageSource, described
from .exact import finite_pages

_ORTHONORMAL = 5e-3
"""How far a basis' Gram matrix may be from the identity: one rounded to bf16 is off by up to 2e-3."""


class Loki:
    """s_g(j) = logsumexp_i( (P_r^T q_g) . (P_r^T k_i) * scale ), P_r the first r principal components of one KV head.

    One basis serves all pages of all sequences.  Reads r numbers a key: 2 r B bytes a page in bf16, 1,024 for r = 32
    and B = 16, beside 832 of LOCKS; rank 26 costs as much as LOCKS.

    The original ranks single tokens, for each query head by itself, and attends the best of them exactly; here the
    approximate logits of a page's tokens become its log-mass, and heads of a group share pages, as with every selector.
    It tries bases calibrated on keys before and after RoPE and takes the better one for a model; `calibrate` takes
    whatever keys it is given.  As in the original, the basis is that of centred keys while the keys it is applied to
    are not centred, logits are scaled by the full head size, and the keys are those after RoPE.

    Parameters
    ----------
    basis : (kv_heads, d, d)
        Of one layer; column j is component j, most variance first: see `calibrate`.
    rank : int, optional
        Components used, 1 to d; a quarter of d, which is the paper's usual choice, if left out.
    """

    def __init__(self, basis: Tensor, rank: int | None = None) -> None:
        if basis.ndim != 3 or basis.shape[-1] != basis.shape[-2] or 0 in basis.shape:
            allowed = "a basis is (kv_heads, head_dim, head_dim)"
            raise reject("basis.shape", tuple(basis.shape), allowed, "Make it with pagelocks.selectors.loki.calibrate.")
        basis = basis.to(torch.float32)
        identity = torch.eye(basis.shape[-1], device=basis.device)
        off = float((basis.mT @ basis - identity).abs().amax())
        if not off <= _ORTHONORMAL:
            allowed = f"columns are orthonormal, to {_ORTHONORMAL} in their products"
            raise reject("basis", f"off by {off:.2g}", allowed, "Make it with pagelocks.selectors.loki.calibrate.")
        head_dim = basis.shape[-1]
        rank = max(1, head_dim // 4) if rank is None else rank
        if type(rank) is not int or not 1 <= rank <= head_dim:
            raise reject("rank", rank, f"1 to the head size, {head_dim}", f"Use {max(1, head_dim // 4)}.")
        self.rank = rank
        self._components = basis[..., :rank]

    def log_mass(self, query: Tensor, pages: PageSource, scale: float) -> Tensor:
        """query (..., kv_heads, G, d) -> fp32 (..., kv_heads, G, P); +inf where a page holds NaN or infinity."""
        heads, head_dim, _ = self._components.shape
        if query.ndim < 3 or query.shape[-3] != heads or query.shape[-1] != head_dim:
            allowed = f"(..., {heads}, G, {head_dim}): the basis is of {heads} KV heads of size {head_dim}"
            raise reject("query.shape", tuple(query.shape), allowed, "Use the basis of the same layer.")
        components = self._components.to(query.device)

        def describe(keys: Tensor) -> tuple[Tensor, Tensor]:
            """What a cache would hold, (..., P, B, r); bool (..., P) where all keys are finite."""
            wide = keys.to(torch.float32)
            seen = torch.unflatten(wide.flatten(-3, -2) @ components, -2, wide.shape[-3:-1])
            return seen, finite_pages(keys)

        seen, readable = described(pages, self, describe)
        logits = query.to(torch.float32) @ components @ seen.flatten(-3, -2).mT * scale
        mass = torch.unflatten(logits, -1, seen.shape[-3:-1]).logsumexp(-1)
        finite = readable.unsqueeze(-2) & mass.isfinite()
        return torch.where(finite, mass, torch.inf)

    def page_bytes(self, head_dim: int, page_size: int = 16, itemsize: int = 2, group: int = 1) -> float:
        """The first `rank` components of every key; the basis is read once for all pages and not counted."""
        return page_size * min(self.rank, head_dim) * itemsize


def calibrate(keys: Tensor) -> Tensor:
    """The principal components of each KV head's keys in one layer.

    Parameters
    ----------
    keys : (..., kv_heads, T, d)
        A calibration set's keys as the cache holds them; leading dimensions are more of the same heads' keys.

    Returns
    -------
    fp32 (kv_heads, d, d); column j is component j, most variance around the mean first.
    """
    if keys.ndim < 3 or keys.shape[:-3].numel() * keys.shape[-2] < 2:
        allowed = "(..., kv_heads, T, head_dim) with two keys or more"
        raise reject("keys.shape", tuple(keys.shape), allowed, "Take the keys of some thousand tokens of text.")
    if not bool(keys.isfinite().all()):
        raise reject("keys", "NaN or infinity", "keys are finite", "Leave out the sequences that hold it.")
    samples = keys.to(torch.float64).movedim(-3, 0).flatten(1, -2)  # (kv_heads, samples, d)
    centred = samples - samples.mean(-2, keepdim=True)
    vectors: Tensor = torch.linalg.eigh(centred.mT @ centred / centred.shape[-2]).eigenvectors  # ascending
    return vectors.flip(-1).to(torch.float32)
