"""Caches, queries and records for the kernels' tests: of any shape, fresh, with poison where nothing may look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagelocks import LocksConfig
from pagelocks.attend import sparse_attention
from pagelocks.kernels import Caches, KernelShape, Pipeline, Rows
from pagelocks.summary import summarize

DEVICE = torch.device("cuda")


def real_keys(pages: int, head_dim: int, generator: torch.Generator, size: float = 1.0) -> Tensor:
    """fp32 (pages, 16, head_dim): a few strong directions a page, channels of large mean, noise, as real keys have."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE)

    decay = torch.logspace(0, -1.5, 16, device=DEVICE)
    keys = (normal(pages, 16, 16) * decay) @ normal(pages, 16, head_dim)
    mean = normal(1, 1, head_dim)
    mean[..., :: max(1, head_dim // 3)] *= 12
    return size * (keys + mean + 0.5 * normal(pages, 1, head_dim))


@dataclass
class Case:
    """One layer's cache, with every row's tokens in it, and queries of one decode step."""

    shape: KernelShape
    lengths: list[int]
    keys: Tensor
    values: Tensor
    records: Tensor
    query: Tensor
    table: Tensor
    scale: float

    @property
    def caches(self) -> Caches:
        """The one layer, for the build kernel."""
        return Caches([self.keys], [self.records])

    @property
    def rows(self) -> Rows:
        """All rows as decode rows."""
        return rows_of(self.lengths, [1 if n else 0 for n in self.lengths], self.table)

    def pages_of(self, row: int) -> tuple[Tensor, Tensor]:
        """Block, and page within it, of a row's complete pages."""
        pages = torch.arange(self.lengths[row] // 16, device=DEVICE)
        per = self.shape.pages_a_block
        return self.table[row, pages // per].long(), pages % per

    def tokens_of(self, row: int) -> tuple[Tensor, Tensor]:
        """K and V of a row, (kv heads, length, head_dim)."""
        position = torch.arange(self.lengths[row], device=DEVICE)
        size = self.shape.block_size
        block = self.table[row, position // size].long()
        return tuple(cache[block, position % size].transpose(0, 1) for cache in (self.keys, self.values))

    def records_of(self, row: int) -> Tensor:
        """uint8 (kv heads, complete pages, record_bytes)."""
        block, slot = self.pages_of(row)
        return self.records[block, slot].transpose(0, 1)


def rows_of(lengths: list[int], queries: list[int], table: Tensor, decode: int | None = None) -> Rows:
    """Rows for the kernels, from numbers."""
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32).to(DEVICE)
    most = sum(queries) // 16 + len(queries)
    count = len(lengths)
    return Rows(torch.tensor(lengths, dtype=torch.int32, device=DEVICE), starts, table, count, decode or count, most)


def make_case(
    shape: KernelShape, lengths: list[int], seed: int, size: float = 1.0, build: bool = True, fused: bool = True
) -> Case:
    """A cache of permuted blocks; NaN past each row's end and in blocks that no row owns; records by the torch core."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    block_size, heads, head_dim = shape.block_size, shape.kv_heads, shape.head_dim
    needed = [-(-n // block_size) for n in lengths]
    blocks = sum(needed) + 5
    order = torch.randperm(blocks, generator=generator, device=DEVICE).to(torch.int32)
    table = torch.full((len(lengths), max(needed) + 3), -(10**6), dtype=torch.int32, device=DEVICE)
    first = 0
    for row, count in enumerate(needed):
        table[row, :count] = order[first : first + count]
        first += count
    # As vLLM lays it out: a token's K and V beside each other.
    if fused:
        cache = torch.full((blocks, block_size, heads, 2 * head_dim), torch.nan, dtype=shape.dtype, device=DEVICE)
        keys, values = cache.split(head_dim, -1)
    else:
        whole = torch.full((2, blocks, heads, block_size, head_dim), torch.nan, dtype=shape.dtype, device=DEVICE)
        keys, values = whole.transpose(2, 3)
    record_bytes = shape.layout.record_bytes
    records = torch.full((blocks, shape.pages_a_block, heads, record_bytes), 0xA5, dtype=torch.uint8, device=DEVICE)
    query = torch.randn(len(lengths), heads * shape.group, head_dim, generator=generator, device=DEVICE)
    case = Case(shape, lengths, keys, values, records, query.to(shape.dtype), table, head_dim**-0.5)
    for row, length in enumerate(lengths):
        pages = -(-length // 16)
        per_head = [real_keys(pages, head_dim, generator, size).reshape(-1, head_dim)[:length] for _ in range(heads)]
        position = torch.arange(length, device=DEVICE)
        block = table[row, position // block_size].long()
        keys[block, position % block_size] = torch.stack(per_head, 1).to(shape.dtype)
        fresh = torch.randn(length, heads, head_dim, generator=generator, device=DEVICE)
        values[block, position % block_size] = fresh.to(shape.dtype)
        if build and length >= 16:
            tokens = case.tokens_of(row)[0][:, : length // 16 * 16].unflatten(1, (-1, 16)).cpu()
            block, slot = case.pages_of(row)
            records[block, slot] = summarize(tokens, shape.config).pack().transpose(0, 1).to(DEVICE)
    return case


def pipeline_of(shape: KernelShape, lengths: list[int], capacity: int | None = None, joint: bool = False) -> Pipeline:
    """A pipeline that fits the rows, its outputs poisoned."""
    pages = sum(n // 16 for n in lengths) + 8 if capacity is None else capacity
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # as where vLLM makes layers
    pipeline = Pipeline(shape, len(lengths), sum(lengths) // 16 + len(lengths), pages, DEVICE, True, joint)
    torch.set_default_dtype(default)
    pipeline.score.log_mass.fill_(torch.nan)
    pipeline.score.partial.fill_(torch.nan)
    pipeline.select.pages.fill_(-7)
    assert pipeline.select.logical is not None
    pipeline.select.logical.fill_(-7)
    return pipeline


def stream() -> int:
    """The current stream's handle."""
    return int(torch.cuda.current_stream().cuda_stream)


BF16, FP16 = torch.bfloat16, torch.float16
SHAPES = [
    # head_dim, kv heads, group, block size, dtype, rank
    (128, 4, 8, 16, BF16, 8),
    (128, 8, 4, 16, BF16, 8),
    (64, 3, 3, 16, BF16, 8),
    (64, 2, 7, 48, BF16, 8),
    (128, 2, 6, 32, FP16, 8),
    (256, 2, 8, 64, BF16, 8),
    (128, 1, 16, 16, BF16, 8),
    (128, 1, 20, 16, FP16, 8),
    (64, 16, 1, 128, BF16, 8),
    (32, 2, 2, 16, BF16, 4),
    (128, 5, 5, 16, BF16, 3),
    (256, 1, 40, 16, FP16, 7),
    (32, 1, 8, 16, BF16, 1),  # 36 stages, more than a warp has lanes
]
IDS = ["-".join(str(part).replace("torch.", "") for part in shape) for shape in SHAPES]


def shape_of(numbers: tuple[Any, ...], **changes: Any) -> KernelShape:
    *sizes, rank = numbers
    return KernelShape(*sizes, LocksConfig(**{"budget": 128, "rank": rank, **changes}))


def planned(case: Case, dense_below: int = 0, capacity: int | None = None, joint: bool = False) -> Any:
    pipeline = pipeline_of(case.shape, case.lengths, capacity, joint)
    pipeline.plan(stream(), case.rows, dense_below)
    return pipeline


def check_output(case: Case, pipeline: Any, output: torch.Tensor) -> None:
    shape, start = case.shape, pipeline.plan_of_step.score_start.tolist()
    for row, length in enumerate(case.lengths):
        if not length:
            assert (output[row] == 0).all()
            continue
        keys, values = case.tokens_of(row)
        pages = torch.arange(-(-length // 16), device=DEVICE).expand(shape.kv_heads, -1)
        if start[row + 1] > start[row]:
            pages = pipeline.select.logical[row]
        query = case.query[row].unflatten(0, (shape.kv_heads, shape.group)).float()
        count = torch.tensor(length, device=DEVICE)
        want = sparse_attention(query, keys.float(), values.float(), pages, count, case.scale).flatten(0, 1)
        assert (output[row].float() - want).abs().max() <= 1.5e-2 * max(1.0, float(want.abs().max()))
        assert (output[row].float() - want).square().mean().sqrt() <= 4e-3
