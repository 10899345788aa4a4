"""What a choice of pages does to the attention output, beside what Eq. 1 and Theorem 1 say of it (arXiv 2607.24555)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..attend import attend
from ..config import LocksConfig
from ..score import page_share
from ..select import select_pages
from ..theory import coverage, output_error_bound
from .decode_record import DecodeRecord
from .links import kept_pages, page_mass


@dataclass(frozen=True, eq=False)
class OutputError:
    """What attending a part of the pages does to the output, float64 (H, G), in units of the values.

    `error` is ||o_S - o||; `mass_bound` is 2 R (1 - gamma_S), which it never exceeds, R the largest norm of a value;
    `identity_gap` is what Eq. 1, o - o_S = (1 - gamma_S) (v_dropped - v_kept), leaves unexplained: rounding.
    """

    error: Tensor
    mass_bound: Tensor
    identity_gap: Tensor


def output_error(record: DecodeRecord, pages: Tensor, page_size: int) -> OutputError:
    """The error of attention over the listed pages (H, k) against dense attention, in float64.

    The means of Eq. 1 are taken by attending the kept and the dropped tokens each by themselves, as
    `theory.output_identity` divides by a mass that can be 0 in float64.
    """
    mass = page_mass(record, page_size)
    kept = kept_pages(pages, mass.shape[-1])
    tokens = kept.repeat_interleave(page_size, -1)[:, : record.length]
    keys, values = record.keys[:, : record.length].double(), record.values[:, : record.length].double()

    def output(mask: Tensor) -> Tensor:
        return attend(record.query.double(), keys, values, mask, record.scale)

    dense, sparse = output(torch.ones_like(tokens)), output(tokens)
    dropped = (mass * ~kept.unsqueeze(-2)).sum(-1)  # not 1 - gamma_S, which would lose the digits of a small mass
    explained = dropped.unsqueeze(-1) * (output(~tokens) - sparse)
    return OutputError(
        error=torch.linalg.vector_norm(sparse - dense, dim=-1),
        mass_bound=2 * value_radius(record).unsqueeze(-1) * dropped,
        identity_gap=torch.linalg.vector_norm(dense - sparse - explained, dim=-1),
    )


def value_radius(record: DecodeRecord) -> Tensor:
    """R, the largest norm of a value that is attended: float64 (H,)."""
    norm: Tensor = torch.linalg.vector_norm(record.values[:, : record.length].double(), dim=-1)
    return norm.amax(-1)


def output_bound(record: DecodeRecord, exact: Tensor, eta: Tensor, config: LocksConfig) -> Tensor:
    """What Theorem 1 leaves of a group's mean output error, mean_g ||o_S - o||, when log-masses err by eta at most.

        2 R (1 - gamma*) + 2 R (1 - exp(-4 eta)) gamma* = 2 R (1 - exp(-4 eta) gamma*)

    The first part is the oracle's own, the second `theory.output_error_bound`.  gamma* is the group's mean coverage by
    the oracle's choice, taken over the complete pages alone: those are what is ranked, and a partial page, always
    attended, only lessens what is dropped.

    Parameters
    ----------
    exact : (H, G, P)
        `theory.exact_log_mass` of the record's complete pages.
    eta : (H,)
        `LogMassError.largest.amax(-1)` of whichever selector; the bound is 2 R, and says nothing, at infinity.

    Returns
    -------
    float64 (H,)
        To be held against `OutputError.error.mean(-1)`.
    """
    lengths = torch.tensor(record.length, device=exact.device)
    share = page_share(exact, lengths, config)
    pages = select_pages(share, lengths, config)
    # A partial page is listed too, and has no share.
    share = torch.nn.functional.pad(share, (0, config.pages_in(record.length) - share.shape[-1]))
    best, radius = coverage(share.double(), pages), value_radius(record)
    return 2 * radius * (1 - best) + output_error_bound(radius, eta.double(), best)
