r"""Where a mathematical answer stands: in the last \boxed{...}."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:(?P<brace>\{)|(?P<bare>[^\s{}$\\]+))")
_MARK = re.compile(r"\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""What the last \boxed{...} or \fbox{...} holds; None without one, or if the last one never ends.

    MATH's rule (hendrycks/math, last_boxed_only_string), \boxed 5 included.  An answer that was cut off inside its
    last box has none: an earlier box is an intermediate result.
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    found = boxes[-1]
    if found["bare"]:
        return found["bare"]
    depth = 1
    for mark in _MARK.finditer(text, found.end()):
        depth += {"{": 1, "}": -1}.get(mark[0], 0)  # an escaped brace is none
        if not depth:
            return text[found.end() : mark.start()].strip()
    return None
