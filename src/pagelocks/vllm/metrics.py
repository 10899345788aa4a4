"""LOCKS' counters at `/metrics`.

vLLM's statistics carry no field for a backend, and its stat-logger plugins switch statistics on for servers that asked
for none.  A collector in the server's Prometheus registry reads the workers' counter files at each scrape instead, and
yields nothing where LOCKS is off.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .counters import family, read_all

_METRICS: tuple[tuple[str, str, str, dict[str, str]], ...] = (
    ("steps", "pagelocks_steps", "Model steps that LOCKS took part in", {}),
    ("rows_sparse", "pagelocks_rows", "Rows (a request in a step) by how they attended", {"kind": "sparse"}),
    ("rows_dense", "pagelocks_rows", "Rows (a request in a step) by how they attended", {"kind": "dense"}),
    ("pages_read", "pagelocks_pages", "Pages of sparse rows, of all layers and KV heads", {"kind": "read"}),
    ("pages_skipped", "pagelocks_pages", "Pages of sparse rows, of all layers and KV heads", {"kind": "skipped"}),
    ("summaries_built", "pagelocks_summaries_built", "Page summaries built, of all layers and KV heads", {}),
    ("records_read", "pagelocks_records_read", "Page summaries read, of all layers and KV heads", {}),
)


class Collector:
    """A Prometheus collector over the counter files of this process's engines."""

    def describe(self) -> list[Any]:
        """Nothing ahead of time; without this the registry would collect when the collector is registered."""
        return []

    def collect(self) -> Iterator[Any]:
        """Counter families, labelled by engine; none where no engine runs LOCKS."""
        from prometheus_client.core import CounterMetricFamily

        families: dict[str, CounterMetricFamily] = {}
        for engine in read_all(family()):
            total = engine.totals()
            for field, name, text, labels in _METRICS:
                metric = families.setdefault(name, CounterMetricFamily(name, text, labels=["engine", *labels]))
                metric.add_metric([engine.header["instance"], *labels.values()], total[field])
        yield from families.values()


_registered = False


def register_collector() -> None:
    """Add the collector to the default registry, once a process."""
    global _registered
    if _registered:
        return
    from prometheus_client import REGISTRY

    REGISTRY.register(Collector())
    _registered = True
