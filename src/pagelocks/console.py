"""How results and progress are shown to people."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Progress = Callable[[str], None]


def percent(share: float | None) -> str:
    """A share for people; a dash for none."""
    return "-" if share is None else f"{100 * share:.1f}%"


def milliseconds(value: float | None) -> str:
    """A time for people; a dash for none."""
    return "-" if value is None else f"{value:.1f} ms"


def table_console() -> Console:
    """Standard output for tables: wide where it is no terminal, so that no column is cut."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = 200
    return console


@contextlib.contextmanager
def reporter() -> Iterator[Progress]:
    """Progress on standard error: one live line on a terminal, elsewhere a line now and then."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("starting") as status:
            yield lambda line: status.update(escape(line))
        return
    last_kind, last_at = "", 0.0

    def say(line: str) -> None:
        nonlocal last_kind, last_at
        kind, now = line.partition(" token ")[0], time.monotonic()
        if kind != last_kind or now - last_at > 10:
            last_kind, last_at = kind, now
            print(line, file=sys.stderr, flush=True)

    yield say
