"""Score against budget as SVG, for a page that must hold its own pictures."""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ..selectors import SELECTORS, SEQUENCE_SELECTORS

_ORDER = ["locks", "exact", *(name for name in (*SELECTORS, *SEQUENCE_SELECTORS) if name not in ("locks", "exact"))]


def score_plot(cells: Sequence[dict[str, Any]], name: str) -> str:
    """One task at one context: a line a selector, with intervals; bars where all have one budget.

    Parameters
    ----------
    cells : objects of `tables.summaries`, dense attention's among them or not
    name : of letters and digits, in front of all the picture's ids, so that two pictures of a page share none

    Returns
    -------
    str
        An `<svg>` element, its text as text in the page's font.
    """
    import matplotlib
    from matplotlib.figure import Figure

    series = defaultdict(list)
    for cell in cells:
        if cell["selector"] != "dense":
            series[cell["selector"], cell["rule"]].append(cell)
    methods = sorted(series, key=lambda key: (_ORDER.index(key[0]) if key[0] in _ORDER else len(_ORDER), key))
    budgets = sorted({cell["budget"] for rows in series.values() for cell in rows})
    dense = [cell for cell in cells if cell["selector"] == "dense"]
    colours = matplotlib.colormaps["tab20"].colors  # type: ignore[attr-defined]
    with matplotlib.rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "svg.hashsalt": name}):
        tall = 3.4 if len(budgets) > 1 else 0.9 + 0.27 * len(methods)
        figure = Figure(figsize=(7.2, tall), layout="constrained")
        axes: Any = figure.subplots()
        for place, (selector, rule) in enumerate(methods):
            rows = sorted(series[selector, rule], key=lambda cell: cell["budget"])
            known = _ORDER.index(selector) if selector in _ORDER else len(_ORDER)
            look = {"color": "black" if selector == "exact" else colours[known % len(colours)]}
            label = selector if rule == "share" else f"{selector}, {rule}"
            scores, errors = [cell["score"] for cell in rows], _errors(rows)
            if len(budgets) > 1:
                shift = 1 + 0.02 * (place - len(methods) / 2)  # intervals beside one another, not on one another
                places = [cell["budget"] * shift for cell in rows]
                style = {"linestyle": "--" if selector == "exact" else "-", "linewidth": 2.4 - (selector != "locks")}
                axes.errorbar(places, scores, errors, marker="o", markersize=4, label=label, capsize=2, **style, **look)
            else:
                axes.barh(place, scores, xerr=errors, capsize=2, height=0.7, **look)
        towards = axes.axhline if len(budgets) > 1 else axes.axvline
        for cell in dense:
            towards(cell["score"], color="gray", linestyle=":", label="dense")
        if len(budgets) > 1:
            axes.set_xscale("log", base=2)
            axes.set_xticks(budgets, [f"{budget:,}" for budget in budgets])
            axes.minorticks_off()
            axes.set(xlabel="budget, tokens a KV head", ylabel="score", ylim=(-4, 104))
            figure.legend(loc="outside right upper", fontsize=8)
        else:
            axes.set_yticks(range(len(methods)), [s if r == "share" else f"{s}, {r}" for s, r in methods])
            axes.invert_yaxis()
            about = f"score at {budgets[0]:,} tokens" if budgets else "score"
            axes.set(xlabel=about + (" (dotted: dense)" if dense else ""), xlim=(0, 104))
        file = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=nothing)
    picture = file.getvalue()
    picture = picture[picture.index("<svg") :]
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", picture)


def _errors(cells: Sequence[dict[str, Any]]) -> list[list[float]]:
    below = [0 if cell["low"] is None else max(0.0, cell["score"] - cell["low"]) for cell in cells]
    above = [0 if cell["high"] is None else max(0.0, cell["high"] - cell["score"]) for cell in cells]
    return [below, above]
