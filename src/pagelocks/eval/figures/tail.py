"""The tail of the log-mass error: how far the worst pages are from the typical, and whether a page's looks tell it.

Theorem 1 is of the unquantised summary, and of the largest error; rounding is measured, so both are here side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...config import LocksConfig
from ...selectors import Locks
from ...theory import exact_log_mass, unquantised
from ..energy import error_by_property, page_properties
from ..links import estimate_log_mass, spearman
from .means import Row, series

if TYPE_CHECKING:  # it needs Transformers, and the command line does not
    from ..capture import Captured

QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)
PROPERTIES = ("dynamic_range", "tail", "norm")
LABELS = {"locks": "as stored (int4, int8)", "unquantised": "unquantised"}


def rows(records: Iterable[Captured], rank: int = LocksConfig.rank) -> list[Row]:
    """Rows of three kinds, over all pairs of a page and a query head; errors are |s^ - s| in nats.

    `kind`: "quantile", of an error, plain and of pairs with a share of 1/1000 or more; "bin", the stored summary's mean
    error in tenths of a property; "correlation", Spearman's of property and error: over all pairs, and the mean of
    those within one layer's KV head, where no difference between layers helps.
    """
    configs = {"locks": LocksConfig(rank=rank), "unquantised": unquantised(rank, LocksConfig.page_size)}
    errors: dict[str, list[Tensor]] = {name: [] for name in configs}
    shares: list[Tensor] = []
    properties: dict[str, list[Tensor]] = {name: [] for name in PROPERTIES}
    within: dict[str, list[Tensor]] = {name: [] for name in PROPERTIES}
    prompts = set[int]()
    for seen in records:
        record = seen.record
        prompts.add(seen.prompt)
        pages = record.pages(configs["locks"]).keys()
        exact = exact_log_mass(record.query, pages, record.scale)
        for name, config in configs.items():
            error = (estimate_log_mass(record, Locks(), config).double() - exact).abs()
            errors[name].append(error.flatten().cpu())
        shares.append(exact.softmax(-1).flatten().cpu())
        stored, looks = errors["locks"][-1].view_as(exact), page_properties(pages, rank)
        for name in PROPERTIES:
            values = getattr(looks, name).unsqueeze(-2).expand_as(exact).cpu()
            properties[name].append(values.flatten())
            within[name].append(spearman(values, stored).flatten())
    share, joined = torch.cat(shares), {name: torch.cat(parts) for name, parts in errors.items()}
    found: list[Row] = []
    for name, error in joined.items():
        for which, values in (("all", error), ("share >= 0.001", error[share >= 1e-3])):
            if len(values) == 0:
                continue
            ascending = values.sort().values  # torch.quantile ends at 16 million values
            for quantile in QUANTILES:
                place = min(len(ascending) - 1, int(quantile * len(ascending)))
                about = {"kind": "quantile", "summary": name, "pairs_of": which, "quantile": quantile}
                found.append(about | {"error": float(ascending[place]), "pairs": len(ascending)})
    for name in PROPERTIES:
        bins = error_by_property(joined["locks"], torch.cat(properties[name]))
        for low, high, mean, count in zip(bins.low, bins.high, bins.mean, bins.count, strict=True):
            about = {"kind": "bin", "property": name, "low": float(low), "high": float(high)}
            found.append(about | {"error": float(mean), "pairs": int(count)})
        inside = float(torch.cat(within[name]).mean())
        found.append({"kind": "correlation", "property": name, "over_all": bins.correlation, "within_heads": inside})
    return [row | {"prompts": len(prompts)} for row in found]


def draw(rows: Sequence[Row], figure: Any) -> None:
    """Quantiles of both summaries, then the mean error in tenths of each property."""
    kinds = series(rows, "kind")
    panels = figure.subplots(1, 1 + len(PROPERTIES))
    for name, lines in series([row for row in kinds["quantile"] if row["pairs_of"] == "all"], "summary").items():
        panels[0].plot(
            [str(row["quantile"]) for row in lines], [row["error"] for row in lines], "o-", label=LABELS[name]
        )
    panels[0].set_yscale("log")
    panels[0].set_title("quantiles of |s^ - s|, nats", fontsize=9)
    panels[0].legend(fontsize=7)
    correlations = {row["property"]: row["within_heads"] for row in kinds["correlation"]}
    for axes, (name, lines) in zip(panels[1:], series(kinds["bin"], "property").items(), strict=True):
        axes.plot(range(1, len(lines) + 1), [row["error"] for row in lines], "o-")
        axes.set_ylim(bottom=0)
        axes.set_xlabel(f"tenths, {lines[0]['low']:.3g} to {lines[-1]['high']:.3g}", fontsize=8)
        axes.set_title(f"by {name.replace('_', ' ')} (in heads {correlations[name]:+.2f})", fontsize=9)
    for axes in panels:
        axes.tick_params(labelsize=7, which="both")
