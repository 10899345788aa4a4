"""Long prompts with one fact to find: a needle in a haystack, made to an exact length, without a download.

The structure is that of RULER's first needle task (`niah_single_1`); the words are our own, and so are the two
haystacks, so a score on these prompts is not to be set beside a published RULER score.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .config import reject

DIGITS = 7
"""Digits of a magic number."""

_INTRODUCTION = "Read the text below with care. Somewhere in it stands a magic number, and a question about it follows."
_NEEDLE = "The special magic number for {key} is {number}."
_QUESTION = "Which special magic number does the text give for {key}?"
# The needle's own words: a small model then copies what followed them.
_ANSWER = "The special magic number for {key} is"

_KEYS = (
    "anchor", "basket", "candle", "dragon", "feather", "garden", "hammer", "island", "jacket", "kettle",
    "lantern", "marble", "needle", "orchard", "pepper", "rocket", "saddle", "tunnel", "violin", "window",
)  # fmt: skip

_NOISE = (
    "The river runs past the mill.",
    "Bread cools on the shelf.",
    "A dog sleeps by the door.",
    "Rain taps on the roof.",
    "The old clock strikes again.",
)

_WHEN = (
    "At dawn", "After the storm", "On market day", "Before supper", "In late autumn", "When the bell had rung",
    "That same week", "Towards evening", "As the fog lifted", "On the first warm day", "Long after midnight",
    "Between two showers",
)  # fmt: skip
_WHO = (
    "the baker", "a tired postman", "the miller's daughter", "an old sailor", "the schoolteacher",
    "a travelling tailor", "the lighthouse keeper", "a boy from the valley", "the ferryman", "her youngest cousin",
    "the watchmaker", "a stranger in a grey coat",
)  # fmt: skip
_DID = (
    "carried a crate of pears", "told a story about wolves", "mended the wooden gate", "lost a letter",
    "bought three yards of blue cloth", "followed the geese", "painted a small boat", "looked for the missing goat",
    "sang to the children", "left a pair of boots", "counted the empty barrels", "planted a row of beans",
)  # fmt: skip
_WHERE = (
    "behind the chapel", "near the harbour wall", "on the road to the hills", "under the great oak", "in the square",
    "beside the frozen pond", "at the edge of the wood", "across the stone bridge", "in the narrow lane",
    "by the station", "outside the inn", "along the canal",
)  # fmt: skip
_PROSE = (
    "{when} {who} {did} {where}.",
    "{when}, {where}, {who} {did} and went home.",
    "Nobody saw how {who} {did} {where}.",
    "People say that {who} once {did} {where}.",
)


def _noise(count: int, _: random.Random) -> list[str]:
    return [_NOISE[number % len(_NOISE)] for number in range(count)]


def _prose(count: int, draw: random.Random) -> list[str]:
    sentences = []
    for _ in range(count):
        parts = {"when": _WHEN, "who": _WHO, "did": _DID, "where": _WHERE}
        filled = draw.choice(_PROSE).format(**{name: draw.choice(choices) for name, choices in parts.items()})
        sentences.append(filled)
    return sentences


HAYSTACKS: dict[str, Callable[[int, random.Random], list[str]]] = {"noise": _noise, "prose": _prose}
"""Name of a haystack -> its first `count` sentences, drawn from a generator.  No sentence holds a digit."""


@dataclass(frozen=True)
class NeedlePrompt:
    """A prompt and what must come out.

    Attributes
    ----------
    text : str
        The whole prompt, chat template included, up to the words that the number follows: give it to `LLM.generate`.
    answer : str
        The number, as digits.  It stands in `text` once, in the needle.
    token_ids : tuple of int
        `text` as the tokenizer encodes it.
    key : str
        The word whose number is asked for.
    depth : float
        Where in the haystack the needle stands: 0 at its start, 1 at its end.
    haystack, seed
        As given.
    """

    text: str
    answer: str
    token_ids: tuple[int, ...]
    key: str
    depth: float
    haystack: str
    seed: int


def needle_prompt(tokenizer: Any, tokens: int, seed: int, haystack: str = "noise") -> NeedlePrompt:
    """A prompt of at most `tokens` tokens, as close to it as whole sentences allow.

    Parameters
    ----------
    tokenizer
        A Transformers tokenizer, or anything with its `encode`; its chat template is used if it has one.
    tokens : int
        Length to fill, the question and the beginning of the answer included.
    seed : int
        Draws the key, the number, the depth and the prose; the same arguments give the same prompt.
    haystack : {"noise", "prose"}
        One passage of five sentences again and again, or sentences that differ.

    Returns
    -------
    NeedlePrompt

    Raises
    ------
    ValueError
        For a value that is not allowed, or `tokens` too few for the needle and the question.
    """
    for name, value in (("tokens", tokens), ("seed", seed)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise reject(name, value, "a whole number is needed", f"Write {name} as an integer.")
    if haystack not in HAYSTACKS:
        raise reject("haystack", haystack, f"one of {', '.join(HAYSTACKS)}", 'Use "noise", the easier one.')
    draw = random.Random(seed)
    key = draw.choice(_KEYS)
    number = str(draw.randrange(10 ** (DIGITS - 1), 10**DIGITS))
    depth = draw.random()
    needle = _NEEDLE.format(key=key, number=number)

    def text_with(count: int) -> str:
        # A generator of its own, so that a longer haystack begins with the shorter one.
        sentences = HAYSTACKS[haystack](count, random.Random(seed))
        sentences.insert(round(depth * count), needle)
        question = _QUESTION.format(key=key)
        request = f"{_INTRODUCTION}\n\n{' '.join(sentences)}\n\n{question}"
        return _ask(tokenizer, request) + _ANSWER.format(key=key)

    def taken(count: int) -> int:
        return len(tokenizer.encode(text_with(count)))

    least = taken(0)
    if tokens < least:
        allowed = f"the needle, the question and the chat template alone take {least} tokens here"
        raise reject("tokens", tokens, allowed, f"Ask for {least} or more.")
    # Small strides first: a much too long text would make the tokenizer warn about the model's context.
    fits, too_many = 0, 1
    while taken(too_many) <= tokens:
        fits, too_many = too_many, too_many + 1 + too_many // 4
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if taken(middle) <= tokens else (fits, middle)
    text = text_with(fits)
    return NeedlePrompt(text, number, tuple(tokenizer.encode(text)), key, depth, haystack, seed)


def _ask(tokenizer: Any, request: str) -> str:
    """The request as a user's turn, up to where the assistant's begins."""
    if getattr(tokenizer, "chat_template", None):
        turn = [{"role": "user", "content": request}]
        asked: str = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        return asked
    return f"{request}\n\n"
