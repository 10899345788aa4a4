"""The CPU backend: stock prefill, LOCKS decode, in torch.

It exists for correctness and for machines without a GPU: it shows what is read, not how fast that can be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from ..attend import attend
from ..score import page_share
from ..select import select_pages
from ..summary import PageSummary, summarize
from .counters import PAGES_READ, PAGES_SKIPPED, RECORDS_READ, ROWS_DENSE, ROWS_SPARSE, STEPS, SUMMARIES_BUILT
from .cpu_layout import measure_layout
from .layer import active_layers, attach_summaries, check_group, describe_layers
from .options import PAGE_SIZE
from .state import LocksState
from .summary_cache import SummaryCache

logger = init_logger("vllm.plugins.pagelocks")


@dataclass
class SparseRow:
    """A decode row: one query token of a request whose context is longer than `dense_below`."""

    row: int
    token: int
    length: int
    blocks: Tensor


@dataclass
class Step:
    """What a step asks of every LOCKS layer; worked out once.

    Attributes
    ----------
    built_blocks, built_pages : int64 (n,)
        The block, and the page within it, of each page that this step completes.
    sparse : list of SparseRow
    dense : CPUAttentionMetadata or None
        Stock metadata of the other rows alone; None if there are none.
    dense_tokens : int64 (tokens,) or None
        Which of the step's tokens they are; None if that is all of them.
    dense_rows : int
    """

    built_blocks: Tensor
    built_pages: Tensor
    sparse: list[SparseRow]
    dense: CPUAttentionMetadata | None
    dense_tokens: Tensor | None
    dense_rows: int


@dataclass
class LocksCPUMetadata(CPUAttentionMetadata):
    """Stock metadata of the whole step, for layers that stay stock, and LOCKS' plan for the others."""

    step: Step | None = None


class LocksCPUMetadataBuilder(CPUAttentionMetadataBuilder):
    """Splits a step's rows into sparse ones and stock ones, and lists the pages it completes."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        active = active_layers(vllm_config, layer_names, LocksCPUImpl)
        self.state: LocksState | None = None
        if not active:
            return
        measure_layout(kv_cache_spec.dtype, self.block_size, self.head_dim, self.isa)  # refuses now, not when serving
        self.state = state = next(iter(active.values())).impl.state
        assert state is not None
        describe_layers(state, active, self.head_dim, kv_cache_spec.dtype.itemsize)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        """Stock metadata, with the plan for the LOCKS layers."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if self.state is None:
            return metadata
        step = self._plan(common_prefix_len, common_attn_metadata, metadata)
        self.state.log_progress()
        return LocksCPUMetadata(**vars(metadata), step=step)

    def _plan(self, common_prefix_len: int, common: CommonAttentionMetadata, whole: CPUAttentionMetadata) -> Step:
        assert self.state is not None
        starts = common.query_start_loc[: common.num_reqs + 1].tolist()
        lengths = common.seq_lens[: common.num_reqs].tolist()
        table = common.block_table_tensor
        pages_a_block = self.block_size // PAGE_SIZE
        blocks, pages, sparse, stock = [], [], [], []
        for row, length in enumerate(lengths):
            queries = starts[row + 1] - starts[row]
            if queries == 0:
                continue
            # Page p is completed by this step when computed < 16 (p + 1) <= length.
            done = torch.arange((length - queries) // PAGE_SIZE, length // PAGE_SIZE)
            blocks.append(table[row, done // pages_a_block].to(torch.int64))
            pages.append(done % pages_a_block)
            if queries == 1 and length > self.state.options.config.dense_below:
                held = -(-length // self.block_size)
                sparse.append(SparseRow(row, starts[row], length, table[row, :held].to(torch.int64)))
            else:
                stock.append(row)
        dense: CPUAttentionMetadata | None = whole if stock else None
        tokens: Tensor | None = None
        if stock and sparse:
            dense, tokens = self._subset(common_prefix_len, common, starts, stock)
        none = torch.zeros(0, dtype=torch.int64)
        return Step(torch.cat([none, *blocks]), torch.cat([none, *pages]), sparse, dense, tokens, len(stock))

    def _subset(
        self, common_prefix_len: int, common: CommonAttentionMetadata, starts: list[int], rows: list[int]
    ) -> tuple[CPUAttentionMetadata, Tensor]:
        """Stock metadata of some of the rows, and which tokens are theirs."""
        index = torch.tensor(rows)
        tokens = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in rows])
        queries = torch.tensor([0] + [starts[row + 1] - starts[row] for row in rows])
        query_start_loc = queries.cumsum(0).to(common.query_start_loc.dtype)
        part = common.replace(
            query_start_loc=query_start_loc,
            query_start_loc_cpu=query_start_loc,
            seq_lens=common.seq_lens[index],
            num_reqs=len(rows),
            num_actual_tokens=len(tokens),
            max_query_len=int(queries.max()),
            max_seq_len=int(common.seq_lens[index].max()),
            block_table_tensor=common.block_table_tensor[index],
            slot_mapping=common.slot_mapping[tokens],
        )
        return super().build(common_prefix_len, part), tokens


class PagedKeysAndValues:
    """Pages of a CPU KV cache (blocks, kv heads, block size, 2 * head_dim), read in their logical order."""

    def __init__(self, kv_cache: Tensor, isa: str) -> None:
        blocks, self.heads, block_size, width = kv_cache.shape
        self.head_dim = width // 2
        self._flat = kv_cache.view(blocks, self.heads, block_size * width)
        self._key_places, self._value_places = measure_layout(kv_cache.dtype, block_size, self.head_dim, isa)

    def keys(self, blocks: Tensor, pages: Tensor) -> Tensor:
        """Keys of the same pages for all KV heads: int64 (n,) twice -> (heads, n, PAGE_SIZE, head_dim)."""
        heads = torch.arange(self.heads).view(-1, 1, 1)
        return self._gather(blocks.unsqueeze(-1), heads, self._key_places[pages])

    def selected(self, blocks: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of each KV head's own pages: int64 (heads, n) twice -> twice (heads, n, PAGE_SIZE, head_dim)."""
        heads = torch.arange(self.heads).view(-1, 1, 1)
        blocks = blocks.unsqueeze(-1)
        keys = self._gather(blocks, heads, self._key_places[pages])
        return keys, self._gather(blocks, heads, self._value_places[pages])

    def _gather(self, blocks: Tensor, heads: Tensor, places: Tensor) -> Tensor:
        return torch.unflatten(self._flat[blocks, heads, places], -1, (PAGE_SIZE, self.head_dim))


class RowPages:
    """The complete pages of one row, for a selector (`pagelocks.selectors.PageSource`)."""

    def __init__(self, impl: LocksCPUImpl, cache: PagedKeysAndValues, row: SparseRow) -> None:
        self._impl, self._cache, self._row = impl, cache, row
        self.count = row.length // PAGE_SIZE

    def summary(self) -> PageSummary:
        """The records that the cache holds, (kv heads, P)."""
        records = self._impl.records()[self._row.blocks]
        records = records.transpose(0, 1).flatten(1, 2)[:, : self.count]
        self._impl.counters[RECORDS_READ] += records.shape[0] * records.shape[1]
        return PageSummary.unpack(records, self._cache.head_dim, self._impl.options.config)

    def keys(self) -> Tensor:
        """The keys that the cache holds, (kv heads, P, PAGE_SIZE, head_dim)."""
        pages = torch.arange(self.count)
        pages_a_block = self._impl.records().shape[2]
        return self._cache.keys(self._row.blocks[pages // pages_a_block], pages % pages_a_block)


class LocksCPUImpl(CPUAttentionBackendImpl):
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
        attn_type: str = AttentionType.DECODER,
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
        self.layer_name = ""  # the metadata builder, which is told it, writes it here, and
        self.counters: Any = None  # this layer's row of the engine's counters
        self._paged: PagedKeysAndValues | None = None
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

    @property
    def options(self) -> Any:
        """The engine's options."""
        assert self.state is not None
        return self.state.options

    def records(self) -> Tensor:
        """uint8 (blocks, kv heads, pages a block, record_bytes): the summaries of the K in this layer's cache."""
        assert self.summaries is not None
        return self.summaries.records()

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Build the pages that this step completes, then attend: sparse rows by LOCKS, the others by the stock kernel.

        Shapes as in the stock backend; the step's K and V are in the cache already.
        """

        def stock(query: Tensor, metadata: Any, output: Tensor) -> Tensor:
            return super(LocksCPUImpl, self).forward(
                layer, query, key, value, kv_cache, metadata, output, output_scale, output_block_scale
            )

        if self.state is None or attn_metadata is None:  # a stock layer, or vLLM warming up
            return stock(query, attn_metadata, output)
        assert isinstance(attn_metadata, LocksCPUMetadata) and attn_metadata.step is not None
        step = attn_metadata.step
        counters = self.counters
        counters[STEPS] += 1
        if self._paged is None:
            assert self.summaries is not None
            check_group(self.summaries, self.layer_name, get_forward_context().attn_metadata)
            self._paged = PagedKeysAndValues(kv_cache, layer.isa)
        if len(step.built_blocks):
            self._build(step.built_blocks, step.built_pages)
            counters[SUMMARIES_BUILT] += len(step.built_blocks) * self.num_kv_heads
        if step.dense is not None and step.dense_tokens is None:
            stock(query, step.dense, output)
        elif step.dense is not None and step.dense_tokens is not None:
            part = torch.empty(len(step.dense_tokens), *output.shape[1:], dtype=output.dtype)
            stock(query[step.dense_tokens], step.dense, part)
            output[step.dense_tokens] = part
        counters[ROWS_DENSE] += step.dense_rows
        for row in step.sparse:
            pages, attended = self._attend_row(query[row.token], row)
            output[row.token] = attended
            read = pages.numel()
            counters[ROWS_SPARSE] += 1
            counters[PAGES_READ] += read
            counters[PAGES_SKIPPED] += self.options.config.pages_in(row.length) * self.num_kv_heads - read
            if self.options.trace is not None:
                self.state.trace(self.layer_name, int(counters[STEPS]), row.row, row.length, pages)
        return output

    def _build(self, blocks: Tensor, pages: Tensor) -> None:
        """Write the records of pages, int64 (n,) blocks and pages within them, from the K in the cache."""
        assert self._paged is not None
        records = summarize(self._paged.keys(blocks, pages), self.options.config).pack()
        self.records()[blocks, :, pages] = records.transpose(0, 1)

    def _attend_row(self, query: Tensor, row: SparseRow) -> tuple[Tensor, Tensor]:
        """Pages (kv heads, n) and output (heads, head_dim) of one row's query (heads, head_dim)."""
        assert self.state is not None and self._paged is not None
        config = self.state.options.config
        grouped = query.view(self.num_kv_heads, self.num_queries_per_kv, self.head_size)
        length = torch.tensor(row.length)
        if row.length <= config.budget:
            pages = torch.arange(config.pages_in(row.length)).expand(self.num_kv_heads, -1)
        else:
            mass = self.state.selector.log_mass(grouped, RowPages(self, self._paged, row), self.scale)
            pages = select_pages(page_share(mass, length, config), length, config).to(torch.int64)
        pages_a_block = self.records().shape[2]
        # A row longer than the budget has pages enough to fill it: there is no -1 among them.
        keys, values = self._paged.selected(row.blocks[pages // pages_a_block], pages % pages_a_block)
        mask = pages.unsqueeze(-1) * PAGE_SIZE + torch.arange(PAGE_SIZE) < row.length
        attended = attend(grouped, keys.flatten(1, 2), values.flatten(1, 2), mask.flatten(1, 2), self.scale)
        return pages, attended.view(self.num_heads, self.head_size)


class LocksCPUBackend(CPUAttentionBackend):
    """vLLM's CPU backend with LOCKS' metadata and layers."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """The attention layer."""
        return LocksCPUImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """The metadata builder."""
        return LocksCPUMetadataBuilder
