"""What a basis of rank r holds of the keys, by the scope it was fitted to, and which pages are scored badly.

Everything is measured within pages: with D_j a page's keys less their mean, a basis W of orthonormal columns holds
||D_j W||^2 of the page's centred energy ||D_j||^2, wherever W comes from.  So scopes differ in W alone, every scope
being given the page's centroid for nothing.  That is more than the published methods of shared scope have (ShadowKV and
Loki rank tokens by uncentred keys): these figures compare scopes, not systems.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..config import reject
from .links import spearman

Centre = Literal["page", "sequence"]
_ORTHONORMAL = 1e-3  # what fp32 leaves of a basis is far below, a basis rounded to bf16 is above


@dataclass(frozen=True, eq=False)
class Energy:
    """Centred energy, float64 (H, P), in squared units of the keys: what a basis has `captured` of the `total`."""

    captured: Tensor
    total: Tensor

    @property
    def by_head(self) -> Tensor:
        """(H,): the fraction of a KV head's energy, pages of much energy counting more; 1 if it has none."""
        return _fraction(self.captured.sum(-1), self.total.sum(-1))


def page_energy(pages: Tensor, rank: int) -> Energy:
    """Scope of a page: each page's own best basis, so the sum of its `rank` largest squared singular values.

    Parameters
    ----------
    pages : floating (H, P, B, d)
        Keys of complete pages.
    rank : int
        1 to d; from B - 1 on, nothing is left to capture.

    Returns
    -------
    Energy
    """
    _check_rank(rank, pages)
    return Energy(_spectrum(pages)[..., :rank].sum(-1), _centred(pages).square().sum((-1, -2)))


def shared_basis(sequences: Sequence[Tensor], rank: int, centre: Centre = "page") -> Tensor:
    """The best basis of a KV head's keys in one sequence, or in a set of sequences to calibrate on.

    The `rank` leading eigenvectors of sum D^T D.  With `centre="page"`, D holds the keys less their page's mean: no
    shared basis captures more of the within-page energy of these keys.  With `centre="sequence"`, less the mean of
    all complete pages of their sequence, so that directions in which pages differ from one another take up rank: the
    usual principal components.

    Parameters
    ----------
    sequences : floating (H, P, B, d) each
        The same H and d; P may differ.

    Returns
    -------
    float64 (H, d, rank)
        Orthonormal columns, in order of energy.
    """
    if not sequences:
        raise reject("sequences", [], "one sequence or more", "Pass [pages] for the sequence's own basis.")
    if centre not in ("page", "sequence"):
        raise reject("centre", centre, "'page' or 'sequence'", "Use 'page' for the strongest shared basis.")
    covariance = torch.zeros((), dtype=torch.float64)
    for pages in sequences:
        _check_rank(rank, pages)
        if (pages.shape[0], pages.shape[3]) != (sequences[0].shape[0], sequences[0].shape[3]):
            allowed = f"KV heads and head size of the first, {tuple(sequences[0].shape)}"
            raise reject("sequences", tuple(pages.shape), allowed, "Calibrate each layer by itself.")
        keys = _centred(pages) if centre == "page" else pages.double() - pages.double().mean((1, 2), keepdim=True)
        rows = keys.flatten(1, 2)
        covariance = covariance.to(rows.device) + rows.mT @ rows
    basis: Tensor = torch.linalg.eigh(covariance).eigenvectors.flip(-1)[..., :rank]
    return basis


def basis_energy(pages: Tensor, basis: Tensor) -> Energy:
    """A given basis: `shared_basis([pages], rank)` for the scope of a sequence, a calibrated one for the global scope.

    Parameters
    ----------
    pages : floating (H, P, B, d)
    basis : floating (H, d, r) or (d, r)
        Orthonormal columns.

    Returns
    -------
    Energy
    """
    centred = _centred(pages)
    _check_basis(basis, pages)
    projected = centred.flatten(1, 2) @ basis.double()
    captured = torch.unflatten(projected, 1, pages.shape[1:3]).square().sum((-1, -2))
    return Energy(captured, centred.square().sum((-1, -2)))


def reconstruct(pages: Tensor, basis: Tensor) -> Tensor:
    """mu_j + W W^T (k_i - mu_j): what a shared basis makes of the keys, as `PageSummary.keys` for a page's own.

    pages (H, P, B, d), basis (H, d, r) or (d, r) -> float64 (H, P, B, d), for `links.logit_error` and, by
    `theory.exact_log_mass`, the log-masses of a shared basis.
    """
    centred = _centred(pages)
    _check_basis(basis, pages)
    rows = centred.flatten(1, 2) @ basis.double() @ basis.double().mT
    return pages.double().mean(-2, keepdim=True) + torch.unflatten(rows, 1, pages.shape[1:3])


@dataclass(frozen=True, eq=False)
class PageProperties:
    """What may tell a badly scored page without its query, float64 (H, P).

    Attributes
    ----------
    dynamic_range : 1 to sqrt(B d)
        Largest magnitude of an entry over the root mean square of all: what one scale of a quantiser has to span.
        1 for a page of zeros.
    tail : squared units of the keys
        Spectral tail: squared singular values of the centred page that the rank drops (Theorem 1's tau).
    norm : units of the keys
        Root mean square of the keys' norms.
    """

    dynamic_range: Tensor
    tail: Tensor
    norm: Tensor


def page_properties(pages: Tensor, rank: int) -> PageProperties:
    """Properties of pages (H, P, B, d) at a rank."""
    _check_rank(rank, pages)
    keys = pages.double()
    square = keys.square().mean((-1, -2))
    peak, rms = keys.abs().amax((-1, -2)), square.sqrt()
    return PageProperties(
        dynamic_range=_fraction(peak, rms),
        tail=_spectrum(pages)[..., rank:].sum(-1),
        norm=(square * pages.shape[-1]).sqrt(),
    )


@dataclass(frozen=True, eq=False)
class ErrorByProperty:
    """Errors in bins of a property: `low` and `high` its least and greatest value in a bin, the bin's `mean` error and
    its `count` of pairs, all (bins,); `correlation`, Spearman's over all pairs.
    """

    low: Tensor
    high: Tensor
    mean: Tensor
    count: Tensor
    correlation: float


def error_by_property(error: Tensor, values: Tensor, bins: int = 10) -> ErrorByProperty:
    """Whether an error depends on a property of its page: means in bins between the property's quantiles.

    Parameters
    ----------
    error : (..., G, P)
        Errors of any sign, by magnitude; `LogMassError.absolute`, say.
    values : broadcasts to `error`
        A property (H, P) as (H, 1, P): `page_properties(...).tail.unsqueeze(-2)`.
    bins : int
        Bins of as many pairs, but equal values share a bin, and bins left empty by that are not reported.

    Returns
    -------
    ErrorByProperty
        float64, `count` int64.
    """
    if type(bins) is not int or bins < 1:
        raise reject("bins", bins, "a whole number, 1 or more", "Use 10.")
    try:
        values = values.broadcast_to(error.shape).flatten().double()
    except RuntimeError:
        allowed = f"a shape that broadcasts to {tuple(error.shape)}"
        remedy = "Give a property of pages a dimension for the group with unsqueeze(-2)."
        raise reject("values.shape", tuple(values.shape), allowed, remedy) from None
    error = error.flatten().double().abs()
    if error.numel() == 0 or not bool((error.isfinite() & values.isfinite()).all()):
        allowed = "finite numbers, at least one pair"
        remedy = "Broadcast, then leave out pages without a log-mass: error[mask], values[mask]."
        raise reject("error, values", f"{error.numel()} pairs", allowed, remedy)
    # Not torch.quantile, which ends at 16 million values; the edges need no interpolation between pairs either.
    ascending = values.sort().values
    edges = ascending[[len(ascending) * k // bins for k in range(1, bins)]]
    which = torch.bucketize(values, edges, right=True)
    members = [each for each in (which == k for k in range(bins)) if bool(each.any())]
    return ErrorByProperty(
        low=torch.stack([values[each].min() for each in members]),
        high=torch.stack([values[each].max() for each in members]),
        mean=torch.stack([error[each].mean() for each in members]),
        count=torch.stack([each.sum() for each in members]),
        correlation=float(spearman(values, error)),
    )


def _fraction(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole > 0, part / torch.where(whole > 0, whole, 1), 1)


def _centred(pages: Tensor) -> Tensor:
    if pages.dim() != 4 or 0 in pages.shape or not pages.is_floating_point():
        found = f"{pages.dtype} of shape {tuple(pages.shape)}"
        raise reject("pages", found, "floating (kv_heads, P, B, d), none empty", "Use record.pages(config).keys().")
    if not bool(pages.isfinite().all()):
        raise reject("pages", "NaN or infinity", "finite keys", "Leave those pages out.")
    return pages.double() - pages.double().mean(-2, keepdim=True)


def _spectrum(pages: Tensor) -> Tensor:
    """Squared singular values of the centred pages, descending: float64 (H, P, B)."""
    centred = _centred(pages)
    values: Tensor = torch.linalg.eigvalsh(centred @ centred.mT).flip(-1).clamp(min=0)
    return values


def _check_rank(rank: int, pages: Tensor) -> None:
    if type(rank) is not int or not 1 <= rank <= pages.shape[-1]:
        raise reject("rank", rank, f"1 to the head size, {pages.shape[-1]}", "Use 8.")


def _check_basis(basis: Tensor, pages: Tensor) -> None:
    heads, head_dim = pages.shape[0], pages.shape[-1]
    lead = tuple(basis.shape[:-1])
    if basis.dim() not in (2, 3) or lead not in ((head_dim,), (heads, head_dim)):
        allowed = f"({head_dim}, r) or ({heads}, {head_dim}, r)"
        raise reject("basis.shape", tuple(basis.shape), allowed, "Calibrate the basis on the same layer.")
    gap = basis.double().mT @ basis.double() - torch.eye(basis.shape[-1], dtype=torch.float64, device=basis.device)
    if not bool((gap.abs() <= _ORTHONORMAL).all()):
        found = f"columns that are {float(gap.abs().max()):.2g} off orthonormal"
        raise reject("basis", found, f"at most {_ORTHONORMAL}", "Orthonormalise it with torch.linalg.qr in fp32.")
