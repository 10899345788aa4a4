"""`pagelocks eval drift`: long answers and conversations by sparse steps, beside dense attention's.

    pagelocks eval drift --model SmolLM2-135M-Instruct --prompt-tokens 2048 --new-tokens 512 --turns 1 4 --prompts 3 \\
        --selector locks exact streaming random --budget 128 512 --output drift.json

`--turns 1` is one long answer; with more, the same number of tokens is answered in as many turns.  Answers have a fixed
length: tokens that would end them are never chosen.
"""

from __future__ import annotations

import argparse
import json
import random
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from ..config import reject
from ..console import table_console
from ..prompts import HAYSTACKS
from .chat import first_turn, next_turn
from .drift import Drift, Forced, Free, Sampler, Script, measure
from .loading import check_output, device_of, load_model, load_tokenizer, stop_tokens
from .runner import Method
from .statistics import Interval
from .trend import BLOCK, trend

BINS = 8
"""Parts of a long answer; a conversation's parts are its turns."""

_FIRST = (
    "Notes from a village follow, in no order.\n\n{notes}\n\nMake a long story of them: the same people, the same "
    "places, one thing after another, and nothing told twice."
)
_NEXT = (
    "Some more notes have turned up.\n\n{notes}\n\nGo on from where you stopped. Bring in one person of these notes "
    "and one of the first, and remember what you have told already."
)
METRICS = (
    *("kl", "agreement", "nll_difference", "kl_fresh", "agreement_fresh", "kl_carried", "keys", "values"),
    *("nll", "nll_dense"),
)
"""Of each part: means of what `drift.Forced` has, of kl less kl_fresh, and of what dense attention makes of a free
answer and of its own."""


def run_drift(arguments: argparse.Namespace) -> Any:
    """Check everything, load the model, measure, write the file, print the table."""
    device = device_of(arguments.device)
    for name, least in (("prompts", 1), ("turn_tokens", 64), ("prompt_tokens", 128)):
        if (value := getattr(arguments, name)) < least:
            raise reject(f"--{name.replace('_', '-')}", value, f"{least} or more", f"Use {least} or more.")
    if not 0 <= arguments.temperature < 100:
        raise reject("--temperature", arguments.temperature, "0 or more, below 100", "Use 0, or 0.7.")
    for turns in arguments.turns:
        least = max(4 * BLOCK, 2 * turns)
        if turns < 1 or arguments.new_tokens < least or arguments.new_tokens % (BINS if turns == 1 else turns):
            allowed = f"--turns of 1 or more, and {least} tokens or more that {BINS} parts, or the turns, divide"
            found = f"{turns} and {arguments.new_tokens}"
            raise reject("--turns and --new-tokens", found, allowed, "Use --turns 1 4 --new-tokens 512.")
    every = (Method(name, budget, arguments.rule) for budget in arguments.budget for name in arguments.selector)
    methods, arguments.turns = list(dict.fromkeys(every)), list(dict.fromkeys(arguments.turns))
    for budget in arguments.budget:
        # Without a page skipped there is nothing to measure; the first turn may be some tokens short.
        if budget > arguments.prompt_tokens - 64:
            raise reject(
                "--budget", budget, f"at most --prompt-tokens less 64, {arguments.prompt_tokens - 64}", "Less."
            )
    check_output(arguments.output)
    folder, tokenizer = load_tokenizer(arguments.model)
    model, about = load_model(folder, arguments.dtype, device)
    window = model.config.max_position_embeddings
    most = arguments.prompt_tokens + arguments.new_tokens + arguments.turn_tokens * (max(arguments.turns) - 1)
    if most > window:
        raise reject("--prompt-tokens and --new-tokens", f"{most} in all", f"the model has {window}", "Use less.")
    settings = ("prompt_tokens", "new_tokens", "turn_tokens", "prompts", "temperature", "seed")
    result = about | {name: getattr(arguments, name) for name in settings} | {"bins": BINS, "block": BLOCK}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    cells: dict[int, list[dict[str, Any]]] = {}  # by turns

    def write(turns: int, *runs: Drift) -> None:
        cells[turns] = summarize(runs, methods, turns, arguments.new_tokens)
        result["cells"] = [cell for each in cells.values() for cell in each]
        beside = arguments.output.with_name(arguments.output.name + ".part")
        beside.write_text(json.dumps(result, indent=1) + "\n")
        beside.replace(arguments.output)  # a run that is killed while it writes loses nothing

    share = 1 / (1 + len(methods))  # of a token, by dense attention or a free answer
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=len(arguments.turns) * arguments.prompts * arguments.new_tokens)
        for turns in arguments.turns:
            runs: list[Drift] = []
            for index in range(arguments.prompts):
                progress.update(bar, description=f"{turns} turn{'s'[: turns > 1]}, prompt {index + 1}")
                script = make_script(tokenizer, arguments, turns, index, model.device)
                sampler = Sampler(arguments.seed + index, arguments.temperature, tuple(stop_tokens(model, tokenizer)))
                report = partial(write, turns, *runs)
                advance = partial(progress.advance, bar, share)
                runs.append(measure(model, script, methods, sampler, advance, report, arguments.free_only))
    if not arguments.json:
        table_console().print(drift_table(result["cells"]))
    return result


def make_script(tokenizer: Any, arguments: argparse.Namespace, turns: int, index: int, device: Any) -> Script:
    """Turns of at most `prompt_tokens` and `turn_tokens` tokens, of generated prose; another for each index."""
    draw = random.Random(f"drift {arguments.seed} {index}")
    texts = [_fit(tokenizer, _FIRST, arguments.prompt_tokens, draw, first_turn)]
    texts += [_fit(tokenizer, _NEXT, arguments.turn_tokens, draw, next_turn) for _ in range(turns - 1)]
    ids = tuple(torch.tensor([tokenizer(text, add_special_tokens=False).input_ids], device=device) for text in texts)
    return Script(ids, arguments.new_tokens // turns)


def _fit(tokenizer: Any, form: str, most: int, draw: random.Random, turn: Any) -> str:
    sentences = HAYSTACKS["prose"](max(8, most // 6), draw)

    def text(count: int) -> str:
        made: str = turn(tokenizer, form.format(notes=" ".join(sentences[:count])))
        return made

    def tokens(count: int) -> int:
        return len(tokenizer(text(count), add_special_tokens=False).input_ids)

    count = bisect_right(range(len(sentences) + 1), most, key=tokens) - 1
    if count < 1:
        raise reject("--turn-tokens, --prompt-tokens", most, f"{tokens(1)} or more for this template", "Use more.")
    return text(count)


def summarize(runs: Sequence[Drift], methods: Sequence[Method], turns: int, tokens: int) -> list[dict[str, Any]]:
    """One object a method, over prompts: `parts` along the answers, means, slopes for 1,000 tokens, free answers.

    The last run may be one that goes on: `answered` says how many of the `tokens` each prompt has, parts that it has
    not reached are of the others, or not there, and free answers, `nll` and `nll_dense` are those of the `free_n`
    prompts that have one.
    """
    width = tokens // (BINS if turns == 1 else turns)
    cells = []
    for method in methods:
        series = [_series(run, method) for run in runs]
        cell: dict[str, Any] = {"turns": turns, "selector": method.selector, "budget": method.budget}
        cell |= {"rule": method.rule, "n": len(runs), "tokens": tokens, "parts": []}
        found = {name: [each[name] for each in series if name in each] for name in METRICS}
        for first in range(0, tokens, width):
            part: dict[str, Any] = {}
            for name, of_runs in found.items():
                inside = [values[(first <= at) & (at < first + width)] for at, values in of_runs]
                if sum(map(len, inside)):
                    part[name] = _round(float(torch.cat(inside).mean()))
            if not part:
                break
            cell["parts"].append({"first": first, "after": first + width} | part)
        for name, of_runs in found.items():
            if of_runs:
                mean, slope = trend(of_runs, BLOCK)
                cell[name] = _interval(mean, 1)
                cell[f"{name}_per_1000"] = _interval(slope, 1000)
        # Dense attention's own: a model that repeats itself is sure of its next token, whatever it reads.
        cell["answered"] = [len(run.dense) for run in runs]
        cell["repetition_dense"] = _round(sum(repetition(run.dense) for run in runs) / len(runs))
        free = [(run.dense, run.free[method]) for run in runs if method in run.free]
        cells.append(cell | {"free_n": len(free)} | (_free_answers(free) if free else {}))
    return cells


def _free_answers(pairs: Sequence[tuple[list[int], Free]]) -> dict[str, Any]:
    """Of dense attention's answers and a method's own, over prompts."""
    equal = [a == b for dense, free in pairs for a, b in zip(dense, free.tokens, strict=True)]
    read, skipped = (sum(getattr(free, name) for _, free in pairs) for name in ("pages_read", "pages_skipped"))
    return {
        "first_difference": [first_difference(dense, free.tokens) for dense, free in pairs],
        "equal_share": _round(sum(equal) / len(equal)),
        "repetition": _round(sum(repetition(free.tokens) for _, free in pairs) / len(pairs)),
        "pages_read_share": _round(read / (read + skipped)) if read + skipped else None,
    }


def first_difference(dense: Sequence[int], said: Sequence[int]) -> int | None:
    """How many tokens are the same from the beginning; None if all are."""
    return next((place for place, (a, b) in enumerate(zip(dense, said, strict=True)) if a != b), None)


def repetition(tokens: Sequence[int], size: int = 4) -> float:
    """Share of the runs of `size` tokens that occurred before: 0 if all are different."""
    runs = [tuple(tokens[at : at + size]) for at in range(len(tokens) - size + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def drift_table(cells: Sequence[dict[str, Any]]) -> Table:
    """Means; slopes for 1,000 tokens, with intervals, of KL and of what the cache carried along of it; free answers and
    what dense attention makes of them, and of its own."""
    table = Table(box=None, header_style="bold")
    for name in (
        "turns",
        "selector",
        "budget",
        "top-1",
        "KL",
        "KL slope",
        "carried slope",
        "keys",
        "equal",
        "repeated",
        "-log p",
        "dense's",
    ):
        table.add_column(name, justify="left" if name == "selector" else "right")
    for cell in cells:
        table.add_row(
            str(cell["turns"]),
            cell["selector"],
            str(cell["budget"]),
            _mean(cell, "agreement", 3),
            _mean(cell, "kl", 4),
            _slope(cell, "kl_per_1000"),
            _slope(cell, "kl_carried_per_1000"),
            _mean(cell, "keys", 3),
            f"{cell['equal_share']:.3f}",
            f"{cell['repetition']:.3f}",
            _mean(cell, "nll", 3),
            _mean(cell, "nll_dense", 3),
        )
    return table


def _mean(cell: dict[str, Any], name: str, digits: int) -> str:
    return f"{cell[name]['mean']:.{digits}f}" if name in cell else ""


def _slope(cell: dict[str, Any], name: str) -> str:
    if name not in cell:
        return ""
    return f"{cell[name]['mean']:+.2f} ({cell[name]['low']:+.2f} to {cell[name]['high']:+.2f})"


def _series(run: Drift, method: Method) -> dict[str, tuple[Tensor, Tensor]]:
    """Of what there is: tokens answered before, and values."""
    forced, free = run.forced.get(method, Forced()), run.free.get(method)
    values = {name: getattr(forced, name, []) for name in METRICS}
    values |= {} if free is None else {"nll": free.nll, "nll_dense": run.nll}  # of the same prompts
    tensors = {name: torch.tensor(each, dtype=torch.float64) for name, each in values.items() if each}
    if "kl_fresh" in tensors:  # nothing fresh for a selector that learns
        tensors["kl_carried"] = tensors["kl"] - tensors["kl_fresh"]
    answered = torch.arange(1, 1 + len(run.nll))
    at = dict.fromkeys(METRICS, torch.tensor(forced.position)) | {"nll": answered, "nll_dense": answered}
    return {name: (at[name], each) for name, each in tensors.items()}


def _interval(found: Interval, scale: float) -> dict[str, float]:
    ends = {"mean": found.estimate, "low": found.low, "high": found.high}
    return {name: _round(value * scale) for name, value in ends.items()}


def _round(value: float) -> float:
    return float(f"{value:.5g}")
