"""`pagelocks eval`: arguments, checks, tables."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..config import LocksConfig, reject
from ..models import resolve
from ..provenance import provenance
from ..selectors import SELECTORS, SEQUENCE_SELECTORS
from ..selectors.groups import GROUP_RULES
from . import ruler
from .drift_run import add_drift
from .tables import summaries, summary_table


def add_eval(commands: Any, **shape: Any) -> None:
    """Add `eval` to the command line."""
    evaluate = commands.add_parser(
        "eval", help="answers of LOCKS, the exact oracle and their rivals, beside dense attention", **shape
    )
    actions = evaluate.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_run(actions, **shape)
    add_drift(actions, **shape)
    table = actions.add_parser("table", help="scores with intervals, from the files of runs", **shape)
    table.add_argument("files", nargs="+", type=Path, metavar="FILE", help="what `pagelocks eval run` wrote")
    table.add_argument("--output", type=Path, metavar="FILE", help="write them as JSON, a list of objects")
    table.set_defaults(run=run_table, prog="pagelocks eval table")
    for command in actions.choices.values():
        command.add_argument("--json", action="store_true", help="print the result as one JSON object")


def add_run(commands: Any, **shape: Any) -> None:
    """Add `run` to `pagelocks eval`."""
    known = [*SELECTORS, *SEQUENCE_SELECTORS]
    parser = commands.add_parser("run", help="RULER tasks by any selectors, on the same records", **shape)
    parser.add_argument("--model", required=True, help="a known name, or a folder")
    parser.add_argument("--task", nargs="+", default=["niah_single_1"], choices=list(ruler.TASKS), metavar="TASK")
    parser.add_argument("--context", type=int, nargs="+", default=[4096], help="tokens of prompt and answer (4096)")
    parser.add_argument("--records", type=int, default=20, help="records a task and context (20)")
    parser.add_argument("--selector", nargs="+", default=["locks", "exact"], choices=known, metavar="SELECTOR")
    parser.add_argument("--budget", type=int, nargs="+", default=[256], help="tokens that a KV head attends (256)")
    parser.add_argument("--rule", nargs="+", default=["share"], choices=list(GROUP_RULES), metavar="RULE")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--batch", type=int, default=1, help="records at a time, if as long as each other (1)")
    parser.add_argument("--new-tokens", type=int, help="at most so many in an answer, instead of the task's own number")
    parser.add_argument("--link-steps", type=int, default=2, help="answer tokens whose links are measured (2)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="the GPU if there is one")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--output", required=True, help="a JSONL file; a run goes on where it left off")
    parser.set_defaults(run=run_command, prog="pagelocks eval run")


def run_command(arguments: argparse.Namespace) -> Any:
    """Check everything, load the model, run, and print the table."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ValueError('transformers is missing: pip install "pagelocks[models,eval]"') from error
    from . import quality

    device: Any = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise reject("--device", device, "PyTorch finds no GPU here", "Use --device cpu.")
    for name, least in (("records", 1), ("batch", 1), ("new_tokens", 2), ("link_steps", 0)):
        if (value := getattr(arguments, name)) is not None and value < least:
            raise reject(f"--{name.replace('_', '-')}", value, f"{least} or more", f"Use {least} or more.")
    for context in arguments.context:
        if context < 64:
            raise reject("--context", context, "64 or more", "Use 4096.")
    for budget in arguments.budget:
        LocksConfig(budget=budget)
        if budget >= min(arguments.context):
            raise reject("--budget", budget, f"less than --context, {min(arguments.context)}", "Use less.")
    folder = resolve(arguments.model, print)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, arguments.dtype)).to(device)
    longest = model.config.max_position_embeddings
    if max(arguments.context) > longest:
        raise reject("--context", max(arguments.context), f"at most {longest} for {arguments.model}", "Use less.")
    digest = hashlib.sha256((Path(folder) / "config.json").read_bytes())
    for path in sorted(Path(folder).glob("*.safetensors")):  # another training run's weights have the same sizes
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
    header = {
        "model": Path(folder).name,
        "config": digest.hexdigest()[:16],
        "dtype": arguments.dtype,
        "seed": arguments.seed,
    }
    header |= {"new_tokens": arguments.new_tokens, "link_steps": arguments.link_steps, **provenance(device)}
    lines = quality.run(arguments, header, model.eval(), tokenizer)
    if not arguments.json:
        Console().print(summary_table(lines))
    return {**header, "cells": summaries(lines)}


def run_table(arguments: argparse.Namespace) -> Any:
    """One list of all files' cells."""
    cells = []
    for path in arguments.files:
        try:
            header, *lines = map(json.loads, path.read_text().splitlines())
            about = {name: header[name] for name in ("model", "dtype", "seed", "versions", "device")}
            cells += [about | cell for cell in summaries(lines)]
        except (OSError, ValueError, KeyError, TypeError) as error:
            remedy = "Give files that pagelocks eval run wrote."
            raise reject("FILE", str(path), f"a header and lines of a run ({error})", remedy) from error
        if not arguments.json:
            Console().print(f"{header['model']}, {header['dtype']}, {path}", summary_table(lines))
    if arguments.output:
        arguments.output.write_text(json.dumps(cells, indent=1) + "\n")
    return cells
