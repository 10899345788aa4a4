"""The error ladder: from logits to the output, link by link, for a page's own basis and what it is measured against.

Representations of keys have logits: the page's basis as stored (int4, int8), the same of rotated keys, the same with
the centroid stored less the mean key of the KV head in other text, and unquantised, a sequence's and a calibrated basis
at the same bytes (see `stored`), and the centroid.  Selectors without reconstructed keys start at the
log-mass.  Errors are against exact attention on the same record; the choices are at the same budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...config import LocksConfig
from ...selectors import make_selector
from ...summary import summarize
from ...theory import exact_log_mass, unquantised
from ..decode_record import DecodeRecord
from ..energy import shared_basis
from ..links import (
    choose_pages,
    coverage,
    estimate_log_mass,
    group_coverage_ratio,
    log_mass_error,
    logit_error,
    page_mass,
    rank_correlation,
)
from ..outputs import output_bound, output_error, value_radius
from .means import Means, Row
from .scope import PAGE_SIZE, calibrated_bases, whole_pages
from .stored import matched_rank, page_keys, rotation, shared_keys, stored_bytes

if TYPE_CHECKING:  # it needs Transformers, and the command line does not
    from ..capture import Captured

BUDGETS = [256]
SELECTORS = ("quest", "second-moment", "exact")
RUNGS = {
    "logit_mae": "logits, MAE",
    "log_mass_mae": "log-mass, MAE",
    "log_mass_weighted": "log-mass, weighted",
    "rank_correlation": "rank correlation",
    "coverage_ratio": "coverage / oracle's",
    "output_error": "output error / R",
}


def representations(pages: Tensor, calibrated: Tensor, mean: Tensor, rank: int) -> Iterator[tuple[str, Tensor]]:
    """Name -> keys (H, P, B, d) that stand for the pages'; from other text a basis (H, d, d) and a mean key (H, d)."""
    head_dim, count = pages.shape[-1], pages.shape[1]
    budget = stored_bytes("page", rank, head_dim, PAGE_SIZE, count)
    own_rank = matched_rank("sequence", budget, head_dim, PAGE_SIZE, count)
    global_rank = matched_rank("global", budget, head_dim, PAGE_SIZE, count)
    yield "page", page_keys(pages, rank)
    mean = mean[:, None, None]
    yield "page, less a mean key", page_keys(pages - mean, rank) + mean
    turn = rotation(head_dim).to(pages.device)
    yield "page, rotated", page_keys(pages.float() @ turn, rank) @ turn
    yield "page, unquantised", summarize(pages, unquantised(rank, PAGE_SIZE)).keys()
    yield "sequence, same bytes", shared_keys(pages, shared_basis([pages], own_rank))
    yield "global, same bytes", shared_keys(pages, calibrated[..., :global_rank])
    yield "global, same rank", shared_keys(pages, calibrated[..., :rank])
    yield "centroid", pages.double().mean(-2, keepdim=True).expand_as(pages).float()


def rows(
    records: Iterable[Captured],
    calibration: Mapping[int, Sequence[Tensor]],
    budgets: Sequence[int] = BUDGETS,
    rank: int = LocksConfig.rank,
) -> list[Row]:
    """One row for each budget and representation or selector.

    `logit_mae` in logits; `log_mass_mae` and `log_mass_weighted` (by exact share) in nats, of pages whose log-mass is
    finite; `rank_correlation`, Spearman's of shares; `coverage_ratio` to the oracle's; `output_error`, the mean of
    ||o_S - o|| over R, the largest norm of a value; `mass_bound`, its bound 2 (1 - gamma_S) of Eq. 1; `theorem_bound`,
    that of Theorem 1 (iii) at the measured eta, which is 2 where it says nothing.
    """
    bases, means = calibrated_bases(calibration), Means("budget", "representation")
    mean_keys = {layer: torch.cat(list(keys), 1).double().mean(1).float() for layer, keys in calibration.items()}
    for seen in records:
        record = seen.record
        pages = whole_pages(record.keys[:, : record.length])
        exact = exact_log_mass(record.query, pages, record.scale)
        found: list[tuple[str, Tensor, dict[str, Tensor]]] = []
        for name, keys in representations(pages, bases[seen.layer], mean_keys[seen.layer], rank):
            logits = logit_error(record.query, pages, keys, record.scale)
            found.append((name, exact_log_mass(record.query, keys, record.scale), {"logit_mae": logits}))
        for name in SELECTORS:
            config = LocksConfig()
            found.append((name, estimate_log_mass(record, make_selector(name, config), config).double(), {}))
        for budget in budgets:
            for name, estimate, values in found:
                rungs = values | _rungs(record, exact, estimate, LocksConfig(budget))
                means.add((budget, name), seen.prompt, **rungs)
    return means.rows(["coverage_ratio"])


def _rungs(record: DecodeRecord, exact: Tensor, estimate: Tensor, config: LocksConfig) -> dict[str, Tensor]:
    error = log_mass_error(estimate, exact)
    chosen, best = (choose_pages(mass, record.length, config) for mass in (estimate, exact))
    mass, radius = page_mass(record, config.page_size), value_radius(record)
    output = output_error(record, chosen, config.page_size)
    bound = output_bound(record, exact, error.largest.amax(-1), config)
    return {
        "log_mass_mae": error.plain,
        "log_mass_weighted": error.weighted,
        "rank_correlation": rank_correlation(estimate, exact, record.length, config),
        "coverage_ratio": group_coverage_ratio(coverage(mass, chosen), coverage(mass, best)),
        "output_error": output.error / radius.unsqueeze(-1),
        "mass_bound": output.mass_bound / radius.unsqueeze(-1),
        "theorem_bound": bound / radius,
    }


def draw(rows: Sequence[Row], figure: Any) -> None:
    """A panel a rung, at the first budget; a bar a representation."""
    lines = [row for row in rows if row["budget"] == rows[0]["budget"]]
    figure.suptitle(f"{lines[0]['budget']} tokens attended")
    panels = figure.subplots(2, 3).flatten()
    for axes, (name, label) in zip(panels, RUNGS.items(), strict=True):
        bars = [row for row in lines if row.get(name) is not None]
        axes.barh([row["representation"] for row in bars], [row[name] for row in bars], color="tab:blue")
        axes.invert_yaxis()
        axes.set_title(label, fontsize=9)
        axes.tick_params(labelsize=7)
        if name in ("rank_correlation", "coverage_ratio"):
            values = torch.tensor([row[name] for row in bars])
            axes.set_xlim(max(-1.0, float(values.min()) - 0.05), 1.0)
