"""Exact attention over the selected pages."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import check_lengths, lengths_on, reject


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Softmax attention of G query heads over T tokens, in fp32.

    Parameters
    ----------
    query : (..., G, d);  keys, values : (..., T, d);  mask : bool (..., T), True where a token is attended
    scale : float

    Returns
    -------
    (..., G, d) in the query's dtype; zeros where nothing is attended.
    """
    wide = torch.float32 if query.dtype != torch.float64 else torch.float64
    logits = (query.to(wide) @ keys.to(wide).mT) * scale
    logits = torch.where(mask.unsqueeze(-2), logits, -torch.inf)
    peak = logits.amax(-1, keepdim=True)
    weight = (logits - torch.where(peak == -torch.inf, 0, peak)).exp()
    total = weight.sum(-1, keepdim=True)
    # A token that is not attended may hold NaN, which times a weight of zero would still be NaN.
    attended = torch.where(mask.unsqueeze(-1), values.to(wide), 0)
    return ((weight @ attended) / torch.where(total == 0, 1, total)).to(query.dtype)


def sparse_attention(
    query: Tensor, keys: Tensor, values: Tensor, pages: Tensor, lengths: Tensor, scale: float, page_size: int = 16
) -> Tensor:
    """Attention over the tokens of the listed pages, as if no other existed.

    Parameters
    ----------
    query : (..., G, d)
    keys, values : (..., tokens, d)
    pages : integer (..., k)
        Distinct page ids in any order, -1 for none; tokens past `lengths` are not attended.
    lengths : integer (...)
        Tokens in the sequence; one number, or as many dimensions as lead.
        On the CPU they save a wait for the GPU.
    scale : float
    page_size : int

    Returns
    -------
    (..., G, d) in the query's dtype; with every page listed, dense attention.

    Raises
    ------
    ValueError
        If keys and values differ in shape, or a page lies past the tokens given.
    """
    if keys.shape != values.shape:
        allowed = f"the keys' shape, {tuple(keys.shape)}"
        raise reject("values.shape", tuple(values.shape), allowed, "Pass the K and V of the same tokens.")
    check_lengths(tuple(lengths.shape), tuple(pages.shape[:-1]))
    tokens, head_dim = keys.shape[-2:]
    longest = int(lengths.max()) if lengths.numel() else 0
    lengths = lengths_on(lengths, pages.device)
    within = torch.arange(page_size, device=pages.device)
    index = (pages.to(torch.int64).unsqueeze(-1) * page_size + within).flatten(-2)  # (..., k * page_size)
    mask = (pages >= 0).repeat_interleave(page_size, -1) & (index < lengths.unsqueeze(-1))
    if longest > tokens and bool((mask & (index >= tokens)).any()):
        allowed = f"page {int(pages.max())} is listed, but {tokens} tokens were given"
        raise reject("lengths", lengths.tolist(), allowed, "Pass every token of the sequence, and its length.")
    if tokens == 0:
        return torch.zeros_like(query)
    index = torch.where(mask, index, 0).unsqueeze(-1).expand(*index.shape, head_dim)
    return attend(query, keys.gather(-2, index), values.gather(-2, index), mask, scale)
