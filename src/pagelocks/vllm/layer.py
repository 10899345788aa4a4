"""What both backends do when an attention layer is made, and when vLLM makes the builder of its metadata."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from vllm.config import VllmConfig, get_current_vllm_config, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType

from ..layout import record_layout
from .options import PAGE_SIZE
from .state import LocksState, state_of
from .summary_cache import SummaryCache
from .support import Unsupported, refuse_layer, refuse_sharing

logger = init_logger("vllm.plugins.pagelocks")

Impl = TypeVar("Impl")


def attach_summaries(
    head_size: int,
    kv_heads: int,
    alibi_slopes: object,
    sliding_window: int | None,
    kv_cache_dtype: str,
    logits_soft_cap: float | None,
    attn_type: str,
    kv_sharing_target_layer_name: str | None,
    sinks: object,
) -> tuple[LocksState, SummaryCache] | tuple[None, None]:
    """Register the cache of the next layer's summaries with vLLM; called while that layer is made.

    Returns
    -------
    LocksState
        What the engine's layers share; None for a layer that stays stock.
    SummaryCache or None

    Raises
    ------
    Unsupported
        For what a layer may ask of its backend and LOCKS does not do.
    """
    refuse_sharing(kv_sharing_target_layer_name)
    if sliding_window is not None:
        logger.info_once("LOCKS leaves layers with a sliding window to stock attention.")
        return None, None
    refuse_layer(str(AttentionType(attn_type).value), alibi_slopes, logits_soft_cap, sinks, kv_cache_dtype)
    vllm_config = get_current_vllm_config()
    state = state_of(vllm_config)
    record_bytes = record_layout(head_size, state.options.config).record_bytes
    layers = vllm_config.compilation_config.static_forward_context
    number = sum(isinstance(layer, SummaryCache) for layer in layers.values())
    summaries = SummaryCache(f"locks.summaries.{number}", kv_heads, record_bytes, state)
    if summaries.layer_name in layers:
        raise ValueError(f"the model already has a layer named {summaries.layer_name!r}")
    layers[summaries.layer_name] = summaries
    return state, summaries


def active_layers(vllm_config: VllmConfig, names: Iterable[str], kind: type[Impl]) -> dict[str, Any]:
    """Of the named layers those that run LOCKS, by name; they have an impl of this kind with a state.

    Raises
    ------
    Unsupported
        If one of them is not plain attention, or no layer of the model runs LOCKS.
    """

    def active(layer: Any) -> bool:
        return isinstance(layer.impl, kind) and getattr(layer.impl, "state", None) is not None

    layers = get_layers_from_vllm_config(vllm_config, Attention, list(names))
    found = {name: layer for name, layer in layers.items() if active(layer)}
    for name, layer in found.items():
        # A subclass (chunked local attention, say) hands its builder other block tables than the cache's.
        if type(layer) is not Attention:
            remedy = "Serve this model without --attention-backend CUSTOM"
            raise Unsupported(type(layer).__name__, f"layer {name} is not plain attention", remedy)
    if not any(active(layer) for layer in get_layers_from_vllm_config(vllm_config, Attention).values()):
        remedy = "Serve it without --attention-backend CUSTOM"
        raise Unsupported("this model", "no layer of it has full attention", remedy)
    return found


def describe_layers(state: LocksState, layers: dict[str, Any], head_size: int, itemsize: int) -> None:
    """Give each layer's impl its name and its row of the counters, and say in the log what runs."""
    impl = next(iter(layers.values())).impl
    kv_bytes = 2 * PAGE_SIZE * head_size * itemsize
    rows = state.describe(list(layers), kv_bytes, impl.summaries.record_bytes)
    for (name, layer), row in zip(layers.items(), rows, strict=True):
        layer.impl.layer_name, layer.impl.counters = name, row


def check_group(summaries: SummaryCache, layer_name: str, metadata: Any) -> None:
    """Raise `Unsupported` unless the summaries are addressed by the attention layer's own block table."""
    ours, theirs = metadata[summaries.layer_name].block_table, metadata[layer_name].block_table
    if ours.data_ptr() != theirs.data_ptr():
        remedy = "Add --disable-hybrid-kv-cache-manager"
        raise Unsupported("this model's KV-cache groups", "summaries and keys have different block tables", remedy)
