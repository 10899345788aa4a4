"""What the LOCKS layers of one engine share: options, counters, trace; and the start-up log."""

from __future__ import annotations

import json
import os
import time
import weakref
from typing import IO, TYPE_CHECKING, Any

from torch import Tensor
from vllm.logger import init_logger

from ..config import reject
from ..selectors import SELECTORS, Selector
from .counters import CounterFile, totals
from .options import Options, options_of
from .support import refuse_engine

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.plugins.pagelocks")

LOG_INTERVAL_S = 10.0


class LocksState:
    """Shared by the LOCKS layers of one engine; made when the first of them is."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._options = options_of(vllm_config)
        refuse_engine(vllm_config)
        self.instance = vllm_config.instance_id
        self.counters = CounterFile(self.instance)
        self.layers: list[str] = []
        self.caches = self.bound = 0  # summary caches made; how often vLLM has bound one
        self.pipelines: dict[Any, Any] = {}  # the GPU's kernels, by shape
        self._page = (0, 0)
        self._allocated: dict[str, int] = {}
        self._selectors: dict[str, Selector] = {}
        self._trace: IO[str] | None = None
        if self.options.trace is not None:
            try:
                self._trace = open(self.options.trace, "w", encoding="utf-8")  # noqa: SIM115  (as long as the engine)
            except OSError as error:
                raise reject(
                    "trace", self.options.trace, f"a file to write ({error.strerror})", "Name another."
                ) from None
        self._logged_at = time.monotonic()
        weakref.finalize(self, self.counters.path.unlink, missing_ok=True)  # also when the process ends

    @property
    def selector(self) -> Selector:
        """The selector that the options name; one instance an engine."""
        name = self.options.selector
        if name not in self._selectors:
            self._selectors[name] = SELECTORS[name]()
        return self._selectors[name]

    @property
    def options(self) -> Options:
        """The engine's options.

        Code in the same process may replace them between steps, but for what the records were made with.
        """
        return self._options

    @options.setter
    def options(self, options: Options) -> None:
        for name in ("rank", "page_size", "basis_bits", "coefficient_bits"):
            old, new = getattr(self._options.config, name), getattr(options.config, name)
            if old != new:
                raise reject(name, new, f"the cache holds records made with {old}", "Start another engine.")
        for name in ("budget", "sink_pages", "recent_pages") if self.pipelines else ():
            old, new = getattr(self._options.config, name), getattr(options.config, name)
            if old != new:
                raise reject(name, new, f"the GPU kernels were made for {old}", "Start another engine.")
        if options.trace != self._options.trace:
            raise reject("trace", options.trace, "it is opened when the engine starts", "Start another engine.")
        self._options = options

    def describe(self, layers: list[str], kv_bytes_a_page: int, record_bytes: int) -> list[Any]:
        """Say which layers run LOCKS and what a page of theirs takes, for the log and for readers of the counters.

        Returns
        -------
        list of int64 arrays
            Each layer's row of counters, to write to.
        """
        if not set(layers) <= set(self.layers):  # vLLM makes builders twice where it first measures CUDA graphs
            self.layers += layers
        self._page = (kv_bytes_a_page, record_bytes)
        header = {
            "instance": self.instance,
            "pid": os.getpid(),
            "layers": self.layers,
            "budget": self.options.config.budget,
            "rank": self.options.config.rank,
            "page_bytes": kv_bytes_a_page,
            "record_bytes": record_bytes,
        }
        self.counters.describe(header)
        return [self.counters.values[self.layers.index(name)] for name in layers]

    def allocated(self, name: str, size: int) -> None:
        """Note the bytes of one summary cache; when vLLM has allocated them all, log what was asked for."""
        self.bound += 1
        self._allocated[name] = size
        if len(self._allocated) == self.caches and self.bound % self.caches == 0:
            self._log_start()

    def _log_start(self) -> None:
        options, config = self.options, self.options.config
        kv_bytes_a_page, record_bytes = self._page
        logger.info(
            "LOCKS is on for %d layers: budget %d tokens = %d pages of %d a KV head, of them %d sink and %d recent "
            "pages always kept; dense_below %d tokens; rank %d, a summary of %d bytes beside %d bytes of K and V "
            "a page (%.1f%%), %.1f MiB for summaries inside vLLM's KV-cache memory%s.",
            len(self.layers),
            config.budget,
            config.budget_pages,
            config.page_size,
            config.sink_pages,
            config.recent_pages,
            config.dense_below,
            config.rank,
            record_bytes,
            kv_bytes_a_page,
            100 * record_bytes / kv_bytes_a_page,
            sum(self._allocated.values()) / 2**20,
            "" if options.selector == "locks" else f"; pages ranked by the selector {options.selector!r}, not by LOCKS",
        )

    def log_progress(self) -> None:
        """Every ten seconds of work, a line with the counters."""
        now = time.monotonic()
        if now - self._logged_at < LOG_INTERVAL_S:
            return
        self._logged_at = now
        total = totals(self.counters.values[: len(self.layers)])
        read, skipped = total["pages_read"], total["pages_skipped"]
        logger.info(
            "LOCKS: %d steps, rows %d sparse and %d dense, pages %d read and %d skipped (%.1f%% read), "
            "%d summaries built.",
            total["steps"],
            total["rows_sparse"],
            total["rows_dense"],
            read,
            skipped,
            100 * read / max(1, read + skipped),
            total["summaries_built"],
        )

    def trace(self, layer: str, step: int, row: int, length: int, pages: Tensor) -> None:
        """Write one row's selected pages, (kv heads, budget_pages), as a line of JSON."""
        assert self._trace is not None
        chosen = [[page for page in head if page >= 0] for head in pages.tolist()]
        line: dict[str, Any] = {"layer": layer, "step": step, "row": row, "length": length, "pages": chosen}
        self._trace.write(json.dumps(line) + "\n")
        self._trace.flush()


def state_of(vllm_config: VllmConfig) -> LocksState:
    """The state that the layers of this engine share: the one that its summary caches hold, or a new one."""
    from .summary_cache import SummaryCache

    layers = vllm_config.compilation_config.static_forward_context.values()
    held = (layer.state for layer in layers if isinstance(layer, SummaryCache))
    return next(held, None) or LocksState(vllm_config)
