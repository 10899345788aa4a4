"""Scope: what a basis of the page's own holds of the keys within pages, beside one for the sequence or for all of them.

At equal rank, and at matched bytes: the shared bases then have as many columns as fit in the bytes of the page's own
basis, as `stored` counts them.  Every scope gets the page's centroid, which published methods of shared scope do not
have, and a calibrated basis sees the same tasks as it is measured on: both favour the shared bases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...config import LocksConfig
from ..energy import basis_energy, page_energy, shared_basis
from .means import Means, Row, series
from .stored import Scope, matched_rank, page_keys, shared_keys, stored_bytes, stored_share

if TYPE_CHECKING:  # it needs Transformers, and the command line does not
    from ..capture import Captured

PAGE_SIZE = LocksConfig.page_size
RANKS = [1, 2, 4, 8, 12, 15]
LABELS = {"page": "the page's own basis", "sequence": "one basis a sequence", "global": "one calibrated basis"}


def calibrated_bases(calibration: Mapping[int, Sequence[Tensor]]) -> dict[int, Tensor]:
    """Layer -> (kv_heads, d, d), the best shared basis of the within-page keys of sequences (kv_heads, T, d)."""
    found = {}
    for layer, sequences in calibration.items():
        pages = [whole_pages(keys) for keys in sequences]
        found[layer] = shared_basis(pages, pages[0].shape[-1])
    return found


def whole_pages(keys: Tensor) -> Tensor:
    """(kv_heads, T, d) -> (kv_heads, P, page_size, d)."""
    count = keys.shape[1] // PAGE_SIZE
    return torch.unflatten(keys[:, : count * PAGE_SIZE], 1, (count, PAGE_SIZE))


def rows(
    records: Iterable[Captured], calibration: Mapping[int, Sequence[Tensor]], ranks: Sequence[int] = RANKS
) -> list[Row]:
    """One row for each rank of the page's basis, scope and match.

    `match`: "rank", all scopes at `page_rank`; "bytes", a shared scope at the bytes of the page's basis.  `energy`: the
    share of the centred energy that the basis holds; `stored`: the same once everything is rounded to what is stored.
    """
    bases, means = calibrated_bases(calibration), Means("page_rank", "scope", "match")
    for seen in records:
        if seen.step > 1:  # the same pages
            continue
        pages = whole_pages(seen.record.keys[:, : seen.record.length])
        head_dim, count = pages.shape[-1], pages.shape[1]
        shared: dict[Scope, Tensor] = {"sequence": shared_basis([pages], head_dim), "global": bases[seen.layer]}
        for own_rank in ranks:
            budget = stored_bytes("page", own_rank, head_dim, PAGE_SIZE, count)
            energy, stored = page_energy(pages, own_rank).by_head, stored_share(pages, page_keys(pages, own_rank))
            key = own_rank, "page", "rank"
            means.add(key, seen.prompt, rank=own_rank, bytes=budget, energy=energy, stored=stored)
            for scope, basis in shared.items():
                matched = matched_rank(scope, budget, head_dim, PAGE_SIZE, count)
                for match, rank in (("rank", own_rank), ("bytes", matched)):
                    part = basis[..., :rank]
                    means.add(
                        (own_rank, scope, match),
                        seen.prompt,
                        rank=rank,
                        bytes=stored_bytes(scope, rank, head_dim, PAGE_SIZE, count),
                        energy=basis_energy(pages, part).by_head,
                        stored=stored_share(pages, shared_keys(pages, part)),
                    )
    return means.rows(["stored"])


def draw(rows: Sequence[Row], figure: Any) -> None:
    """Energy against rank, and against bytes."""
    left, right = figure.subplots(1, 2, sharey=True)
    for scope, lines in series(rows, "scope").items():
        alike = [row for row in lines if row["match"] == "rank"]
        left.plot([row["rank"] for row in alike], [row["energy"] for row in alike], "o-", label=LABELS[scope])
        matched = [row for row in lines if scope == "page" or row["match"] == "bytes"]
        where = [row["bytes"] for row in matched]
        (line,) = right.plot(where, [row["energy"] for row in matched], "o-", label="basis")
        right.plot(where, [row["stored"] for row in matched], "o--", color=line.get_color(), alpha=0.6)
    left.set_xlabel("rank")
    left.set_ylabel("share of the centred key energy within pages")
    left.legend()
    right.set_xlabel("bytes a page and KV head (dashed: as stored, rounded)")
    for axes in (left, right):
        axes.grid(alpha=0.3)
