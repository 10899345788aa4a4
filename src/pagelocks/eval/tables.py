"""From the lines of `pagelocks eval run` to scores with intervals, paired with dense attention and the oracle."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from ..config import reject
from .statistics import bootstrap_difference, bootstrap_mean, permutation_test, wilson_interval

Line = dict[str, Any]
LINKS = (
    "coverage_ratio",
    "worst",
    "p5",
    "coverage_ratio_retrieval",
    "coverage_ratio_rest",
    "retrieval_heads",
    "retention",
    "carriers_kept",
    "carriers_kept_by_oracle",
)
CELL = ("task", "context", "selector", "budget", "rule")
NEEDED = (*CELL, "index", "score", "substitute", "links", "pages_read", "pages_skipped")
"""What a line must have."""
KINDS: dict[str, Any] = {"task": str, "context": int, "selector": str, "budget": int, "rule": str, "index": int}
KINDS |= dict.fromkeys(("score", "pages_read", "pages_skipped"), (int, float)) | {"links": (dict, type(None))}
"""Of what types."""


def read_run(path: Path, flag: str = "FILE") -> tuple[Line, list[Line]]:
    """Header and lines of a file that `pagelocks eval run` wrote, or writes: a last line that is not whole is left out.

    Raises
    ------
    ValueError
        If it is none, or holds no answer yet; `flag` is what the command calls the file.
    """
    try:
        text = path.read_text(encoding="utf-8")
        header, *lines = map(json.loads, text[: text.rfind("\n") + 1].splitlines())
        if not lines or any(name not in line for line in lines for name in NEEDED):
            raise ValueError("no line, or a line without a score")
        for number, line in enumerate(lines, 2):
            if wrong := [name for name, kind in KINDS.items() if not isinstance(line[name], kind)]:
                raise ValueError(f"line {number} has {wrong[0]}={line[wrong[0]]!r}")
        return {"model": header["model"], "dtype": header["dtype"], "seed": header["seed"]} | header, lines
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = "Give files that pagelocks eval run wrote."
        raise reject(flag, str(path), f"a header and lines of a run ({error})", remedy) from error


def summaries(lines: Sequence[Line], compare: bool = True) -> list[Line]:
    """One object for each task, context, selector, budget and rule; scores from 0 to 100.

    Intervals of 95%: Wilson's where every score is right or wrong, else the bootstrap's, None for one record.
    `against_dense` and `against_exact` are mean differences on the records that both have, with interval and
    permutation test; the oracle is the one at the same budget and rule.  Without `compare` both are left out: they take
    the time.  `scores` has each record's, from 0 to 1, at its index, and None where there is no such record: enough for
    other pairs and means than these, when the lines are gone.
    """
    cells: dict[tuple[Any, ...], dict[int, Line]] = defaultdict(dict)
    for line in lines:
        cells[tuple(line[name] for name in CELL)][line["index"]] = line
    found = []
    for key, records in cells.items():
        task, context, selector, budget, rule = key
        scores = [line["score"] for line in records.values()]
        low, high = _interval(scores)
        about: Line = dict(zip(CELL, key, strict=True)) | {"n": len(scores)}
        about["substitute"] = any(line["substitute"] for line in records.values())
        about["page_bytes"] = next(iter(records.values())).get("page_bytes")
        about["commits"] = sorted({str(line.get("commit")) for line in records.values()})
        about["scores"] = [records[index]["score"] if index in records else None for index in range(max(records) + 1)]
        about |= {"score": _percent(sum(scores) / len(scores)), "low": _percent(low), "high": _percent(high)}
        sparse = [line["sparse_share"] for line in records.values() if line.get("sparse_share") is not None]
        about["sparse_share"] = round(sum(sparse) / len(sparse), 4) if sparse else None
        for name in LINKS:
            values = [line["links"][name] for line in records.values() if line["links"] and name in line["links"]]
            about[name] = round(sum(values) / len(values), 4) if values else None
        read, skipped = (sum(line[name] for line in records.values()) for name in ("pages_read", "pages_skipped"))
        about["pages_read_share"] = round(read / (read + skipped), 4) if read + skipped else None
        if compare and selector != "dense":
            about["against_dense"] = against(records, cells.get((task, context, "dense", 0, "share"), {}))
            about["against_exact"] = against(records, cells.get((task, context, "exact", budget, rule), {}))
        found.append(about)
    return found


def summary_table(lines: Sequence[Line]) -> Table:
    """The same for people; bytes are those read to score a page of a KV head.  Coverage of
    the query heads that look for the answer stands beside that of the rest where records say where it is, the share of
    sparse steps where some were dense."""
    cells = summaries(lines)
    apart = any(about["coverage_ratio_retrieval"] is not None for about in cells)
    dense_too = any(about["sparse_share"] not in (None, 1) for about in cells)
    table = Table(box=None, header_style="bold")
    for name in (
        "task",
        "context",
        "selector",
        "budget",
        "rule",
        "n",
        "score",
        "95%",
        "- dense",
        "coverage",
        *(("retrieval heads", "the rest") if apart else ()),
        "retention",
        *(("sparse steps",) if dense_too else ()),
        "bytes",
    ):
        table.add_column(name, justify="left" if name in ("task", "selector", "rule") else "right")
    for about in cells:
        dense = about.get("against_dense")
        table.add_row(
            about["task"],
            f"{about['context']:,}",
            about["selector"],
            str(about["budget"] or ""),
            about["rule"] if about["selector"] != "dense" else "",
            str(about["n"]),
            f"{about['score']:.1f}",
            "" if about["low"] is None else f"{about['low']:.0f} to {about['high']:.0f}",
            f"{dense['difference']:+.1f}" if dense else "",
            *(
                "" if about[name] is None else f"{about[name]:.3f}"
                for name in ("coverage_ratio", "coverage_ratio_retrieval", "coverage_ratio_rest", "retention")
                if apart or name in ("coverage_ratio", "retention")
            ),
            *(["" if about["sparse_share"] is None else f"{about['sparse_share']:.0%}"] if dense_too else []),
            "" if about["page_bytes"] is None else f"{about['page_bytes']:g}",
        )
    return table


def _interval(scores: Sequence[float]) -> tuple[float | None, float | None]:
    if all(score in (0, 1) for score in scores):
        interval = wilson_interval(sum(score == 1 for score in scores), len(scores))
    elif len(scores) == 1:
        return None, None
    else:
        interval = bootstrap_mean(scores)
    return interval.low, interval.high


def against(ours: Mapping[Any, Line], theirs: Mapping[Any, Line]) -> Line | None:
    """Mean difference on the records that both have, with interval and permutation test; None for fewer than two."""
    shared = sorted(set(ours) & set(theirs))
    if len(shared) < 2:
        return None
    first, second = ([side[index]["score"] for index in shared] for side in (ours, theirs))
    interval, test = bootstrap_difference(first, second), permutation_test(first, second)
    numbers = {"difference": interval.estimate, "low": interval.low, "high": interval.high}
    return {name: _percent(value) for name, value in numbers.items()} | {
        "p": round(test.p_value, 4),
        "n": len(shared),
    }


def _percent(value: float | None) -> float | None:
    return None if value is None else round(100 * value, 2)
