"""Time per output token and time to first token in vLLM: LOCKS beside dense attention, in one run on one card.

Each side is an engine in a process of its own, as served.  Decode timings start from a cache that is full already (see
`fill`); times to first token are real prefills.  A run in which a sequence waited for memory is refused.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..vllm.support import BENCH_FILL

SHAPES: dict[str, dict[str, Any]] = {
    "glm-4-9b-1m": {
        "architectures": ["GlmForCausalLM"],
        "model_type": "glm",
        "attention_bias": True,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "max_position_embeddings": 1048576,
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1.5625e-07,
        "rope_theta": 100000000.0,
        "partial_rotary_factor": 0.5,
        "vocab_size": 151552,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "vocab_size": 128256,
    },
    "qwen3-4b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "max_position_embeddings": 262144,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_theta": 5000000.0,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
}
"""Configurations of known models, from their public config.json; dummy weights are drawn for them."""


@dataclass(frozen=True)
class Case:
    """A batch to decode: the context of each of its sequences, and LOCKS' `dense_below` for it."""

    contexts: tuple[int, ...]
    dense_below: int = 0

    @classmethod
    def parse(cls, text: str) -> Case:
        """From "131072", "24x32768" (a batch) or "1024+4096+131072" (a mix); "@16384" after it sets `dense_below`."""
        batch, at, below = text.partition("@")
        contexts: list[int] = []
        for part in batch.split("+"):
            count, times, context = part.rpartition("x")
            numbers = [context, count if times else "1", below if at else "0"]
            if not all(number.isdigit() for number in numbers) or int(context) < 32:
                raise ValueError(
                    f"case={text!r} is not allowed: a context of 32 tokens or more, COUNTxCONTEXT, or several joined "
                    'by +, then perhaps @ and a number of tokens. Write, say, "131072", "24x32768" or "1024@16384".'
                )
            contexts += [int(context)] * int(count or 1)
        return cls(tuple(contexts), int(below or 0))

    @property
    def batch(self) -> str:
        """The shortest way to write the contexts."""
        kinds = sorted(set(self.contexts))
        return "+".join(f"{n}x{c}" if (n := self.contexts.count(c)) > 1 else str(c) for c in kinds)

    @property
    def name(self) -> str:
        """The shortest way to write it all."""
        return self.batch + (f"@{self.dense_below}" if self.dense_below else "")


def set_dense_below(worker: Any, tokens: int) -> None:
    """In an engine's worker: attend everything in requests of this many tokens or fewer."""
    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        state = getattr(layer, "state", None)
        if state is not None:
            state.options = replace(state.options, config=replace(state.options.config, dense_below=tokens))
            return


def chosen_pages(worker: Any, rows: int) -> list[list[int]]:
    """In an engine's worker, after a step of this many rows: for each row and KV head the distinct pages that the last
    layer's scores choose; empty for a row that attends everything."""
    import torch

    from ..vllm.gpu import builder_in

    pipeline = builder_in(worker).pipeline
    plan, table = pipeline.plan_of_step, worker.model_runner.block_tables.input_block_tables[0]
    starts = plan.score_start.tolist()[: rows + 1]  # what lies behind is of earlier steps
    if starts[rows] == 0:
        return [[] for _ in range(rows)]
    stream = int(torch.cuda.current_stream().cuda_stream)
    pipeline.select(stream, table, plan.score_start, plan.lengths, rows)
    pages = pipeline.select.pages[:rows].cpu()
    return [
        [len(set(head)) for head in row] if starts[n + 1] > starts[n] else [] for n, row in enumerate(pages.tolist())
    ]


@dataclass(frozen=True)
class Measurement:
    """What a side measures.

    Attributes
    ----------
    model : str
        A folder with a config.json; weights are drawn at random.
    cases : decode timings;  prefills : contexts whose time to first token is taken
    steps, repeats : int
        Timed tokens of a decode, those after the first, and decodes of each case.
    locks : options of LOCKS, or None for dense
    utilization : float
        Of the card's memory.
    """

    model: str
    cases: tuple[Case, ...]
    prefills: tuple[int, ...]
    steps: int = 64
    repeats: int = 5
    locks: dict[str, Any] | None = None
    utilization: float = 0.95


def run_side(plan: Measurement) -> Iterator[dict[str, Any]]:
    """Start an engine and measure; yields results as they come.  Runs in a process of its own."""
    from vllm import LLM, SamplingParams

    longest = max([max(case.contexts) for case in plan.cases] + list(plan.prefills))
    sequences = max([len(case.contexts) for case in plan.cases] + [1])
    options: dict[str, Any] = {}
    if plan.locks is not None:
        options = {"attention_backend": "CUSTOM", "additional_config": {"locks": plan.locks}}
    fill = {"kv_connector": "FilledCache", "kv_connector_module_path": BENCH_FILL, "kv_role": "kv_both"}
    fill["kv_connector_extra_config"] = {"startup_fill": True}  # type: ignore[assignment]
    llm = LLM(
        plan.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=longest + plan.steps + 64,
        enable_prefix_caching=False,
        gpu_memory_utilization=plan.utilization,
        max_num_seqs=sequences,
        max_num_batched_tokens=16384,
        disable_log_stats=False,
        kv_transfer_config=fill,
        **options,
    )

    def generate(contexts: Sequence[int], tokens: int, prefill: bool, seed: int) -> list[Any]:
        prompts: Any = [
            {"prompt_token_ids": [(7 * i + 13 * j + 31 * seed) % 50000 + 5 for i in range(context)]}
            for j, context in enumerate(contexts)
        ]
        extra = {"kv_transfer_params": {"prefill": True}} if prefill else None
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=extra)
        outputs: list[Any] = llm.generate(prompts, params, use_tqdm=False)
        waits = [o.metrics.scheduled_ts - min(other.metrics.scheduled_ts for other in outputs) for o in outputs]
        if not prefill and max(waits) > 1.0:
            raise RuntimeError(f"a sequence waited {max(waits):.1f} s for memory: {contexts} do not fit together")
        return outputs

    done: set[str] = set()
    for number, case in enumerate(plan.cases):
        if plan.locks is not None:
            llm.collective_rpc(set_dense_below, args=(case.dense_below,))
        elif case.batch in done:
            continue
        done.add(case.batch)
        generate(case.contexts, 8, False, number)
        times = []
        for repeat in range(plan.repeats):
            metrics = [o.metrics for o in generate(case.contexts, plan.steps + 1, False, number + repeat)]
            # From the moment all have a token, to the last token of all: nobody waits, everybody decodes.
            begin, end = max(m.first_token_ts for m in metrics), max(m.last_token_ts for m in metrics)
            times.append((end - begin) / plan.steps * 1e3)
        line: dict[str, Any] = {"case": case.name if plan.locks is not None else case.batch, "tpot_ms": times}
        if plan.locks is not None:
            line["distinct_pages"] = llm.collective_rpc(chosen_pages, args=(len(case.contexts),))[0]
        yield line
    for context in plan.prefills:
        generate([context], 1, True, 99)
        times = []
        for repeat in range(plan.repeats if context <= 65536 else 2):
            metrics = generate([context], 1, True, repeat)[0].metrics
            times.append(metrics.first_token_ts - metrics.scheduled_ts)
        yield {"prefill": context, "ttft_s": times}


def run_in_child(plan: Measurement) -> list[dict[str, Any]]:
    """`run_side` in a process of its own, so that nothing of one side is left when the other starts."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.jsonl"
        source = json.dumps({**asdict(plan), "cases": [case.name for case in plan.cases]})
        command = [sys.executable, "-m", "pagelocks.bench.decode", source, str(path)]
        # Functions of ours run in the engine's worker; without this vLLM sends it names of its own methods alone.
        environment = {**os.environ, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
        code = subprocess.run(command, check=False, env=environment, stdout=sys.stderr).returncode
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        if code:
            lines.append({"error": f"the engine ended with status {code}"})
        return lines


def write_model(folder: Path, shape: str) -> str:
    """A folder with the configuration of a known shape, for dummy weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**SHAPES[shape], "torch_dtype": "bfloat16", "use_cache": True}))
    return str(folder)


def joined(dense: list[dict[str, Any]], locks: list[dict[str, Any]], about: dict[str, Any]) -> list[dict[str, Any]]:
    """One object a case, from both sides' results."""

    def by(lines: list[dict[str, Any]], key: str) -> dict[Any, dict[str, Any]]:
        return {line[key]: line for line in lines if key in line}

    first = [
        {line["prefill"]: statistics.median(line["ttft_s"]) for line in s if "prefill" in line} for s in (dense, locks)
    ]
    results = []
    theirs = by(dense, "case")
    for name, line in by(locks, "case").items():
        case = Case.parse(name)
        if case.batch not in theirs:
            continue
        other = theirs[case.batch]
        context, batch = max(case.contexts), len(case.contexts)
        ms = {side: [round(x, 4) for x in each["tpot_ms"]] for side, each in (("dense", other), ("locks", line))}
        medians = {side: statistics.median(each) for side, each in ms.items()}
        results.append(
            {
                "case": case.batch,
                "context": context,
                "batch": batch,
                "dense_below": case.dense_below,
                "dense_ms": medians["dense"],
                "locks_ms": medians["locks"],
                "speedup": round(medians["dense"] / medians["locks"], 4),
                "dense_ms_all": ms["dense"],
                "locks_ms_all": ms["locks"],
                "distinct_pages": line.get("distinct_pages"),
                "dense_ttft_s": first[0].get(context) if batch == 1 else None,
                "locks_ttft_s": first[1].get(context) if batch == 1 else None,
                **about,
            }
        )
    return results


def main() -> None:
    """One side: the plan as JSON, the file for its results."""
    given = json.loads(sys.argv[1])
    given |= {"cases": tuple(Case.parse(name) for name in given["cases"]), "prefills": tuple(given["prefills"])}
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        for line in run_side(Measurement(**given)):
            file.write(json.dumps(line) + "\n")
            file.flush()
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
