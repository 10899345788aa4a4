"""Carrier retention against budget: whether the pages that hold the answer are kept, and by whom.

Two counts: of the carrier pages that the oracle keeps, over all KV heads; and of all carrier pages, for retrieval heads
apart from the rest.  A retrieval head puts a tenth or more of its exact attention on the carriers at that step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...config import LocksConfig, reject
from ...selectors import Selector, make_selector
from ...selectors.loki import Loki, calibrate
from ...theory import exact_log_mass
from ..carriers import LEAST_MASS, carrier_retention, carriers_kept, retrieval_heads
from ..links import choose_pages, coverage, estimate_log_mass, group_coverage_ratio, page_mass
from .means import Means, Row, series

if TYPE_CHECKING:  # it needs Transformers, and the command line does not
    from ..capture import Captured

BUDGETS = [64, 128, 256, 512, 1024, 2048]
SELECTORS = ("exact", "locks", "loki", "quest", "centroid", "second-moment", "shadowkv", "streaming", "random")


def principal_components(calibration: Mapping[int, Sequence[Tensor]]) -> dict[int, Tensor]:
    """Layer -> (kv_heads, d, d), of sequences of keys (kv_heads, T, d), as Loki has them."""
    return {layer: calibrate(torch.cat(list(sequences), -2)) for layer, sequences in calibration.items()}


def rows(
    records: Iterable[Captured], calibration: Mapping[int, Sequence[Tensor]], budgets: Sequence[int] = BUDGETS
) -> list[Row]:
    """One row for each budget below a prompt's length and selector.

    `retention`: of the carrier pages that the oracle keeps; `retrieval` and `rest`: of all carrier pages, by query
    heads; `coverage_ratio` of groups, to the oracle's; `coverage_retrieval` and `coverage_rest`: the attention that is
    kept of query heads, to be held against the row of the oracle, whose ratios head by head have no mean to speak of.
    """
    bases, means = principal_components(calibration), Means("budget", "selector")
    for seen in records:
        record = seen.record
        if not record.carriers:
            continue
        mass = page_mass(record, LocksConfig.page_size)
        for budget in (each for each in budgets if each < record.length):
            config = LocksConfig(budget)
            exact = exact_log_mass(record.query, record.pages(config).keys(), record.scale)
            best = choose_pages(exact, record.length, config)
            possible = coverage(mass, best)
            for name in SELECTORS:
                selector: Selector = Loki(bases[seen.layer]) if name == "loki" else make_selector(name, config)
                estimate = exact if name == "exact" else estimate_log_mass(record, selector, config)
                chosen = choose_pages(estimate, record.length, config)
                kept, held = carrier_retention(record, chosen, config.page_size), coverage(mass, chosen)
                looks = retrieval_heads([kept], LEAST_MASS)
                fraction = kept.fraction.unsqueeze(-1).expand_as(looks)
                means.add(
                    (budget, name),
                    seen.prompt,
                    retention=carriers_kept(record, chosen, best, config.page_size),
                    retrieval=fraction[looks],
                    rest=fraction[~looks],
                    coverage_ratio=group_coverage_ratio(held, possible),
                    coverage_retrieval=held[looks],
                    coverage_rest=held[~looks],
                )
    found = means.rows(["retention"])
    if not found:
        allowed = "records of which some have carriers, and a budget below their length"
        raise reject("--task, --budget", list(budgets), allowed, "Use niah_single_1, and --budget 128.")
    return found


def draw(rows: Sequence[Row], figure: Any) -> None:
    """Retention, and the kept carriers of retrieval heads, against budget."""
    panels = figure.subplots(1, 2, sharey=True)
    titles = {"retention": "carrier pages kept, of the oracle's", "retrieval": "of all carriers, by retrieval heads"}
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        for selector, lines in series(rows, "selector").items():
            drawn = [row for row in lines if row[name] is not None]
            budgets, values = [row["budget"] for row in drawn], [row[name] for row in drawn]
            style, width = ("k--", 1.5) if selector == "exact" else ("o-", 2.5 if selector == "locks" else 1.2)
            axes.plot(budgets, values, style, label=selector, linewidth=width)
        axes.set_xscale("log", base=2)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("tokens attended")
        axes.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
