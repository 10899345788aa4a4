"""Ways to rank pages, one a file, behind one interface: LOCKS, and what it is measured against."""

from collections.abc import Callable
from functools import partial

from ..config import LocksConfig, reject
from .base import Observer, PageSource, Selector, observes
from .centroid import Centroid
from .exact import Exact
from .h2o import H2O
from .kvzip import KVzip
from .lazyeviction import LazyEviction
from .locks import Locks
from .locks_centred import LocksCentred
from .locks_reranked import LocksReranked
from .loki import Loki
from .quest import Quest
from .random import Random
from .rkv import RKV
from .rocketkv import RocketKV
from .second_moment import SecondMoment
from .shadowkv import ShadowKV
from .snapkv import SnapKV
from .streaming import Streaming
from .triattention import TriAttention

SELECTORS: dict[str, Callable[[], Selector]] = {
    "locks": Locks,
    "exact": Exact,
    "centroid": Centroid,
    "quest": Quest,
    "second-moment": SecondMoment,
    "streaming": Streaming,
    "random": Random,
}
"""Name -> a selector that needs nothing but a query and pages; one instance may serve all layers and sequences."""

SEQUENCE_SELECTORS: dict[str, Callable[[LocksConfig], Selector]] = {
    "locks-reranked": LocksReranked,
    "shadowkv": ShadowKV,
    "rocketkv": RocketKV,
    "h2o": H2O,
    "snapkv": SnapKV,
    "kvzip-prompt": KVzip,
    "rkv": RKV,
    "lazyeviction": LazyEviction,
}
"""Name -> a selector that depends on the budget or observes: one instance for one layer of one batch."""

CALIBRATED_SELECTORS: dict[str, Callable[..., Selector]] = {
    "locks-centred": LocksCentred,
    "loki": Loki,
    "triattention": TriAttention,
}
"""Name -> a selector whose first argument was measured beforehand, layer by layer; its class says how."""

REPEATING_SELECTORS: dict[str, Callable[[LocksConfig], Selector]] = {
    "kvzip": partial(KVzip, repeated=True),
}
"""Name -> a selector that must be shown the prompt's repetition (`reconstruct`) before it selects."""


def make_selector(name: str, config: LocksConfig) -> Selector:
    """A new selector for one layer of one batch; ValueError if there is none, or more must be done first."""
    if name in SELECTORS:
        return SELECTORS[name]()
    if name in SEQUENCE_SELECTORS:
        return SEQUENCE_SELECTORS[name](config)
    if name in CALIBRATED_SELECTORS or name in REPEATING_SELECTORS:
        calibrated = "it takes what was measured beforehand, layer by layer"
        allowed = calibrated if name in CALIBRATED_SELECTORS else "the prompt must be repeated to it before it selects"
        raise reject("selector", name, allowed, "Give a function from a layer to a selector.")
    known = ", ".join([*SELECTORS, *SEQUENCE_SELECTORS])
    raise reject("selector", name, f"one of {known}", 'Use "locks".')


__all__ = [
    "CALIBRATED_SELECTORS",
    "H2O",
    "REPEATING_SELECTORS",
    "RKV",
    "SELECTORS",
    "SEQUENCE_SELECTORS",
    "Centroid",
    "Exact",
    "KVzip",
    "LazyEviction",
    "Locks",
    "LocksCentred",
    "LocksReranked",
    "Loki",
    "Observer",
    "PageSource",
    "Quest",
    "Random",
    "RocketKV",
    "SecondMoment",
    "Selector",
    "ShadowKV",
    "SnapKV",
    "Streaming",
    "TriAttention",
    "make_selector",
    "observes",
]
