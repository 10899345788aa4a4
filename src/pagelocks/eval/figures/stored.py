"""What a basis of each scope stores of a page at so many bytes, quantised alike, so that scopes compare at equal bytes.

Bytes a page of a KV head, with d channels and B keys, no padding or header for any scope:

    every scope   centroid int8 and its fp16 scale (d + 2), coefficients int8 with an fp16 scale a key (B r + 2 B)
    page          its basis: int4 entries and an fp16 scale a column (d r / 2 + 2 r)
    sequence      a P-th of the sequence's basis in bf16 (2 d r / P)
    global        nothing: one basis serves all sequences

So a shared basis at the bytes of the page's own has about three times its rank.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ...config import LocksConfig, reject
from ...quantize import quantize
from ...summary import summarize
from ..energy import basis_energy

Scope = Literal["page", "sequence", "global"]
SCOPES: tuple[Scope, ...] = ("page", "sequence", "global")
_HALF = 2  # bytes of an fp16 or bf16 number


def stored_bytes(scope: Scope, rank: int, head_dim: int, page_size: int, pages: int) -> float:
    """Bytes a page of a KV head, in a sequence of `pages` pages."""
    common = head_dim + _HALF + page_size * (rank + _HALF)
    basis = {
        "page": rank * (head_dim / 2 + _HALF),
        "sequence": _HALF * head_dim * rank / pages,
        "global": 0.0,
    }
    return common + basis[scope]


def matched_rank(scope: Scope, budget: float, head_dim: int, page_size: int, pages: int) -> int:
    """The largest rank, at most the head size, that is stored in `budget` bytes."""
    fitting = [
        rank for rank in range(1, head_dim + 1) if stored_bytes(scope, rank, head_dim, page_size, pages) <= budget
    ]
    if not fitting:
        least = stored_bytes(scope, 1, head_dim, page_size, pages)
        raise reject("budget", budget, f"at least {least:g} bytes a page, rank 1", "Use a higher rank for the page.")
    return fitting[-1]


def page_keys(pages: Tensor, rank: int) -> Tensor:
    """What LOCKS stores of pages (H, P, B, d): int4 basis, int8 coefficients and centroid -> fp32, the same shape."""
    size = pages.shape[-2]
    return summarize(pages, LocksConfig(3 * size, rank, size)).keys()


def rotation(head_dim: int) -> Tensor:
    """fp32 (d, d), symmetric and orthogonal: Hadamard matrices, of the largest power of two that divides d, on the
    diagonal.  Keys and queries that are both multiplied by it have the logits they had, and no channel stands out."""
    size = head_dim & -head_dim
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return torch.kron(torch.eye(head_dim // size), matrix / size**0.5)


def shared_keys(pages: Tensor, basis: Tensor) -> Tensor:
    """What a shared basis (H, d, r) stores of pages (H, P, B, d), by the rounding that LOCKS uses -> fp32.

    Centroid int8 with one scale, coefficients int8 with a scale a key; the basis is rounded to bf16.
    """
    basis_energy(pages, basis)  # checks both
    keys, basis = pages.double(), basis.double()
    mean = keys.mean(-2)
    coefficients = (keys - mean.unsqueeze(-2)).flatten(1, 2) @ basis
    codes, scale = quantize(coefficients, 8, -1)
    centre, centre_scale = quantize(mean, 8, -1)
    rows = (codes.double() * scale.double().unsqueeze(-1)) @ basis.bfloat16().double().mT
    deviations = torch.unflatten(rows, 1, pages.shape[1:3])
    return ((centre.double() * centre_scale.double().unsqueeze(-1)).unsqueeze(-2) + deviations).float()


def stored_share(pages: Tensor, stored: Tensor) -> Tensor:
    """1 - ||k - k^||^2 / ||k - mu||^2 of each KV head, float64 (H,): what is left after rounding, 1 if nothing is lost.

    Like `Energy.by_head`, but of what is stored, so errors of the centroid count too.
    """
    keys = pages.double()
    lost = (keys - stored.double()).square().sum((-1, -2, -3))
    total = (keys - keys.mean(-2, keepdim=True)).square().sum((-1, -2, -3))
    return 1 - lost / total.clamp(min=1e-300)
