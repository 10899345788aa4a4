"""Each kernel alone: time, bytes, and what share that is of the bandwidth at which this card reads memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..config import LocksConfig
from ..kernels import Caches, KernelShape, Pipeline, Rows
from ..kernels.compiler import Kernel
from ..kernels.select_attend import MOST_ATTENDED
from .decode import SHAPES
from .keys import like_real_keys
from .timing import microseconds

LEAST_BYTES = 1 << 30
"""What a kernel reads lies in buffers of at least this size together, or in 65 of them if that is less, so that little
is left in L2 when it comes back to the first."""


@dataclass(frozen=True)
class Timing:
    """One line of the result; `bytes` is what the kernel must read, `gbps` that over the time."""

    kernel: str
    shape: str
    context: int
    rows: int
    us: float
    bytes: int
    gbps: float
    read_gbps: float
    peer_us: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


def read_bandwidth() -> float:
    """GB/s at which this card reads, measured over 4 GiB."""
    data = torch.randint(0, 1 << 30, (1 << 29,), device="cuda", dtype=torch.int64)
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")
    kernel = Kernel("read", "read_all", {}, "PPq", 512)
    size = data.numel() * 8
    grid = 4 * torch.cuda.get_device_properties(0).multi_processor_count
    time = microseconds(lambda: kernel.launch(_stream(), (grid, 1), data.data_ptr(), sink.data_ptr(), size // 16))
    return size / time / 1e3


def _stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


class Layers:
    """Caches and records of as many layers as make `LEAST_BYTES` of what is read, filled through the build kernel."""

    def __init__(self, shape: KernelShape, context: int, rows: int, seed: int = 0) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        self.shape, self.context, self.rows = shape, context, rows
        blocks_a_row = -(-context // shape.block_size)
        blocks = rows * blocks_a_row
        order = torch.randperm(blocks, generator=generator, device="cuda").to(torch.int32)
        table = order.view(rows, blocks_a_row)
        record = shape.layout.record_bytes
        heads, head_dim, per = shape.kv_heads, shape.head_dim, shape.pages_a_block
        cache_bytes = blocks * shape.block_size * heads * 2 * head_dim * shape.dtype.itemsize
        self.record_bytes = rows * (context // 16) * heads * record
        caches = max(1, -(-LEAST_BYTES // cache_bytes))
        records = max(1, -(-LEAST_BYTES // self.record_bytes))
        cache = torch.empty(blocks, shape.block_size, heads, 2 * head_dim, dtype=shape.dtype, device="cuda")
        chunk = max(1, (1 << 27) // (shape.block_size * heads * head_dim))
        for first in range(0, blocks, chunk):
            part = cache[first : first + chunk]
            keys = like_real_keys(part.shape[0] * per, heads, head_dim, shape.dtype, generator)
            part[..., :head_dim] = keys.view(part.shape[0], shape.block_size, heads, head_dim)
            part[..., head_dim:].normal_(generator=generator)
        self.caches = [cache] + [cache.clone() for _ in range(min(caches - 1, 64))]
        lengths = torch.full((rows,), context, dtype=torch.int32, device="cuda")
        self.decode_rows = Rows(
            lengths, torch.arange(rows + 1, dtype=torch.int32, device="cuda"), table, rows, rows, rows
        )
        starts = torch.arange(rows + 1, dtype=torch.int32, device="cuda") * context
        self.prefill_rows = Rows(lengths, starts, table, rows, rows, rows * (context // 16))
        pages = rows * (context // 16) + 1
        self.pipeline = Pipeline(shape, rows, pages + rows, pages, torch.device("cuda"), logical=True)
        built = torch.zeros(blocks, per, heads, record, dtype=torch.uint8, device="cuda")
        self.pipeline.plan(_stream(), self.prefill_rows)
        self.pipeline.build(_stream(), self.prefill_rows, Caches([cache[..., :head_dim]], [built]))
        if bool((built.flatten(0, 2).amax(-1) == 0).any()) and context % shape.block_size == 0:
            raise AssertionError("a page was left without a record")
        self.records = [built] + [built.clone() for _ in range(min(records - 1, 64))]
        ring = [self.caches[i % len(self.caches)][..., :head_dim] for i in range(len(self.records))]
        self.all_layers = Caches(ring, self.records)
        query = torch.randn(rows, heads * shape.group, head_dim, generator=generator, device="cuda")
        self.query = query.to(shape.dtype)
        self.output = torch.empty_like(self.query)
        self.scale = head_dim**-0.5

    def keys_and_values(self, layer: int) -> Any:
        """Views of a layer's cache, (blocks, block_size, kv_heads, head_dim) each."""
        return self.caches[layer].tensor_split(2, -1)

    def score(self, layer: int) -> None:
        """One layer's scores."""
        start, rows = self.pipeline.plan_of_step.score_start, self.decode_rows
        self.pipeline.score(_stream(), self.query, self.records[layer], rows.block_table, start, self.rows, self.scale)

    def select(self) -> None:
        """The pages of one layer, from its scores."""
        plan, table = self.pipeline.plan_of_step, self.decode_rows.block_table
        self.pipeline.select(_stream(), table, plan.score_start, plan.lengths, self.rows)

    def attend(self, layer: int) -> None:
        """One layer's attention, over what the plan says."""
        keys, values = self.keys_and_values(layer)
        self.pipeline.attend(_stream(), self.decode_rows, self.query, keys, values, self.output, self.scale)

    def select_attend(self, layer: int) -> None:
        """Selection and attention of one layer, in one kernel."""
        keys, values = self.keys_and_values(layer)
        self.pipeline.select_attend(_stream(), self.decode_rows, self.query, keys, values, self.output, self.scale)

    def decode(self, layer: int) -> None:
        """All that one layer launches in a decode step."""
        keys, values = self.keys_and_values(layer % len(self.caches))
        records = self.records[layer % len(self.records)]
        tensors = (self.query, keys, values, records, self.output)
        self.pipeline.decode(_stream(), self.decode_rows, *tensors, self.scale)

    def build(self, layer: int, whole: Rows) -> None:
        """The records of one layer."""
        self.pipeline.build(_stream(), whole, self.all_layers, layer)


def time_kernels(shape: KernelShape, name: str, context: int, rows: int, read_gbps: float) -> Iterator[Timing]:
    """Time build, score, select, attention over the chosen pages, over all, and a layer of a decode step as a whole."""
    layers = Layers(shape, context, rows)
    pipeline, config = layers.pipeline, shape.config
    pages = rows * (context // 16) * shape.kv_heads
    page_bytes = 2 * 16 * shape.head_dim * shape.dtype.itemsize

    def timing(kernel: str, work: Callable[[], None], count: int, size: int) -> Timing:
        time = microseconds(work) / count
        return Timing(
            kernel, name, context, rows, round(time, 2), size, round(size / time / 1e3, 1), round(read_gbps, 1)
        )

    def over(count: int, one: Callable[[int], None]) -> Callable[[], None]:
        def work() -> None:
            for layer in range(count):
                one(layer)

        return work

    pipeline.plan(_stream(), layers.prefill_rows)
    builds = min(len(layers.records), 4)
    yield timing("build", over(builds, lambda i: layers.build(i, layers.prefill_rows)), builds, pages * page_bytes // 2)
    pipeline.plan(_stream(), layers.decode_rows, dense_below=0)
    completed = rows if context % 16 == 0 else 0
    name_of_build = f"build, {completed} pages of one layer"
    yield timing(name_of_build, over(20, lambda _: layers.build(0, layers.decode_rows)), 20, 0)
    if context > config.budget:
        count = len(layers.records)
        yield timing("score", over(count, layers.score), count, pages * shape.layout.record_bytes)
        yield timing("select", over(20, lambda _: layers.select()), 20, pages * shape.group * 4)
        count = len(layers.caches)
        chosen = rows * shape.kv_heads * config.budget_pages * page_bytes
        yield timing("attend, chosen pages", over(count, layers.attend), count, chosen)
        if pipeline.is_joint(rows):
            yield timing("select and attend in one", over(count, layers.select_attend), count, chosen)
        count = max(len(layers.records), len(layers.caches))
        scored = pages * shape.layout.record_bytes
        yield timing("decode, chosen pages", over(count, layers.decode), count, scored + chosen)
    pipeline.plan(_stream(), layers.decode_rows, dense_below=1 << 30)
    yield timing("score, nothing to do", over(20, lambda _: layers.score(0)), 20, 0)
    yield timing("select, nothing to do", over(20, lambda _: layers.select()), 20, 0)
    count = len(layers.caches)
    yield timing("attend, all pages", over(count, layers.attend), count, pages * page_bytes)
    if not pipeline.is_joint(rows) or context <= MOST_ATTENDED:
        yield timing("decode, all pages", over(count, layers.decode), count, pages * page_bytes)
    dense = flash_attention(layers)
    if dense is not None:
        yield timing("FlashAttention 3", over(count, dense), count, pages * page_bytes)


def flash_attention(layers: Layers) -> Callable[[int], None] | None:
    """vLLM's FlashAttention 3 on the same caches, called as vLLM calls it in CUDA graphs; None without vLLM."""
    try:
        from vllm.v1.attention.backends import fa_utils
    except ImportError:
        return None
    if not fa_utils.is_flash_attn_varlen_func_available():
        return None
    flash: Any = fa_utils
    shape, rows = layers.shape, layers.decode_rows
    metadata = flash.get_scheduler_metadata(
        batch_size=layers.rows,
        max_seqlen_q=1,
        max_seqlen_k=layers.context,
        num_heads_q=shape.kv_heads * shape.group,
        num_heads_kv=shape.kv_heads,
        headdim=shape.head_dim,
        cache_seqlens=rows.lengths,
        qkv_dtype=shape.dtype,
        cu_seqlens_q=rows.query_starts,
        page_size=shape.block_size,
        causal=True,
        window_size=(-1, -1),
        num_splits=32,
    )

    def run(layer: int) -> None:
        keys, values = layers.keys_and_values(layer)
        flash.flash_attn_varlen_func(
            q=layers.query,
            k=keys,
            v=values,
            out=layers.output,
            cu_seqlens_q=rows.query_starts,
            max_seqlen_q=1,
            seqused_k=rows.lengths,
            max_seqlen_k=layers.context,
            softmax_scale=layers.scale,
            causal=True,
            block_table=rows.block_table,
            scheduler_metadata=metadata,
            fa_version=3,
            num_splits=32,
        )

    return run


def preset_shape(name: str, config: LocksConfig) -> KernelShape:
    """The shape of a known model, in bf16 with blocks of 16."""
    model = SHAPES[name]
    heads, kv_heads = model["num_attention_heads"], model["num_key_value_heads"]
    return KernelShape(model["head_dim"], kv_heads, heads // kv_heads, 16, torch.bfloat16, config)
