"""What every layer sees while dense attention decodes the first answer tokens: decode records, one at a time.

    for seen in capture(model, prompts, steps=2, stop={tokenizer.eos_token_id}):
        seen.record  # a DecodeRecord of seen.layer, at seen.step of prompts[seen.prompt]

No more is held than the cache of one prompt: a record's keys and values are the cache's own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import hf
from ..config import LocksConfig, reject
from .decode_record import DecodeRecord
from .prompt import LEAST_BUDGET, Prompt

SHORTEST = LEAST_BUDGET + 1
"""Tokens of the shortest prompt: a step of no more than the least budget is not reported."""


@dataclass(frozen=True, eq=False)
class Captured:
    """One layer at one step of dense decoding.

    Attributes
    ----------
    prompt : number of the prompt, from 0;  task : its task
    layer : number of the layer;  step : of the answer's token, from 1
    record : DecodeRecord
    """

    prompt: int
    task: str
    layer: int
    step: int
    record: DecodeRecord


def capture(
    model: Any, prompts: Sequence[Prompt], steps: int, stop: Collection[int] = (), chunk: int = 2048
) -> Iterator[Captured]:
    """Prefill each prompt, let dense attention decode, and yield every layer of every step.

    Parameters
    ----------
    model : a causal Transformers model; its attention becomes "locks", and "sdpa" when the last record was taken
    prompts : of 49 tokens or more
    steps : answer tokens a prompt whose queries are recorded; fewer where the answer ends
    stop : token ids that end an answer
    chunk : tokens of a prefill's part

    Yields
    ------
    Captured
        Prompt by prompt, step by step, layer by layer.  Layers with a sliding window are not among them.
    """
    if steps < 1:
        raise reject("steps", steps, "1 or more", "Use 2.")
    for number, prompt in enumerate(prompts):
        if len(prompt.token_ids) < SHORTEST:
            raise reject(f"prompts[{number}]", f"{len(prompt.token_ids)} tokens", f"{SHORTEST} or more", "Use longer.")
    try:
        for number, prompt in enumerate(prompts):
            for step, layers in enumerate(_steps(model, prompt, steps, set(stop), chunk), 1):
                while layers:
                    seen = layers.pop(0)
                    record = DecodeRecord(
                        seen.query[0], seen.keys[0], seen.values[0], seen.scale, seen.keys.shape[-2], prompt.carriers
                    )
                    yield Captured(number, prompt.record.task, seen.layer, step, record)
    finally:
        hf.detach(model)


def _steps(model: Any, prompt: Prompt, steps: int, stop: set[int], chunk: int) -> Iterator[list[hf.SparseStep]]:
    """The layers of each step.  Modes and hooks are set around a forward pass alone: others run between two steps."""
    from transformers import DynamicCache

    # Streaming costs the least, and what it chooses is not looked at: every step attends everything.
    config = LocksConfig(budget=LEAST_BUDGET, dense_below=0)
    session = hf.attach(model, config, "streaming", attend_all=True, only_grows=True)
    with torch.inference_mode():
        ids, cache = torch.tensor([prompt.token_ids], device=model.device), DynamicCache(config=model.config)
        for part in torch.split(ids, chunk, 1):
            logits = model(part, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    layers: list[hf.SparseStep] = []
    session.on_step = layers.append  # not before: a prompt's last part may be a single token
    for _ in range(steps):
        token = logits[:, -1].argmax(-1)
        if int(token) in stop:
            return
        with torch.inference_mode():
            logits = model(token[:, None], past_key_values=cache, use_cache=True).logits
        yield layers


def captured_keys(model: Any, prompts: Sequence[Prompt], chunk: int = 2048) -> dict[int, list[Tensor]]:
    """Layer -> the keys (kv_heads, tokens, head_dim) of each prompt, to calibrate a basis with: all are held."""
    keys: dict[int, list[Tensor]] = {}
    for seen in capture(model, prompts, 1, chunk=chunk):
        keys.setdefault(seen.layer, []).append(seen.record.keys)
    return keys
