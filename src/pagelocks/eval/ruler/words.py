"""The two counting tasks: cwe, common words of a numbered list, and fwe, frequent words of a coded text."""

from __future__ import annotations

import math
import random
import string
from collections.abc import Sequence

from .base import Draft, Order, Parts
from .text import Span, distinct, lay, vocabulary

COMMON = 10
"""Words to find in cwe."""
SHORT = 4096
"""Below this length cwe repeats its words less often."""

_EXAMPLE_TIMES, _EXAMPLE_RARE = (3, 1), 10
_LIST = "Below is a numbered list of words. A few of them come again and again; a question about these follows."
_WHICH_COMMON = "Ten words stand in the list far more often than the others. Which ones?"
_COMMON_ANSWER = "The ten frequent words are"

_CODE = "The text below is in code: no word of it means a thing, but some return more often than others. Dots are gaps."
_WHICH_FREQUENT = "Dots left aside, which three words of the coded text return most often?"
_FREQUENT_ANSWER = "The three most frequent coded words are"
_FILLER = "..."
# From here on int(N / (zeta(2) rank ** 2)) differs between the ranks up to 5, so that ranks 2 to 4 are no tie.
_LEAST_WORDS = 74


def common_draft(order: Order) -> Draft:
    """A record of cwe but for the size: words that are not among the ten."""
    times = (6, 1) if order.length < SHORT else (30, 3)
    draw = order.draw("words")
    every = sorted({word for category in ("nouns", "adjectives", "verbs") for word in vocabulary(category)})
    draw.shuffle(every)
    example, rest = every[: COMMON + _EXAMPLE_RARE], every[COMMON + _EXAMPLE_RARE :]
    common, rare = rest[:COMMON], rest[COMMON:]
    solved, _ = _numbered(f"{_LIST}\n\n", example[:COMMON], example[COMMON:], _EXAMPLE_TIMES, order.draw("example"))
    solved += f"\n\n{_WHICH_COMMON}\n\n{_COMMON_ANSWER} {', '.join(example[:COMMON])}.\n\n"

    def build(size: int) -> Parts:
        before = f"{solved}{_LIST}\n\n"
        context, facts = _numbered(before, common, rare[:size], times, order.draw("order"))
        return Parts(context, _WHICH_COMMON, _COMMON_ANSWER, facts)

    supply = f"the {len(every)} words that there are"
    return Draft(build, tuple(common), {"times": times}, least=COMMON, most=len(rare), supply=supply)


def _numbered(
    before: str, common: Sequence[str], rare: Sequence[str], times: tuple[int, int], draw: random.Random
) -> tuple[str, tuple[Span, ...]]:
    words = [*common] * times[0] + [*rare] * times[1]
    draw.shuffle(words)
    wanted = set(common)
    marked = {number for number, word in enumerate(words) if word in wanted}
    return lay(before, [f"{number}. {word}" for number, word in enumerate(words, 1)], " ", marked)


def zipf_counts(words: int, ranks: int) -> list[int]:
    """How often the words of ranks 1, 2, ... occur: Zipf's law with exponent 2, for about `words` words in all."""
    zeta = math.pi**2 / 6
    return [int(words / (zeta * rank**2)) for rank in range(1, ranks + 1)]


def frequent_draft(order: Order) -> Draft:
    """A record of fwe but for the size: the N of Zipf's law."""
    ranks = max(order.length // 50, 4)
    draw, used = order.draw("words"), set[str]()
    letters = string.ascii_lowercase
    words = [_FILLER, *(distinct(lambda: "".join(draw.choices(letters, k=6)), used) for _ in range(ranks - 1))]
    wanted = words[1:4]

    def build(size: int) -> Parts:
        counts = zipf_counts(size, ranks)
        text = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
        order.draw("order").shuffle(text)
        marked = {number for number, word in enumerate(text) if word in wanted}
        context, facts = lay(f"{_CODE}\n\n", text, " ", marked)
        return Parts(context, _WHICH_FREQUENT, _FREQUENT_ANSWER, facts)

    return Draft(build, tuple(wanted), {"ranks": ranks}, least=_LEAST_WORDS)
