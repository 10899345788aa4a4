"""What the benchmarks share: an example, a task, and how a prompt is cut to fit a window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ...config import reject
from .files import Row


@dataclass(frozen=True)
class Example:
    """A prompt, in parts, and what is held against the answer.

    Attributes
    ----------
    task : str
        As `load` takes it, such as "longbench/hotpotqa".
    index, id
        Number in the file, from 0, and the file's own name for it (the index if it has none).
    before, context, after : str
        Instruction; the long text, which alone `fit` may cut; what is asked.  Without a long text `context` is empty.
    references : tuple of str
        What the task's score compares with; most tasks take the best of them.
    new_tokens : int
        Tokens to generate.
    chat : bool
        False where the benchmark gives the bare prompt to chat models too, as examples or code to be continued.
    cut : int
        Tokens that `fit` took out of the context.
    meta : dict
        What else the file says of it, by benchmark.
    """

    task: str
    index: int
    id: str
    before: str
    context: str
    after: str
    references: tuple[str, ...]
    new_tokens: int
    chat: bool = True
    cut: int = 0
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def prompt(self) -> str:
        """The text for the model; a chat template goes around it where `chat` is True."""
        return self.before + self.context + self.after


@dataclass(frozen=True)
class Parts:
    """What a task makes of a row; see `Example`."""

    before: str
    context: str
    after: str
    references: tuple[str, ...]
    id: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """One of the tasks.

    Attributes
    ----------
    name : str
    new_tokens : int
        Tokens to generate.
    make
        The parts of an example from a row; it raises ValueError for a row of another format.
    grade
        The score of an answer, from 0 to 1.
    needs : tuple of str
        Modules that `grade` imports; `load` looks for them, so that no run ends at its first score.
    chat : bool
        See `Example`.
    """

    name: str
    new_tokens: int
    make: Callable[[Row], Parts]
    grade: Callable[[str, Example], float]
    needs: tuple[str, ...] = ()
    chat: bool = True


def whole(name: str, value: object, least: int) -> None:
    """Raise ValueError unless this is an integer of at least so much."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise reject(name, value, "a whole number is needed", f"Write {name} as an integer.")
    if value < least:
        raise reject(name, value, f"the least is {least}", f"Use {least} or more.")


def fit(example: Example, tokenizer: Any, tokens: int, add_special_tokens: bool = True) -> Example:
    """The example with the middle of its context cut out until the prompt has at most so many tokens.

    LongBench keeps the first and the last half of a prompt's tokens.  So does this, except that the text around the
    context stays whole where it is longer than a half, and that the kept text is the file's, not decoded tokens.

    Parameters
    ----------
    example : Example
    tokenizer
        A fast Transformers tokenizer.
    tokens : int
        Room for the prompt: the model's window less `example.new_tokens` and what a chat template adds.
    add_special_tokens : bool
        Whether the prompt will be encoded with them.

    Returns
    -------
    Example
        The same one if it fits; else one whose `cut` says how many tokens are gone.

    Raises
    ------
    ValueError
        If what stands around the context leaves no room for any of it.
    """
    whole("tokens", tokens, 1)

    def count(text: str, special: bool = False) -> int:
        return len(tokenizer(text, add_special_tokens=special)["input_ids"])

    used = count(example.prompt, add_special_tokens)
    if used <= tokens:
        return example
    text = example.context
    encoding = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    spans = [span for span in encoding["offset_mapping"] if span[1] > span[0]]
    first_half = max(tokens // 2 - count(example.before), 0)
    kept = len(spans) - (used - tokens)
    while kept > 0:
        head = min(first_half, kept)
        upto = spans[head - 1][1] if head else 0
        # Several tokens may share a character, which must not stand on both sides.
        onward = max(spans[head - kept][0], upto) if kept > head else len(text)
        shorter = replace(example, context=text[:upto] + text[onward:])
        left = count(shorter.prompt, add_special_tokens)
        if left <= tokens:
            return replace(shorter, cut=example.cut + used - left)
        kept -= left - tokens  # where the ends meet, other tokens come about
    around = used - len(spans)
    allowed = f"{example.task} has about {around} tokens around its context, which are never cut"
    raise reject("tokens", tokens, allowed, f"Give the prompt more than {around} tokens.")
