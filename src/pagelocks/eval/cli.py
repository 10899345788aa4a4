"""`pagelocks eval`: arguments, checks, tables."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ..config import LocksConfig, reject
from ..console import table_console
from ..selectors import CALIBRATED_SELECTORS, REPEATING_SELECTORS, SELECTORS, SEQUENCE_SELECTORS
from ..selectors.groups import GROUP_RULES
from . import ruler
from .figures.cli import add_figure
from .loading import check_output, device_of, load_model, load_tokenizer, need_transformers
from .overview import add_overview
from .prompt import read_data
from .report import add_report
from .tables import read_run, summaries, summary_table


def add_eval(commands: Any, **shape: Any) -> None:
    """Add `eval` to the command line."""
    evaluate = commands.add_parser(
        "eval", help="answers of LOCKS, the exact oracle and their rivals, beside dense attention", **shape
    )
    actions = evaluate.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_run(actions, **shape)
    add_figure(actions, **shape)
    add_drift(actions, **shape)
    table = actions.add_parser("table", help="scores with intervals, from the files of runs", **shape)
    table.add_argument("files", nargs="+", type=Path, metavar="FILE", help="what `pagelocks eval run` wrote")
    table.add_argument("--output", type=Path, metavar="FILE", help="write them as JSON, a list of objects")
    table.set_defaults(run=run_table, prog="pagelocks eval table")
    add_overview(actions, **shape)
    add_report(actions, **shape)
    for command in actions.choices.values():
        command.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else")


def add_run(commands: Any, **shape: Any) -> None:
    """Add `run` to `pagelocks eval`."""
    known = [*SELECTORS, *SEQUENCE_SELECTORS, *CALIBRATED_SELECTORS, *REPEATING_SELECTORS]
    parser = commands.add_parser(
        "run", help="RULER tasks and benchmarks by any selectors, on the same records", **shape
    )
    parser.add_argument("--model", required=True, help="a known name, or a folder")
    parser.add_argument(
        "--task", nargs="+", choices=list(ruler.TASKS), metavar="TASK", help="of RULER (niah_single_1, unless --data)"
    )
    parser.add_argument(
        "--data",
        nargs="+",
        default=[],
        metavar="NAME=FILE",
        help="a benchmark's file: longbench/hotpotqa=hotpotqa.jsonl",
    )
    parser.add_argument("--context", type=int, nargs="+", default=[4096], help="tokens of prompt and answer (4096)")
    parser.add_argument("--records", type=int, default=20, help="records a task and context (20)")
    parser.add_argument("--selector", nargs="+", default=["locks", "exact"], choices=known, metavar="SELECTOR")
    parser.add_argument("--budget", type=int, nargs="+", default=[256], help="tokens that a KV head attends (256)")
    parser.add_argument("--rule", nargs="+", default=["share"], choices=list(GROUP_RULES), metavar="RULE")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--batch", type=int, default=1, help="records at a time, if as long as each other (1)")
    parser.add_argument(
        "--one-length",
        action="store_true",
        help="line breaks ahead of RULER's prompts, so that all of a task and context are as long as each other",
    )
    parser.add_argument("--new-tokens", type=int, help="at most so many in an answer, instead of the task's own number")
    parser.add_argument("--link-steps", type=int, default=2, help="answer tokens whose links are measured (2)")
    parser.add_argument("--link-records", type=int, help="links of the first so many records alone (all)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="the GPU if there is one")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--output", required=True, help="a JSONL file; a run goes on where it left off")
    parser.set_defaults(run=run_command, prog="pagelocks eval run")


def run_command(arguments: argparse.Namespace) -> Any:
    """Check everything, load the model, run, and print the table."""
    need_transformers()
    from . import quality
    from .calibration import LENGTH, calibration_text

    device = device_of(arguments.device)
    for name, least in (("records", 1), ("batch", 1), ("new_tokens", 2), ("link_steps", 0), ("link_records", 0)):
        if (value := getattr(arguments, name)) is not None and value < least:
            raise reject(f"--{name.replace('_', '-')}", value, f"{least} or more", f"Use {least} or more.")
    for context in arguments.context:
        if context < 64:
            raise reject("--context", context, "64 or more", "Use 4096.")
    for budget in arguments.budget:
        LocksConfig(budget=budget)
        if budget >= min(arguments.context):
            raise reject("--budget", budget, f"less than --context, {min(arguments.context)}", "Use less.")
    data = read_data(arguments.data, arguments.records)
    for each in data:
        if (answer := arguments.new_tokens or each.examples[0].new_tokens) + 64 > min(arguments.context):
            allowed = f"{answer + 64} or more: {each.name} allows an answer {answer} tokens"
            raise reject("--context", min(arguments.context), allowed, "Use more, or a lower --new-tokens.")
    arguments.task = arguments.task or ([] if data else ["niah_single_1"])
    check_output(Path(arguments.output))
    folder, tokenizer = load_tokenizer(arguments.model)
    model, about = load_model(folder, arguments.dtype, device)
    longest = model.config.max_position_embeddings
    if max(arguments.context) > longest:
        raise reject("--context", max(arguments.context), f"at most {longest} for {arguments.model}", "Use less.")
    text = None
    if any(name in CALIBRATED_SELECTORS for name in arguments.selector):
        try:
            text = calibration_text(tokenizer, arguments.seed, min(LENGTH, longest))
        except ImportError as error:  # of the package with RULER's words
            raise ValueError(str(error)) from error
    settings = {name: getattr(arguments, name) for name in ("seed", "new_tokens", "link_steps", "one_length")}
    header = about | settings | {"calibration": None if text is None else text.about}
    lines = quality.run(arguments, header, model, tokenizer, data, text)
    if not arguments.json:
        table_console().print(summary_table(lines))
    return {**header, "cells": summaries(lines)}


def add_drift(commands: Any, **shape: Any) -> None:
    """Add `drift` to `pagelocks eval`."""
    known = [*SELECTORS, *SEQUENCE_SELECTORS]
    parser = commands.add_parser("drift", help="long answers and conversations: does an error grow?", **shape)
    parser.add_argument("--model", required=True, help="a known name, or a folder")
    parser.add_argument("--prompt-tokens", type=int, default=2048, help="tokens of the first turn (2048)")
    parser.add_argument("--new-tokens", type=int, default=512, help="tokens answered, all turns together (512)")
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 4], help="1: one long answer; 4: as many (1 4)")
    parser.add_argument("--turn-tokens", type=int, default=128, help="tokens of a later turn (128)")
    parser.add_argument("--prompts", type=int, default=3, help="of each kind (3)")
    parser.add_argument(
        "--selector", nargs="+", default=["locks", "exact", "streaming", "random"], choices=known, metavar="SELECTOR"
    )
    parser.add_argument("--budget", type=int, nargs="+", default=[128, 512], help="tokens a KV head attends (128 512)")
    parser.add_argument("--rule", default="share", choices=list(GROUP_RULES), metavar="RULE")
    parser.add_argument("--temperature", type=float, default=0.0, help="of all answers; 0 is greedy (0)")
    parser.add_argument("--free-only", action="store_true", help="methods only answer by themselves: quicker")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="the GPU if there is one")
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="where the JSON goes")
    parser.set_defaults(run=run_drift, prog="pagelocks eval drift")


def run_drift(arguments: argparse.Namespace) -> Any:
    """Hand on to what needs Transformers."""
    need_transformers()
    from .drift_run import run_drift

    return run_drift(arguments)


def run_table(arguments: argparse.Namespace) -> Any:
    """One list of all files' cells."""
    if arguments.output:
        check_output(arguments.output)
    cells = []
    for path in arguments.files:
        header, lines = read_run(path)
        about = {name: header.get(name) for name in ("model", "dtype", "seed", "versions", "device")}
        cells += [about | cell for cell in summaries(lines)]
        if not arguments.json:
            table_console().print(f"{header['model']}, {header['dtype']}, {path}", summary_table(lines))
    if arguments.output:
        arguments.output.write_text(json.dumps(cells, indent=1) + "\n")
    return cells
