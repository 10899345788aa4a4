"""Timing on the GPU: graphs replayed between events, so that neither launches nor the host are in the figure."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch


def graph_of(work: Callable[[], None]) -> Any:
    """`work`, run once to warm up and captured."""
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def microseconds(work: Callable[[], None], repeats: int = 15) -> float:
    """Median time of `work` in microseconds."""
    graph = graph_of(work)
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = _event(), _event()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return float(statistics.median(times))


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
