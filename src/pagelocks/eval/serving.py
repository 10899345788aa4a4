"""Real tokens under vLLM on a GPU: the same answers as dense, needles, the records' invariant, steady steps.

    python -m pagelocks.eval.serving --model SmolLM2-135M-Instruct --jobs 5 --output serving.json

Every engine runs in a process of its own, so nothing of one is left when the next starts; with `--jobs` several share
the card, but for the steps, which are timed alone.  Without a GPU the same checks run on vLLM's CPU backend, slowly:
that is for trying out this file.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..bench.cli import about
from ..config import reject
from ..models import ModelError, resolve
from ..prompts import HAYSTACKS, needle_prompt
from ..vllm.options import PAGE_SIZE, Options
from .engines import MODES
from .needle import NEW_TOKENS, Cell, show

PARTS = {
    "exact": ("dense", "covering"),
    "needles": ("dense", "locks", "random"),
    "invariant": ("invariant",),
    "steps": ("steps",),
}
"""Part -> the engines that it needs."""
NEEDLE_LENGTHS = (4096, 6144, 8192, 16384, 28672)
SHORTEST, LONGEST = 30, 2000
"""Tokens of the prompts for exactness."""
NOISE = 0.25
"""A bf16 logit of 16 to 32 is a multiple of 0.125: two such steps, as in the CPU's tests."""
WARM_UP = 50
SLOW = 1.5
"""A step slower than this many medians is listed."""


def first_difference(
    expected: Sequence[int], best: Sequence[Sequence[tuple[int, float]]], found: Sequence[int]
) -> dict[str, Any] | None:
    """Where `found` leaves `expected`, and whether noise explains it; None if it does not.

    Parameters
    ----------
    expected, found : sequence of int
        Greedy tokens of dense attention, and of LOCKS.
    best : for each expected token, dense's best tokens and their log-probabilities, best first

    Returns
    -------
    dict or None
        `at`; `gap`, of dense's two best; `behind`, how far LOCKS' token lies behind dense's best (None if it is not
        listed); `explained`, whether that is within `NOISE` (and then so is the gap).
    """
    at = next((n for n, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b), None)
    if at is None:
        return None
    listed, top = dict(best[at]), best[at][0][1]
    behind = top - listed[found[at]] if found[at] in listed else None
    explained = behind is not None and behind <= NOISE + 1e-4  # log-probabilities are rounded differences
    return {"at": at, "gap": top - best[at][1][1], "behind": behind, "explained": explained}


def step_statistics(taken: Sequence[tuple[float, int]], warm_up: int = WARM_UP) -> dict[str, Any]:
    """Median, 99th percentile, maximum and the slow ones of steps, the first `warm_up` left out.

    Parameters
    ----------
    taken : for each step, its milliseconds, and the pages that it built, over all rows

    Raises
    ------
    ValueError
        If no step is left.
    """
    steps = list(enumerate(taken))[warm_up:]
    if not steps:
        raise reject("steps", len(taken), f"more than the {warm_up} of the warm-up", "Generate more tokens.")
    times = sorted(time for _, (time, _) in steps)
    median = statistics.median(times)
    slow = [{"step": n, "ms": round(t, 4), "built": pages} for n, (t, pages) in steps if t > SLOW * median]
    by_built: dict[int, list[float]] = {}
    for _, (t, pages) in steps:
        by_built.setdefault(pages, []).append(t)
    return {
        "steps": len(times),
        "median_ms": median,
        "p99_ms": times[min(len(times) - 1, int(0.99 * len(times)))],
        "max_ms": times[-1],
        "slow": len(slow),
        "slow_with_pages": sum(1 for each in slow if each["built"]),
        "slow_steps": slow[:50],
        "median_ms_by_pages_built": {n: round(statistics.median(t), 4) for n, t in sorted(by_built.items())},
    }


def exact_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Prose of `SHORTEST` to `LONGEST` tokens, as token ids; prompt n is drawn from seed n."""
    made = []
    for seed in range(count):
        length = round(SHORTEST * (LONGEST / SHORTEST) ** (seed / max(1, count - 1)))
        sentences = HAYSTACKS["prose"](LONGEST // 4, random.Random(seed))
        made.append(list(tokenizer.encode(" ".join(sentences)))[:length])
    return made


def run_engine(engine: str, plan: Path, timeout: int) -> dict[str, Any]:
    """`child` in a process of its own; what it wrote, or `error`, and the `seconds` that it took."""
    output, log, began = plan.with_name(f"{engine}.json"), plan.with_name(f"{engine}.log"), time.monotonic()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    # The steps run as served.  The others have the engine in their own process, where it can be looked at.
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(engine == "steps"))
    environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions of ours run in the engine's worker
    source = "import sys; from pagelocks.eval.engines import child; child(*sys.argv[1:])"
    command = [sys.executable, "-c", source, engine, str(plan), str(output)]
    with open(log, "wb") as stream:
        process = subprocess.Popen(
            command, env=environment, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = f"status {process.wait(timeout)}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and what it started
            status = f"no answer in {timeout} s"
    seconds = round(time.monotonic() - began, 1)
    print(f"{engine}: {seconds} s", file=sys.stderr, flush=True)
    if output.exists():
        return {**json.loads(output.read_text()), "seconds": seconds}
    print("\n".join(log.read_text(errors="replace").splitlines()[-60:]), file=sys.stderr, flush=True)
    return {"error": f"the engine {engine} ended with {status}", "seconds": seconds}


def judge(results: dict[str, dict[str, Any]], warm_up: int = WARM_UP) -> dict[str, Any]:
    """The report's parts from the engines' results, and `failures`, in words."""
    failures = [each["error"] for each in results.values() if "error" in each]
    report: dict[str, Any] = {"seconds": {name: each["seconds"] for name, each in results.items()}}
    dense, covering = (results.get(name, {}).get("exact") for name in PARTS["exact"])
    if dense and covering:
        differences = [
            first_difference(expected["ids"], expected["best"], found["ids"])
            for expected, found in zip(dense, covering, strict=True)
        ]
        report["exact"] = {"prompts": len(dense), "tokens": len(dense[0]["ids"]), "differences": differences}
        unexplained = [n for n, each in enumerate(differences) if each and not each["explained"]]
        if unexplained:
            failures.append(f"exact: prompts {unexplained} differ by more than noise")
    cells = [cell for name in PARTS["needles"] for cell in results.get(name, {}).get("cells", ())]
    report["cells"] = sorted(cells, key=lambda cell: cell["context"])  # dense first in each context
    if seen := results.get("invariant", {}).get("invariant"):
        report["invariant"] = seen
        if seen["wrong"] or not seen["pages_checked"] or not seen["a_flipped_bit_is_seen"]:
            failures.append(f"invariant: {seen['wrong']} records are wrong")
    if steps := results.get("steps", {}).get("steps"):
        report["steps"] = {"prompt_tokens": steps.pop("lengths")}
        report["steps"] |= {clock: step_statistics(taken, warm_up) for clock, taken in steps.items()}
        if "gpu" in steps:
            sums = [sum(ms for ms, _ in steps[name][warm_up:]) for name in ("build", "gpu")]
            report["steps"]["build_share"] = sums[0] / sums[1]
    return {**report, "failures": failures}


def show_report(report: dict[str, Any], console: Console) -> None:
    """The tables."""
    if exact := report.get("exact"):
        found = [(n, each) for n, each in enumerate(exact["differences"]) if each]
        same = exact["prompts"] - len(found)
        table = Table("prompt", "token", "gap of dense's two best", "LOCKS' token behind", "noise")
        for number, each in found:
            behind = "not listed" if each["behind"] is None else f"{each['behind']:.3f}"
            said = "yes" if each["explained"] else "NO"
            table.add_row(str(number), str(each["at"]), f"{each['gap']:.3f}", behind, said)
        console.print(f"Exact: {same} of {exact['prompts']} prompts gave dense's {exact['tokens']} tokens")
        if found:
            console.print(table)
    if report["cells"]:
        show([Cell(**cell) for cell in report["cells"]], console)
    if seen := report.get("invariant"):
        console.print("Records: " + ", ".join(f"{name} {value}" for name, value in seen.items()))
    if steps := report.get("steps"):
        table = Table("clock", "steps", "median ms", "p99", "max", f"slower than {SLOW} medians", "of them with pages")
        for clock in ("engine", "gpu"):
            if clock in steps:
                each = steps[clock]
                times = (f"{each[name]:.3f}" for name in ("median_ms", "p99_ms", "max_ms"))
                table.add_row(clock, str(each["steps"]), *times, str(each["slow"]), str(each["slow_with_pages"]))
        console.print(table)
        if "build" in steps:
            build = steps["build"]
            console.print(
                f"Builds take {steps['build_share']:.2%} of a step: median {build['median_ms'] * 1e3:.1f} us, "
                f"p99 {build['p99_ms'] * 1e3:.1f}, max {build['max_ms'] * 1e3:.1f}"
            )
    console.print("Seconds: " + ", ".join(f"{name} {seconds}" for name, seconds in report["seconds"].items()))
    for failure in report["failures"]:
        console.print(f"FAILED: {failure}", markup=False)


_tokenizer: Any = None


def _needle(job: tuple[int, int, str]) -> tuple[list[int], str]:
    prompt = needle_prompt(_tokenizer, *job)
    return list(prompt.token_ids), prompt.answer


def add_prompts(work: dict[str, Any]) -> None:
    """Prompts for exactness and the needles, once for all engines, on every core that is ours."""
    global _tokenizer
    from transformers import AutoTokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer = AutoTokenizer.from_pretrained(work["model"], model_max_length=10**9)
    seeds = range(work["prompts"])
    work["exact_prompts"] = exact_prompts(_tokenizer, work["prompts"])
    lengths = work["needle_lengths"] if "needles" in work["only"] else []
    jobs = [(length, seed, work["haystack"]) for length in lengths for seed in seeds]
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        made = iter(pool.map(_needle, jobs, chunksize=1))
    work["needle_prompts"] = {str(length): [next(made) for _ in seeds] for length in lengths}


def plan_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments, checked, with what follows from them.

    Raises
    ------
    ValueError, OSError, ModelError
        For a bad value, or a model that cannot be had or read.
    """
    at_least = {"prompts": 1, "tokens": 2, "sequences": 2, "steps": 2, "step_prompt": 16, "requests": 8, "jobs": 1}
    for name, least in at_least.items():
        if getattr(arguments, name) < least:
            raise reject(name, getattr(arguments, name), f"{least} or more", f"Use {least} or more.")
    if arguments.steps <= arguments.warm_up:
        raise reject("steps", arguments.steps, f"more than the warm-up's {arguments.warm_up}", "Ask for more.")
    for name in ("budget", "step_budget"):
        Options.parse({"budget": getattr(arguments, name)})
    if arguments.output and not os.access(arguments.output.resolve().parent, os.W_OK):
        raise reject("output", str(arguments.output), "in a folder that exists and is yours", "Name another.")
    model = resolve(arguments.model, lambda line: print(line, file=sys.stderr))
    context = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    most = context - NEW_TOKENS
    lengths = arguments.needle_lengths or [n for n in NEEDLE_LENGTHS if arguments.budget < n <= most]
    if bad := [n for n in lengths if not arguments.budget < n <= most]:
        allowed = f"above the budget of {arguments.budget} and at most {most} for this model"
        raise reject("needle_lengths", bad, allowed, "Take other lengths, or another model.")
    needs = [LONGEST + arguments.tokens] + [n + NEW_TOKENS for n in (lengths if "needles" in arguments.only else [])]
    longest = -(-max(needs) // PAGE_SIZE) * PAGE_SIZE
    if longest > context:
        raise reject("tokens", arguments.tokens, f"at most {context - LONGEST} for this model", "Ask for fewer.")
    import torch

    found = {"model": str(model), "needle_lengths": lengths, "longest": longest, "cuda": torch.cuda.is_available()}
    return {**vars(arguments), **found, "output": None}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; see `--help`.  0 if nothing failed."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser("python -m pagelocks.eval.serving", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="SmolLM2-135M-Instruct", help="a name that pagelocks fetches, or a folder")
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=list(PARTS), help="parts to run (all)")
    parser.add_argument("--prompts", type=int, default=20, help="prompts for exactness, and needles of each length")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of a prompt for exactness (96)")
    parser.add_argument("--needle-lengths", type=int, nargs="+", help="prompt tokens (those that the model holds)")
    parser.add_argument("--budget", type=int, default=1024, help="tokens that a KV head attends, for needles (1024)")
    parser.add_argument("--haystack", default="noise", choices=list(HAYSTACKS))
    parser.add_argument("--requests", type=int, default=32, help="requests of the invariant's stress (32)")
    parser.add_argument("--block-size", type=int, help="tokens of a block for the invariant (16, on a CPU 32)")
    parser.add_argument("--sequences", type=int, default=64, help="sequences that take steps together (64)")
    parser.add_argument("--steps", type=int, default=2000, help="steps that they take (2000)")
    parser.add_argument("--step-prompt", type=int, default=500, help="tokens of their prompts, about (500)")
    parser.add_argument("--step-budget", type=int, default=512, help="budget for the steps (512)")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help=f"steps left out ({WARM_UP})")
    parser.add_argument("--mode", choices=list(MODES), help="how engines start (engines.MODE_OF; random: eager)")
    parser.add_argument("--jobs", type=int, default=1, help="engines at once on the card, but for the steps (1)")
    parser.add_argument("--kv-gib", type=float, default=12, help="memory for each engine's KV cache on a GPU (12)")
    parser.add_argument("--timeout", type=int, default=240, help="seconds after which an engine is given up (240)")
    parser.add_argument("--commit", help="the commit, for the report, instead of what git says")
    parser.add_argument("--output", type=Path, help="a JSON file")
    arguments = parser.parse_args(argv)
    try:
        work = plan_of(arguments)
    except (OSError, ValueError, ModelError) as error:
        parser.error(str(error))
    add_prompts(work)
    engines = list(dict.fromkeys(engine for part in PARTS if part in arguments.only for engine in PARTS[part]))
    together = [engine for engine in engines if engine != "steps"]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as threads:
        plan = Path(folder) / "plan.json"
        plan.write_text(json.dumps(work))

        def run(engine: str) -> dict[str, Any]:
            return run_engine(engine, plan, arguments.timeout)

        results = dict(zip(together, threads.map(run, together), strict=True))
        results |= {engine: run(engine) for engine in engines if engine not in together}
    report = judge(results, arguments.warm_up)
    facts = about() if work["cuda"] else {"card": None}
    facts["commit"] = arguments.commit or facts.get("commit")
    given = {name: value for name, value in work.items() if not name.endswith("_prompts")}
    given |= {"model": Path(work["model"]).name, "seeds": list(range(arguments.prompts)), "noise": NOISE}
    report = {**facts, "arguments": given, **report}
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    show_report(report, Console())
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
