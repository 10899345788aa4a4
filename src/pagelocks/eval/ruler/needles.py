"""The eight needle tasks: facts about keys, hidden in noise, in prose or among facts of the same form."""

from __future__ import annotations

import functools
import random
import re
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config import reject
from ...prompts import DIGITS, HAYSTACKS
from .base import Draft, Order, Parts
from .text import Grown, distinct, lay, place, vocabulary


@dataclass(frozen=True)
class Kind:
    """What sets the needle tasks apart: the haystack, what keys and values are, how many there are and are asked."""

    haystack: str
    key: str = "word"
    value: str = "number"
    keys: int = 1
    values: int = 1
    queries: int = 1


KINDS = {
    "niah_single_1": Kind("noise"),
    "niah_single_2": Kind("essay"),
    "niah_single_3": Kind("essay", value="UUID"),
    "niah_multikey_1": Kind("essay", keys=4),
    "niah_multikey_2": Kind("needle"),
    "niah_multikey_3": Kind("needle", key="UUID", value="UUID"),
    "niah_multivalue": Kind("essay", values=4),
    "niah_multiquery": Kind("essay", keys=4, queries=4),
}
"""Name of a task -> its kind."""

DEPTHS = tuple(number / 39 for number in range(40))
"""Where in an essay needles may stand."""

_PHRASE = "special magic"
_INTRODUCTION = f"Read the text below with care. It holds {_PHRASE} {{what}}s, and a question about them follows."
_NEEDLE = f"The {_PHRASE} {{what}} for {{key}} is {{value}}."
_ONE_OF_SEVERAL = f"Among the {_PHRASE} {{what}}s for {{key}} is {{value}}."
# As in prompts.py the answer's first words are the needle's own: a small model then copies what followed them.
_QUESTION = f"Which {_PHRASE} {{what}} does the text give for {{key}}?", f"The {_PHRASE} {{what}} for {{key}} is"
_SEVERAL = (
    f"Which {_PHRASE} {{what}}s does the text give for {{key}}? Name all {{count}}.",
    f"The {_PHRASE} {{what}}s for {{key}} are",
)
_LONGEST_SENTENCE = 40


def draft(order: Order) -> Draft:
    """A needle task's record, but for the size: sentences, or lines of the needle haystack, beside the needles."""
    kind = KINDS[order.task]
    sentences = None if order.source is None else read_sentences(order.source)
    draw, used = order.draw("needles"), set[str]()
    template = _NEEDLE if kind.values == 1 else _ONE_OF_SEVERAL
    keys = [_fresh(kind.key, draw, used) for _ in range(kind.keys)]
    values = {key: [_fresh(kind.value, draw, used) for _ in range(kind.values)] for key in keys}
    asked = keys[: kind.queries]
    references = tuple(value for key in asked for value in values[key])
    needles = [(key, template.format(what=kind.value, key=key, value=v)) for key in keys for v in values[key]]
    draw.shuffle(needles)
    if kind.haystack == "essay":
        depths = sorted(draw.sample(DEPTHS, len(needles)))
    else:
        depths = sorted(draw.random() for _ in needles)
    other = order.draw("distractors")

    def distractor() -> str:
        key, value = _fresh(kind.key, other, used), _fresh(kind.value, other, used)
        return _NEEDLE.format(what=kind.value, key=key, value=value)

    distractors = Grown(distractor)

    def haystack(size: int) -> list[str]:
        if kind.haystack == "needle":
            return distractors.first(size)
        if sentences is not None:
            return [sentences[number % len(sentences)] for number in range(size)]
        return HAYSTACKS["noise" if kind.haystack == "noise" else "prose"](size, order.draw("prose"))

    question, prefix = _QUESTION if len(references) == 1 else _SEVERAL
    words = {"what": kind.value, "key": _listed(asked), "count": len(references)}
    introduction = _INTRODUCTION.format(**words) + "\n\n"
    needed = {text for key, text in needles if key in asked}
    separator = "\n" if kind.haystack == "needle" else " "

    def build(size: int) -> Parts:
        units, marked = place(haystack(size), zip(depths, [text for _, text in needles], strict=True))
        marked = {number for number in marked if units[number] in needed}
        context, facts = lay(introduction, units, separator, marked)
        return Parts(context, question.format(**words), prefix.format(**words), facts)

    meta: dict[str, Any] = {"keys": keys, "asked": asked, "depths": depths, "haystack": kind.haystack}
    return Draft(build, references, meta, substitute=kind.haystack == "essay" and sentences is None)


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _fresh(what: str, draw: random.Random, used: set[str]) -> str:
    """A number, word or UUID that is not in use."""
    makers = {
        "number": lambda: str(draw.randrange(10 ** (DIGITS - 1), 10**DIGITS)),
        "word": lambda: f"{draw.choice(vocabulary('adjectives'))}-{draw.choice(vocabulary('nouns'))}",
        "UUID": lambda: str(uuid.UUID(int=draw.getrandbits(128), version=4)),
    }
    return distinct(makers[what], used)


def read_sentences(path: Path) -> tuple[str, ...]:
    """The sentences of a text file, line breaks taken out; one of more than 40 words comes in pieces."""
    return _sentences(path.resolve(), path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _sentences(path: Path, _: int) -> tuple[str, ...]:
    try:
        text = " ".join(path.read_text(encoding="utf-8").split())
    except UnicodeDecodeError:
        raise reject("source", str(path), "a text file in UTF-8 is needed", "Convert the file.") from None
    if not text:
        raise reject("source", str(path), "a file with text in it is needed", "Give another file.")
    if _PHRASE in text.lower():
        allowed = f"the text must not speak of {_PHRASE} things, as needles do"
        raise reject("source", str(path), allowed, "Take those sentences out.")
    pieces = list[str]()
    for sentence in re.split(r"(?<=[.!?])\s+", text):
        words = sentence.split()
        pieces += (" ".join(words[at : at + _LONGEST_SENTENCE]) for at in range(0, len(words), _LONGEST_SENTENCE))
    return tuple(pieces)
