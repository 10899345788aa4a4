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
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from .. import hf
from ..config import reject
from ..select import select_pages
from ..selectors import Exact, Selector
from ..selectors.groups import group_rule
from . import ruler
from .carriers import carrier_pages
from .decode_record import DecodeRecord
from .links import coverage, coverage_ratio, group_coverage_ratio, kept_pages, page_mass, summarize_heads
from .runner import Answers, Method, Runner

DENSE = Method("dense")


@dataclass(frozen=True)
class Prompt:
    """A record as a model gets it: token ids, and where the answer stands in them."""

    record: ruler.Record
    token_ids: tuple[int, ...]
    carriers: tuple[tuple[int, int], ...]


def encode(tokenizer: Any, record: ruler.Record) -> Prompt:
    """The record as a user's turn, the first words of the answer as the beginning of the assistant's.

    A model without a chat template gets the record's prompt as it is.
    """
    if tokenizer.chat_template is None:
        ids = tuple(tokenizer(record.prompt).input_ids)
        return Prompt(record, ids, tuple(ruler.fact_tokens(tokenizer, record)))
    turn = [{"role": "user", "content": record.request}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) + record.prefix
    ids = tuple(tokenizer(text, add_special_tokens=False).input_ids)
    return Prompt(record, ids, tuple(ruler.fact_tokens(tokenizer, record, text, add_special_tokens=False)))


def aligned(prompts: Sequence[Prompt], filler: int) -> tuple[Tensor, list[Prompt]]:
    """Prompts of one length, int64 (rows, tokens): shorter ones get `filler` tokens ahead, and their carriers move."""
    longest = max(len(prompt.token_ids) for prompt in prompts)
    made = []
    for prompt in prompts:
        more = longest - len(prompt.token_ids)
        carriers = tuple((first + more, after + more) for first, after in prompt.carriers)
        made.append(Prompt(prompt.record, (filler,) * more + prompt.token_ids, carriers))
    return torch.tensor([prompt.token_ids for prompt in made]), made


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
        self._groups: list[dict[Method, list[Tensor]]] = [{} for _ in prompts]
        self._heads: list[dict[Method, list[Tensor]]] = [{} for _ in prompts]
        self._kept: list[dict[Method, list[Tensor]]] = [{} for _ in prompts]

    def __call__(self, step: hf.SparseStep, selectors: dict[Method, Selector]) -> None:
        """Look at one layer's step, of all rows."""
        self._seen[step.layer] = self._seen.get(step.layer, 0) + 1
        if self._seen[step.layer] > self.steps:
            return
        length = torch.tensor(step.keys.shape[-2], device=step.keys.device)
        exact = Exact().log_mass(step.query, step.source, step.scale)
        for method, selector in selectors.items():
            rule = group_rule("share" if method.rule == "per-head" else method.rule)
            estimate = selector.log_mass(step.query, step.source, step.scale)
            choices = (select_pages(rule(m, length, method.config), length, method.config) for m in (estimate, exact))
            chosen, best = choices
            for row, prompt in enumerate(self.prompts):
                seen = DecodeRecord(
                    step.query[row], step.keys[row], step.values[row], step.scale, int(length), prompt.carriers
                )
                mass = page_mass(seen, method.config.page_size)
                held, possible = coverage(mass, chosen[row]), coverage(mass, best[row])
                self._groups[row].setdefault(method, []).append(group_coverage_ratio(held, possible).flatten().cpu())
                self._heads[row].setdefault(method, []).append(coverage_ratio(held, possible).cpu())
                if prompt.carriers:
                    carriers = carrier_pages(seen, method.config.page_size)
                    ours, oracle = (kept_pages(c[row], len(carriers))[:, carriers] for c in (chosen, best))
                    counts = [(ours & oracle).sum(), oracle.sum(), ours.sum(), torch.tensor(ours.numel())]
                    self._kept[row].setdefault(method, []).append(torch.tensor([int(count) for count in counts]))

    def links(self, row: int, method: Method) -> dict[str, float] | None:
        """Over layers, KV heads and steps; None if nothing was seen.

        `coverage_ratio` is the mean over groups; `worst`, the worst head of a group, and `p5`, the 5th percentile, are
        of single query heads, whose ratio may exceed 1, as the oracle chooses for the group.
        """
        if method not in self._groups[row]:
            return None
        heads = summarize_heads(torch.stack(self._heads[row][method]))
        found = {"coverage_ratio": float(torch.cat(self._groups[row][method]).mean())}
        found |= {"worst": heads.worst_head, "p5": heads.percentile_5}
        if method in self._kept[row]:
            both, oracle, ours, pairs = torch.stack(self._kept[row][method]).sum(0).tolist()
            found |= {"carriers_kept": ours / pairs, "carriers_kept_by_oracle": oracle / pairs}
            if oracle:
                found["retention"] = both / oracle
        return {name: round(value, 6) for name, value in found.items()}


def lines_of(
    answers: dict[Method, Answers], prompts: Sequence[Prompt], tokenizer: Any, probe: Probe
) -> Iterator[dict[str, Any]]:
    """One line a record and method, for the file."""
    for method, answer in answers.items():
        for row, prompt in enumerate(prompts):
            record = prompt.record
            said = tokenizer.decode(answer.tokens[row], skip_special_tokens=True)
            line = {"task": record.task, "context": record.length, "index": record.index, "selector": method.selector}
            line |= {"budget": method.budget, "rule": method.rule, "score": ruler.score(said, record), "answer": said}
            line |= {"prompt_tokens": len(prompt.token_ids), "substitute": record.substitute}
            line |= {
                "pages_read": answer.pages_read / len(prompts),
                "pages_skipped": answer.pages_skipped / len(prompts),
            }
            yield line | {"links": probe.links(row, method)}


def read_lines(path: Path, header: dict[str, Any]) -> list[dict[str, Any]]:
    """What a file holds so far; a last line that was cut off while it was written is left out.

    Raises
    ------
    ValueError
        If the file is of another run: its model, type or seed is another one.
    """
    if not path.exists() or not path.read_text().strip():
        return []
    lines = []
    for number, text in enumerate(path.read_text().splitlines()):
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            if number == len(path.read_text().splitlines()) - 1:
                break
            remedy = "Give a file that pagelocks eval run wrote."
            raise reject(f"line {number + 1} of {path}", text[:40], "one JSON object a line", remedy) from None
    for name in ("model", "dtype", "seed", "new_tokens", "link_steps"):
        if lines[0].get(name) != header[name]:
            found = f"{name}={lines[0].get(name)!r}, and this run has {header[name]!r}"
            raise reject(
                "--output", str(path), f"a file of the same settings; it has {found}", "Write to another file."
            )
    return lines[1:]


def key_of(line: dict[str, Any]) -> tuple[Any, ...]:
    """What a line is about."""
    return tuple(line[name] for name in ("task", "context", "index", "selector", "budget", "rule"))


def run(arguments: argparse.Namespace, header: dict[str, Any], model: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """Answer what the file does not hold yet; returns all its lines."""
    path = Path(arguments.output)
    done = read_lines(path, header)
    methods = [Method(s, b, r) for s in arguments.selector for b in arguments.budget for r in arguments.rule]
    stop = [tokenizer.eos_token_id, *(x for x in [model.generation_config.eos_token_id] if isinstance(x, int))]
    runner = Runner(model, methods, stop)
    filler = tokenizer("\n", add_special_tokens=False).input_ids[-1]
    held = {key_of(line) for line in done}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in [header, *done]))
    work = [(task, context) for context in arguments.context for task in arguments.task]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns) as progress, path.open("a") as file:
        bar = progress.add_task("", total=len(work) * arguments.records)
        for name, context in work:
            for first in range(0, arguments.records, arguments.batch):
                indices = range(first, min(first + arguments.batch, arguments.records))
                progress.update(bar, description=f"{name}, {context} tokens")

                def missing(method: Method, indices: range = indices, name: str = name, context: int = context) -> bool:
                    about = (method.selector, method.budget, method.rule)
                    return any((name, context, index, *about) not in held for index in indices)

                wanted = [method for method in methods if missing(method)]
                if wanted or missing(DENSE):
                    records = [ruler.task(name).make(tokenizer, context, arguments.seed, index) for index in indices]
                    ids, prompts = aligned([encode(tokenizer, record) for record in records], filler)
                    probe = Probe(prompts, arguments.link_steps)
                    looks = probe if arguments.link_steps else None
                    most = arguments.new_tokens or records[0].max_new_tokens
                    answers = runner.run(ids.to(model.device), most, looks, wanted)
                    for line in lines_of(answers, prompts, tokenizer, probe):
                        if key_of(line) not in held:
                            held.add(key_of(line))
                            done.append(line)
                            file.write(json.dumps(line) + "\n")
                    file.flush()
                progress.advance(bar, len(indices))
    return done
