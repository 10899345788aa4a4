"""Page size by rank, at one budget of tokens: larger pages cost fewer bytes a token and choose more coarsely.

So coverage has two references: the oracle's with pages of the same size (`coverage_ratio`, the summary's loss alone),
and all of the attention (`coverage`, the pages' coarseness too).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ...config import LocksConfig, reject
from ...layout import record_layout
from ...selectors import Locks
from ...theory import exact_log_mass
from ..links import choose_pages, coverage, estimate_log_mass, group_coverage_ratio, log_mass_error, page_mass
from .means import Means, Row, series

if TYPE_CHECKING:  # it needs Transformers, and the command line does not
    from ..capture import Captured

BUDGETS = [256]
RANKS = [2, 4, 8, 12, 15]
PAGE_SIZES = [8, 16, 32, 64]


def rows(
    records: Iterable[Captured],
    budgets: Sequence[int] = BUDGETS,
    ranks: Sequence[int] = RANKS,
    page_sizes: Sequence[int] = PAGE_SIZES,
) -> list[Row]:
    """One row for each budget, page size and rank below it.

    `coverage` and `oracle_coverage`: of all attention, over query heads; `coverage_ratio`: of groups, to the oracle's
    at that page size; `log_mass_weighted` in nats; `bytes_a_token`, of the records.
    """
    configs = [
        LocksConfig(budget, rank, size) for budget in budgets for size in page_sizes for rank in ranks if rank < size
    ]
    if not configs:
        raise reject("--rank", list(ranks), f"ranks below a page size, {list(page_sizes)}", "Use --rank 4 8.")
    means = Means("budget", "page_size", "rank")
    for seen in records:
        record = seen.record
        for config in configs:
            exact = exact_log_mass(record.query, record.pages(config).keys(), record.scale)
            estimate, mass = estimate_log_mass(record, Locks(), config), page_mass(record, config.page_size)
            held, possible = (coverage(mass, choose_pages(m, record.length, config)) for m in (estimate, exact))
            means.add(
                (config.budget, config.page_size, config.rank),
                seen.prompt,
                bytes_a_token=record_layout(record.keys.shape[-1], config).record_bytes / config.page_size,
                coverage=held,
                oracle_coverage=possible,
                coverage_ratio=group_coverage_ratio(held, possible),
                log_mass_weighted=log_mass_error(estimate, exact).weighted,
            )
    return means.rows(["coverage"])


def draw(rows: Sequence[Row], figure: Any) -> None:
    """Coverage against bytes a token, and its ratio to the oracle's against rank, at the first budget."""
    left, right = figure.subplots(1, 2)
    for size, lines in series([row for row in rows if row["budget"] == rows[0]["budget"]], "page_size").items():
        ranks = [row["rank"] for row in lines]
        left.plot(ranks, [row["coverage_ratio"] for row in lines], "o-", label=f"{size} tokens a page")
        bytes_ = [row["bytes_a_token"] for row in lines]
        (line,) = right.plot(bytes_, [row["coverage"] for row in lines], "o-")
        right.axhline(lines[0]["oracle_coverage"], color=line.get_color(), linestyle=":", linewidth=1)
    left.set_title(f"coverage / oracle's, {rows[0]['budget']} tokens", fontsize=10)
    left.set_xlabel("rank")
    left.legend(fontsize=8)
    right.set_title("coverage (dotted: the oracle's)", fontsize=10)
    right.set_xlabel("bytes of records a token and KV head")
    for axes in (left, right):
        axes.grid(alpha=0.3)
