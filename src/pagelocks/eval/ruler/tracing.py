"""The tracing task, vt: a chain of variables that all come to hold one number, scattered over noise."""

from __future__ import annotations

import string
from collections.abc import Sequence

from ...prompts import HAYSTACKS
from .base import Draft, Order, Parts
from .text import Span, distinct, lay, place

HOPS = 4
"""Assignments after the first."""

_INTRODUCTION = (
    "Here and there the text below sets a variable, to a number or to what another variable holds. Keep track of them; "
    "a question follows."
)
_FACT = "SET {name} = {value}."
_QUESTION = "Which variables hold {value}, on their own or by way of others? Name all five."
_ANSWER = "The five variables that hold {value} are"
_EXAMPLE_SENTENCES = 10


def draft(order: Order) -> Draft:
    """A record of vt but for the size: sentences of noise."""
    draw, used = order.draw("chain"), set[str]()
    capitals = string.ascii_uppercase

    def chain() -> tuple[str, list[str], list[float]]:
        value = distinct(lambda: str(draw.randrange(10_000, 100_000)), used)
        names = [distinct(lambda: "".join(draw.choices(capitals, k=5)), used) for _ in range(HOPS + 1)]
        return value, names, sorted(draw.random() for _ in names)

    example, (value, names, depths) = chain(), chain()

    def text(
        before: str, value: str, names: Sequence[str], depths: Sequence[float], size: int
    ) -> tuple[str, tuple[Span, ...]]:
        facts = [_FACT.format(name=n, value=v) for n, v in zip(names, [value, *names], strict=False)]
        units, marked = place(HAYSTACKS["noise"](size, draw), zip(depths, facts, strict=True))
        return lay(f"{before}{_INTRODUCTION}\n\n", units, " ", marked)

    solved, _ = text("", *example, _EXAMPLE_SENTENCES)
    solved += f"\n\n{_QUESTION}\n\n{_ANSWER} ".format(value=example[0]) + ", ".join(example[1]) + ".\n\n"

    def build(size: int) -> Parts:
        context, facts = text(solved, value, names, depths, size)
        return Parts(context, _QUESTION.format(value=value), _ANSWER.format(value=value), facts)

    return Draft(build, tuple(names), {"value": value, "depths": depths})
