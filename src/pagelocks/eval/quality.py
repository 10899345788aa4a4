"""RULER in Transformers: dense attention and every method on the same records, with the links in between.

    pagelocks eval run --model Qwen2.5-Coder-0.5B-Instruct --task niah_single_2 --context 4096 --records 50 \\
        --selector locks exact quest --budget 128 256 --output quality.jsonl

Answers go to the file as they come, one line a record and method, and a run that was stopped goes on where it was.
Links are measured on the queries of dense attention's first answer tokens: the same queries for all methods.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from .. import hf
from ..config import LocksConfig, reject
from ..selectors import Exact, Selector, make_selector
from ..selectors.groups import group_rule
from . import ruler
from .carriers import carrier_pages
from .decode_record import DecodeRecord
from .links import choose_pages, coverage, coverage_ratio, group_coverage_ratio, kept_pages, page_mass, summarize_heads
from .runner import Answers, Method, Runner

DENSE = Method("dense")
SETTINGS = ("model", "config", "dtype", "seed", "new_tokens", "link_steps")
"""What all lines of a file have in common."""


@dataclass(frozen=True)
class Prompt:
    """A record as a model gets it: token ids, and where the answer stands in them."""

    record: ruler.Record
    token_ids: tuple[int, ...]
    carriers: tuple[tuple[int, int], ...]
    context: int = 0  # tokens asked for, of the chat template, the prompt and the answer


def encode(tokenizer: Any, record: ruler.Record) -> Prompt:
    """The record as a user's turn, the first words of the answer as the beginning of the assistant's.

    A model without a chat template gets the record's prompt as it is.
    """
    context = record.length + template_tokens(tokenizer)
    if tokenizer.chat_template is None:
        ids = tuple(tokenizer(record.prompt).input_ids)
        return Prompt(record, ids, tuple(ruler.fact_tokens(tokenizer, record)), context)
    turn = [{"role": "user", "content": record.request}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) + record.prefix
    ids = tuple(tokenizer(text, add_special_tokens=False).input_ids)
    facts = ruler.fact_tokens(tokenizer, record, text, add_special_tokens=False)
    return Prompt(record, ids, tuple(facts), context)


def template_tokens(tokenizer: Any) -> int:
    """How many tokens a chat template adds to a turn."""
    if tokenizer.chat_template is None:
        return 0
    turn = [{"role": "user", "content": "x"}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return len(tokenizer(text, add_special_tokens=False).input_ids) - len(tokenizer("x").input_ids)


def alike(prompts: Sequence[Prompt], most: int) -> Iterator[list[Prompt]]:
    """Prompts that follow one another and have as many tokens, `most` at a time: a batch has no padding."""
    for _, same in groupby(prompts, key=lambda prompt: len(prompt.token_ids)):
        group = list(same)
        for first in range(0, len(group), most):
            yield group[first : first + most]


class Probe:
    """Coverage and retention of each method's choice, against the oracle's at the same budget and rule.

    Retention is of the carrier pages that the oracle kept, over all KV heads: most heads do not look for the answer,
    and what they keep of it by chance says nothing.

    Parameters
    ----------
    prompts : the rows
    steps : of the first answer tokens, how many to look at
    """

    def __init__(self, prompts: Sequence[Prompt], steps: int) -> None:
        self.prompts, self.steps = prompts, steps
        self._seen: dict[int, int] = {}  # layer -> steps
        # Row -> (step, method) -> what each layer adds.
        self._groups: list[dict[tuple[int, Method], list[Tensor]]] = [{} for _ in prompts]
        self._heads: list[dict[tuple[int, Method], list[Tensor]]] = [{} for _ in prompts]
        self._kept: list[dict[tuple[int, Method], list[Tensor]]] = [{} for _ in prompts]

    def __call__(self, step: hf.SparseStep, selectors: dict[Method, Selector]) -> None:
        """Look at one layer's step, of all rows."""
        number = self._seen[step.layer] = self._seen.get(step.layer, 0) + 1
        if number > self.steps:
            return
        exact = Exact().log_mass(step.query, step.source, step.scale)
        # A choice of each query head's own is no group's to compare.
        asked = {method: selector for method, selector in selectors.items() if method.rule != "per-head"}
        estimates = {method: each.log_mass(step.query, step.source, step.scale) for method, each in asked.items()}
        length, size = step.keys.shape[-2], LocksConfig().page_size
        for row, prompt in enumerate(self.prompts):
            tensors = step.query[row], step.keys[row], step.values[row]
            seen = DecodeRecord(*tensors, step.scale, length, prompt.carriers)
            mass = page_mass(seen, size)
            carriers = carrier_pages(seen, size) if prompt.carriers else None
            for method, estimate in estimates.items():
                key, rule = (number, method), group_rule(method.rule)
                ours, oracle = (choose_pages(m[row], length, method.config, rule) for m in (estimate, exact))
                held, possible = coverage(mass, ours), coverage(mass, oracle)
                self._groups[row].setdefault(key, []).append(group_coverage_ratio(held, possible).flatten().cpu())
                self._heads[row].setdefault(key, []).append(coverage_ratio(held, possible).cpu())
                if carriers is not None:
                    kept, best = (kept_pages(pages, len(carriers))[:, carriers] for pages in (ours, oracle))
                    counts = [(kept & best).sum(), best.sum(), kept.sum(), torch.tensor(kept.numel())]
                    self._kept[row].setdefault(key, []).append(torch.tensor([int(count) for count in counts]))

    def links(self, row: int, method: Method, tokens: int) -> dict[str, float] | None:
        """Over layers, KV heads and the steps of an answer of so many tokens.

        `coverage_ratio` is the mean over groups; `worst`, the worst head of a group, and `p5`, the 5th percentile, are
        of single query heads, whose ratio may exceed 1, as the oracle chooses for the group.  None if nothing was seen,
        or each query head has pages of its own.
        """

        def gathered(found: dict[tuple[int, Method], list[Tensor]]) -> list[Tensor]:
            return [each for step in range(1, tokens + 1) for each in found.get((step, method), [])]

        groups, kept = gathered(self._groups[row]), gathered(self._kept[row])
        if not groups:
            return None
        heads = summarize_heads(torch.stack(gathered(self._heads[row])))
        links = {"coverage_ratio": float(torch.cat(groups).mean())}
        links |= {"worst": heads.worst_head, "p5": heads.percentile_5}
        if kept:
            both, oracle, ours, pairs = torch.stack(kept).sum(0).tolist()
            links |= {"carriers_kept": ours / pairs, "carriers_kept_by_oracle": oracle / pairs}
            if oracle:
                links["retention"] = both / oracle
        return {name: round(value, 6) for name, value in links.items()}


def lines_of(
    answers: dict[Method, Answers],
    prompts: Sequence[Prompt],
    tokenizer: Any,
    probe: Probe,
    shared: dict[Method, dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """One line a record and method, for the file; `shared` is in all of a method's."""
    for method, answer in answers.items():
        for row, prompt in enumerate(prompts):
            record = prompt.record
            said = tokenizer.decode(answer.tokens[row], skip_special_tokens=True)
            line = {"task": record.task, "context": prompt.context, "index": record.index, "selector": method.selector}
            line |= {"budget": method.budget, "rule": method.rule, "score": ruler.score(said, record), "answer": said}
            line |= {"prompt_tokens": len(prompt.token_ids), "substitute": record.substitute}
            line |= {
                "pages_read": answer.pages_read / len(prompts),
                "pages_skipped": answer.pages_skipped / len(prompts),
            }
            links = probe.links(row, method, len(answers[DENSE].tokens[row]))
            yield line | {"links": links} | shared[method]


def page_bytes(method: Method, model: Any) -> float:
    """Bytes that a method's step reads to score a page of a KV head."""
    config, size = model.config, LocksConfig().page_size
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    selector = make_selector(method.selector, method.config)
    return selector.page_bytes(head_dim, size, model.dtype.itemsize, heads // config.num_key_value_heads)


def read_lines(path: Path, header: dict[str, Any]) -> list[dict[str, Any]]:
    """What a file holds so far; a file that is not there gets the header, a last line that was cut off is cut away.

    Raises
    ------
    ValueError
        If the file is of another run: its model, type, seed or other setting is another one.
    """
    text = path.read_text() if path.exists() else ""
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
        if lines[0].get(name) != header[name]:
            found = f"{name}={lines[0].get(name)!r}, and this run has {header[name]!r}"
            raise reject(
                "--output", str(path), f"a file of the same settings; it has {found}", "Write to another file."
            )
    if whole != text:
        with path.open("r+") as file:
            file.truncate(len(whole.encode()))
    return lines[1:]


def key_of(line: dict[str, Any]) -> tuple[Any, ...]:
    """What a line is about."""
    return tuple(line[name] for name in ("task", "context", "index", "selector", "budget", "rule"))


def run(arguments: argparse.Namespace, header: dict[str, Any], model: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """Answer what the file does not hold yet; returns all its lines."""
    path = Path(arguments.output)
    done = read_lines(path, header)
    every = (Method(s, b, r) for s in arguments.selector for b in arguments.budget for r in arguments.rule)
    methods = list(dict.fromkeys(every))
    ends = model.generation_config.eos_token_id
    stop = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    runner, held = Runner(model, methods, sorted(stop)), {key_of(line) for line in done}
    shared = {method: {"page_bytes": page_bytes(method, model), "commit": header.get("commit")} for method in methods}
    shared[DENSE] = {"page_bytes": None, "commit": header.get("commit")}
    added = template_tokens(tokenizer)
    work = [(task, context) for context in arguments.context for task in arguments.task]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns) as progress, path.open("a") as file:
        bar = progress.add_task("", total=len(work) * arguments.records)
        for name, context in work:
            progress.update(bar, description=f"{name}, {context} tokens")

            wanted = {
                index: [
                    m for m in [DENSE, *methods] if (name, context, index, m.selector, m.budget, m.rule) not in held
                ]
                for index in range(arguments.records)
            }
            progress.advance(bar, sum(not methods_left for methods_left in wanted.values()))
            records = (
                ruler.task(name).make(tokenizer, context - added, arguments.seed, i)
                for i, left in wanted.items()
                if left
            )
            prompts_of_work = [encode(tokenizer, record) for record in records]
            shortest = min((len(prompt.token_ids) for prompt in prompts_of_work), default=context)
            if (largest := max(method.budget for method in methods)) >= shortest:
                allowed = f"less than the prompts of {name}, of which one has {shortest} tokens"
                raise reject("--budget", largest, allowed, "Use less, or a longer --context.")
            for prompts in alike(prompts_of_work, arguments.batch):
                some = [m for m in methods if any(m in wanted[prompt.record.index] for prompt in prompts)]
                ids = torch.tensor([prompt.token_ids for prompt in prompts], device=model.device)
                probe = Probe(prompts, arguments.link_steps)
                most = arguments.new_tokens or prompts[0].record.max_new_tokens
                answers = runner.run(ids, most, probe if arguments.link_steps else None, some)
                for line in lines_of(answers, prompts, tokenizer, probe, shared):
                    if key_of(line) not in held:
                        held.add(key_of(line))
                        done.append(line)
                        file.write(json.dumps(line) + "\n")
                file.flush()
                progress.advance(bar, len(prompts))
    return done
