"""Whether the pages that hold the answer survive selection: what average coverage hides (arXiv 2607.24555, Fig. 1b).

A carrier page is one that holds a token of a record's carrier spans.  A choice is made for a KV head, so it is counted
once for a group; a query head shares its group's choice, and heads count one by one where they are told apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import reject
from .decode_record import DecodeRecord
from .links import kept_pages, page_mass

LEAST_MASS = 0.1
"""Query heads that put so much of their exact attention on the carrier pages are retrieval heads: far above what a head
that looks everywhere alike puts there."""


def carrier_pages(record: DecodeRecord, page_size: int) -> Tensor:
    """bool (pages,), ceil(length / page_size) of them: True where a page holds a carrier token."""
    if not record.carriers:
        raise reject("carriers", (), "one span or more", "Record which tokens hold the answer.")
    tokens = torch.zeros(record.length + -record.length % page_size, dtype=torch.bool, device=record.keys.device)
    for first, after in record.carriers:
        tokens[first:after] = True
    return torch.unflatten(tokens, 0, (-1, page_size)).any(-1)


@dataclass(frozen=True, eq=False)
class Retention:
    """What one choice kept of a record's carrier pages.

    Attributes
    ----------
    every : bool (H,)
        Whether all carrier pages were chosen.
    fraction : float64 (H,)
        The fraction of them that was.
    mass : float64 (H, G)
        The exact attention mass that each query head puts on them, chosen or not, over all tokens.
    """

    every: Tensor
    fraction: Tensor
    mass: Tensor


def carrier_retention(record: DecodeRecord, pages: Tensor, page_size: int) -> Retention:
    """Retention of a record's carriers by the chosen pages, integer (H, k), -1 for none.

    A carrier in the sink or recent pages is kept by any choice: place answers elsewhere.
    """
    carriers = carrier_pages(record, page_size)
    kept = kept_pages(pages, carriers.shape[0])[:, carriers]
    mass = page_mass(record, page_size)[..., carriers].sum(-1)
    return Retention(kept.all(-1), kept.double().mean(-1), mass)


def carriers_kept(record: DecodeRecord, pages: Tensor, best: Tensor, page_size: int) -> Tensor:
    """Of the carrier pages that the oracle's choice `best` keeps, which another one keeps: float64 (n,), 0 or 1.

    Both choices integer (H, k), -1 for none; over all KV heads, as most heads do not look for the answer.
    """
    carriers = carrier_pages(record, page_size)
    kept, possible = (kept_pages(each, carriers.shape[0])[:, carriers] for each in (pages, best))
    return kept[possible].double()


def retrieval_heads(retentions: Sequence[Retention], least_mass: float) -> Tensor:
    """Which query heads look for the answer: those whose exact mass on the carrier pages is `least_mass` or more.

    It is exact attention that decides, never a selector's, so all selectors are judged on the same heads.

    Parameters
    ----------
    retentions : of one layer
        Its mean over these records counts: a head's role is not one step's.  Pass one record for the heads of a step.
    least_mass : float
        Above 0, at most 1.  A head that looks everywhere alike puts carrier tokens / length there; stay well above.

    Returns
    -------
    bool (H, G)
    """
    if not 0 < least_mass <= 1:
        raise reject("least_mass", least_mass, "a share of the mass, above 0 and at most 1", "Use 0.1.")
    return _stacked(retentions, "mass").mean(0) >= least_mass


def _stacked(retentions: Sequence[Retention], name: str) -> Tensor:
    shapes = sorted({tuple(each.mass.shape) for each in retentions})
    if len(shapes) != 1:
        allowed = "one record or more, all with the same (kv_heads, G)"
        raise reject("retentions", shapes, allowed, "Rate each layer by itself, then join the rates by their pairs.")
    return torch.stack([getattr(each, name) for each in retentions])
