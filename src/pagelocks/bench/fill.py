"""A KV cache that is full from the start, for decode timings at contexts whose prefill would take minutes.

It is vLLM's own DecodeBenchConnector with other contents: keys with the within-page spectrum of real ones, and, where
LOCKS runs, a record of every page by the production kernel.  A request whose `kv_transfer_params` say `prefill` is
prefilled for real.  Benchmarks alone may use it: what is generated means nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import DecodeBenchConnector
from vllm.model_executor.layers.attention import Attention

from ..kernels import Caches
from .keys import like_real_keys

CHUNK = 2048
"""Blocks filled at a time."""


class FilledCache(DecodeBenchConnector):
    """The connector, by the name that `--kv-transfer-config` gives."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config, self._role = vllm_config, role

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """All tokens but the last, unless the request wants a real prefill."""
        if (request.kv_transfer_params or {}).get("prefill"):
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Fill them."""
        if self._role == KVConnectorRole.WORKER:
            fill(self._config)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is left to load."""


def fill(vllm_config: Any) -> None:
    """Write keys and values into every block of every attention layer, and build every record."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    attention = [layer for layer in layers if isinstance(layer, Attention) and layer.kv_cache.numel()]
    generator = torch.Generator("cuda").manual_seed(0)
    for layer in attention:
        cache = layer.kv_cache.transpose(1, 2)  # (blocks, tokens, heads, 2 head_dim)
        blocks, tokens, heads, width = cache.shape
        for first in range(0, blocks, CHUNK):
            part = cache[first : first + CHUNK]
            keys = like_real_keys(part.shape[0] * tokens // 16, heads, width // 2, part.dtype, generator)
            part[..., : width // 2] = keys.view(part.shape[0], tokens, heads, width // 2)
            part[..., width // 2 :] = torch.randn(
                part.shape[0], tokens, heads, width // 2, dtype=part.dtype, device="cuda", generator=generator
            )
    active = [layer for layer in attention if getattr(layer.impl, "state", None) is not None]
    if active:
        build_everything(active)


def build_everything(layers: list[Any]) -> None:
    """The record of every page of every block, by the kernel that serves.

    Raises
    ------
    RuntimeError
        If a page is left without one.
    """
    impl = layers[0].impl
    keys = [layer.kv_cache.transpose(1, 2)[..., : impl.head_size] for layer in layers]
    caches = Caches(keys, [layer.impl.summaries.records_by_page() for layer in layers])
    pages = torch.arange(keys[0].shape[0] * keys[0].shape[1] // 16, dtype=torch.int32, device="cuda")
    count = torch.tensor([len(pages)], dtype=torch.int32, device="cuda")
    impl.pipeline.build_pages(int(torch.cuda.current_stream().cuda_stream), caches, pages, count, len(pages))
    missing = [bool((records[..., :2] == 0).all(-1).any()) for records in caches.records]
    if any(missing):
        raise RuntimeError(f"{sum(missing)} layers have pages without a record")
