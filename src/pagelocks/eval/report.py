"""`pagelocks eval report`: the files of runs and figures as one page for a browser.

pagelocks eval report run.jsonl drift.json drift.png --output report.html
"""

from __future__ import annotations

import argparse
import base64
import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from ..config import reject
from ..provenance import provenance
from . import tables
from .loading import check_output

PICTURES = {".png": "image/png", ".svg": "image/svg+xml"}
MACHINE = ("versions", "commit", "uncommitted_changes", "date", "device", "threads")
"""What of a run's header two files of the same records may differ in; all else are settings."""


def add_report(commands: Any, **shape: Any) -> None:
    """Add `report` to `pagelocks eval`."""
    parser = commands.add_parser(
        "report", help="runs and figures as one page for a browser: tables, tests, plots, settings", **shape
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSONL of runs; JSON, PNG, SVG of figures")
    parser.add_argument("--title", default="Quality report", metavar="TEXT", help="the page's title")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the page to write, HTML")
    parser.set_defaults(run=run_report, prog="pagelocks eval report")


def run_report(arguments: argparse.Namespace) -> dict[str, Any]:
    """Read all files, write the page."""
    if arguments.output in arguments.files:
        raise reject("--output", str(arguments.output), "a file of its own to write", "Name one, such as report.html.")
    check_output(arguments.output)
    runs, figures = list[dict[str, Any]](), dict[str, dict[str, Any]]()
    for path in arguments.files:
        if path.suffix.lower() in (".json", *PICTURES):  # a figure's numbers and its picture have one name
            figures.setdefault(path.stem, {"name": path.stem}).update(read_figure(path))
        else:
            runs.append(read_run(path))
    try:
        models = sections(runs)
    except ImportError as error:
        raise ValueError('matplotlib is missing: pip install "pagelocks[plot]"') from error

    from .web import write_page

    made = provenance()
    write_page(
        arguments.output,
        "report.html",
        title=arguments.title,
        models=models,
        figures=list(figures.values()),
        made=f"pagelocks {made['versions']['pagelocks']}, commit {made['commit']}, {made['date']}",
    )
    if not arguments.json:
        print(arguments.output)
    cells = sum(len(task["cells"]) for model in models for task in model["tasks"])
    return {"output": str(arguments.output), "models": len(models), "cells": cells, "figures": list(figures)}


def read_run(path: Path) -> dict[str, Any]:
    """A file that `pagelocks eval run` wrote: `name`, `header`, `lines`.

    Raises
    ------
    ValueError
        If it is none, or holds no line yet.
    """
    header, lines = tables.read_run(path)
    return {"name": path.name, "header": header, "lines": lines}


def read_figure(path: Path) -> dict[str, Any]:
    """Numbers or a picture of a figure: `tables`, `settings` and `raw`, or `picture`, a URL that holds it."""
    try:
        if path.suffix.lower() in PICTURES:
            held = base64.b64encode(path.read_bytes()).decode()
            return {"picture": f"data:{PICTURES[path.suffix.lower()]};base64,{held}"}
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise reject("FILE", str(path), f"a picture, or JSON of a figure ({error})", "Check the path.") from error
    parts = found if isinstance(found, dict) else {"": found}
    tables = {name: part for name, part in parts.items() if _is_table(part)}
    return {
        "tables": [_table(name, rows) for name, rows in tables.items()],
        "settings": {name: _text(part) for name, part in parts.items() if name not in tables},
    }


def sections(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs of the same model and settings together, as the page shows them.

    Their records are the same, so their lines are one set; where two files hold the same answer the later one counts.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        settings = {name: value for name, value in run["header"].items() if name not in MACHINE and value is not None}
        groups.setdefault(json.dumps(settings, sort_keys=True), []).append(run)
    number, found = count(), []
    for group in groups.values():
        read: dict[str, set[str]] = {}
        for line in (line for run in group for line in run["lines"] if line.get("source")):
            read.setdefault(line["task"], set()).add(line["source"])
        if twice := [task for task, digests in read.items() if len(digests) > 1]:
            names = ", ".join(run["name"] for run in group)
            allowed = f"one file of {twice[0]}; they were read from files of digests {', '.join(read[twice[0]])}"
            raise reject("FILE", names, allowed, "Make a report of each.")
        cells = tables.summaries([line for run in group for line in run["lines"]])
        tasks: dict[tuple[int, str], list[dict[str, Any]]] = {}
        for cell in cells:
            tasks.setdefault((cell["context"], cell["task"]), []).append(cell)
        header = group[0]["header"]
        found.append(
            {
                "name": header["model"],
                "settings": {n: _text(v) for n, v in header.items() if n not in ("model", *MACHINE)},
                "files": [
                    {"name": run["name"], "about": {n: _text(v) for n, v in run["header"].items() if n in MACHINE}}
                    for run in group
                ],
                "overviews": [overview(cells, context) for context in sorted({context for context, _ in tasks})],
                "tasks": [_task(*key, own, next(number)) for key, own in sorted(tasks.items(), key=lambda at: at[0])],
            }
        )
    return found


def overview(cells: Sequence[dict[str, Any]], context: int) -> dict[str, Any]:
    """Scores at one context: a row a method, a column a task, and the mean of a method that answered all tasks."""
    here = [cell for cell in cells if cell["context"] == context]
    tasks = list(dict.fromkeys(cell["task"] for cell in here))
    scores: dict[tuple[str, int, str], dict[str, float]] = {}
    for cell in here:
        scores.setdefault((cell["selector"], cell["budget"], cell["rule"]), {})[cell["task"]] = cell["score"]
    rows = []
    for (selector, budget, rule), row in scores.items():
        mean = sum(row.values()) / len(row) if len(row) == len(tasks) else None
        values = [*(row.get(task) for task in tasks), mean]
        rows.append({"selector": selector, "budget": budget, "rule": rule, "scores": values})
    return {"context": context, "tasks": tasks, "rows": rows}


def _task(context: int, task: str, cells: list[dict[str, Any]], number: int) -> dict[str, Any]:
    from .plots import score_plot

    substitute = any(cell["substitute"] for cell in cells)
    picture = score_plot(cells, f"plot{number}")
    return {"name": task, "context": context, "substitute": substitute, "cells": cells, "picture": picture}


def _is_table(part: Any) -> bool:
    return isinstance(part, list) and bool(part) and all(isinstance(row, dict) for row in part)


def _table(name: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Columns that say the same in all rows stand apart: `shared`."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = {column: [_text(row.get(column)) for row in rows] for column in columns}
    shared = {column: texts[0] for column, texts in cells.items() if len(rows) > 1 and len(set(texts)) == 1}
    kept = [column for column in columns if column not in shared]
    return {"name": name, "columns": kept, "rows": list(zip(*(cells[column] for column in kept), strict=True))} | {
        "count": len(rows),
        "shared": shared,
    }


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(part)}" for name, part in value.items())
    return ", ".join(map(_text, value)) if isinstance(value, list) else str(value)
