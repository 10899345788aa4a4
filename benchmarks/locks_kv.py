"""Time locks-kv's kernels beside ours: the same keys, values, queries and block tables, the same card, one process.

    python benchmarks/locks_kv.py [--shape glm-4-9b-1m] [--context N ...] [--rows N] [--output FILE]

It needs a Hopper GPU, pagelocks with its `gpu` extra, and locks-kv 0.1.4 with what that asks for: Python 3.10, torch
2.4 and triton 3.0 or newer; and nvcc, ninja and a C++ compiler, as it compiles its kernels at first use.  It is
published under Apache-2.0.  None of it is copied here: what is installed is called.  vLLM is not needed.

Each side scores its own summaries, which its own build made from the same keys, and selects within the same budget,
sink and recent pages included.  Where only attention is timed, both read the same pages, those that our select chose.
Printed beside the times, so that unequal work shows: how far the log-masses of both scores are apart, which share of
the selected pages they have in common, how far both outputs over the same pages are apart.  The two rules differ where
query heads share a KV head (a head's masses are divided by their sum here, by their largest there), which on random
queries moves a tenth or two of the pages; so our rule is also put to their scores, to see what the summaries alone do.

- CUDA graphs, over so many layers' buffers that little stays in L2, as in `pagelocks bench kernels`; its build is not
  made for graphs and is timed without one, host included.
- Its attention is timed as its dispatch table has it (Triton) and with its CUDA kernel.
- Its state is sized for the context, not for a model's longest, which can only help it.
- Keys and values lie as vLLM 0.32 keeps them, a head's value behind its key; its kernels take any strides.
- Its build options are environment variables that it reads when imported, RKI4_MMA=1 (tensor cores where eight query
  heads share a KV head) among them; those set are recorded as `peer_options`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

try:
    import torch
    from locks_kv_sides import Locks, Peer, in_common, masses_by_row
    from rich.console import Console
    from rich.table import Table

    from pagelocks.bench.cli import KERNEL_CONTEXTS, about
    from pagelocks.bench.decode import SHAPES
    from pagelocks.bench.kernels import Layers, preset_shape, read_bandwidth
    from pagelocks.bench.timing import microseconds
    from pagelocks.config import LocksConfig
    from pagelocks.score import page_share
    from pagelocks.select import select_pages
except ImportError as missing:
    sys.exit(
        f"locks_kv.py needs torch, rich and pagelocks ({missing}). Run pip install -e '.[gpu]', or set PYTHONPATH."
    )

TESTED = "0.1.4"
DECIMALS = 4


def without_graph(work: Callable[[], None], repeats: int = 3) -> float:
    """Median time of `work` in microseconds, with whatever it does on the host."""
    work()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return float(statistics.median(times))


def over(count: int, one: Callable[[int], object], timer: Callable[[Callable[[], None]], float] = microseconds) -> Any:
    """A function that times one of `count` calls in turn."""

    def work() -> None:
        for i in range(count):
            one(i)

    return lambda: timer(work) / count


def attempt(work: Callable[[], Any]) -> tuple[Any, str | None]:
    """What `work` returns, or None and its error.

    Raises
    ------
    RuntimeError
        If the error took the CUDA context with it: nothing after it could run.
    """
    try:
        return work(), None
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    try:
        torch.cuda.synchronize()
    except Exception as error:
        raise RuntimeError(f"the GPU is lost to this process after: {text}") from error
    return None, text


def compare(locks: Locks, shape: Any, name: str, context: int, rows: int, read_gbps: float) -> Iterator[dict[str, Any]]:
    """One line for each kernel of one context."""
    layers, config = Layers(shape, 1, context, rows, memory=0.0), shape.config
    pipeline = layers.pipeline
    our_pages: Any = pipeline.select.logical  # (rows, kv_heads, budget_pages)
    complete, total = context // 16, -(-context // 16)
    both_score = min(complete, total - config.recent_pages)  # theirs leaves the recent pages out
    pages = rows * complete * shape.kv_heads
    page_bytes = 2 * 16 * shape.head_dim * shape.dtype.itemsize
    scored, chosen = pages * shape.layout.record_bytes, rows * shape.kv_heads * config.budget_pages * page_bytes

    def stream() -> int:
        return int(torch.cuda.current_stream().cuda_stream)

    def line(kernel: str, us: Any, peer_us: Any, size: int, **more: Callable[[], Any]) -> dict[str, Any]:
        found: dict[str, Any] = {"kernel": kernel, "shape": name, "context": context, "rows": rows}
        results = {"ours": attempt(us), "locks-kv": attempt(peer_us)}
        more_results = {key: attempt(value) for key, value in more.items()}
        time, peer_time = (value and round(value, 2) for value, _ in results.values())
        gbps = round(size / time / 1e3, 1) if time else None
        found |= {"us": time, "bytes": size, "gbps": gbps, "read_gbps": round(read_gbps, 1), "peer_us": peer_time}
        found |= {key: value for key, (value, _) in more_results.items()}
        errors = {key: error for key, (_, error) in (results | more_results).items() if error}
        return found | ({"errors": errors} if errors else {})

    peer, error = attempt(lambda: Peer(locks, layers))
    if peer is None:
        raise RuntimeError(f"locks-kv takes no such shape: {error}")
    pipeline.plan(stream(), layers.prefill_rows)
    few = min(len(layers.records), 4)
    build = "build, the whole prompt of one layer (theirs outside a graph)"
    theirs = over(1, lambda _: peer.build(few), without_graph)
    half = pages * page_bytes // 2
    yield line(build, over(few, lambda i: layers.build(i, layers.prefill_rows)), lambda: theirs() / few, half)
    pipeline.plan(stream(), layers.decode_rows, dense_below=0)
    if context % 16 == 0:
        count = len(layers.records)
        build = f"build, a row's last page in {count} layers together (theirs outside a graph)"
        ours = over(1, lambda _: pipeline.build(stream(), layers.decode_rows, layers.all_layers))
        size = rows * count * shape.kv_heads * page_bytes // 2
        yield line(build, ours, over(1, lambda _: peer.build_last(), without_graph), size)
    plan = over(20, lambda _: pipeline.plan(stream(), layers.decode_rows, dense_below=0))
    yield line("plan, once a step", plan, over(20, lambda _: peer.plan()), 0)
    if context <= config.budget:
        return

    def ready() -> None:
        """Both sides' scores and pages of one layer."""
        pipeline.plan(stream(), layers.decode_rows, dense_below=0)
        peer.plan()
        for side in (layers, peer):
            side.score(0)
            side.select()
        torch.cuda.synchronize()

    def masses() -> float:
        ready()
        ours = masses_by_row(pipeline.score.log_mass, rows, complete)[..., :both_score]
        return round(float((ours - peer.state.score_h[:rows, ..., :both_score]).abs().median()), DECIMALS)

    def shares(common: Any) -> list[float]:
        return [round(float(value), DECIMALS) for value in (common.mean(), common.min())]

    def overlap() -> list[float]:
        ready()
        table, counts = peer.state.page_table[:rows], peer.state.page_cnt[:rows]
        return shares(in_common(our_pages, table, counts, total))

    def overlap_of_one_rule() -> list[float]:
        ready()
        theirs = masses_by_row(pipeline.score.log_mass, rows, complete).clone()
        theirs[..., :both_score] = peer.state.score_h[:rows, ..., :both_score]
        lengths = layers.decode_rows.lengths.unsqueeze(-1)
        chosen = select_pages(page_share(theirs, lengths, config), lengths, config)
        return shares(in_common(our_pages, chosen, (chosen >= 0).sum(-1), total))

    def outputs(cuda: bool) -> float:
        peer.take_pages(our_pages)
        layers.attend(0)
        peer.attend(0, cuda)
        ours, theirs = layers.output.float(), peer.output.float()
        return round(float((ours - theirs).norm() / ours.norm()), DECIMALS)

    def its_select() -> float:
        if os.environ.get("LOCKS_HMAX") == "1":
            raise RuntimeError("with LOCKS_HMAX its select uses up what score left; see score and select")
        return float(over(20, lambda _: peer.select())())

    def both(side: Any, *steps: str) -> Callable[[int], None]:
        def run(layer: int) -> None:
            for step in steps:
                getattr(side, step)(*(() if step == "select" else (layer,)))

        return run

    _, error = attempt(peer.fill)
    if error:
        raise RuntimeError(f"locks-kv built no summaries: {error}")
    attempt(ready)  # compiles; an error comes again below, with the kernel that it is of
    count = len(layers.records)
    yield line("score", over(count, layers.score), over(count, peer.score), scored, log_mass_difference=masses)
    ours = over(20, lambda _: layers.select())
    checks = {"pages_in_common": overlap, "pages_in_common_by_our_rule": overlap_of_one_rule}
    yield line("select", ours, its_select, pages * shape.group * 4, **checks)
    ours, theirs = (over(count, both(side, "score", "select")) for side in (layers, peer))
    yield line("score and select", ours, theirs, scored)
    attempt(ready)
    attempt(lambda: peer.take_pages(our_pages))
    count = len(layers.caches)
    for kernel, cuda in (("Triton", False), ("CUDA", True)):
        attend = f"attend, the same chosen pages (theirs in {kernel})"
        theirs = over(count, partial(peer.attend, cuda=cuda))
        yield line(attend, over(count, layers.attend), theirs, chosen, output_difference=partial(outputs, cuda))
    if pipeline.is_joint(rows):
        theirs = over(count, both(peer, "select", "attend"))
        yield line("select and attend (ours in one kernel)", over(count, layers.select_attend), theirs, chosen)
    count = max(len(layers.records), len(layers.caches))
    ours, theirs = over(count, layers.decode), over(count, peer.decode)
    yield line("decode, a layer's score, select and attend", ours, theirs, scored + chosen)


def note_of(found: dict[str, Any]) -> str:
    """What a person must know beside the times."""
    notes = []
    if found.get("log_mass_difference") is not None:
        notes.append(f"log-masses {found['log_mass_difference']} apart (median)")
    for key, rule in (("pages_in_common", ""), ("pages_in_common_by_our_rule", " by our rule from their scores")):
        if found.get(key) is not None:
            mean, least = found[key]
            notes.append(f"{mean:.1%} of pages in common{rule}, least of a head {least:.1%}")
    if found.get("output_difference") is not None:
        notes.append(f"outputs {found['output_difference']:.2%} apart")
    notes += [f"{side} failed: {error[:160]}" for side, error in found.get("errors", {}).items()]
    return "; ".join(notes)


def main() -> int:
    """Parse, check, time, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="glm-4-9b-1m", help="a known model's shape")
    parser.add_argument("--context", type=int, nargs="+", metavar="N", default=KERNEL_CONTEXTS, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=1, metavar="N", help="rows of a step (1)")
    parser.add_argument("--output", metavar="FILE", help="write the results as JSON, one object a line")
    args = parser.parse_args()
    for option, value, least in [("--rows", args.rows, 1), *(("--context", context, 48) for context in args.context)]:
        # A cache of two blocks would look to locks-kv like one of keys and one of values, hence 48.
        if value < least:
            parser.error(f"{option} {value} is not allowed: {least} or more")
    if importlib.util.find_spec("locks") is None:
        sys.exit(f"locks-kv is not here. Run pip install locks-kv=={TESTED}, or put it on PYTHONPATH.")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.exit("This needs a GPU of compute capability 9.0 and PyTorch for CUDA.")
    from torch.utils import cpp_extension

    if cpp_extension.CUDA_HOME is None or not cpp_extension.is_ninja_available():
        sys.exit("locks-kv compiles its kernels: nvcc (CUDA_HOME) and ninja are needed.")
    if args.output and not os.access(Path(args.output).resolve().parent, os.W_OK):
        parser.error(f"--output {args.output} is not in a folder that exists and is yours")
    try:
        locks = Locks()
    except (ImportError, AttributeError) as error:
        sys.exit(f"What is installed as `locks` is not locks-kv {TESTED}, or lacks what it needs ({error}).")
    console = Console(width=None if sys.stdout.isatty() else 200)
    if locks.version != TESTED:
        console.print(f"locks-kv {locks.version} is installed; this was written for {TESTED}")
    facts = about()
    facts["versions"] |= {"locks-kv": locks.version}
    with contextlib.suppress(PackageNotFoundError):
        facts["versions"]["triton"] = version("triton")
    options = {key: value for key, value in os.environ.items() if key.startswith(("LOCKS_", "RKI4_"))}
    facts["peer_options"] = dict(sorted(options.items()))
    try:
        shape, read, failed = preset_shape(args.shape, LocksConfig()), read_bandwidth(), False
    except Exception as error:
        sys.exit(f"Our own kernels do not run here: {error}")
    print("compiling locks-kv's kernels: some minutes the first time", file=sys.stderr, flush=True)
    for text in locks.compile(shape):
        print(text, file=sys.stderr, flush=True)
    table = Table("kernel", "context", "rows", "us", "locks-kv us", "theirs / ours", "", box=None, header_style="bold")
    with open(args.output, "w") if args.output else contextlib.nullcontext() as file:
        try:
            for context in args.context:
                try:
                    for found in compare(locks, shape, args.shape, context, args.rows, read):
                        times = found["us"], found["peer_us"]
                        ratio = f"{times[1] / times[0]:.2f}" if all(times) else "-"
                        shown = ("-" if time is None else f"{time:,.2f}" for time in times)
                        cells = [found["kernel"], f"{context:,}", str(args.rows), *shown, ratio, note_of(found)]
                        table.add_row(*cells)
                        print(*cells, sep="  ", file=sys.stderr, flush=True)  # should it be stopped before the table
                        failed |= "errors" in found
                        if file:
                            print(json.dumps(found | facts), file=file, flush=True)
                except Exception as error:
                    torch.cuda.synchronize()  # raises where the GPU is lost
                    failed = True
                    table.add_row("(ended)", f"{context:,}", str(args.rows), "-", "-", "-", str(error)[:300])
                gc.collect()
                torch.cuda.empty_cache()
        except Exception as error:
            failed = True
            table.add_row("(ended)", "", "", "-", "-", "-", f"no kernel after this one could run: {error}"[:300])
    console.print(table)
    console.print(f"this card reads at {read:,.0f} GB/s; locks-kv {locks.version}, options {facts['peer_options']}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
