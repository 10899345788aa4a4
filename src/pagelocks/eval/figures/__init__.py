"""The paper's figures and tables, and `shortlist`, our own; one a file: decode records -> rows, and rows -> a picture.

Rows are plain dicts, for JSON.  Means are over prompts, after the mean over a prompt's layers, heads
and steps, but in groups, tail and theory, which pool all heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...config import LocksConfig
from . import groups, ladder, page_size, precision, retention, scope, shortlist, tail, theory
from .means import Row


@dataclass(frozen=True)
class Figure:
    """A figure that is made from decode records.

    Attributes
    ----------
    help : one line
    rows : (records, **options) -> rows; also `calibration`, layer -> keys, if `calibrated`
    draw : (rows, a matplotlib figure) -> None
    options : keyword of `rows` -> default: a list, or one number
    size : of the picture, in inches
    """

    help: str
    rows: Callable[..., list[Row]]
    draw: Callable[[list[Row], Any], None]
    options: dict[str, Any]
    calibrated: bool = False
    size: tuple[float, float] = (9.0, 4.0)


FIGURES: dict[str, Figure] = {
    "scope": Figure(
        "key energy that a basis holds, by its scope, at equal rank and at matched bytes",
        scope.rows,
        scope.draw,
        {"ranks": scope.RANKS},
        calibrated=True,
    ),
    "retention": Figure(
        "whether the pages with the answer are kept, against budget, for many selectors",
        retention.rows,
        retention.draw,
        {"budgets": retention.BUDGETS},
        calibrated=True,
        size=(10.0, 4.5),
    ),
    "ladder": Figure(
        "errors link by link: logits, log-mass, ranking, coverage, output",
        ladder.rows,
        ladder.draw,
        {"budgets": ladder.BUDGETS, "rank": LocksConfig.rank},
        calibrated=True,
        size=(13.0, 6.0),
    ),
    "precision": Figure(
        "coverage, carriers kept and log-mass error by rank and bits of the basis",
        precision.rows,
        precision.draw,
        {"budgets": precision.BUDGETS, "ranks": precision.RANKS, "bits": precision.BITS},
    ),
    "page-size": Figure(
        "coverage by page size and rank",
        page_size.rows,
        page_size.draw,
        {"budgets": page_size.BUDGETS, "ranks": page_size.RANKS, "page_sizes": page_size.PAGE_SIZES},
    ),
    "shortlist": Figure(
        "what looking at the keys of a few budgets' pages buys, by the rank of the summary that picks them",
        shortlist.rows,
        shortlist.draw,
        {"budgets": shortlist.BUDGETS, "ranks": shortlist.RANKS, "factors": shortlist.FACTORS},
    ),
    "groups": Figure(
        "coverage of query heads by the rule that joins a group: mean, worst, 5th percentile",
        groups.rows,
        groups.draw,
        {"budgets": groups.BUDGETS},
    ),
    "tail": Figure(
        "quantiles of the log-mass error, and the error by properties of a page",
        tail.rows,
        tail.draw,
        {"rank": LocksConfig.rank},
        size=(13.0, 3.5),
    ),
    "theory": Figure(
        "Theorem 1, Eq. 1 and Proposition 1 on real keys; fails if a bound is broken",
        theory.rows,
        theory.draw,
        {"budgets": theory.BUDGETS, "ranks": theory.RANKS},
        calibrated=True,
        size=(10.0, 4.0),
    ),
}
