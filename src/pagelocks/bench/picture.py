"""A picture of decode timings: milliseconds a token against context, both sides and what the records cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw_decode(results: list[dict[str, Any]], path: Path) -> None:
    """Write a PNG of the single-sequence cases without `dense_below`, if there are any.

    The third line is dense's time at no context, by a straight line through its first and last, plus the records at
    dense's own rate.  It is no bound: that time holds what dense attention costs however short the context is, which
    is more than LOCKS does.
    """
    from ..config import LocksConfig
    from ..layout import record_layout
    from .decode import SHAPES

    lines = sorted((r for r in results if r["batch"] == 1 and not r["dense_below"]), key=lambda r: r["context"])
    if not lines:
        return  # nothing but batches
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    contexts = [r["context"] for r in lines]
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    axes.plot(contexts, [r["dense_ms"] for r in lines], "o-", color="tab:gray", label="dense (FlashAttention 3)")
    axes.plot(
        contexts, [r["locks_ms"] for r in lines], "o-", color="tab:blue", label=f"LOCKS, {lines[0]['budget']} tokens"
    )
    if len(lines) > 1:
        first, last = lines[0], lines[-1]
        slope = (last["dense_ms"] - first["dense_ms"]) / (last["context"] - first["context"])
        base = first["dense_ms"] - slope * first["context"]
        head_dim = SHAPES[first["shape"]]["head_dim"]
        share = record_layout(head_dim, LocksConfig()).record_bytes / (2 * 16 * head_dim * 2)
        records = [base + slope * context * share for context in contexts]
        label = "dense at no context, and the records at dense's rate"
        axes.plot(contexts, records, "--", color="tab:green", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{c // 1024}K" if c < 1_000_000 else "1M" for c in contexts])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens in context")
    axes.set_ylabel("ms per output token")
    axes.set_title(f"{lines[0]['shape']}, batch 1, {lines[0]['card']}")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
