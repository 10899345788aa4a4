"""What a budget is chosen by: means over the tasks that dense attention solves, and each task's budget floor.

    pagelocks eval overview *.jsonl

The floor of a selector is the least budget from which on, at every budget that was run, it is as good as dense
attention but for some points; below the oracle's, a better estimate of the pages' shares does not help.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from ..config import reject
from ..console import table_console
from .loading import check_output
from .report import MACHINE
from .tables import CELL, Line, against, read_run, summaries

SOLVED, WITHIN = 60.0, 3.0
MEANS = ("score", "coverage_ratio", "worst", "p5", "retention", "pages_read_share")


def add_overview(commands: Any, **shape: Any) -> None:
    """Add `overview` to `pagelocks eval`."""
    parser = commands.add_parser("overview", help="means over tasks, and the budget that each task needs", **shape)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="what `pagelocks eval run` wrote")
    parser.add_argument(
        "--solved", type=float, default=SOLVED, metavar="POINTS", help="dense attention's least score of a task (60)"
    )
    parser.add_argument(
        "--within", type=float, default=WITHIN, metavar="POINTS", help="below dense attention, at a budget floor (3)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write both as JSON")
    parser.set_defaults(run=run_overview, prog="pagelocks eval overview")


def run_overview(arguments: argparse.Namespace) -> list[Line]:
    """One object a model and settings, of all their files; answers may be of other lengths, as tasks need them."""
    for name in ("solved", "within"):
        if not 0 <= getattr(arguments, name) <= 100:
            raise reject(f"--{name}", getattr(arguments, name), "points, 0 to 100", "Leave it out.")
    if arguments.output:
        check_output(arguments.output)
    groups: dict[str, list[Line]] = defaultdict(list)
    for path in arguments.files:
        header, lines = read_run(path)
        apart = {name: value for name, value in header.items() if name not in (*MACHINE, "new_tokens", "calibration")}
        groups[json.dumps(apart, sort_keys=True)] += lines
    found = []
    for settings, lines in groups.items():
        result: Line = json.loads(settings) | {"solved": arguments.solved, "within": arguments.within}
        result |= {"means": means(lines, arguments.solved), "floors": floors(lines, arguments.solved, arguments.within)}
        found.append(result)
        if not arguments.json:
            about = f"{result['model']}, {result['dtype']}, seed {result['seed']}"
            table_console().print(about, means_table(result["means"]), floors_table(result["floors"]))
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")
    return found


def means(lines: Sequence[Line], solved: float = SOLVED) -> list[Line]:
    """One object a context, selector, budget and rule that answered all of the tasks that dense attention solves.

    Means of the tasks' means; differences `against_dense`, at the same budget `against_exact` and `against_locks`, on
    all tasks' records together.
    """
    lines = _complete(lines)
    cells = summaries(lines, compare=False)
    tasks: dict[int, list[str]] = defaultdict(list)
    for cell in cells:
        if cell["selector"] == "dense" and cell["score"] >= solved:
            tasks[cell["context"]].append(cell["task"])
    records: dict[tuple[Any, ...], dict[Any, Line]] = defaultdict(dict)
    for line in lines:
        key = line["context"], line["selector"], line["budget"], line["rule"]
        if line["task"] in tasks[line["context"]]:
            records[key][line["task"], line["index"]] = line
    found = []
    for (context, selector, budget, rule), pooled in records.items():
        ours = [
            cell
            for cell in cells
            if (cell["context"], cell["selector"], cell["budget"], cell["rule"]) == (context, selector, budget, rule)
            and cell["task"] in tasks[context]
        ]
        if len(ours) < len(tasks[context]):
            continue  # the mean over other tasks is not to be compared
        about: Line = {"context": context, "selector": selector, "budget": budget, "rule": rule}
        about |= {"tasks": sorted(tasks[context]), "n": len(pooled)}
        for name in MEANS:
            values = [cell[name] for cell in ours if cell[name] is not None]
            about[name] = round(sum(values) / len(values), 4) if values else None
        if selector != "dense":
            about["against_dense"] = against(pooled, records.get((context, "dense", 0, "share"), {}))
            for other in ("exact", "locks"):
                about[f"against_{other}"] = against(pooled, records.get((context, other, budget, rule), {}))
        found.append(about)
    return sorted(found, key=lambda about: about["context"])


def _complete(lines: Sequence[Line]) -> list[Line]:
    """Those of methods that answered every record that dense attention answered of the task and context."""
    records: dict[tuple[Any, ...], set[int]] = defaultdict(set)
    for line in lines:
        records[tuple(line[name] for name in CELL)].add(line["index"])

    def whole(line: Line) -> bool:
        dense = records.get((line["task"], line["context"], "dense", 0, "share"), set())
        return dense <= records[tuple(line[name] for name in CELL)]

    return [line for line in lines if whole(line)]


def floors(lines: Sequence[Line], solved: float = SOLVED, within: float = WITHIN) -> list[Line]:
    """One object a context and task that dense attention solves: `floors`, selector -> the least budget, None for none.

    By the rule "share".  A budget counts if the score there, and at all larger budgets that were run, is at most
    `within` points below dense attention's.
    """
    cells = summaries(_complete(lines), compare=False)
    found = []
    for dense in cells:
        if dense["selector"] != "dense" or dense["score"] < solved:
            continue
        scores: dict[str, dict[int, float]] = defaultdict(dict)
        for cell in cells:
            if all(cell[name] == dense[name] for name in ("task", "context", "rule")) and cell["selector"] != "dense":
                scores[cell["selector"]][cell["budget"]] = cell["score"]
        about: Line = {name: dense[name] for name in ("context", "task", "substitute", "n")}
        about |= {"dense": dense["score"], "floors": {}}
        for selector, by_budget in scores.items():
            floor = None
            for budget in sorted(by_budget, reverse=True):
                if by_budget[budget] < dense["score"] - within:
                    break
                floor = budget
            about["floors"][selector] = floor
        found.append(about)
    return sorted(found, key=lambda about: about["context"])


def means_table(rows: Sequence[Line]) -> Table:
    """`means`, for people: scores with the differences' intervals, coverage and retention."""
    table = Table(box=None, header_style="bold")
    others = ("dense", "exact", "locks")
    differences = (f"- {name}" for name in others)
    for name in ("context", "tasks", "selector", "budget", "score", *differences, "coverage", "retention"):
        table.add_column(name, justify="left" if name == "selector" else "right")
    for row in rows:
        sides = [row.get(f"against_{name}") if row["selector"] != name else None for name in others]
        rule = "" if row["rule"] == "share" else f" ({row['rule']})"
        table.add_row(
            f"{row['context']:,}",
            str(len(row["tasks"])),
            row["selector"] + rule,
            str(row["budget"] or ""),
            f"{row['score']:.1f}",
            *(
                f"{each['difference']:+.1f} ({each['low']:+.1f} to {each['high']:+.1f})" if each else ""
                for each in sides
            ),
            *("" if row[name] is None else f"{row[name]:.3f}" for name in ("coverage_ratio", "retention")),
        )
    return table


def floors_table(rows: Sequence[Line]) -> Table:
    """`floors`, for people: a column a selector; a dash where no budget that was run is enough."""
    selectors = list(dict.fromkeys(name for row in rows for name in row["floors"]))
    table = Table(box=None, header_style="bold", title="budget floors", title_justify="left")
    for name in ("context", "task", "n", "dense", *selectors):
        table.add_column(name, justify="left" if name == "task" else "right")
    for row in rows:
        budgets = [row["floors"].get(name, "") for name in selectors]
        shown = ["-" if budget is None else str(budget) for budget in budgets]
        table.add_row(f"{row['context']:,}", row["task"], str(row["n"]), f"{row['dense']:.1f}", *shown)
    return table
