"""Engines in child processes, tiny models made on the spot, and a shadow of the KV cache."""

from __future__ import annotations

import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the child itself, where its layers can be looked at
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",  # two threads that wait for each other crawl on a busy machine
}


class ChildError(AssertionError):
    """What a function run in a child raised; `message` is its type and text."""

    def __init__(self, message: str, trace: str) -> None:
        super().__init__(f"{message}\n{trace}")
        self.message = message


def _serve(pipe: Any, environment: dict[str, str]) -> None:
    """In the child: run what comes, one call after the other."""
    os.environ.update(environment)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            result: Any = (True, function(*args))
        except BaseException as error:
            result = (False, (f"{type(error).__name__}: {error}", traceback.format_exc()))
        gc.collect()  # the engine, with its cache
        pipe.send(result)


class Child:
    """A process with vLLM's environment set, which runs functions."""

    def __init__(self, environment: dict[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, {**ENVIRONMENT, **environment}), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function(*args)` there and return its result; raises ChildError for what it raised."""
        try:
            self._pipe.send((function, args))
            done, result = self._pipe.recv()
        except (EOFError, BrokenPipeError):
            self._process.join()
            raise ChildError(f"the child died with exit status {self._process.exitcode}", "") from None
        if not done:
            raise ChildError(*result)
        return result

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(timeout=10)
        self._process.kill()


_shared: list[Child] = []


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    """Run `function(*args)` in a child that all tests of a module share: importing vLLM takes longer than an engine.

    The function leaves vLLM as it found it.
    """
    if not _shared:
        _shared.append(Child({}))
    try:
        return _shared[0].call(function, *args)
    except ChildError as error:
        if "the child died" in error.message:
            close_shared()
        raise


def close_shared() -> None:
    """End the shared child."""
    while _shared:
        _shared.pop().close()


def in_new_child(function: Callable[..., Any], *args: Any, **environment: str) -> Any:
    """Run `function(*args)` in a child of its own, with more environment variables."""
    child = Child(environment)
    try:
        return child.call(function, *args)
    finally:
        child.close()


def tiny_model(folder: Path, kind: str = "llama", **changes: Any) -> str:
    """Save a model of two or four small layers with random weights, large enough to make attention uneven.

    `kind` is "llama", or "gemma3" for sliding and full layers in turn.
    """
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

    common: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "bfloat16",
    }
    torch.manual_seed(0)
    if kind == "gemma3":
        types = ["sliding_attention", "full_attention"] * 2
        config = Gemma3TextConfig(
            **{**common, "num_hidden_layers": 4, "layer_types": types, "sliding_window": 64, **changes}
        )
        model = Gemma3ForCausalLM(config)
    else:
        model = LlamaForCausalLM(LlamaConfig(**{**common, "num_hidden_layers": 2, **changes}))
    path = folder / kind
    model.to(torch.bfloat16).save_pretrained(path)
    return str(path)


def engine(model: str, locks: dict[str, Any] | None = None, **options: Any) -> Any:
    """An LLM with LOCKS on (`locks` given, perhaps empty) or off."""
    from vllm import LLM

    settings: dict[str, Any] = {"enforce_eager": True, "max_model_len": 4096, "seed": 0}
    if "SmolLM2" not in model:
        settings["skip_tokenizer_init"] = True
    if locks is not None:
        settings |= {"attention_backend": "CUSTOM", "additional_config": {"locks": locks}}
    return LLM(model, **{**settings, **options})


def layers_of(llm: Any) -> dict[str, Any]:
    """The attention layers that run LOCKS, by name."""
    from pagelocks.vllm.cpu import LocksCPUImpl

    context = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    layers = {name: layer for name, layer in context.items() if isinstance(getattr(layer, "impl", None), LocksCPUImpl)}
    return {name: layer for name, layer in layers.items() if layer.impl.state is not None}


def counters_of(llm: Any) -> dict[str, int]:
    """The totals of the engine's counters."""
    from pagelocks.vllm.counters import read_all

    instance = llm.llm_engine.vllm_config.instance_id
    return next(counters for counters in read_all({os.getpid()}) if counters.header["instance"] == instance).totals()


class Shadow:
    """Every layer's K and V as they were handed to the cache, by slot: no knowledge of the cache's own layout.

    Records while it is entered as a context.
    """

    def __init__(self) -> None:
        self.keys: dict[str, Any] = {}
        self.values: dict[str, Any] = {}

    def __enter__(self) -> Shadow:
        from pagelocks.vllm.cpu import LocksCPUImpl

        update = LocksCPUImpl.do_kv_cache_update

        def recording(impl: Any, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
            slots = kv_cache.shape[0] * kv_cache.shape[2]
            for store, new in ((self.keys, key), (self.values, value)):
                if layer.layer_name not in store:
                    store[layer.layer_name] = new.new_full((slots, *new.shape[1:]), float("nan"))
                store[layer.layer_name][slot_mapping] = new[: len(slot_mapping)]
            update(impl, layer, key, value, kv_cache, slot_mapping)

        self._patch = patch.object(LocksCPUImpl, "do_kv_cache_update", recording)
        self._patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.stop()

    def sequence(self, layer: str, blocks: Any, length: int, block_size: int) -> tuple[Any, Any]:
        """K and V, each (kv heads, length, head_dim), of the tokens that these blocks hold."""
        import torch

        slots = (blocks.unsqueeze(-1) * block_size + torch.arange(block_size)).flatten()[:length]
        return self.keys[layer][slots].transpose(0, 1), self.values[layer][slots].transpose(0, 1)
