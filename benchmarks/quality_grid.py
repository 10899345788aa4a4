"""Many `pagelocks eval run` on one GPU: some processes that keep the model each take the next of a list of runs.

    python benchmarks/quality_grid.py runs.jsonl --model Qwen2.5-Coder-1.5B-Instruct --folder answers --workers 5
    pagelocks eval table answers/*.jsonl

A line of the list is an object: `name` (of the file of answers), `task`, `context`, `budgets` (an object, each
selector's list), `new_tokens`, `batch` and `gib`, the memory that it takes; `records` is 50 unless given.  All else is
as in the grid of docs/quality.md: seed 42, prompts of one length, links of the first eight records.  The first run of
the list begins for which the memory planned (`--memory`) has room.  On a GPU a run's PyTorch gets no more than its
`gib`: where that is not enough it goes on with half the batch.  Answers are written as they come, and the same command
goes on where it was stopped, by `--seconds` or otherwise.  Start NVIDIA's MPS first (`nvidia-cuda-mps-control -d`), or
processes wait for each other.

Answer one short record there first, and look: on a machine that is lent by the hour a mistake may cost all of it.  So
far this has run on a CPU alone; of `eval run` on a GPU, with the selectors that learn, it is known that it takes (bf16,
weights included) 17 GiB with Qwen2.5-Coder-0.5B at 4,096 tokens and a batch of 50 and 23 GiB at 28,672 and 25; with
1.5B 24 GiB at 4,096 and 50, 16 GiB at 8,192 and 25, 30 GiB at 28,672 and 17.  Four processes keep an H200 busy.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from pagelocks import LocksConfig
from pagelocks.eval import ruler
from pagelocks.selectors import CALIBRATED_SELECTORS, REPEATING_SELECTORS, SELECTORS, SEQUENCE_SELECTORS

NEEDED = ("name", "task", "context", "budgets", "new_tokens", "batch", "gib")
NUMBERS = ("context", "new_tokens", "batch", "records", "gib")
KNOWN = {*SELECTORS, *SEQUENCE_SELECTORS, *CALIBRATED_SELECTORS, *REPEATING_SELECTORS}


def read_runs(path: Path) -> list[dict[str, Any]]:
    """The list; ValueError before anything is loaded, if a run could not be what it says."""
    runs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        where = f"line {number} of {path}"
        if not line.strip():
            continue
        try:
            run = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is no JSON ({error}): give one object a line") from None
        if not isinstance(run, dict):
            raise ValueError(f"{where} is {run!r}: give one object a line")
        if missing := [name for name in NEEDED if name not in run]:
            raise ValueError(f"{where} has no {', '.join(missing)}: a run needs {', '.join(NEEDED)}")
        for name in ("name", "task"):
            if not isinstance(run[name], str) or not run[name] or Path(run[name]).name != run[name]:
                raise ValueError(f"{where} has {name}={run[name]!r}: give a name")
        for name in NUMBERS:
            value = run.get(name, 1)
            if type(value) not in ((int, float) if name == "gib" else (int,)) or not value > 0:  # nor NaN
                raise ValueError(f"{where} has {name}={value!r}: give a number above 0")
        if run["task"] not in ruler.TASKS:
            raise ValueError(f"{where} has task={run['task']!r}: give one of {', '.join(ruler.TASKS)}")
        budgets = run["budgets"]
        lists = budgets.values() if isinstance(budgets, dict) else []
        if not lists or not all(isinstance(each, list) and each for each in lists):
            raise ValueError(f'{where} has budgets={budgets!r}: give an object as {{"locks": [64, 128]}}')
        if unknown := [name for name in budgets if name not in KNOWN]:
            raise ValueError(f"{where} has selector {unknown[0]!r}: give of {', '.join(sorted(KNOWN))}")
        every = [budget for each in lists for budget in each]
        for budget in every:
            try:
                LocksConfig(budget=budget)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
        if (largest := max(every)) >= run["context"]:
            raise ValueError(f"{where} has budget {largest}: give less than context={run['context']}")
        if run["name"] in [other["name"] for other in runs]:
            raise ValueError(f"{where} has name={run['name']!r}, as another: runs would share a file")
        runs.append(run)
    if not runs:
        raise ValueError(f"{path} has no run: give one object a line")
    return runs


def arguments_of(run: dict[str, Any], folder: Path) -> argparse.Namespace:
    """As `pagelocks eval run` has them."""
    return argparse.Namespace(
        task=[run["task"]],
        context=[run["context"]],
        records=run.get("records", 50),
        seed=42,
        batch=run["batch"],
        one_length=True,
        new_tokens=run["new_tokens"],
        link_steps=2,
        link_records=8,
        output=str(folder / f"{run['name']}.jsonl"),
    )


def answer(
    run: dict[str, Any], folder: Path, header: dict[str, Any], model: Any, tokenizer: Any, text: Any
) -> list[dict[str, Any]]:
    """The lines of a run; where memory is too small it goes on from the last line with half the batch."""
    from pagelocks.eval import quality
    from pagelocks.eval.runner import Method

    methods = [Method(name, budget) for name, budgets in run["budgets"].items() for budget in budgets]
    arguments = arguments_of(run, folder)
    settings = {name: getattr(arguments, name) for name in ("seed", "new_tokens", "link_steps", "one_length")}
    while True:
        try:
            return quality.run(arguments, header | settings, model, tokenizer, (), text, methods)
        except RuntimeError as error:  # libraries that PyTorch calls say it in words of their own
            if arguments.batch == 1 or not ("out of memory" in str(error) or "ALLOC_FAILED" in str(error)):
                raise
        arguments.batch = (arguments.batch + 1) // 2
        print(f"{run['name']}: out of memory, on with a batch of {arguments.batch}", flush=True)
        free()


def free() -> None:
    """Give back what a run held; one that failed leaves cycles, which hold its caches."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def work(options: argparse.Namespace, runs: list[dict[str, Any]], plan: Any, lock: Any, stop: float) -> None:
    """One process: take runs until none is left that could begin."""
    import torch

    from pagelocks.eval import calibration
    from pagelocks.eval.loading import load_model, load_tokenizer

    folder, tokenizer = load_tokenizer(options.model)
    model, about = load_model(folder, options.dtype, options.device)
    text = calibration.calibration_text(tokenizer, 42)
    while time.time() < stop:
        with lock:
            waiting = [run for run in runs if run["name"] not in plan["taken"]]
            room = options.memory - sum(plan["held"].values())
            run = next((run for run in waiting if run["gib"] <= room), None)
            if run is not None:
                plan["taken"] = [*plan["taken"], run["name"]]
                plan["held"] = plan["held"] | {os.getpid(): run["gib"]}
        if run is None and not waiting:
            return
        if run is None:
            time.sleep(1)
            continue
        begun = time.time()
        if options.device == "cuda":
            torch.cuda.set_per_process_memory_fraction(min(1, run["gib"] * 2**30 / torch.cuda.mem_get_info()[1]))
        try:
            lines = answer(run, options.folder, about | {"calibration": text.about}, model, tokenizer, text)
            print(f"{run['name']}: {len(lines)} answers, {time.time() - begun:.0f} s", flush=True)
        except Exception:  # the others go on
            print(f"{run['name']} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            with lock:
                plan["failed"] = [*plan["failed"], run["name"]]
        free()
        with lock:
            plan["held"] = {process: gib for process, gib in plan["held"].items() if process != os.getpid()}
            plan["ended"] = [*plan["ended"], run["name"]]


def main() -> int:
    """Start the workers; 1 if a run failed, or a worker did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="the list, JSON lines")
    parser.add_argument("--model", required=True, help="a known name, or a folder")
    parser.add_argument("--folder", type=Path, required=True, help="for the files of answers")
    parser.add_argument("--workers", type=int, default=4, help="processes (%(default)s)")
    parser.add_argument("--memory", type=float, default=130, help="GiB that all runs may take together (%(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many, wherever runs are")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    try:
        runs = read_runs(options.runs)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if large := [run["name"] for run in runs if run["gib"] > options.memory]:
        parser.error(
            f"{', '.join(large)} would take more than --memory {options.memory:g}: give more, or smaller batches"
        )
    options.folder.mkdir(parents=True, exist_ok=True)
    context, stop = multiprocessing.get_context("spawn"), time.time() + options.seconds
    with context.Manager() as manager:
        plan, lock = manager.dict(taken=[], held={}, failed=[], ended=[]), manager.Lock()
        workers = [
            context.Process(target=work, args=(options, runs, plan, lock, stop), daemon=True)
            for _ in range(options.workers)
        ]
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers) and time.time() < stop:
            with lock:  # one that died holds nothing any more
                alive = [worker.pid for worker in workers if worker.is_alive()]
                plan["held"] = {process: gib for process, gib in plan["held"].items() if process in alive}
            time.sleep(1)
        broken = sum(worker.exitcode not in (0, None) for worker in workers)
        left = [run["name"] for run in runs if run["name"] not in plan["taken"]]
        cut = [name for name in plan["taken"] if name not in plan["ended"]]
        if plan["failed"] or broken or left or cut:
            found = f"failed: {plan['failed']}; workers that broke: {broken}; not finished: {cut}; not begun: {left}"
            print(found, file=sys.stderr)
        return int(bool(plan["failed"] or broken))


if __name__ == "__main__":
    raise SystemExit(main())
