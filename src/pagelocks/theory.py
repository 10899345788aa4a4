"""What LOCKS proves (arXiv 2607.24555, section 3 and Theorem 1), as functions that can be checked.

The bounds hold for unquantised summaries.  Bound (ii) is vacuous at the errors seen on real keys: it is here to be
checked, not to be advertised.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .config import LocksConfig
from .summary import summarize


def unquantised(rank: int, page_size: int) -> LocksConfig:
    """The configuration that the theorems speak of."""
    budget = 3 * page_size
    return LocksConfig(budget, rank, page_size, basis_bits=None, coefficient_bits=None)


def spectral_tail(keys: Tensor, rank: int) -> Tensor:
    """tau_j, the sum over k > rank of S_k^2, which this rank drops: keys (..., P, B, d) -> float64 (..., P)."""
    return summarize(keys, unquantised(rank, keys.shape[-2])).tail


def exact_log_mass(query: Tensor, keys: Tensor, scale: float) -> Tensor:
    """s_g(j) from the keys themselves: query (..., G, d), keys (..., P, B, d) -> float64 (..., G, P)."""
    logits = torch.einsum("...gd,...pbd->...gpb", query.double(), keys.double()) * scale
    return logits.logsumexp(-1)


def log_mass_error_bound(query: Tensor, keys: Tensor, rank: int, scale: float) -> Tensor:
    """Theorem 1 (i), page by page: |s^ - s| <= ||q_perp|| sqrt(tau_j) * scale.

    `q_perp` is the part of the query outside the page's basis.  query (..., G, d), keys (..., P, B, d) ->
    float64 (..., G, P); its maximum bounds eta.
    """
    summary = summarize(keys, unquantised(rank, keys.shape[-2]))
    basis = summary.basis_in_page_units().double()  # (..., P, r, d)
    query = query.double()
    projection = torch.einsum("...gd,...prd->...gpr", query, basis)
    outside = query.unsqueeze(-2) - torch.einsum("...gpr,...prd->...gpd", projection, basis)
    length: Tensor = torch.linalg.vector_norm(outside, dim=-1)
    return length * summary.tail.sqrt().unsqueeze(-2) * scale


def retention_bound(eta: Tensor) -> Tensor:
    """Theorem 1 (ii): the least part of the oracle's group-average coverage that a selection with error eta keeps."""
    return (-4 * eta).exp()


def output_error_bound(value_radius: Tensor, eta: Tensor, oracle_coverage: Tensor) -> Tensor:
    """Theorem 1 (iii): 2 R (1 - exp(-4 eta)) gamma*, what selecting by estimates can add to the output's error."""
    return 2 * value_radius * (1 - retention_bound(eta)) * oracle_coverage


def coverage(share: Tensor, pages: Tensor) -> Tensor:
    """gamma_S: the shares (..., P) of the listed pages (..., k), -1 for none, added up."""
    padded = torch.nn.functional.pad(share, (0, 1))
    index = torch.where(pages >= 0, pages, share.shape[-1]).to(torch.int64)
    return padded.gather(-1, index).sum(-1)


def output_identity(query: Tensor, keys: Tensor, values: Tensor, kept: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Eq. 1: o - o_S = (1 - gamma_S) (v_dropped - v_kept), mass-weighted means of the dropped and the kept values.

    query (..., G, d), keys and values (..., T, d), kept bool (..., T) with some tokens kept and some dropped;
    returns both sides, float64 (..., G, d).
    """
    logits = torch.einsum("...gd,...td->...gt", query.double(), keys.double()) * scale
    weight = logits.softmax(-1)
    inside = weight * kept.unsqueeze(-2)
    outside = weight - inside
    gamma = inside.sum(-1, keepdim=True)
    kept_mean = inside @ values.double() / gamma
    dropped_mean = outside @ values.double() / outside.sum(-1, keepdim=True)
    return weight @ values.double() - kept_mean, (1 - gamma) * (dropped_mean - kept_mean)


def blind_direction(shared: Tensor, toward: Tensor | None = None) -> Tensor:
    """A unit vector (d,) orthogonal to the columns of a shared projection (d, rho), rho < d.

    The one that is closest to `toward` (d,), a query, if that is given and has a part outside the projection.
    """
    full = torch.linalg.qr(shared.double(), mode="complete").Q
    outside = full[:, shared.shape[1] :]
    part = outside.new_zeros(outside.shape[1]) if toward is None else outside.mT @ toward.double()
    length = torch.linalg.vector_norm(part)
    direction: Tensor = outside @ part / length if length > 0 else outside[:, 0]
    return direction


def blind_page(page: Tensor, shared: Tensor, distance: float, toward: Tensor | None = None) -> Tensor:
    """Proposition 1's construction: a page that a shared projection cannot tell from `page`.

    Adds `distance` * u to the first key and takes it from the second, u orthogonal to `shared`: centroid and sketch
    stay, while the log-mass for any query with q . u > 0 grows without bound.  page (B, d), shared (d, rho), toward
    (d,) as in `blind_direction` -> float64 (B, d).
    """
    step = distance * blind_direction(shared, toward)
    moved = page.double().clone()
    moved[0] += step
    moved[1] -= step
    return moved
