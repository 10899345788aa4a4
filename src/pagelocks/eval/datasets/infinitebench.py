"""InfiniteBench: 12 tasks, a file each, scored as published; the prompts are our own words.

Format, scores and lengths of answers are those of OpenBMB/InfiniteBench (src/compute_scores.py, src/eval_utils.py),
commit 88b3daa.  The scores read an answer by the letter, and have quirks that are kept: they are what published
figures were counted with.  Where the published code fails (an answer of 3.5 to math_find), the score is 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from .base import Example, Parts, Task
from .files import Row, short
from .metrics import f1, f1_of_characters, rouge_lsum
from .prompts import INFINITEBENCH

References = tuple[str, ...]

_DIGITS = re.compile(r"[0-9]+")
_NUMBER = re.compile(r"\d+\.\d+|\d+")
_CALL = re.compile(r"func_[0-9]+\(-?[0-9]+\)")
_LETTERS = "ABCD"


def _spaced(text: str, *separators: str) -> str:
    for separator in separators:
        text = text.replace(separator, " ")
    return text


def first_integer(answer: str, references: References) -> float:
    """Whether the first digits of the answer are the reference."""
    found = _DIGITS.search(answer)
    return float(found is not None and found[0] == references[0])


def any_word(answer: str, references: References) -> float:
    """Whether a word of the answer is the reference."""
    return float(references[0] in _spaced(answer, *":\"'.,?!{}").split())


def any_name(answer: str, references: References) -> float:
    """Whether a word of the answer, in capitals, is the first reference; a name of two words never is."""
    return any_word(answer.upper(), references)


def last_integer(answer: str, references: References) -> float:
    """Whether the last word of the answer is the reference, a whole number."""
    words = _spaced(answer, *".`'\":").split()
    try:
        return float(int(words[-1]) == int(references[0]))
    except (IndexError, ValueError):
        return 0.0


def first_number(answer: str, references: References) -> float:
    """Whether the first number of the answer, its sign left out, is the reference."""
    found = _NUMBER.search(answer)
    return float(found is not None and float(found[0]) == float(references[0]))


def leading_integers(answer: str, references: References) -> float:
    """How many of the references the answer's integers, signs left out, match before the first that is wrong."""
    right = 0
    for said, wanted in zip(_DIGITS.findall(answer), references, strict=False):
        if int(said) != int(wanted):
            break
        right += 1
    return right / len(references)


def _after_phrase(said: str, phrases: tuple[str, ...], accepted: References) -> bool | None:
    """Whether what follows the first of these phrases, and one character, is accepted; None if there is none."""
    for phrase in phrases:
        if phrase in said:
            return said.split(phrase, 1)[1][1:].startswith(accepted)
    return None


def chosen_function(answer: str, references: References) -> float:
    """Whether the answer begins with the right letter and "." or ":", or gives letter or name after "answer is:"."""
    name, letter = references
    answer = answer.strip()
    if answer[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    said = re.sub(" +", " ", _spaced(answer, *"\n`'\"-*", "Option", "option"))
    return float(_after_phrase(said, ("answer is:", "is:", "answer:"), (letter, name)) or False)


def chosen_option(answer: str, references: References) -> float:
    """Whether the answer begins with the right letter, is the option, gives either after "answer is", or names it."""
    answer = answer.strip()
    if answer[:1] in (*_LETTERS,):
        return float(answer[0] in references)
    if answer in references:
        return 1.0
    said = re.sub(" +", " ", _spaced(answer, *"\n\"'.,?!{}"))
    found = _after_phrase(said, ("answer is:", "answer:", "answer is", "option is"), references)
    if found is None:
        found = next((word in references for word in said.split() if word in _LETTERS), False)
    return float(found)


def best(metric: Callable[[str, str], float], answer: str, references: References) -> float:
    """The best of the references counts."""
    return max(metric(answer, reference) for reference in references)


@dataclass(frozen=True)
class Kind:
    """What sets the tasks apart.

    The score and tokens of an answer; what the references must be if they are numbers; whether there are four options;
    what the score imports.
    """

    grade: Callable[[str, References], float]
    new_tokens: int
    number: type | None = None
    options: bool = False
    needs: tuple[str, ...] = ()


KINDS = {
    "passkey": Kind(first_integer, 6, int),
    "number_string": Kind(first_integer, 12, int),
    "kv_retrieval": Kind(any_word, 50),
    "longbook_qa_eng": Kind(partial(best, f1), 40),
    "longbook_qa_chn": Kind(partial(best, f1_of_characters), 40),
    "longbook_choice_eng": Kind(chosen_option, 40, options=True),
    "longbook_sum_eng": Kind(partial(best, rouge_lsum), 1200, needs=("rouge_score.rouge_scorer",)),
    "longdialogue_qa_eng": Kind(any_name, 40),
    "math_find": Kind(first_number, 3, float),
    "math_calc": Kind(leading_integers, 30_000, int),
    "code_run": Kind(last_integer, 5, int),
    "code_debug": Kind(chosen_function, 5, options=True),
}
"""Name of a task, without "infinitebench/" -> its kind."""


def _answers(row: Row) -> list[Any]:
    # Older files have a bare value, later ones a list of it; for math_calc that is a list of a list.
    answers = row.get("answer")
    answers = answers if isinstance(answers, list) else [answers]
    answers = answers[0] if answers and isinstance(answers[0], list) else answers
    if not answers or any(isinstance(answer, bool) or not isinstance(answer, str | int | float) for answer in answers):
        raise row.error(f"the field 'answer' must be text, a number or a list of these, not {short(row.get('answer'))}")
    return answers


def _make(name: str, kind: Kind, row: Row) -> Parts:
    references = tuple(map(str, _answers(row)))
    words: dict[str, Any] = {"input": row.text("input", empty=True)}
    if kind.number is not None:
        try:
            [kind.number(reference) for reference in references]
        except ValueError:
            raise row.error(f"the field 'answer' must be a number, not {short(row.get('answer'))}") from None
    if kind.options:
        options = words["options"] = row.texts("options")
        if len(options) != len(_LETTERS) or references[0] not in options:
            raise row.error(f"four options are needed, {references[0]!r} among them; there are {short(options)}")
        if len(references) == 1:
            references = references[0], _LETTERS[options.index(references[0])]
        elif len(references) != 2 or references[1] not in (*_LETTERS,):
            raise row.error(f"the field 'answer' must be an option or an option and its letter, not {references!r}")
    before, after = INFINITEBENCH[name]
    if "{call}" in after:
        found = _CALL.search(words["input"])
        if not found:
            raise row.error(f"the field 'input' must name a call such as func_3(-4), unlike {short(words['input'])}")
        words["call"] = found[0]
    identity = str(row.data["id"]) if "id" in row.data else None
    return Parts(before, row.text("context"), after.format(**words), references, identity)


def _grade(kind: Kind, answer: str, example: Example) -> float:
    return kind.grade(answer, example.references)


TASKS = tuple(
    Task(f"infinitebench/{name}", kind.new_tokens, partial(_make, name, kind), partial(_grade, kind), kind.needs)
    for name, kind in KINDS.items()
)
