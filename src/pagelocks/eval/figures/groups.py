"""GQA combination: what each rule for a group's one ranking leaves its heads, and what a choice a head would cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...config import LocksConfig, reject
from ...selectors import Locks
from ...selectors.groups import GROUP_RULES
from ...theory import exact_log_mass
from ..links import choose_pages, coverage, estimate_log_mass, kept_pages, page_mass, summarize_heads
from .means import Row, series

if TYPE_CHECKING:  # it needs Transformers, and the command line does not
    from ..capture import Captured

BUDGETS = [128, 256]


def rows(records: Iterable[Captured], budgets: Sequence[int] = BUDGETS) -> list[Row]:
    """One row for each budget, selector (the oracle, LOCKS) and rule.

    Coverage of query heads: `mean`, `worst_head` of a group averaged over groups, `percentile_5` and `least` of all
    heads; `pages_read`: different pages that a KV head reads, which per-head choices make more.
    """
    found: dict[tuple[int, str, str], list[Tensor]] = defaultdict(list)
    read: dict[tuple[int, str, str], list[Tensor]] = defaultdict(list)
    prompts = set[int]()
    for seen in records:
        record = seen.record
        if record.query.shape[1] == 1:
            raise reject("--model", "one query head a KV head", "a model with grouped-query attention", "Use another.")
        prompts.add(seen.prompt)
        mass = page_mass(record, LocksConfig.page_size)
        for budget in budgets:
            config = LocksConfig(budget)
            exact = exact_log_mass(record.query, record.pages(config).keys(), record.scale)
            for selector, estimate in (("exact", exact), ("locks", estimate_log_mass(record, Locks(), config))):
                for name, rule in GROUP_RULES.items():
                    pages, key = choose_pages(estimate, record.length, config, rule), (budget, selector, name)
                    found[key].append(coverage(mass, pages))
                    read[key].append(kept_pages(pages.flatten(1), mass.shape[-1]).sum(-1).double())
    rows: list[Row] = []
    for key, values in found.items():
        heads = summarize_heads(torch.cat(values))
        row: Row = dict(zip(("budget", "selector", "rule"), key, strict=True))
        for name in ("mean", "worst_head", "percentile_5", "least"):
            row[name] = round(getattr(heads, name), 6)
        pages_read = round(float(torch.cat(read[key]).mean()), 2)
        rows.append(row | {"pages_read": pages_read, "heads": heads.heads, "prompts": len(prompts)})
    return rows


def draw(rows: Sequence[Row], figure: Any) -> None:
    """Three bars a rule, LOCKS, a panel a budget."""
    budgets = series([row for row in rows if row["selector"] == "locks"], "budget")
    panels = figure.subplots(1, len(budgets), sharey=True, squeeze=False)[0]
    for axes, (budget, lines) in zip(panels, budgets.items(), strict=True):
        for place, name in enumerate(("mean", "worst_head", "percentile_5")):
            where = [number + 0.27 * (place - 1) for number in range(len(lines))]
            axes.bar(where, [row[name] for row in lines], width=0.25, label=name.replace("_", " "))
        axes.set_xticks(range(len(lines)), [f"{row['rule']}\n{row['pages_read']:.0f} pages" for row in lines])
        axes.set_title(f"LOCKS, {budget} tokens", fontsize=10)
        axes.set_ylim(0, 1)
    panels[0].set_ylabel("coverage of a query head")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=8)
