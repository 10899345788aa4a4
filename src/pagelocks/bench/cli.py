"""`pagelocks bench`: its arguments, its tables, its files."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..config import LocksConfig, reject
from ..provenance import provenance
from .decode import SHAPES, Case, Measurement, joined, run_in_child, write_model
from .picture import draw_decode

KERNEL_CONTEXTS = (1024, 16384, 32768, 131072, 262144, 524288, 1000000)
DECODE_CASES = ("1024@6144", "4096@6144", "16384", "32768", "131072", "262144", "524288", "1000000")


class BenchFailure(RuntimeError):
    """There is nothing to measure on, or a side did not come to its end."""


def add_bench(commands: Any, **shape: Any) -> None:
    """Add `bench` to the command line."""
    bench = commands.add_parser("bench", help="time the GPU kernels, or decoding beside dense attention", **shape)
    actions = bench.add_subparsers(title="commands", metavar="COMMAND", required=True)
    kernels = actions.add_parser(
        "kernels",
        help="each kernel alone",
        description="Time each kernel, and FlashAttention 3 if vLLM is here, over many layers' buffers in turn.",
        **shape,
    )
    kernels.add_argument(
        "--context", type=int, action="append", metavar="N", help="tokens of each row; may be repeated"
    )
    kernels.add_argument("--rows", type=int, default=1, metavar="N", help="rows of a step (1)")
    kernels.set_defaults(run=run_kernels, prog="pagelocks bench kernels")
    decode = actions.add_parser(
        "decode",
        help="time per output token in vLLM, LOCKS beside dense",
        description="Start vLLM with dense attention, then with LOCKS, on dummy weights and a cache that is filled.",
        **shape,
    )
    decode.add_argument(
        "--case",
        action="append",
        metavar="C",
        help='"131072", a batch "24x32768", a mix "1024+131072"; "@N" after it sets dense_below; may be repeated',
    )
    decode.add_argument(
        "--prefill", type=int, action="append", metavar="N", help="contexts whose time to first token to take"
    )
    decode.add_argument("--repeats", type=int, default=5, metavar="N", help="decodes of each case (5)")
    decode.add_argument("--steps", type=int, default=64, metavar="N", help="timed tokens of each decode (64)")
    decode.add_argument("--utilization", type=float, default=0.95, metavar="F", help="of the card's memory (0.95)")
    decode.add_argument("--picture", metavar="FILE", help="write a PNG: time a token against context")
    decode.set_defaults(run=run_decode, prog="pagelocks bench decode")
    for command in (kernels, decode):
        command.add_argument("--shape", choices=sorted(SHAPES), default="glm-4-9b-1m", help="a known model's shape")
        command.add_argument("--budget", type=int, default=2048, metavar="N", help="tokens a step attends (2048)")
        command.add_argument("--output", metavar="FILE", help="write the results as JSON")
        command.add_argument("--json", action="store_true", help="print the results as one JSON object")


def run_kernels(args: argparse.Namespace) -> Any:
    """Time the kernels and print a table."""
    config = LocksConfig(budget=args.budget)
    contexts = args.context or KERNEL_CONTEXTS
    for name, value, least in [("--rows", args.rows, 1), *(("--context", context, 32) for context in contexts)]:
        _at_least(name, value, least)
    _prepare(args)
    from .kernels import preset_shape, read_bandwidth, time_kernels

    read, facts = read_bandwidth(), about()
    table = Table("kernel", "context", "rows", "us", "GB/s", "of read", box=None, header_style="bold")
    found = []
    for context in contexts:
        for timing in time_kernels(preset_shape(args.shape, config), args.shape, context, args.rows, read):
            found.append({**timing.as_dict(), **facts})
            share = f"{timing.gbps / read:.0%}" if timing.bytes else ""
            numbers = f"{timing.context:,}", str(timing.rows), f"{timing.us:.2f}", f"{timing.gbps:,.0f}"
            table.add_row(timing.kernel, *numbers, share)
    return _finish(args, table, found, f"this card reads at {read:,.0f} GB/s")


def run_decode(args: argparse.Namespace) -> Any:
    """Time decoding and print a table."""
    longest = SHAPES[args.shape]["max_position_embeddings"] - args.steps - 64
    given = [Case.parse(text) for text in args.case or ()]
    cases = tuple(given or (case for case in map(Case.parse, DECODE_CASES) if max(case.contexts) <= longest))
    prefills = tuple(args.prefill or ())
    LocksConfig(budget=args.budget)
    for name, value in (("--repeats", args.repeats), ("--steps", args.steps)):
        _at_least(name, value, 1)
    for context in [max(case.contexts) for case in cases] + list(prefills):
        _at_least("a context", context, 32)
        if context > longest:
            raise reject("a context", context, f"at most {longest} for {args.shape}", "Take another --shape.")
    if not 0 < args.utilization < 1:
        raise reject("--utilization", args.utilization, "between 0 and 1", "Use 0.95.")
    _prepare(args)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), args.shape)
        common: dict[str, Any] = {"steps": args.steps, "repeats": args.repeats, "utilization": args.utilization}
        dense = run_in_child(Measurement(model, cases, prefills, **common))
        # As an engine would start that has it; each case then sets its own.
        options = {"budget": args.budget, "dense_below": max(case.dense_below for case in cases)}
        locks = run_in_child(Measurement(model, cases, prefills, **common, locks=options))
    facts = {"shape": args.shape, "budget": args.budget, "steps": args.steps, "repeats": args.repeats, **about()}
    found = joined(dense, locks, facts)
    table = Table("case", "dense_below", "dense ms", "LOCKS ms", "dense / LOCKS", box=None, header_style="bold")
    for line in found:
        times = f"{line['dense_ms']:.3f}", f"{line['locks_ms']:.3f}", f"{line['speedup']:.3f}"
        table.add_row(line["case"], str(line["dense_below"]), *times)
    sides = (("dense", dense), ("LOCKS", locks))
    errors = [f"{side}: {line['error']}" for side, lines in sides for line in lines if "error" in line]
    result = _finish(args, table, found, "medians")
    if args.picture:
        draw_decode(found, Path(args.picture))
    if errors:
        if args.json:
            print(json.dumps(result))
        raise BenchFailure("; ".join(errors) + ". What was measured before it is printed and written.")
    return result


def about() -> dict[str, Any]:
    """Card, versions, commit and date, for every result; the commit is None outside a checkout of this package."""
    facts = provenance("cuda")
    return {
        "card": facts["device"],
        "versions": facts["versions"],
        "commit": facts["commit"] and facts["commit"][:7],
        "date": facts["date"][:10],
    }


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise reject(name, value, f"{least} or more", f"Use {least} or more.")


def _prepare(args: argparse.Namespace) -> None:
    """Before minutes are spent: a GPU, and files that can be written."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        remedy = "Run it on such a machine."
        raise BenchFailure(f"{args.prog} needs a GPU of compute capability 9.0 and PyTorch for CUDA. {remedy}")
    for file in (args.output, getattr(args, "picture", None)):
        if file and not os.access(Path(file).resolve().parent, os.W_OK):
            raise reject("the file", file, "in a folder that exists and is yours", "Name another.")
    if getattr(args, "picture", None) and importlib.util.find_spec("matplotlib") is None:
        raise BenchFailure("--picture needs matplotlib. Run pip install 'pagelocks[plot]', or leave it out.")


def _finish(args: argparse.Namespace, table: Table, found: list[dict[str, Any]], note: str) -> Any:
    if args.output:
        Path(args.output).write_text(json.dumps(found, indent=1) + "\n")
    if not args.json:
        Console().print(table)
        Console().print(note)
    return {"results": found}
