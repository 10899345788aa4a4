"""Benchmarks in Transformers: dense attention and every method on the same records, with the links in between.

    pagelocks eval run --model Qwen2.5-Coder-0.5B-Instruct --task niah_single_2 --context 4096 --records 50 \\
        --selector locks exact quest --budget 128 256 --output quality.jsonl

Answers go to the file as they come, one line a record and method, and a run that was stopped goes on where it was.
Links are measured on the queries of dense attention's first answer tokens: the same queries for all methods.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..config import LocksConfig, reject
from ..selectors import CALIBRATED_SELECTORS, REPEATING_SELECTORS, Selector
from . import calibration
from .loading import stop_tokens
from .probe import Probe
from .prompt import Data, Prompt, alike, encode, encode_example, lengthen, make_record
from .runner import Answers, Method, Runner

DENSE = Method("dense")
SETTINGS = ("model", "config", "dtype", "seed", "new_tokens", "link_steps", "one_length", "calibration")
"""What all lines of a file have in common; `calibration` where selectors were calibrated."""
DEFAULTS = {"one_length": False}
"""Of settings that older files do not name."""


LINE = ("task", "context", "index", "selector", "budget", "rule")


def lines_of(
    method: Method,
    answers: Answers,
    dense: Answers,
    prompts: Sequence[Prompt],
    tokenizer: Any,
    probe: Probe,
) -> Iterator[dict[str, Any]]:
    """One line a record, for the file; `dense` says for how many steps there are links."""
    for row, prompt in enumerate(prompts):
        record = prompt.record
        said = tokenizer.decode(answers.tokens[row], skip_special_tokens=True)
        line = {"task": record.task, "context": prompt.context, "index": record.index, "selector": method.selector}
        line |= {"budget": method.budget, "rule": method.rule, "score": prompt.score(said), "answer": said}
        line |= {"prompt_tokens": len(prompt.token_ids), **prompt.about}
        line |= {
            "pages_read": answers.pages_read[row],
            "pages_skipped": answers.pages_skipped[row],
            "sparse_share": answers.sparse_share[row],
        }
        yield line | {"links": probe.links(row, method, len(dense.tokens[row]))}


def page_bytes(selector: Selector, model: Any) -> float:
    """Bytes that a selector's step reads to score a page of a KV head."""
    config, size = model.config, LocksConfig().page_size
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return selector.page_bytes(head_dim, size, model.dtype.itemsize, heads // config.num_key_value_heads)


def read_lines(path: Path, header: dict[str, Any]) -> list[dict[str, Any]]:
    """What a file holds so far; a file that is not there gets the header, a last line that was cut off is cut away.

    Raises
    ------
    ValueError
        If the file is of another run: its model, type, seed or other setting is another one.
    """
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    except UnicodeDecodeError as error:
        raise reject("--output", str(path), f"a text file ({error})", "Write to another file.") from error
    whole = text[: text.rfind("\n") + 1]
    if not whole:
        if text:
            remedy = "Delete it if a run was stopped before its first answer, or give another file."
            raise reject("--output", str(path), "a new file, or one that pagelocks eval run wrote", remedy)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(header) + "\n")
        return []
    lines = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            remedy = "Give a file that pagelocks eval run wrote."
            raise reject(f"line {number} of {path}", line[:40], "one JSON object a line", remedy) from None
    if not all(isinstance(line, dict) for line in lines):
        raise reject("--output", str(path), "a file that pagelocks eval run wrote", "Write to another file.")
    for name in SETTINGS:
        theirs, ours = (each.get(name, DEFAULTS.get(name)) for each in (lines[0], header))
        if theirs != ours and not (name == "calibration" and None in (theirs, ours)):
            found = f"{name}={theirs!r}, and this run has {ours!r}"
            raise reject(
                "--output", str(path), f"a file of the same settings; it has {found}", "Write to another file."
            )
    for number, line in enumerate(lines[1:], 2):
        if missing := [name for name in (*LINE, "score") if name not in line]:
            remedy = "Give a file that pagelocks eval run wrote."
            raise reject(f"line {number} of {path}", line, f"an answer; {missing[0]} is missing", remedy)
    if whole != text:
        with path.open("r+") as file:
            file.truncate(len(whole.encode()))
    return lines[1:]


def key_of(line: dict[str, Any]) -> tuple[Any, ...]:
    """What a line is about."""
    return tuple(line[name] for name in LINE)


def check_data(done: Sequence[dict[str, Any]], data: Sequence[Data]) -> None:
    """Raise unless the file's lines of these benchmarks come from the same files."""
    digests = {each.name: each.digest for each in data}
    for line in done:
        if line["task"] in digests and line.get("source") != digests[line["task"]]:
            allowed = f"the file that {line['task']} was read from, of digest {line.get('source')}"
            raise reject("--data", digests[line["task"]], allowed, "Write to another file.")


def run(
    arguments: argparse.Namespace,
    header: dict[str, Any],
    model: Any,
    tokenizer: Any,
    data: Sequence[Data] = (),
    text: calibration.Text | None = None,
    methods: Sequence[Method] | None = None,
) -> list[dict[str, Any]]:
    """Answer what the file does not hold yet; returns all its lines.

    Parameters
    ----------
    arguments : of `pagelocks eval run`
    header : the file's first line
    data : benchmarks beside RULER's tasks
    text : to calibrate on; only with selectors that are
    methods : instead of every selector at every budget by every rule
    """
    path = Path(arguments.output)
    done = read_lines(path, header)
    check_data(done, data)
    digest = text.about["digest"] if text is not None else None
    for line in done:
        if line["selector"] in CALIBRATED_SELECTORS and digest not in (None, line.get("calibration", digest)):
            allowed = f"the text of this file's {line['selector']}, of digest {line['calibration']}"
            raise reject("calibration", digest, allowed, "Write to another file.")
    if methods is None:
        methods = [Method(s, b, r) for s in arguments.selector for b in arguments.budget for r in arguments.rule]
    methods, held = list(dict.fromkeys(methods)), {key_of(line) for line in done}
    if not methods:
        raise reject("methods", [], "one or more", "Name a selector and a budget.")
    names = {method.selector for method in methods}
    counts = dict.fromkeys(arguments.task, arguments.records) | {each.name: len(each.examples) for each in data}
    work = [(task, context) for context in arguments.context for task in counts]
    wanted = {
        (name, context, index): left
        for name, context in work
        for index in range(counts[name])
        if (left := [m for m in [DENSE, *methods] if (name, context, index, m.selector, m.budget, m.rule) not in held])
    }
    if not wanted:
        return done
    sources = {each.name: each for each in data}
    largest, window = max(method.budget for method in methods), model.config.max_position_embeddings

    def prompt_of(name: str, context: int, index: int) -> Prompt:
        if name in sources:
            example = sources[name].examples[index]
            return encode_example(tokenizer, example, context, arguments.new_tokens or example.new_tokens)
        prompt = encode(tokenizer, make_record(tokenizer, name, context, arguments.seed, index))
        if arguments.one_length:
            prompt = lengthen(tokenizer, prompt, context - prompt.new_tokens)
        # A benchmark's own prompts are as long as they are; RULER's are made to a length.
        tokens, most = len(prompt.token_ids), arguments.new_tokens or prompt.new_tokens
        if largest >= tokens:
            allowed = f"less than the prompts of {name}, of which one has {tokens} tokens"
            raise reject("--budget", largest, allowed, "Use less, or a longer --context.")
        if tokens + most > window:
            allowed = f"at most {window - tokens} after a prompt of {name} of {tokens} tokens"
            raise reject("--new-tokens", most, allowed, "Use less.")
        return prompt

    for name, context in work:  # what cannot be is said before anything is answered
        for index in [index for index in range(counts[name]) if (name, context, index) in wanted][:1]:
            prompt_of(name, context, index)
    measured = None
    if text is not None and names & CALIBRATED_SELECTORS.keys():
        measured = calibration.measure(model, text.sequences)
    request = calibration.repetition_request(tokenizer) if names & set(REPEATING_SELECTORS) else []
    runner = Runner(model, methods, stop_tokens(model, tokenizer), calibration=measured, request=request)
    shared = {DENSE: {"page_bytes": None, "commit": header.get("commit")}}
    for method in methods:
        number = page_bytes(runner.selector(method, runner.a_layer), model)
        shared[method] = {"page_bytes": number, "commit": header.get("commit")}
        if method.selector in CALIBRATED_SELECTORS:
            shared[method]["calibration"] = digest

    def write_lines(
        file: TextIO, prompts: Sequence[Prompt], probe: Probe, method: Method, answers: Answers, dense: Answers
    ) -> None:
        for line in lines_of(method, answers, dense, prompts, tokenizer, probe):
            line |= shared[method]
            if line["task"] in sources:
                line["source"] = sources[line["task"]].digest
            if key_of(line) not in held:
                held.add(key_of(line))
                done.append(line)
                file.write(json.dumps(line) + "\n")
        file.flush()

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress, path.open("a") as file:
        bar = progress.add_task("", total=len(arguments.context) * sum(counts.values()))
        for name, context in work:
            progress.update(bar, description=f"{name}, {context} tokens")
            indices = [index for index in range(counts[name]) if (name, context, index) in wanted]
            progress.advance(bar, counts[name] - len(indices))
            prompts_of_work = [prompt_of(name, context, index) for index in indices]
            for prompts in alike(prompts_of_work, arguments.batch):
                asked = {method for prompt in prompts for method in wanted[name, context, prompt.record.index]}
                some = [method for method in methods if method in asked]
                ids = torch.tensor([prompt.token_ids for prompt in prompts], device=model.device)
                linked = arguments.link_records
                rows = [row for row, each in enumerate(prompts) if linked is None or each.record.index < linked]
                probe = Probe(prompts, arguments.link_steps, rows)
                look = probe if arguments.link_steps and rows else None
                most = arguments.new_tokens or prompts[0].new_tokens
                write = partial(write_lines, file, prompts, probe)
                runner.run(ids, most, look, some, short=name in sources, each=write, probe_steps=arguments.link_steps)
                progress.advance(bar, len(prompts))
    return done
