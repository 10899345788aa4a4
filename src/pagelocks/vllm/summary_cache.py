"""The summaries as a KV-cache layer of their own.

vLLM allocates this layer beside each attention layer's K and V, inside its own memory budget and under the same block
ids, so that prefix caching, block reuse and preemption keep a page's summary with the page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from .options import PAGE_SIZE
from .state import LocksState
from .support import Unsupported


@dataclass
class SummaryMetadata:
    """The block table of the KV-cache group that the summaries are in."""

    block_table: Tensor


class SummaryMetadataBuilder(AttentionMetadataBuilder[Any]):
    """Checks at start-up where vLLM put the summaries; has nothing to compute in a step."""

    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # Where page sizes must be unified (full and sliding layers in one model), vLLM pads the summaries to the size
        # of K and V, or gives them larger blocks; either way they lie in a group of their own.
        padded = kv_cache_spec.page_size_padded
        if padded is not None or kv_cache_spec.block_size != vllm_config.cache_config.block_size:
            raise Unsupported(
                "this model's KV-cache groups",
                f"vLLM gave the summaries blocks of {kv_cache_spec.block_size} tokens padded to {padded} bytes, apart "
                f"from the K and V they belong to",
                "Add --disable-hybrid-kv-cache-manager, which puts all layers into one group",
            )

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SummaryMetadata:
        """Only the block table, for the check that it is the attention layer's."""
        return SummaryMetadata(common_attn_metadata.block_table_tensor)


class SummaryBackend(AttentionBackend):
    """A backend that stores and never attends."""

    supported_dtypes = [torch.uint8]  # noqa: RUF012  (the parent declares it)

    @staticmethod
    def get_name() -> str:
        """A name for vLLM's logs."""
        return "LOCKS_SUMMARY"

    @staticmethod
    def get_impl_cls() -> Any:
        """Never called: no model layer attends through this backend."""
        raise NotImplementedError

    @staticmethod
    def get_builder_cls() -> type[SummaryMetadataBuilder]:
        """The builder that checks the placement."""
        return SummaryMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Whole pages."""
        return [MultipleOf(PAGE_SIZE)]


class SummaryCache(nn.Module, AttentionLayerBase):
    """Storage for the records of one attention layer, as vLLM sees it.

    Parameters
    ----------
    name : str
        Unique among the model's layers, and with one number in it: vLLM sorts caches by it.
    kv_heads : int
    record_bytes : int
        A multiple of twice the page size.
    state : LocksState
        What all LOCKS layers of the engine share; it lives as long as they do.
    """

    def __init__(self, name: str, kv_heads: int, record_bytes: int, state: LocksState) -> None:
        super().__init__()
        self.layer_name, self.kv_heads, self.record_bytes, self.state = name, kv_heads, record_bytes, state
        self.kv_cache = torch.tensor([])
        state.caches += 1

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Take the tensor that vLLM allocated."""
        super().bind_kv_cache(kv_cache)
        self.state.allocated(self.layer_name, kv_cache.numel())

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> AttentionSpec:
        """A record's bytes, spread over the page's tokens as if they were a K and a V of uint8."""
        half = self.record_bytes // PAGE_SIZE // 2
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.kv_heads,
            head_size=half,
            head_size_v=half,
            dtype=torch.uint8,
        )

    def get_attn_backend(self) -> type[AttentionBackend]:
        """The storage-only backend."""
        return SummaryBackend

    def records(self) -> Tensor:
        """A view uint8 (blocks, kv heads, pages a block, record_bytes) of a cache with heads outside tokens."""
        blocks, heads = self.kv_cache.shape[:2]
        return self.kv_cache.view(blocks, heads, -1, self.record_bytes)

    def records_by_page(self) -> Tensor:
        """A view uint8 (blocks, pages a block, kv heads, record_bytes) of the cache, whatever its layout.

        vLLM's order within a block means nothing here: its bytes only need to be one piece.

        Raises
        ------
        Unsupported
            If they are not.
        """
        blocks, heads, tokens, width = self.kv_cache.shape
        size = heads * tokens * width
        inner = zip(self.kv_cache.stride()[1:], self.kv_cache.shape[1:], strict=True)
        if 1 + sum((length - 1) * stride for stride, length in inner) != size:
            reason = f"a block's summaries are not one piece of memory (strides {self.kv_cache.stride()})"
            raise Unsupported("this KV-cache layout", reason, "Use the default --kv-cache-layout")
        shape = (blocks, tokens // PAGE_SIZE, heads, self.record_bytes)
        stride = (self.kv_cache.stride(0), heads * self.record_bytes, self.record_bytes, 1)
        return self.kv_cache.as_strided(shape, stride)
