"""Bytes that a decode step reads of one KV head, by context, and the summaries' share of the cache: no model needed.

Counted as in the selectors: `page_bytes` of every complete page, then the keys and values of the budget.  Dense reads
all keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...config import LocksConfig, reject
from ...layout import check_head_dim, record_layout
from ...selectors import make_selector
from .means import Row, series

CONTEXTS = [4096, 16384, 65536, 262144, 1048576]
BUDGETS = [256, 2048]
HEAD_DIMS = [64, 128]
SELECTORS = ("locks", "exact", "quest", "centroid", "second-moment", "shadowkv", "streaming")


def rows(
    contexts: Sequence[int] = CONTEXTS,
    budgets: Sequence[int] = BUDGETS,
    head_dims: Sequence[int] = HEAD_DIMS,
    itemsize: int = 2,
    group: int = 4,
) -> list[Row]:
    """One row for each head size, budget, selector and context.

    `summary_bytes`, `attended_bytes` and their sum `bytes`, a KV head and step; `dense_bytes`; `share` of them;
    `summary_share`: what the summaries take beside the cache.  Keys take `itemsize` bytes a number, a KV head has
    `group` query heads.
    """
    found: list[Row] = []
    for budget in budgets:
        LocksConfig(budget)
        for context in contexts:
            if context <= budget:
                allowed = f"more than the budget, {budget}: else a step is dense"
                raise reject("--context", context, allowed, "Use more, or a smaller --budget.")
    for head_dim in head_dims:
        check_head_dim(head_dim, LocksConfig())
        for budget in budgets:
            for name in SELECTORS:
                selector = make_selector(name, LocksConfig(budget))
                page = selector.page_bytes(head_dim, LocksConfig.page_size, itemsize, group)
                for context in contexts:
                    pages, token = context // LocksConfig.page_size, 2 * head_dim * itemsize
                    dense, summaries, attended = context * token, pages * page, budget * token
                    row: Row = {"head_dim": head_dim, "budget": budget, "selector": name, "context": context}
                    row |= {"page_bytes": page, "summary_bytes": summaries, "attended_bytes": attended}
                    row |= {"bytes": summaries + attended, "dense_bytes": dense}
                    row |= {
                        "share": round((summaries + attended) / dense, 5),
                        "summary_share": round(summaries / dense, 5),
                    }
                    found.append(row)
    return found


def summary_rows(head_dims: Sequence[int] = HEAD_DIMS, itemsize: int = 2) -> list[Row]:
    """LOCKS' records at other ranks and page sizes: `record_bytes` a page, and their share of the cache's."""
    found: list[Row] = []
    for head_dim in head_dims:
        for size in (8, 16, 32, 64):
            for rank in (2, 4, 8, 12, 15):
                if rank < size:
                    record = record_layout(head_dim, LocksConfig(3 * size, rank, size)).record_bytes
                    share = round(record / (2 * size * head_dim * itemsize), 5)
                    row: Row = {"head_dim": head_dim, "page_size": size, "rank": rank}
                    found.append(row | {"record_bytes": record, "summary_share": share})
    return found


def draw(rows: Sequence[Row], figure: Any) -> None:
    """Share of dense's bytes against context, at the last head size, a panel a budget."""
    budgets = series(
        [row for row in rows if row.get("head_dim") == rows[-1]["head_dim"] and "context" in row], "budget"
    )
    panels = figure.subplots(1, len(budgets), sharey=True, squeeze=False)[0]
    for axes, (budget, lines) in zip(panels, budgets.items(), strict=True):
        for selector, drawn in series(lines, "selector").items():
            axes.plot([row["context"] for row in drawn], [row["share"] for row in drawn], "o-", label=selector)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("tokens in context")
        axes.set_title(f"{budget} tokens attended, head size {rows[-1]['head_dim']}", fontsize=10)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("bytes read a step, of dense's")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
