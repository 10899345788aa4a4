"""Records of RULER and examples of public benchmarks as a model gets them, and what their answers are worth."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from ..config import LocksConfig, reject
from . import datasets, ruler
from .chat import first_turn

LEAST_BUDGET = 3 * LocksConfig.page_size
"""Tokens: the sink page, the most recent one, and one that is chosen."""


@dataclass(frozen=True)
class Prompt:
    """A record as a model gets it: token ids, and where the answer stands in them.

    Attributes
    ----------
    record : of RULER, or an example of a public benchmark
    token_ids : tuple of int
    carriers : spans of tokens (first, one after the last) that hold the answer; none where the record does not say
    context : tokens asked for, of the chat template, the prompt and the answer
    """

    record: ruler.Record | datasets.Example
    token_ids: tuple[int, ...]
    carriers: tuple[tuple[int, int], ...]
    context: int = 0

    @property
    def new_tokens(self) -> int:
        """Tokens that the benchmark allows an answer."""
        record = self.record
        return record.max_new_tokens if isinstance(record, ruler.Record) else record.new_tokens

    @property
    def about(self) -> dict[str, Any]:
        """What a line says of where the text comes from."""
        if isinstance(self.record, ruler.Record):
            return {"substitute": self.record.substitute}
        return {"substitute": False, "id": self.record.id, "cut": self.record.cut}

    def score(self, answer: str) -> float:
        """From 0 to 1, by the benchmark's own metric."""
        if isinstance(self.record, ruler.Record):
            return ruler.score(answer, self.record)
        return datasets.score(answer, self.record)


def make_record(
    tokenizer: Any, task: str, context: int, seed: int, index: int = 0, template: bool = True
) -> ruler.Record:
    """A record of RULER whose prompt and answer take `context` tokens with the chat template's, if that is used.

    Raises
    ------
    ValueError
        If the task needs more.
    """
    added = template_tokens(tokenizer) if template else 0
    try:
        return ruler.task(task).make(tokenizer, context - added, seed, index)
    except ValueError as error:
        raise ValueError(f"--context {context}, of which the chat template takes {added}: {error}") from error


def encode(tokenizer: Any, record: ruler.Record) -> Prompt:
    """The record as a user's turn, the first words of the answer as the beginning of the assistant's.

    A model without a chat template gets the record's prompt as it is.
    """
    context = record.length + template_tokens(tokenizer)
    if tokenizer.chat_template is None:
        ids = tuple(tokenizer(record.prompt).input_ids)
        return Prompt(record, ids, tuple(ruler.fact_tokens(tokenizer, record)), context)
    text = first_turn(tokenizer, record.request) + record.prefix
    ids = tuple(tokenizer(text, add_special_tokens=False).input_ids)
    facts = ruler.fact_tokens(tokenizer, record, text, add_special_tokens=False)
    return Prompt(record, ids, tuple(facts), context)


def lengthen(tokenizer: Any, prompt: Prompt, tokens: int) -> Prompt:
    """The prompt with line breaks ahead of the user's turn, so that it has so many tokens; a longer one as it is.

    Records of a task differ by a sentence or a line; of one length, any of them make a batch without padding.
    """
    missing = tokens - len(prompt.token_ids)
    if missing <= 0:
        return prompt
    line_break = tokenizer("\n", add_special_tokens=False).input_ids
    if len(line_break) != 1:
        raise reject("tokenizer", f"{len(line_break)} tokens for a line break", "one", "Leave out --one-length.")
    bare = tokenizer.chat_template is None
    texts = (text if bare else first_turn(tokenizer, text) for text in "xy")
    one, other = (tokenizer(text, add_special_tokens=bare).input_ids for text in texts)
    # Tokens before the turn: the template's, or the one that a tokenizer begins with.
    ahead = next(place for place, (first, second) in enumerate(zip(one, other, strict=True)) if first != second)
    ids = prompt.token_ids[:ahead] + (line_break[0],) * missing + prompt.token_ids[ahead:]
    carriers = tuple((first + missing, after + missing) for first, after in prompt.carriers)
    return replace(prompt, token_ids=ids, carriers=carriers)


def encode_example(tokenizer: Any, example: datasets.Example, context: int, new_tokens: int) -> Prompt:
    """The example as a user's turn, or bare where the benchmark gives it bare; its context cut to leave `new_tokens`.

    Raises
    ------
    ValueError
        If what must not be cut does not fit, as `datasets.fit` says.
    """
    bare = tokenizer.chat_template is None or not example.chat
    room = context - new_tokens - (0 if bare else template_tokens(tokenizer))
    if room < 1:
        found = f"{context} for an answer of {new_tokens} tokens to {example.task}"
        raise reject("--context", found, "room for the answer and a prompt", "Use more, or a lower --new-tokens.")
    # The template joins its own tokens to the text's, and the seam may take one more than counted.
    for spare in range(8):
        fitted = datasets.fit(example, tokenizer, max(1, room - spare), add_special_tokens=bare)
        text = fitted.prompt if bare else first_turn(tokenizer, fitted.prompt)
        ids = tuple(tokenizer(text, add_special_tokens=bare).input_ids)
        if len(ids) + new_tokens <= context:
            return Prompt(fitted, ids, (), context)
    raise reject("chat_template", f"{len(ids)} tokens", f"at most {context - new_tokens} for the prompt", "Use more.")


def template_tokens(tokenizer: Any) -> int:
    """How many tokens a chat template adds to a turn."""
    if tokenizer.chat_template is None:
        return 0
    text = first_turn(tokenizer, "x")
    return len(tokenizer(text, add_special_tokens=False).input_ids) - len(tokenizer("x").input_ids)


def alike(prompts: Sequence[Prompt], most: int) -> Iterator[list[Prompt]]:
    """Prompts that follow one another and have as many tokens, `most` at a time: a batch has no padding."""
    for _, same in groupby(prompts, key=lambda prompt: len(prompt.token_ids)):
        group = list(same)
        for first in range(0, len(group), most):
            yield group[first : first + most]


@dataclass(frozen=True)
class Data:
    """A public benchmark's file: the first examples of it, and a digest of the whole."""

    name: str
    examples: tuple[datasets.Example, ...]
    digest: str


def read_data(given: Sequence[str], limit: int) -> list[Data]:
    """What `--data NAME=PATH ...` names; a colon may stand for the slash of a name.

    Raises
    ------
    ValueError
        For another form, an unknown name, a name given twice, a file that is missing or of another format, or a missing
        package.
    """
    found: dict[str, Data] = {}
    for each in given:
        name, equals, path = each.partition("=")
        name = name.replace(":", "/", 1)
        if not equals or not path or name in found:
            raise reject("--data", each, "NAME=PATH, each name once", "Use longbench/hotpotqa=hotpotqa.jsonl, say.")
        datasets.dataset(name)
        try:
            examples = tuple(datasets.load(name, path, limit))
        except ImportError as error:  # of a package that the score takes
            raise ValueError(str(error)) from error
        digest = hashlib.sha256()
        with Path(path).open("rb") as file:
            while part := file.read(1 << 20):
                digest.update(part)
        found[name] = Data(name, examples, digest.hexdigest()[:16])
    return list(found.values())
