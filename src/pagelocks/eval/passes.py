"""What rivals learn from a long prompt, in Triton: all attention, and all likeness of keys, without a matrix of either.

H2O, LazyEviction, KVzip and R-KV look at as many numbers as there are pairs of tokens.  In plain PyTorch these are
written down and read again several times; here a block of them lives in registers, and sums, maxima and gaps alone are
stored.  `History` computes the same in PyTorch, which is the reference.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..selectors import history

BLOCK = 64
"""Queries by keys of a block; at head sizes up to 128 both and their product fit in registers."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TYPES = (torch.bfloat16, torch.float16)
"""Products of these are exact in fp32."""


@triton.jit
def _later(one, other):  # type: ignore[no-untyped-def]
    """So that a scan gives the latest so far."""
    return tl.maximum(one, other)


@triton.jit  # type: ignore[untyped-decorator]
def _block(base, stride, first, count, D: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows `first` to `first + BLOCK` of a matrix; zeros from `count` on."""
    row = first + tl.arange(0, BLOCK)
    place = base + (row * stride)[:, None] + tl.arange(0, D)[None, :]
    return tl.load(place, mask=row[:, None] < count, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _normalisers(  # type: ignore[no-untyped-def]
    query, keys, out, scale, steps, tokens, query_lead, query_group, query_step, key_lead, key_step,
    G: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp of each query's logits, by blocks of queries; grid (blocks, lead * G)."""
    start, number = tl.program_id(0) * BLOCK, tl.program_id(1).to(tl.int64)
    lead, head = number // G, number % G
    row = start + tl.arange(0, BLOCK)
    position = tokens - steps + row
    query_block = _block(query + lead * query_lead + head * query_group, query_step, start, steps, D, BLOCK)
    peak = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, tl.minimum(tokens, tokens - steps + start + BLOCK), BLOCK):
        column = first + tl.arange(0, BLOCK)
        key_block = _block(keys + lead * key_lead, key_step, first, tokens, D, BLOCK)
        logits = tl.dot(query_block, tl.trans(key_block)) * scale
        logits = tl.where(column[None, :] <= position[:, None], logits, float("-inf"))
        larger = tl.maximum(peak, tl.max(logits, 1))
        total = total * tl.exp(peak - larger) + tl.sum(tl.exp(logits - larger[:, None]), 1)
        peak = larger
    tl.store(out + number * steps + row, peak + tl.log(total), mask=row < steps)


@triton.jit  # type: ignore[untyped-decorator]
def _columns(  # type: ignore[no-untyped-def]
    query, keys, normalisers, sums, most, last, gap, scale, threshold, steps, tokens,
    query_lead, query_group, query_step, key_lead, key_step,
    GAPS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What each key gets, by blocks of keys; grid (blocks, lead * G).  `last` and `gap` are gone on with."""
    start, number = tl.program_id(0) * BLOCK, tl.program_id(1).to(tl.int64)
    lead, head = number // G, number % G
    column = start + tl.arange(0, BLOCK)
    place, there = number * tokens + column, column < tokens
    key_block = _block(keys + lead * key_lead, key_step, start, tokens, D, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    largest = tl.zeros([BLOCK], tl.float32)
    if GAPS:
        latest = tl.load(last + place, mask=there, other=0.0).to(tl.int32)
        longest = tl.load(gap + place, mask=there, other=0.0).to(tl.int32)
    before = tokens - steps
    for first in range(tl.maximum(0, start - before) // BLOCK * BLOCK, steps, BLOCK):
        row = first + tl.arange(0, BLOCK)
        query_block = _block(query + lead * query_lead + head * query_group, query_step, first, steps, D, BLOCK)
        normaliser = tl.load(normalisers + number * steps + row, mask=row < steps, other=float("inf"))
        weights = tl.exp(tl.dot(query_block, tl.trans(key_block)) * scale - normaliser[:, None])
        weights = tl.where(column[None, :] <= (before + row)[:, None], weights, 0.0)
        total += tl.sum(weights, 0)
        greatest = tl.max(weights, 0)
        largest = tl.maximum(largest, greatest)
        if GAPS:  # noqa: SIM102 - known when it is compiled, what follows is not
            if tl.max(greatest, 0) >= threshold:
                position = (before + row)[:, None]
                # The last position that reached the threshold, -1 for none; a gap that is closed is one more than the
                # longest that a key was left alone before it.
                reached = tl.where(weights >= threshold, position, -1)
                ended = tl.max(reached, 0)
                began = tl.min(tl.where(reached < 0, 1 << 30, reached), 0)
                recent = tl.associative_scan(reached, 0, _later)
                inside = (position >= began[None, :]) & (position < ended[None, :])
                alone = tl.max(tl.where(inside, position - recent + 1, 0), 0)
                longest = tl.maximum(longest, tl.where(ended >= 0, tl.maximum(alone, began - latest), 0))
                latest = tl.maximum(latest, ended)
    tl.store(sums + place, total, mask=there)
    tl.store(most + place, largest, mask=there)
    if GAPS:
        tl.store(last + place, latest.to(tl.float32), mask=there)
        tl.store(gap + place, longest.to(tl.float32), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _likeness(  # type: ignore[no-untyped-def]
    keys, inverse, total, last, cosine, threshold, row_start, row_stop, column_start, column_stop, tokens,
    key_lead, key_step, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows' cosines with columns, added to what is known of the rows; grid (blocks of rows, lead)."""
    start, lead = row_start + tl.program_id(0) * BLOCK, tl.program_id(1).to(tl.int64)
    row = start + tl.arange(0, BLOCK)
    place, there = lead * tokens + row, row < row_stop
    keys += lead * key_lead
    rows = _block(keys, key_step, start, row_stop, D, BLOCK)
    size = tl.load(inverse + place, mask=there, other=0.0)
    rows = tl.where(size[:, None] > 0, rows, 0.0).to(rows.dtype)
    summed = tl.load(total + place, mask=there, other=0.0)
    latest = tl.load(last + place, mask=there, other=0)
    value = tl.load(cosine + place, mask=there, other=0.0)
    for first in range(column_start, column_stop, BLOCK):
        column = first + tl.arange(0, BLOCK)
        columns = _block(keys, key_step, first, column_stop, D, BLOCK)
        known = column < column_stop
        sizes = tl.load(inverse + lead * tokens + column, mask=known, other=0.0)
        columns = tl.where(sizes[:, None] > 0, columns, 0.0).to(rows.dtype)
        cosines = tl.dot(rows, tl.trans(columns)) * size[:, None] * sizes[None, :]
        cosines = tl.where(row[:, None] == column[None, :], 0.0, cosines)
        summed += tl.sum(cosines, 1)
        like = tl.where((cosines > threshold) & known[None, :], column[None, :] + 1, 0)
        newest = tl.max(like, 1)
        found = tl.sum(tl.where((like > 0) & (like == newest[:, None]), cosines, 0.0), 1)
        value = tl.where(newest > 0, found, value)
        latest = tl.where(newest > 0, newest, latest)
    tl.store(total + place, summed, mask=there)
    tl.store(last + place, latest, mask=there)
    tl.store(cosine + place, value, mask=there)


def _usable(query: Tensor, keys: Tensor) -> bool:
    """Of `query` (..., n, d), or the keys themselves, and keys (..., T, d); offsets within a matrix are 32 bits."""
    return (
        keys.ndim > 2
        and keys.dtype == query.dtype in TYPES
        and keys.shape[-1] in (32, 64, 128)
        and all(each.is_cuda or INTERPRETED for each in (query, keys))
        and all(each.stride(-1) == 1 and each.shape[-2] * each.stride(-2) < 2**31 for each in (query, keys))
    )


def columns(query: Tensor, keys: Tensor, scale: float, gaps: history.Gaps | None) -> history.Columns | None:
    """What each key gets of the attention of the last n tokens.

    Parameters
    ----------
    query : (..., G, n, d);  keys : (..., T, d), one lead dimension or more
    scale : float
    gaps : with fp32 (..., G, T), to be continued

    Returns
    -------
    Columns; None for other types than 16 bits, other head sizes than 32, 64 and 128, and other devices.
    """
    if not _usable(query, keys):
        return None
    group, steps, head_dim = query.shape[-3:]
    tokens = keys.shape[-2]
    queries, matrix = query.flatten(0, -4), keys.flatten(0, -3)
    number = len(matrix) * group
    normalisers = keys.new_empty(number, steps, dtype=torch.float32)
    sums, most = (keys.new_empty((*query.shape[:-2], tokens), dtype=torch.float32) for _ in range(2))
    threshold, last, longest = gaps or (1.0, None, None)
    last, longest = (None if each is None else each.contiguous().clone() for each in (last, longest))
    strides = queries.stride(0), queries.stride(1), queries.stride(2), matrix.stride(0), matrix.stride(1)
    with torch.cuda.device_of(keys):  # type: ignore[no-untyped-call]
        _normalisers[triton.cdiv(steps, BLOCK), number](
            queries, matrix, normalisers, scale, steps, tokens, *strides, G=group, D=head_dim, BLOCK=BLOCK
        )
        _columns[triton.cdiv(tokens, BLOCK), number](
            queries, matrix, normalisers, sums, most, last, longest, scale, threshold, steps, tokens, *strides,
            GAPS=gaps is not None, G=group, D=head_dim, BLOCK=BLOCK,
        )  # fmt: skip
    if gaps is None or last is None or longest is None:
        return history.Columns(sums, most, None)
    return history.Columns(sums, most, history.Gaps(gaps.threshold, last, longest))


def likeness(
    keys: Tensor, inverse: Tensor, threshold: float, known: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Each key's cosines with all others; as `history.Passes` says, None where `columns` answers None."""
    if not _usable(keys, keys):
        return None
    tokens, start = keys.shape[-2], known[0].shape[-1]
    total, last, cosine = (torch.nn.functional.pad(each, (0, tokens - start)) for each in known)
    matrix, inverse = keys.flatten(0, -3), inverse.contiguous()
    for rows, some in (((0, start), (start, tokens)), ((start, tokens), (0, tokens))):
        if rows[1] > rows[0] and some[1] > some[0]:
            with torch.cuda.device_of(keys):  # type: ignore[no-untyped-call]
                _likeness[triton.cdiv(rows[1] - rows[0], BLOCK), len(matrix)](
                    matrix, inverse, total, last, cosine, threshold, *rows, *some, tokens,
                    matrix.stride(0), matrix.stride(1), D=keys.shape[-1], BLOCK=BLOCK,
                )  # fmt: skip
    return total, last, cosine


def use() -> None:
    """Have the selectors learn by these."""
    history.passes = history.Passes(columns, likeness)
