"""The GPU backend: stock prefill, LOCKS decode by the kernels of `pagelocks.kernels`, inside vLLM's CUDA graphs.

A step of decode rows alone is one FULL graph: score, select and attend of each layer read the step's plan from device
memory, so nothing in it depends on what the host knows.  The pages that such a step completes get their records at the
start of the next one, in all layers by one launch; until then the records read as missing, which no row of the step but
one that shares the page can notice, and that one reads the page exactly.  So do those of a step without decode rows,
where nothing looks at a record.  A step that has both runs layer by layer: build first, decode rows by LOCKS, the
others by stock attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from ..kernels import Caches, KernelShape, Pipeline, Rows
from .counters import FIELDS, PAGES_READ, PAGES_SKIPPED, RECORDS_READ, ROWS_DENSE, ROWS_SPARSE, STEPS, SUMMARIES_BUILT
from .layer import active_layers, attach_summaries, check_group, describe_layers
from .options import PAGE_SIZE
from .state import LocksState
from .summary_cache import SummaryCache
from .support import Unsupported, refuse_gpu

logger = init_logger("vllm.plugins.pagelocks")


@dataclass
class Step:
    """What a step asks of every LOCKS layer; the numbers are in the pipeline's plan, on the device.

    Attributes
    ----------
    rows : Rows
    caches : Caches
    build_now : bool
        Whether each layer builds the pages that the step completes before it decodes.
    prefill : FlashAttentionMetadata or None
        Stock metadata of the rows after the decode rows; None if there are none.
    """

    rows: Rows
    caches: Caches
    build_now: bool
    prefill: FlashAttentionMetadata | None


@dataclass
class LocksMetadata(FlashAttentionMetadata):
    """Stock metadata of the whole step, complete only if some layer of the group is stock, and LOCKS' plan."""

    step: Step | None = None


class LocksMetadataBuilder(FlashAttentionMetadataBuilder):
    """Plans a step on the device, and builds what the step before it completed."""

    # FULL graphs for decode, piecewise ones for steps with prefill.
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    supports_update_block_table = False  # a plan is of one block table

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._layers = active_layers(vllm_config, layer_names, LocksImpl)
        self._some_stock = len(self._layers) < len(layer_names)
        self.state: LocksState | None = None
        if not self._layers:
            return
        impl: LocksImpl = next(iter(self._layers.values())).impl
        state = impl.state
        assert state is not None
        self.state = state
        if kv_cache_spec.dtype != self.model_config.dtype:
            found = f"a KV cache in {kv_cache_spec.dtype} under a model in {self.model_config.dtype}"
            raise Unsupported(found, "the kernels take one type for queries and keys", "Remove --kv-cache-dtype")
        for index, layer in enumerate(self._layers.values()):
            layer.impl.index = index
        describe_layers(state, self._layers, self.headdim, kv_cache_spec.dtype.itemsize)
        group = impl.num_heads // impl.num_kv_heads
        shape = KernelShape(
            self.headdim, self.num_heads_kv, group, self.block_size, kv_cache_spec.dtype, state.options.config
        )
        self.pipeline = pipeline_of(state, shape, vllm_config)
        for layer in self._layers.values():
            layer.impl.pipeline = self.pipeline
        self._caches: Caches | None = None
        self._bound = 0
        self._pending: Rows | None = None

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashAttentionMetadata:
        """The plan, and stock metadata for the rows that need it."""
        if self.state is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        common = common_attn_metadata
        count, decode = common.num_reqs, decode_rows(common)
        most = common.num_actual_tokens // PAGE_SIZE + count
        table = common.block_table_tensor
        rows = Rows(common.seq_lens, common.query_start_loc, table, count, decode, most)
        self.flush()
        caches = self.caches()
        only_decode, build_now = decode == count, 0 < decode < count
        dense_below = self.state.options.config.dense_below
        self.pipeline.plan(_stream(), rows, dense_below, caches if only_decode else None)
        if not build_now:
            self._pending = rows
        prefill = None
        if not only_decode:
            prefill = super().build(common_prefix_len, rows_from(common, decode), fast_build)
        if self._some_stock:
            whole = super().build(common_prefix_len, common, fast_build)
        else:
            whole = FlashAttentionMetadata(
                num_actual_tokens=common.num_actual_tokens,
                max_query_len=common.max_query_len,
                query_start_loc=common.query_start_loc,
                max_seq_len=common.max_seq_len,
                seq_lens=common.seq_lens,
                block_table=table,
                slot_mapping=common.slot_mapping,
            )
        self._count(common, decode)
        self.state.log_progress()
        return LocksMetadata(**vars(whole), step=Step(rows, caches, build_now, prefill))

    def flush(self) -> None:
        """Build, in all layers, the pages that the last step completed, if that is still to be done."""
        caches = self.caches()
        if self._pending is not None:
            self.pipeline.build(_stream(), self._pending, caches)
            self._pending = None

    def caches(self) -> Caches:
        """Where this group's keys and records lie; found again whenever vLLM binds other caches."""
        assert self.state is not None
        if self._caches is None or self._bound != self.state.bound:
            keys = [layer.kv_cache.transpose(1, 2)[..., : self.headdim] for layer in self._layers.values()]
            records = [layer.impl.summaries.records_by_page() for layer in self._layers.values()]
            self._caches, self._bound, self._pending = Caches(keys, records), self.state.bound, None
        return self._caches

    def _count(self, common: CommonAttentionMetadata, decode: int) -> None:
        """Add the step to every layer's counters, from what the host knows of the lengths."""
        assert self.state is not None and common.seq_lens_cpu_upper_bound is not None
        config, heads = self.state.options.config, self.num_heads_kv
        starts = common.query_start_loc_cpu.numpy()[: common.num_reqs + 1].astype(np.int64)
        queries = np.diff(starts)
        lengths = common.seq_lens_cpu_upper_bound.numpy()[: common.num_reqs].astype(np.int64)
        lengths = np.where(queries > 0, lengths, 0)
        decoding = lengths[:decode]
        selects = decoding > max(config.dense_below, config.budget)
        # The plan's own rule: a row whose scores do not fit the workspace attends everything.
        selects &= np.cumsum(np.where(selects, decoding // PAGE_SIZE, 0)) <= self.pipeline.capacity
        touched = (decoding + PAGE_SIZE - 1) // PAGE_SIZE
        row = np.zeros(len(FIELDS), np.int64)
        row[STEPS], row[ROWS_SPARSE] = 1, selects.sum()
        row[ROWS_DENSE] = (queries > 0).sum() - row[ROWS_SPARSE]
        row[PAGES_READ] = row[ROWS_SPARSE] * config.budget_pages * heads
        row[PAGES_SKIPPED] = touched[selects].sum() * heads - row[PAGES_READ]
        row[RECORDS_READ] = (decoding[selects] // PAGE_SIZE).sum() * heads
        row[SUMMARIES_BUILT] = (lengths // PAGE_SIZE - (lengths - queries) // PAGE_SIZE).sum() * heads
        for layer in self._layers.values():
            layer.impl.counters += row


def builder_in(worker: Any) -> LocksMetadataBuilder:
    """In an engine's worker: the builder of its LOCKS layers' metadata, for those who measure or check an engine."""
    groups = [group for groups in worker.model_runner.attn_groups for group in groups]
    builders = [builder for group in groups for builder in group.metadata_builders]
    return next(b for b in builders if isinstance(b, LocksMetadataBuilder) and b.state is not None)


def decode_rows(common: CommonAttentionMetadata) -> int:
    """How many rows at the front have one query token; padding counts where there is nothing but decode rows."""
    if common.max_query_len == 1:
        return common.num_reqs
    queries = np.diff(common.query_start_loc_cpu.numpy()[: common.num_reqs + 1])
    longer = np.flatnonzero(queries != 1)
    return int(longer[0]) if len(longer) else common.num_reqs


def rows_from(common: CommonAttentionMetadata, first: int) -> CommonAttentionMetadata:
    """The rows from `first` on, which have one token each before them, as a batch of their own."""
    if first == 0:
        return common
    bound = common.seq_lens_cpu_upper_bound
    return common.replace(
        query_start_loc=common.query_start_loc[first:] - first,
        query_start_loc_cpu=common.query_start_loc_cpu[first:] - first,
        seq_lens=common.seq_lens[first:],
        seq_lens_cpu_upper_bound=None if bound is None else bound[first:],
        num_reqs=common.num_reqs - first,
        num_actual_tokens=common.num_actual_tokens - first,
        block_table_tensor=common.block_table_tensor[first:],
        slot_mapping=common.slot_mapping[first:],
        is_prefilling=None if common.is_prefilling is None else common.is_prefilling[first:],
        positions=None if common.positions is None else common.positions[first:],
    )


def pipeline_of(state: LocksState, shape: KernelShape, vllm_config: VllmConfig) -> Pipeline:
    """The kernels of this shape, compiled once an engine, with a workspace for what the engine may be asked.

    Scores of all pages that the card's memory holds, twice over: rows that share pages score them each for itself.
    """
    known: Pipeline | None = state.pipelines.get(shape)
    if known is not None:
        return known
    scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
    max_rows = max(scheduler.max_num_seqs, vllm_config.compilation_config.max_cudagraph_capture_size or 0)
    layers = max(1, model.get_num_layers(vllm_config.parallel_config))
    page = shape.kv_heads * (2 * PAGE_SIZE * shape.head_dim * shape.dtype.itemsize + shape.layout.record_bytes)
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    capacity = min(2 * memory // (page * layers), max_rows * -(-model.max_model_len // PAGE_SIZE))
    completed = scheduler.max_num_batched_tokens // PAGE_SIZE + max_rows
    device = torch.device("cuda", torch.cuda.current_device())
    pipeline = Pipeline(shape, max_rows, completed, int(capacity), device)
    pipeline.warm_up()
    logger.info(
        "LOCKS scores up to %d pages a step, over all its sparse rows; a row past that attends everything.",
        pipeline.capacity,
    )
    state.pipelines[shape] = pipeline
    return pipeline


def _stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


class LocksImpl(FlashAttentionImpl):
    """Attention of one layer; stock where the layer has a sliding window."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: AttentionType = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            sinks,
        )
        # The metadata builder writes these: the layer's name and number, its row of the counters, the kernels.
        self.layer_name, self.index = "", 0
        self.counters: Any = None
        self.pipeline: Pipeline | None = None
        self._group_checked = False
        self.state: LocksState | None
        self.summaries: SummaryCache | None
        self.state, self.summaries = attach_summaries(
            head_size,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            sinks,
        )
        if self.state is None:
            return
        vllm_config = get_current_vllm_config()
        refuse_gpu(self.state.options, torch.cuda.get_device_capability())
        # While the model loads: so that vLLM counts the workspace before it sizes the KV cache.
        config, block_size = self.state.options.config, vllm_config.cache_config.block_size or PAGE_SIZE
        dtype = vllm_config.model_config.dtype
        assert isinstance(dtype, torch.dtype)
        shape = KernelShape(head_size, num_kv_heads, num_heads // num_kv_heads, block_size, dtype, config)
        pipeline_of(self.state, shape, vllm_config)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlashAttentionMetadata,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend the decode rows by LOCKS, the others by the stock kernel; shapes as in the stock backend.

        The step's K and V are in the cache already.
        """
        step = getattr(attn_metadata, "step", None)
        if self.state is None or step is None:  # a stock layer, or vLLM measuring memory
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        if output_scale is not None or output_block_scale is not None:
            raise Unsupported("fused output quantisation", "it is not covered by a test", "Turn the fusion off")
        pipeline, rows = self.pipeline, step.rows
        assert pipeline is not None and self.summaries is not None
        if not self._group_checked:  # while vLLM warms up
            check_group(self.summaries, self.layer_name, get_forward_context().attn_metadata)
            self._group_checked = True
        stream, first = _stream(), rows.decode
        if step.build_now:
            pipeline.build(stream, rows, step.caches, self.index)
        if step.prefill is not None:
            rest = (query[first:], key[first:], value[first:], kv_cache, step.prefill, output[first:])
            super().forward(layer, *rest)
        if first:
            keys = step.caches.keys[self.index]
            values = kv_cache.transpose(1, 2)[..., self.head_size :]
            records = step.caches.records[self.index]
            pipeline.decode(stream, rows, query, keys, values, records, output, self.scale)
        return output


class LocksCUDABackend(FlashAttentionBackend):
    """vLLM's FlashAttention backend with LOCKS' metadata and layers."""

    @staticmethod
    def get_name() -> str:
        """vLLM's slot for plugins."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        """The attention layer."""
        return LocksImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        """The metadata builder."""
        return LocksMetadataBuilder
