"""Ways to rank pages, one a file, behind one interface: LOCKS, and what it is measured against."""

from collections.abc import Callable

from .base import PageSource, Selector
from .centroid import Centroid
from .exact import Exact
from .locks import Locks
from .quest import Quest
from .random import Random
from .streaming import Streaming

SELECTORS: dict[str, Callable[[], Selector]] = {
    "locks": Locks,
    "exact": Exact,
    "centroid": Centroid,
    "quest": Quest,
    "streaming": Streaming,
    "random": Random,
}

__all__ = ["SELECTORS", "Centroid", "Exact", "Locks", "PageSource", "Quest", "Random", "Selector", "Streaming"]
