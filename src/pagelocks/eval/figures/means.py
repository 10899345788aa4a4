"""From values of many layers, heads and steps to rows: means over prompts, which are what was drawn at random."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..statistics import bootstrap_mean

Row = dict[str, Any]
Key = tuple[Any, ...]


class Means:
    """Sums of values by key and prompt.

    Parameters
    ----------
    names : of a key's parts
    """

    def __init__(self, *names: str) -> None:
        self.names = names
        self._sums: dict[Key, dict[str, dict[int, tuple[float, int]]]] = defaultdict(lambda: defaultdict(dict))

    def add(self, key: Key, prompt: int, **values: Tensor | float) -> None:
        """Add all entries of each value; an empty tensor adds none."""
        for name, value in values.items():
            entries = torch.as_tensor(value, dtype=torch.float64)
            total, count = self._sums[key][name].get(prompt, (0.0, 0))
            self._sums[key][name][prompt] = total + float(entries.sum()), count + entries.numel()

    def rows(self, intervals: Sequence[str] = ()) -> list[Row]:
        """A row for each key, in the order they came.

        Each value is the mean over prompts of the prompt's mean, None where no prompt has one.  Those in `intervals`
        also have `_low` and `_high`: 95% by the bootstrap over prompts, None for a single one.  `prompts`: how many
        have one.
        """
        found = []
        for key, values in self._sums.items():
            row: Row = dict(zip(self.names, key, strict=True))
            for name, prompts in values.items():
                means = [total / count for total, count in prompts.values() if count]
                row[name] = _rounded(sum(means) / len(means)) if means else None
                if name in intervals:
                    interval = bootstrap_mean(means) if len(means) > 1 else None
                    row[f"{name}_low"] = _rounded(interval.low) if interval else None
                    row[f"{name}_high"] = _rounded(interval.high) if interval else None
            counted = (sum(count > 0 for _, count in prompts.values()) for prompts in values.values())
            found.append(row | {"prompts": max(counted)})
        return found


def _rounded(value: float) -> float:
    """Six significant digits."""
    return float(f"{value:.6g}")


def series(rows: Sequence[Row], by: str) -> dict[Any, list[Row]]:
    """Rows by one of their fields, in the order they came."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(row[by], []).append(row)
    return found


def line_panels(
    rows: Sequence[Row], figure: Any, titles: Mapping[str, str], along: str, by: str, label: str, xlabel: str
) -> None:
    """A panel for each field in `titles`: its values at the first budget against `along`, a line for each of `by`.

    `label` is a line's, with {} for its value; rows without a value are left out.
    """
    lines = [row for row in rows if row["budget"] == rows[0]["budget"]]
    panels = figure.subplots(1, len(titles))
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        for value, each in series(lines, by).items():
            drawn = [row for row in each if row.get(name) is not None]
            axes.plot([row[along] for row in drawn], [row[name] for row in drawn], "o-", label=label.format(value))
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(xlabel)
        axes.grid(alpha=0.3)
    panels[0].legend()
