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

LEAST_BYTES, MOST_LAYERS = 1 << 30, 65
"""What a kernel reads lies in buffers of so many bytes together, or in so many of them if that is less: little of the
first is left in L2 when it comes back to it."""


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
    """Caches and records of a model's layers, filled through the build kernel.

    As in an engine, all layers together take most of the card's memory and the rows' blocks lie anywhere in it, so that
    addresses are as far apart as they are in one.

    Attributes
    ----------
    caches : list of (blocks, block_size, kv_heads, 2 * head_dim);  records : list, as `Caches` has them

    Parameters
    ----------
    layers : int
        At least so many, if they fit.
    memory : float
        Share of the card's free memory that caches and records take, if they need no more.
    """

    def __init__(
        self, shape: KernelShape, layers: int, context: int, rows: int, seed: int = 0, memory: float = 0.7
    ) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        self.shape, self.context, self.rows = shape, context, rows
        heads, head_dim, per, size = shape.kv_heads, shape.head_dim, shape.pages_a_block, shape.block_size
        record, pages = shape.layout.record_bytes, rows * (context // 16)
        block_bytes = per * heads * (2 * 16 * head_dim * shape.dtype.itemsize + record)
        needed = rows * -(-context // size)
        layers = max(layers, min(MOST_LAYERS, -(-LEAST_BYTES // (pages * heads * record))))
        torch.cuda.empty_cache()  # what an earlier context left
        free = torch.cuda.mem_get_info()[0]
        layers = max(1, min(layers, int(0.85 * free) // (needed * block_bytes)))
        blocks = max(needed, int(memory * free) // (layers * block_bytes))
        used = torch.randperm(blocks, generator=generator, device="cuda")[:needed]
        table = used.to(torch.int32).view(rows, -1)
        self.caches = [
            torch.empty(blocks, size, heads, 2 * head_dim, dtype=shape.dtype, device="cuda") for _ in range(layers)
        ]
        self.records = [
            torch.zeros(blocks, per, heads, record, dtype=torch.uint8, device="cuda") for _ in range(layers)
        ]
        self.all_layers = Caches([cache[..., :head_dim] for cache in self.caches], self.records)
        chunk = max(1, (1 << 27) // (size * heads * head_dim))
        for blocks_of_chunk in torch.split(used, chunk):
            keys = like_real_keys(len(blocks_of_chunk) * per, heads, head_dim, shape.dtype, generator)
            keys = keys.view(-1, size, heads, head_dim)
            part = torch.cat([keys, torch.empty_like(keys).normal_(generator=generator)], -1)
            for cache in self.caches:
                cache[blocks_of_chunk] = part
        lengths = torch.full((rows,), context, dtype=torch.int32, device="cuda")
        one_each = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
        self.decode_rows = Rows(lengths, one_each, table, rows, rows, rows)
        self.prefill_rows = Rows(lengths, one_each * context, table, rows, rows, pages)
        self.pipeline = Pipeline(shape, rows, pages + rows, pages + 1, torch.device("cuda"), logical=True)
        self.pipeline.plan(_stream(), self.prefill_rows)
        self.pipeline.build(_stream(), self.prefill_rows, self.all_layers)
        if context % size == 0 and any(bool((each[used][..., :2] == 0).all(-1).any()) for each in self.records):
            raise AssertionError("a page was left without a record")
        query = torch.randn(rows, heads * shape.group, head_dim, generator=generator, device="cuda")
        self.query = query.to(shape.dtype)
        self.output = torch.empty_like(self.query)
        self.scale = head_dim**-0.5
        width = heads * shape.group * head_dim
        self.weights = [torch.randn(width, width, dtype=shape.dtype, device="cuda") for _ in range(8)]
        self.projected = torch.empty(rows, width, dtype=shape.dtype, device="cuda")

    def keys_and_values(self, layer: int) -> Any:
        """Views of a layer's cache, (blocks, block_size, kv_heads, head_dim) each."""
        return self.caches[layer].tensor_split(2, -1)

    def score(self, layer: int) -> None:
        """One layer's scores."""
        keys, _ = self.keys_and_values(layer)
        self.pipeline.score_pages(_stream(), self.decode_rows, self.query, self.records[layer], keys, self.scale)

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
        keys, values = self.keys_and_values(layer)
        tensors = (self.query, keys, values, self.records[layer], self.output)
        self.pipeline.decode(_stream(), self.decode_rows, *tensors, self.scale)

    def product(self, layer: int) -> None:
        """A product by a matrix as large as a layer's projections, such as comes between two layers' attention."""
        torch.mm(self.query.flatten(1), self.weights[layer % len(self.weights)], out=self.projected)

    def build(self, layer: int, whole: Rows) -> None:
        """The records of one layer."""
        self.pipeline.build(_stream(), whole, self.all_layers, layer)


def time_kernels(shape: KernelShape, name: str, context: int, rows: int, read_gbps: float) -> Iterator[Timing]:
    """Time build, score, select, attention over the chosen pages, over all, and a layer of a decode step as a whole."""
    layers = Layers(shape, SHAPES[name]["num_hidden_layers"], context, rows)
    pipeline, config, count = layers.pipeline, shape.config, len(layers.caches)
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

    def between_products(kernel: str, one: Callable[[int], None], size: int) -> Timing:
        """As in a model, where other kernels' code and data have been in the caches since the last layer."""

        def both(layer: int) -> None:
            one(layer)
            layers.product(layer)

        alone = microseconds(over(count, layers.product)) / count
        time = microseconds(over(count, both)) / count - alone
        name_of_it = f"{kernel}, between products"
        rate = round(size / time / 1e3, 1)
        return Timing(name_of_it, name, context, rows, round(time, 2), size, rate, round(read_gbps, 1))

    pipeline.plan(_stream(), layers.prefill_rows)
    builds = min(count, 4)
    yield timing("build", over(builds, lambda i: layers.build(i, layers.prefill_rows)), builds, pages * page_bytes // 2)
    pipeline.plan(_stream(), layers.decode_rows, dense_below=0)
    completed = rows if context % 16 == 0 else 0
    name_of_build = f"build, {completed} pages of one layer"
    yield timing(name_of_build, over(20, lambda _: layers.build(0, layers.decode_rows)), 20, 0)
    if context > config.budget:
        yield timing("score", over(count, layers.score), count, pages * shape.layout.record_bytes)
        yield timing("select", over(20, lambda _: layers.select()), 20, pages * shape.group * 4)
        chosen = rows * shape.kv_heads * config.budget_pages * page_bytes
        yield timing("attend, chosen pages", over(count, layers.attend), count, chosen)
        if pipeline.is_joint(rows):
            yield timing("select and attend in one", over(count, layers.select_attend), count, chosen)
        scored = pages * shape.layout.record_bytes
        yield timing("decode, chosen pages", over(count, layers.decode), count, scored + chosen)
        yield between_products("decode, chosen pages", layers.decode, scored + chosen)
    pipeline.plan(_stream(), layers.decode_rows, dense_below=1 << 30)
    yield timing("score, nothing to do", over(20, lambda _: layers.score(0)), 20, 0)
    yield timing("select, nothing to do", over(20, lambda _: layers.select()), 20, 0)
    yield timing("attend, all pages", over(count, layers.attend), count, pages * page_bytes)
    if not pipeline.is_joint(rows) or context <= MOST_ATTENDED:
        yield timing("decode, all pages", over(count, layers.decode), count, pages * page_bytes)
        yield between_products("decode, all pages", layers.decode, pages * page_bytes)
    dense = flash_attention(layers)
    if dense is not None:
        yield timing("FlashAttention 3", over(count, dense), count, pages * page_bytes)
        yield between_products("FlashAttention 3", dense, pages * page_bytes)


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
