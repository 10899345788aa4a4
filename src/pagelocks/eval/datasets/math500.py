"""MATH-500: 500 of MATH's test problems (openai/prm800k), an object a line; answers compared by math-verify."""

from __future__ import annotations

import threading
from typing import Any

from .aime import NEW_TOKENS
from .base import Example, Parts, Task
from .boxed import last_boxed
from .files import Row
from .metrics import package

_BEFORE = "Solve the following problem.\n\n"
_AFTER = (
    "\n\nThink it through one step after another. At the very end, write the result, in simplest form and nothing "
    "else with it, as \\boxed{...}."
)
_SECONDS = 5
_LONGEST = 500  # MATH's answers are far shorter; what a model repeats until it is stopped takes long to parse


def equivalent(answer: str, reference: str) -> bool:
    r"""Whether two results, as they stand in a \boxed{...}, are the same text or, to math-verify, the same thing.

    math-verify does not look at the base of a number, so 4210_7 passes for 4210_5.  It gives up after 5 seconds, but
    can do so in the main thread alone: in another one a tower of powers takes as long as it takes.
    """
    if "".join(answer.split()) == "".join(reference.split()):
        return True
    if not answer.strip() or len(answer) > _LONGEST:
        return False
    verifier = package("math_verify")
    seconds = _SECONDS if threading.current_thread() is threading.main_thread() else None
    config = [verifier.LatexExtractionConfig(boxed_match_priority=0)]

    def parsed(text: str) -> Any:
        return verifier.parse(f"\\boxed{{{text}}}", extraction_config=config, parsing_timeout=seconds)

    # The order matters: it is the reference's form (a set, a tuple, an interval) that decides how they are compared.
    return bool(verifier.verify(parsed(reference), parsed(answer), timeout_seconds=seconds))


def _make(row: Row) -> Parts:
    meta: dict[str, Any] = {name: row.data[name] for name in ("subject", "level", "solution") if name in row.data}
    name = str(row.data["unique_id"]) if "unique_id" in row.data else None
    return Parts(_BEFORE + row.text("problem"), "", _AFTER, (row.text("answer"),), name, meta)


def _grade(answer: str, example: Example) -> float:
    said = last_boxed(answer)
    return float(said is not None and equivalent(said, example.references[0]))


TASKS = (Task("math500", NEW_TOKENS, _make, _grade, ("math_verify",)),)
