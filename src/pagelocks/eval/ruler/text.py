"""What the texts of the thirteen tasks are made with: facts among other units, their places, words."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

Span = tuple[int, int]
"""Start and end, in characters or in tokens."""

T = TypeVar("T")


def place(units: Sequence[str], facts: Iterable[tuple[float, str]]) -> tuple[list[str], set[int]]:
    """Units with facts among them at depths from 0 to 1, in the order of the depths, and which of them are facts."""
    placed, marked, taken = list[str](), set[int](), 0
    for depth, fact in sorted(facts, key=lambda pair: pair[0]):
        upto = round(depth * len(units))
        placed += units[taken:upto]
        taken = upto
        marked.add(len(placed))
        placed.append(fact)
    return [*placed, *units[taken:]], marked


def lay(before: str, units: Sequence[str], separator: str, marked: set[int]) -> tuple[str, tuple[Span, ...]]:
    """Text that ends in the joined units, and the spans of the marked ones in it."""
    spans, at = list[Span](), len(before)
    for number, unit in enumerate(units):
        if number in marked:
            spans.append((at, at + len(unit)))
        at += len(unit) + len(separator)
    return before + separator.join(units), tuple(spans)


def distinct(make: Callable[[], T], used: set[T]) -> T:
    """The first value that was not used before; it is then."""
    while (value := make()) in used:
        pass
    used.add(value)
    return value


@dataclass
class Grown:
    """A list that grows when more is asked for, always by the same values."""

    make: Callable[[], str]
    made: list[str] = field(default_factory=list)

    def first(self, count: int) -> list[str]:
        """Its first `count` values."""
        while len(self.made) < count:
            self.made.append(self.make())
        return self.made[:count]


@functools.cache
def vocabulary(category: str) -> tuple[str, ...]:
    """English "nouns", "adjectives" or "verbs" of lower-case letters alone, sorted."""
    try:
        from wonderwords import RandomWord
    except ImportError as error:
        raise ImportError("this task takes its words from wonderwords: run pip install 'pagelocks[eval]'") from error
    words = RandomWord().filter(include_categories=[category])
    return tuple(sorted({word for word in words if word.isascii() and word.isalpha() and word.islower()}))
