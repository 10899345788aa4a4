"""The engines of `pagelocks.eval.serving`, each in a process of its own: what runs in one, and what it hands back.

`work`, everywhere, is the command line's arguments and what the command adds to them (see `serving.plan_of`).
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..vllm.counters import PAGES_READ, PAGES_SKIPPED, ROWS_DENSE, ROWS_SPARSE, read_all
from ..vllm.options import PAGE_SIZE
from .needle import NEW_TOKENS, Cell
from .records import check_cpu, check_gpu, complete_pages, flush, spoil

MODES: dict[str, dict[str, Any]] = {
    "graphs": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "compiled": {},
    "eager": {"enforce_eager": True},
}
"""How an engine starts: FULL decode graphs without torch.compile (a fast start), vLLM's own default, or neither."""
MODE_OF = {"random": "eager", "invariant": "compiled", "steps": "compiled"}
"""Engine -> its mode, "graphs" for the others."""
SPARE_STEPS = 120
"""Tokens beyond the steps asked for: the warm-up, and the first sequences to start are done before the last."""


def start(work: dict[str, Any], locks: dict[str, Any] | None, **options: Any) -> Any:
    """vLLM in this process, with LOCKS if `locks` is given."""
    from vllm import LLM

    settings: dict[str, Any] = {"seed": 0, "max_num_seqs": max(8, work["prompts"])}
    if work["cuda"]:
        mode = MODE_OF.get(work["engine"], "graphs")
        settings |= MODES[mode if mode == "eager" else work["mode"] or mode]
        # Measuring memory is for engines alone on a card.
        settings["kv_cache_memory_bytes"] = int(work["kv_gib"] * 2**30)
        settings["gpu_memory_utilization"] = 0.85 / (1 if work["engine"] == "steps" else work["jobs"])
    else:
        settings["enforce_eager"] = True
    if locks is not None:
        settings |= {"attention_backend": "CUSTOM", "additional_config": {"locks": locks}}
    return LLM(work["model"], **{**settings, **options})


def counters(llm: Any) -> Any:
    """The engine's counters, int64 (layers, fields); it runs in this process."""
    ours = llm.llm_engine.vllm_config.instance_id
    return next(each.values for each in read_all({os.getpid()}) if each.header["instance"] == ours).copy()


def greedy(llm: Any, work: dict[str, Any]) -> list[dict[str, Any]]:
    """Greedy tokens of the prompts for exactness, with the five best of each step, best first."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=work["tokens"], logprobs=5, ignore_eos=True, detokenize=False)
    prompts: Any = [{"prompt_token_ids": ids} for ids in work["exact_prompts"]]
    results = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        answer = output.outputs[0]
        best = [
            sorted(((token, entry.logprob) for token, entry in step.items()), key=lambda pair: -pair[1])
            for step in answer.logprobs
        ]
        results.append({"ids": list(answer.token_ids), "best": best})
    return results


def needles(llm: Any, work: dict[str, Any], selector: str, budget: int | None) -> list[dict[str, Any]]:
    """A `Cell` for each length, as a dict.

    Raises
    ------
    RuntimeError
        If a sparse run was not sparse in every layer and step.
    """
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, stop=[".", "\n"])
    cells = []
    for length, prompts in work["needle_prompts"].items():
        before, began = counters(llm) if budget else 0, time.monotonic()
        given: Any = [{"prompt_token_ids": ids} for ids, _ in prompts]
        outputs = llm.generate(given, params, use_tqdm=False)
        cell = Cell(int(length), selector, budget, seconds=time.monotonic() - began)
        cell.answers = [output.outputs[0].text for output in outputs]
        cell.right = [answer in text for (_, answer), text in zip(prompts, cell.answers, strict=True)]
        if budget:
            added = counters(llm) - before
            sparse, read, skipped = (added[:, field] for field in (ROWS_SPARSE, PAGES_READ, PAGES_SKIPPED))
            steps = sum(len(output.outputs[0].token_ids) - 1 for output in outputs)  # the first is the prefill's
            if len(added) == 0 or steps == 0 or sparse.min() < steps or skipped.min() == 0:
                found = f"sparse rows {sparse.tolist()}, pages skipped {skipped.tolist()}"
                raise RuntimeError(f"{selector} at {budget} was not sparse in {steps} steps, by layer: {found}")
            cell.pages_read, cell.pages_skipped = int(read.sum()), int(skipped.sum())
        cells.append(asdict(cell))
    return cells


def run_dense(work: dict[str, Any]) -> dict[str, Any]:
    """Stock vLLM: what the others are held against."""
    llm = start(work, None, max_model_len=work["longest"])
    found: dict[str, Any] = {"exact": greedy(llm, work)} if "exact" in work["only"] else {}
    return found | ({"cells": needles(llm, work, "dense", None)} if "needles" in work["only"] else {})


def run_covering(work: dict[str, Any]) -> dict[str, Any]:
    """LOCKS with a budget that covers every sequence: rows attend everything, by our kernel."""
    llm = start(work, {"budget": work["longest"], "dense_below": 0}, max_model_len=work["longest"])
    found, counted = greedy(llm, work), counters(llm)
    rows = counted[:, ROWS_SPARSE] + counted[:, ROWS_DENSE]  # the CPU backend calls a covered row sparse
    if len(counted) == 0 or counted[:, PAGES_SKIPPED].any() or rows.min() < len(found) * (work["tokens"] - 1):
        raise RuntimeError(f"not every row attended everything by LOCKS: {counted.tolist()}")
    return {"exact": found}


def run_locks(work: dict[str, Any]) -> dict[str, Any]:
    """LOCKS at the budget."""
    llm = start(work, {"budget": work["budget"], "dense_below": 0}, max_model_len=work["longest"])
    return {"cells": needles(llm, work, "locks", work["budget"])}


def run_random(work: dict[str, Any]) -> dict[str, Any]:
    """Random pages at the budget; on a GPU by scores that are drawn once score has run."""
    locks = {"budget": work["budget"], "dense_below": 0}
    if work["cuda"]:
        draw_scores()
    else:
        locks["selector"] = "random"
    llm = start(work, locks, max_model_len=work["longest"])
    return {"cells": needles(llm, work, "random", work["budget"])}


def draw_scores() -> None:
    """Have every score kernel of this process, which runs eagerly, followed by random scores in its output."""
    from ..kernels.score import Score

    score: Any = Score.__call__

    def drawn(self: Any, *args: Any, **more: Any) -> None:
        score(self, *args, **more)
        self.log_mass.uniform_()
        self.partial[..., 0] = 0.0
        self.partial[..., 1] = 1.0

    Score.__call__ = drawn  # type: ignore[method-assign]


def run_invariant(work: dict[str, Any]) -> dict[str, Any]:
    """Chunked prompts with shared beginnings, aborts and preemptions; every record looked at now and then."""
    from vllm import SamplingParams

    block = work["block_size"] or (16 if work["cuda"] else 32)
    llm = start(
        work,
        {"budget": 128, "dense_below": 0},
        max_model_len=2048,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        enable_prefix_caching=True,
        block_size=block,
        num_gpu_blocks_override=3200 // block,
    )
    engine, draw, seen = llm.llm_engine, random.Random(7), dict[str, Any]()
    scheduler = engine.engine_core.engine_core.scheduler
    for name in ("steps", "checks", "pages_checked", "waiting", "wrong", "cached_tokens", "aborted"):
        seen[name] = 0
    preempted = dict[str, int]()
    seen["async_scheduling"] = bool(engine.vllm_config.scheduler_config.async_scheduling)
    check = check_gpu if work["cuda"] else check_cpu

    def tokens(count: int) -> list[int]:
        return [draw.randrange(1000, 30000) for _ in range(count)]

    def look(count: bool = True) -> int:
        pages = complete_pages(scheduler, block // PAGE_SIZE)
        wrong, waiting, first = llm.collective_rpc(check, args=(pages,))[0] if pages else (0, 0, [])
        if count:
            for name, more in (("checks", 1), ("pages_checked", len(pages)), ("waiting", waiting), ("wrong", wrong)):
                seen[name] += more
            if wrong:  # layer, physical page, KV head
                where = [(layer, pages[at], head) for layer, at, head in first]
                seen.setdefault("first_wrong", {"step": seen["steps"], "records": wrong, "where": where})
        return int(wrong)

    shared = tokens(700)
    prompts = [shared[: draw.randrange(100, 700)] + tokens(draw.randrange(1, 800)) for _ in range(work["requests"])]
    for twin in range(1, len(prompts), 8):  # scheduled in one step, the second reads blocks that the first fills
        prompts[twin] = prompts[twin - 1]
    sent = list[str]()
    while prompts or engine.has_unfinished_requests():
        # Eight at once, then two every few steps: decode and prefill share steps, and blocks run out.
        for prompt in prompts[: 8 if not sent else 2 if seen["steps"] % 5 == 0 else 0]:
            new = draw.randrange(20, 250)
            params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
            sent.append(str(len(sent)))
            engine.add_request(sent[-1], {"prompt_token_ids": prompt}, params)
            prompts.pop(0)
        for output in engine.step():
            seen["cached_tokens"] += (output.num_cached_tokens or 0) if output.finished else 0
        seen["steps"] += 1
        preempted |= {name: request.num_preemptions for name, request in scheduler.requests.items()}
        if seen["steps"] % 40 == 0:
            unfinished = engine.get_num_unfinished_requests()
            engine.abort_request([draw.choice(sent)])  # one that has ended is passed over
            seen["aborted"] += unfinished - engine.get_num_unfinished_requests()
        if seen["steps"] % 7 == 0:  # not after each: a look waits for the GPU, which a served step does not
            look()
    look()
    page = complete_pages(scheduler, block // PAGE_SIZE)[-1]
    if work["cuda"]:
        llm.collective_rpc(flush)
        look()
    llm.collective_rpc(spoil, args=(page, work["cuda"]))
    seen["preemptions"] = sum(preempted.values())
    seen["a_flipped_bit_is_seen"] = look(count=False) == 1
    return {"invariant": seen}


# Steps


def time_flushes(worker: Any) -> None:
    """In a GPU's worker: from now on, events around the builds at each step's start."""
    import torch

    from ..vllm.gpu import LocksMetadataBuilder

    flush, taken = LocksMetadataBuilder.flush, list[Any]()

    def timed(builder: Any) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        pending = builder._pending
        rows = 0 if pending is None else pending.count
        built = None if pending is None else builder.pipeline.plan_of_step.completed_start[rows].clone()
        begin.record()
        flush(builder)
        end.record()
        taken.append((begin, end, rows, built))

    LocksMetadataBuilder.flush = timed  # type: ignore[method-assign, assignment]
    worker.flushes = taken


def read_flushes(worker: Any) -> list[tuple[float, float, int, int]]:
    """For each step: ms to the next one, ms of its builds, rows of it if it only decoded (else 0), pages built."""
    import torch

    torch.cuda.synchronize()
    taken = worker.flushes
    return [
        (begin.elapsed_time(later), begin.elapsed_time(end), after, 0 if built is None else int(built))
        for (begin, end, _, built), (later, _, after, _) in pairwise(taken)
    ]


def run_steps(work: dict[str, Any]) -> dict[str, Any]:
    """Many sequences decoding at once, in the engine's own process as served.

    Returns
    -------
    dict
        "engine", "gpu": for each step, on that clock, its milliseconds and the pages built in it; "build": the builds'
        own milliseconds, and the pages.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    count, draw = work["sequences"], random.Random(11)
    lengths = [draw.randrange(work["step_prompt"] * 4 // 5, work["step_prompt"] * 6 // 5) for _ in range(count)]
    new = work["steps"] + SPARE_STEPS
    llm = start(
        work,
        {"budget": work["step_budget"], "dense_below": 0},
        max_model_len=max(lengths) + new + 16,
        max_num_seqs=count,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
    )
    if work["cuda"]:
        llm.collective_rpc(time_flushes)
    engine, params = llm.llm_engine, SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    params.output_kind = RequestOutputKind.DELTA  # whole answers would be copied again in each step
    held = {}
    for number, length in enumerate(lengths):
        prompt: Any = {"prompt_token_ids": [draw.randrange(1000, 30000) for _ in range(length)]}
        held[engine.add_request(str(number), prompt, params)] = length - 1
    stamps, completed = list[float](), list[int]()
    client, get_output = engine.engine_core, engine.engine_core.get_output

    def stamped() -> Any:
        outputs = get_output()
        for output in outputs.outputs:  # a row's last token is not in the cache yet
            held[output.request_id] += len(output.new_token_ids)
        if len(outputs.outputs) == count:
            stamps.append(outputs.timestamp)  # the engine's own clock, whenever this process reads it
            # What this step completes, the next one builds; a CPU builds it at once.
            completed.append(sum(held[output.request_id] % PAGE_SIZE == 0 for output in outputs.outputs))
        return outputs

    client.get_output = stamped
    while engine.has_unfinished_requests():
        engine.step()
    if len(stamps) < work["steps"]:
        raise RuntimeError(f"{count} sequences were never at work together for {work['steps']} steps: {len(stamps)}")
    times = [1e3 * (later - earlier) for earlier, later in pairwise(stamps)]
    found: dict[str, Any] = {"lengths": lengths, "engine": list(zip(times, completed, strict=False))}
    if work["cuda"]:
        taken = [each for each in llm.collective_rpc(read_flushes)[0] if each[2] == count]
        found["gpu"] = [(step, built) for step, _, _, built in taken]
        found["build"] = [(build, built) for _, build, _, built in taken]
    return {"steps": found}


ENGINES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "dense": run_dense,
    "covering": run_covering,
    "locks": run_locks,
    "random": run_random,
    "invariant": run_invariant,
    "steps": run_steps,
}


def child(engine: str, plan: str, output: str) -> None:
    """One engine's process: read the plan, run, write what was found."""
    work = json.loads(Path(plan).read_text())
    Path(output).write_text(json.dumps(ENGINES[engine]({**work, "engine": engine})))
