"""Shortlists: what it buys to look at the keys of a few budgets' pages that a summary of some rank puts first.

A second look is worth most where the first is poor: so the rank may fall, and with it the bytes of each summary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...config import LocksConfig, reject
from ...layout import record_layout
from ...selectors import Locks, LocksReranked, Selector
from ...theory import exact_log_mass
from ..carriers import carriers_kept
from ..links import choose_pages, coverage, group_coverage_ratio, page_mass
from .means import Means, Row, line_panels

if TYPE_CHECKING:  # it needs Transformers, and the command line does not
    from ..capture import Captured

BUDGETS = [128]
RANKS = [2, 4, 8]
FACTORS = [1, 2, 3, 4, 8]


def rows(
    records: Iterable[Captured],
    budgets: Sequence[int] = BUDGETS,
    ranks: Sequence[int] = RANKS,
    factors: Sequence[int] = FACTORS,
) -> list[Row]:
    """One row for each budget, rank and factor; factor 1 is LOCKS without a second look.

    `coverage_ratio`: of groups, to the oracle's; `retention`: of the carrier pages that the oracle keeps, None without
    carriers; `record_bytes`: of a page's summary; `shortlist_bytes`: of the keys looked at, a KV head and step.
    """
    if any(factor < 1 for factor in factors):
        raise reject("factors", list(factors), "1 or more", "Use 1 for LOCKS without a second look.")
    means = Means("budget", "rank", "factor")
    for seen in records:
        record, size = seen.record, LocksConfig.page_size
        mass = page_mass(record, size)
        exact = exact_log_mass(record.query, record.pages(LocksConfig()).keys(), record.scale)
        for rank in ranks:
            pages = record.pages(replace(LocksConfig(), rank=rank))
            for budget in budgets:
                config = LocksConfig(budget)
                best = choose_pages(exact, record.length, config)
                possible = coverage(mass, best)
                for factor in factors:
                    selector: Selector = Locks() if factor == 1 else LocksReranked(config, factor)
                    estimate = selector.log_mass(record.query, pages, record.scale)
                    chosen = choose_pages(estimate, record.length, config)
                    values: dict[str, Any] = {}
                    if record.carriers:
                        values["retention"] = carriers_kept(record, chosen, best, size)
                    looked_at = 0 if factor == 1 else min(pages.count, factor * config.budget_pages)
                    head_dim, itemsize = record.keys.shape[-1], record.keys.element_size()
                    means.add(
                        (budget, rank, factor),
                        seen.prompt,
                        coverage_ratio=group_coverage_ratio(coverage(mass, chosen), possible),
                        record_bytes=record_layout(head_dim, replace(LocksConfig(), rank=rank)).record_bytes,
                        shortlist_bytes=looked_at * size * head_dim * itemsize,
                        **values,
                    )
    return means.rows(["coverage_ratio", "retention"])


def draw(rows: Sequence[Row], figure: Any) -> None:
    """Coverage and retention against the factor, a line for each rank, at the first budget."""
    titles = {
        "coverage_ratio": f"coverage / oracle's, {rows[0]['budget']} tokens",
        "retention": "carrier pages kept, of the oracle's",
    }
    line_panels(rows, figure, titles, "factor", "rank", "rank {}", "pages looked at, in budgets (1: none)")
