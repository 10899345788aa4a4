"""The two question tasks: a passage that holds the answer among numbered ones that do not.

qa_1 takes SQuAD v2's JSON, qa_2 HotpotQA's.  Without a file, people and towns are invented: qa_1 then asks for a town
that one passage names, qa_2 for one that takes a second passage to find.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config import reject
from ...prompts import HAYSTACKS
from .base import Draft, Order, Parts
from .text import distinct, lay

SQUAD = 'a JSON file of SQuAD v2 ({"data": [{"paragraphs": [{"context", "qas"}]}]})'
HOTPOT = 'a JSON file of HotpotQA ([{"question", "answer", "context", "supporting_facts"}])'

_INTRODUCTION = "One question follows the passages below. Reply with the bare answer, as short as can be."
_PASSAGE = "Passage {number}:\n{text}"
_ANSWER = "Answer:"


@dataclass(frozen=True)
class Question:
    """A question with its answers; `right` and `near` number the passages that hold it and that come with it."""

    text: str
    answers: tuple[str, ...]
    right: tuple[int, ...]
    near: tuple[int, ...]


@dataclass(frozen=True)
class Corpus:
    """Distinct passages, and questions about them."""

    passages: tuple[str, ...]
    questions: tuple[Question, ...]


def draft(order: Order) -> Draft:
    """A QA record but for the size: passages without the answer, those that come with the question first."""
    if order.source is None:
        corpus = _invented(order)
        question = corpus.questions[0]
    else:
        corpus = read_corpus(order.source, order.task)
        if order.index >= len(corpus.questions):
            allowed = f"{order.source} has {len(corpus.questions)} questions with an answer"
            raise reject("index", order.index, allowed, f"Use 0 to {len(corpus.questions) - 1}.")
        numbers = list(range(len(corpus.questions)))
        random.Random(f"{order.task} {order.seed}").shuffle(numbers)  # the same for every index: none comes twice
        question = corpus.questions[numbers[order.index]]
    draw = order.draw("passages")
    near = draw.sample(question.near, len(question.near))
    known = {*question.right, *near}
    others = near + [n for n in draw.sample(range(len(corpus.passages)), len(corpus.passages)) if n not in known]
    ranks = [draw.random() for _ in corpus.passages]

    def build(size: int) -> Parts:
        chosen = sorted((*question.right, *others[:size]), key=ranks.__getitem__)
        texts = [_PASSAGE.format(number=at, text=corpus.passages[number]) for at, number in enumerate(chosen, 1)]
        marked = {at for at, number in enumerate(chosen) if number in question.right}
        context, facts = lay(f"{_INTRODUCTION}\n\n", texts, "\n\n", marked)
        return Parts(context, f"Question: {question.text}", _ANSWER, facts)

    supply = f"the question's passages and {len(others)} more"
    substitute = order.source is None
    return Draft(build, question.answers, {}, most=len(others), supply=supply, substitute=substitute)


def read_corpus(path: Path, task: str) -> Corpus:
    """The passages and the questions with an answer of a file: SQuAD v2's for qa_1, HotpotQA's for qa_2."""
    return _corpus(path.resolve(), path.stat().st_mtime_ns, task)


@functools.lru_cache(maxsize=4)
def _corpus(path: Path, _: int, task: str) -> Corpus:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        corpus = _squad(data) if task == "qa_1" else _hotpot(data)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        wanted = SQUAD if task == "qa_1" else HOTPOT
        allowed = f"{task} takes {wanted}; this file gave {type(error).__name__}: {error}"
        raise reject("source", str(path), allowed, "Give the file as published.") from None
    if not corpus.questions:
        raise reject("source", str(path), "a file with a question that has an answer", "Give the file as published.")
    return corpus


class _Numbers:
    """Passages by number, each once."""

    def __init__(self) -> None:
        self.of: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        if not isinstance(text, str) or not text.strip():
            raise TypeError("a passage is not text")
        return self.of.setdefault(text.strip(), len(self.of))


def _question(text: Any, answers: Sequence[Any], right: Sequence[int], near: Sequence[int]) -> Question:
    if not isinstance(text, str) or not all(isinstance(answer, str) and answer for answer in answers):
        raise TypeError("a question or an answer is not text")
    right = tuple(dict.fromkeys(right))
    return Question(text, tuple(dict.fromkeys(answers)), right, tuple(n for n in dict.fromkeys(near) if n not in right))


def _squad(data: Any) -> Corpus:
    numbers, questions = _Numbers(), list[Question]()
    for article in data["data"]:
        near = [numbers(paragraph["context"]) for paragraph in article["paragraphs"]]
        for paragraph, right in zip(article["paragraphs"], near, strict=True):
            for asked in paragraph["qas"]:
                answers = [answer["text"] for answer in asked["answers"]]
                if answers:  # in SQuAD v2 many have none
                    questions.append(_question(asked["question"], answers, [right], near))
    return Corpus(tuple(numbers.of), tuple(questions))


def _hotpot(data: Any) -> Corpus:
    numbers, questions = _Numbers(), list[Question]()
    for asked in data:
        titles = {title: numbers(f"{title}\n{''.join(sentences)}") for title, sentences in asked["context"]}
        right = [titles[title] for title, _ in asked["supporting_facts"]]
        if right:
            questions.append(_question(asked["question"], [asked["answer"]], right, list(titles.values())))
    return Corpus(tuple(numbers.of), tuple(questions))


_FIRST = (
    "Alda", "Bero", "Cyra", "Dorin", "Elka", "Fenn", "Gisa", "Hanno", "Ilse", "Joris", "Kaja", "Ludo", "Mira", "Nils",
    "Oda", "Pavo", "Quin", "Runa", "Sven", "Tilda", "Ulf", "Vera", "Wim", "Yara", "Zeno",
)  # fmt: skip
_STARTS = (
    "Bar", "Cal", "Dun", "Far", "Gor", "Hol", "Ker", "Lan", "Mor", "Nor", "Pel", "Ran", "Sel", "Tor", "Ves", "Wil",
)  # fmt: skip
_MIDDLES = ("a", "e", "i", "o", "u", "an", "en", "in", "on", "un", "ar", "er", "ir", "or", "ur", "al", "el", "il", "ol")
_SURNAME_ENDS = ("wick", "mond", "stead", "gard", "vane", "lock", "brand", "croft", "shaw", "tree")
_TOWN_ENDS = (
    "burg", "dale", "ford", "ham", "holm", "mouth", "port", "stow", "thorpe", "ton", "vik", "wald", "bridge", "field",
    "haven", "mere", "kirk", "cliff", "moor", "worth",
)  # fmt: skip
_TRADES = ("baker", "clockmaker", "dyer", "glazier", "joiner", "mason", "potter", "saddler", "tanner", "weaver")
_LEAST_TOKENS = 20
"""Fewer than any tokenizer takes for an invented passage, so that there are enough of them for the length."""


def _invented(order: Order) -> Corpus:
    """People, each with a passage; the first one is asked about, for qa_2 through the second, who taught the first."""
    draw, used = order.draw("people"), set[str]()
    # Two towns a person, drawn until they are new: not all that there are.
    most = len(_STARTS) * len(_MIDDLES) * len(_TOWN_ENDS) // 2 * 9 // 10
    count = min(order.length // _LEAST_TOKENS + 4, most)

    def made(ends: Sequence[str]) -> str:
        return draw.choice(_STARTS) + draw.choice(_MIDDLES) + draw.choice(ends)

    names = [distinct(lambda: f"{draw.choice(_FIRST)} {made(_SURNAME_ENDS)}", used) for _ in range(count)]
    towns = [distinct(lambda: made(_TOWN_ENDS), used) for _ in range(2 * count)]
    prose = HAYSTACKS["prose"](count, order.draw("prose"))
    passages = list[str]()
    for number, (name, remark) in enumerate(zip(names, prose, strict=True)):
        first, trade = name.split()[0], draw.choice(_TRADES)
        teacher = names[1] if number == 0 else names[draw.randrange(2, count)]
        facts = f"{name} was born in {towns[2 * number]} and moved to {towns[2 * number + 1]}"
        passages.append(f"{facts}, where {teacher} taught {first} the trade of a {trade}. {remark}")
    if order.task == "qa_2":
        text = f"In which town was the person born who taught {names[0]} a trade?"
        asked = Question(text, (towns[2],), (0, 1), ())
    elif draw.random() < 0.5:
        asked = Question(f"In which town was {names[0]} born?", (towns[0],), (0,), ())
    else:
        asked = Question(f"To which town did {names[0]} move?", (towns[1],), (0,), ())
    return Corpus(tuple(passages), (asked,))
