"""Task score against budget for every selector, from files of `pagelocks eval run` or of `pagelocks eval table`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...config import reject
from ..tables import read_run, summaries
from .means import Row, series

SETTINGS = ("model", "dtype", "seed", "new_tokens", "one_length")
NEEDED = ("model", "task", "context", "selector", "budget", "rule", "score", "low", "high")


def rows(files: Sequence[Path]) -> list[Row]:
    """The cells of `pagelocks eval table`, of one model, with its name: score with interval, coverage, retention."""
    found: list[Row] = []
    for path in files:
        try:
            text = path.read_text()
            if text.startswith("["):
                cells = json.loads(text)
            else:
                header, lines = read_run(path, "--runs")
                about = {name: header.get(name) for name in SETTINGS}
                cells = [about | cell for cell in summaries(lines)]
            [cell[name] for cell in cells for name in NEEDED]
        except (OSError, ValueError, KeyError, TypeError) as error:
            allowed = f"a header and lines of a run, or a table's cells ({error!r})"
            remedy = "Give files that pagelocks eval run or pagelocks eval table wrote."
            raise reject("--runs", str(path), allowed, remedy) from error
        found += cells
    models = sorted({row["model"] for row in found})
    if len(models) != 1:
        raise reject("--runs", models, "files of one model with answers", "Draw each model by itself.")
    for name in SETTINGS:
        if len(values := {row.get(name) for row in found}) > 1:
            raise reject(
                "--runs",
                f"{name} of {', '.join(sorted(map(str, values)))}",
                "files of one setting",
                "Draw each by itself.",
            )
    if all(row["selector"] == "dense" for row in found):
        raise reject("--runs", [str(path) for path in files], "answers of a selector beside dense's", "Add runs.")
    return found


def draw(rows: Sequence[Row], figure: Any) -> None:
    """A panel for each task and context; dense is a line across."""
    works: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        works.setdefault((row["task"], row["context"]), []).append(row)
    wide = min(3, len(works))
    panels = figure.subplots(-(-len(works) // wide), wide, sharey=True, squeeze=False).flatten()
    for axes in panels[len(works) :]:
        axes.set_visible(False)
    for axes, ((task, context), cells) in zip(panels, works.items(), strict=False):
        for selector, lines in series([row for row in cells if row["rule"] == "share"], "selector").items():
            if selector == "dense":
                axes.axhline(lines[0]["score"], color="black", linestyle=":", label="dense")
                continue
            lines = sorted(lines, key=lambda row: row["budget"])
            (line,) = axes.plot([row["budget"] for row in lines], [row["score"] for row in lines], "o-", label=selector)
            if selector in ("locks", "exact") and all(row["low"] is not None for row in lines):
                low, high = ([row[name] for row in lines] for name in ("low", "high"))
                axes.fill_between([row["budget"] for row in lines], low, high, color=line.get_color(), alpha=0.15)
        axes.set_xscale("log", base=2)
        axes.set_title(f"{task}, {context:,} tokens", fontsize=9)
        axes.set_xlabel("tokens attended")
        axes.set_ylim(-3, 103)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("score")
    panels[0].legend(fontsize=7)
