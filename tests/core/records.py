"""Decode records for the tests of `pagelocks.eval`, and the slow, plain way from one to its logits."""

import torch

from pagelocks.eval.decode_record import DecodeRecord

from .helpers import normal


def make_record(
    seed=0, heads=2, group=3, length=75, head_dim=32, dtype=torch.float32, spare=5, carriers=(), page_size=8
):
    """Pages around centroids of their own, most energy in few directions; `spare` tokens of NaN past the length."""
    pages = -(-length // page_size)
    spectrum = torch.linspace(1.5, 0.1, head_dim)
    keys = normal(seed, heads, pages, page_size, head_dim) * spectrum
    keys = (keys + normal(seed + 1, heads, pages, 1, head_dim)).flatten(1, 2)[:, :length]
    values = normal(seed + 2, heads, length, head_dim)
    past = torch.full((heads, spare, head_dim), torch.nan)
    keys, values = (torch.cat([part, past], 1).to(dtype) for part in (keys, values))
    query = (normal(seed + 3, heads, group, head_dim) * 2).to(dtype)
    return DecodeRecord(query, keys, values, head_dim**-0.5, length, carriers)


def slow_logits(record):
    """logits[h][g][t], numbers: one product at a time."""
    query, keys = record.query.double().tolist(), record.keys.double().tolist()
    return [
        [[sum(a * b for a, b in zip(q, k, strict=True)) * record.scale for k in head[: record.length]] for q in group]
        for group, head in zip(query, keys, strict=True)
    ]
