"""What the thirteen tasks share: the record, the checks, the search for the length."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config import reject
from .text import Span


@dataclass(frozen=True)
class Record:
    """A prompt, in parts, and what must come out.

    Attributes
    ----------
    context, question, prefix : str
        Instruction, solved example and haystack; what is asked; the first words of the answer.  For a chat model,
        `request` is the user's turn and `prefix` begins the assistant's.
    references : tuple of str
        What the answer must hold: all of it, or for a QA task any of it.
    prompt_token_ids : tuple of int
        `prompt` as the tokenizer encodes it: at most `length` - `max_new_tokens`.
    facts : tuple of (start, end)
        Where what the answer takes stands, in characters of `context` (so of `request` and `prompt` too), in order.
    substitute : bool
        Whether generated text stands where the benchmark takes a data set.
    meta : dict
        What else was drawn, by task.
    """

    task: str
    length: int
    seed: int
    index: int
    context: str
    question: str
    prefix: str
    references: tuple[str, ...]
    max_new_tokens: int
    prompt_token_ids: tuple[int, ...]
    facts: tuple[Span, ...]
    substitute: bool
    meta: dict[str, Any]

    @property
    def request(self) -> str:
        """Everything but the first words of the answer."""
        return _request(self)

    @property
    def prompt(self) -> str:
        """The text that `prompt_token_ids` encodes."""
        return _prompt(self)


@dataclass(frozen=True)
class Parts:
    """The text of a record for one size of its haystack; see `Record`."""

    context: str
    question: str
    prefix: str
    facts: tuple[Span, ...]


def _request(parts: Parts | Record) -> str:
    return f"{parts.context}\n\n{parts.question}"


def _prompt(parts: Parts | Record) -> str:
    return f"{_request(parts)}\n\n{parts.prefix}"


@dataclass(frozen=True)
class Draft:
    """All of a record but the size of its haystack: `build` makes its parts for any size from `least` to `most`.

    `meta` gets that size as `size`; `supply` says what there is too little of when `most` does not fill the length.
    """

    build: Callable[[int], Parts]
    references: tuple[str, ...]
    meta: dict[str, Any]
    least: int = 0
    most: int | None = None
    supply: str = ""
    substitute: bool = False


@dataclass(frozen=True)
class Order:
    """What a draft is made from."""

    task: str
    length: int
    seed: int
    index: int
    source: Path | None

    def draw(self, purpose: str) -> random.Random:
        """A generator for one purpose, always at its beginning."""
        return random.Random(f"{self.task} {self.length} {self.seed} {self.index} {purpose}")


@dataclass(frozen=True)
class Task:
    """One of the tasks.

    Attributes
    ----------
    name : str
    max_new_tokens : int
        Tokens to generate.
    draft
        Makes what does not depend on the tokenizer.
    source : str or None
        The file that `make` can take, in words; None if it takes none.
    best : bool
        Whether the best reference counts instead of the mean.
    """

    name: str
    max_new_tokens: int
    draft: Callable[[Order], Draft]
    source: str | None = None
    best: bool = False

    def make(
        self, tokenizer: Any, length: int, seed: int = 42, index: int = 0, source: str | Path | None = None
    ) -> Record:
        """Record `index` of the task, as long as whole units of its haystack allow.

        Parameters
        ----------
        tokenizer
            A Transformers tokenizer, or anything with its `encode`.
        length : int
            Tokens of the prompt and of the answer together.
        seed, index : int
            Together with task and length they decide what is drawn, however many records are made.
        source : path, optional
            The file to take the text from, for a task with a `source`.

        Raises
        ------
        ValueError
            For a value that is not allowed, a file that is missing or of another format, a length that is too short
            for the task or longer than what there is to fill it.
        ImportError
            If the package with the words is missing.
        """
        for name, value, least in (("length", length, 1), ("seed", seed, None), ("index", index, 0)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise reject(name, value, "a whole number is needed", f"Write {name} as an integer.")
            if least is not None and value < least:
                raise reject(name, value, f"the least is {least}", f"Use {least} or more.")
        if source is not None:
            if self.source is None:
                raise reject("source", str(source), f"{self.name} takes no file", "Leave source out.")
            if not Path(source).is_file():
                raise reject("source", str(source), f"{self.source} is needed", "Give the path of an existing file.")
        path = None if source is None else Path(source)
        draft = self.draft(Order(self.name, length, seed, index, path))
        size, parts, ids = _fill(tokenizer, draft, length, self)
        return Record(
            task=self.name,
            length=length,
            seed=seed,
            index=index,
            context=parts.context,
            question=parts.question,
            prefix=parts.prefix,
            references=draft.references,
            max_new_tokens=self.max_new_tokens,
            prompt_token_ids=ids,
            facts=parts.facts,
            substitute=draft.substitute,
            meta={**draft.meta, "size": size},
        )


_FIRST_STRIDE, _GUESSES, _MARGIN = 64, 8, 40


def _fill(tokenizer: Any, draft: Draft, length: int, task: Task) -> tuple[int, Parts, tuple[int, ...]]:
    """The largest size that leaves room for the answer, with its parts and tokens.

    A long text takes a tokenizer a while, so the sizes tried are guessed from the tokens that a unit took so far.
    """
    room = length - task.max_new_tokens

    def encoded(size: int) -> tuple[int, Parts, tuple[int, ...]]:
        parts = draft.build(size)
        return size, parts, tuple(tokenizer.encode(_prompt(parts)))

    best = encoded(draft.least)
    at_least = len(best[2])
    if at_least > room:
        allowed = f"{task.name} takes at least {at_least + task.max_new_tokens} tokens here, "
        allowed += f"{task.max_new_tokens} of them for the answer"
        # With a margin: another length draws other words, and they may take a few tokens more.
        raise reject("length", length, allowed, f"Ask for {at_least + task.max_new_tokens + _MARGIN} or more.")
    above: tuple[int, int] | None = None if draft.most is None else (draft.most + 1, 0)  # size, tokens if known
    rate, guesses = 0.0, 0
    while above is None or above[0] - best[0] > 1:
        spare = room - len(best[2])
        if not rate:
            size = best[0] + _FIRST_STRIDE
        elif above is not None and guesses > _GUESSES:  # an odd tokenizer: halve what is left
            size = (best[0] + above[0]) // 2
        elif above is not None and above[1] and above[1] - room < spare:
            size = above[0] - max(1, round((above[1] - room) / rate))
        else:
            size = best[0] + max(1, int(spare / rate))
        size = max(size, best[0] + 1)
        if above is not None:
            size = min(size, above[0] - 1)
        tried = encoded(size)
        rate = max(len(tried[2]) - at_least, 1) / (size - draft.least)
        guesses += 1
        if len(tried[2]) <= room:
            best = tried
        else:
            above = size, len(tried[2])
    if best[0] == draft.most and room - len(best[2]) > 2 * max(rate, 1):
        filled = len(best[2]) + task.max_new_tokens
        raise reject("length", length, f"{draft.supply} fill {filled} tokens", f"Ask for {filled} or less.")
    return best
