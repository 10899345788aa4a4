"""From shares to the pages a KV head reads."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import LocksConfig, check_lengths, lengths_on


def select_pages(share: Tensor, lengths: Tensor, config: LocksConfig) -> Tensor:
    """The sink pages, the recent pages and the best others by share, within the budget.

    Parameters
    ----------
    share : (..., P)
        From `page_share`.  Pages past P, up to the end of the sequence, count as share 0.
    lengths : integer (...)
        Tokens in the sequence; one number, or as many dimensions as lead.
        On the CPU they save a wait for the GPU.
    config : LocksConfig

    Returns
    -------
    int32 (..., budget_pages)
        Page ids, ascending, then -1: min(budget_pages, pages of the sequence) distinct ones.  Ties go to the lower
        page; a page of share +inf comes before any other but sink and recent.
    """
    check_lengths(tuple(lengths.shape), tuple(share.shape[:-1]))
    most_pages = -(-int(lengths.max()) // config.page_size) if lengths.numel() else 0
    lengths = lengths_on(lengths, share.device).broadcast_to(share.shape[:-1]).to(torch.int64)
    held = (lengths + config.page_size - 1).div(config.page_size, rounding_mode="floor").unsqueeze(-1)
    columns = max(share.shape[-1], config.budget_pages, most_pages)
    share = torch.nn.functional.pad(share, (0, columns - share.shape[-1]))
    pages = torch.arange(columns, device=share.device).expand_as(share)
    always = (pages < config.sink_pages) | (pages >= held - config.recent_pages)
    largest = torch.finfo(share.dtype).max
    key = torch.where(always, torch.inf, share.nan_to_num(largest, largest))
    key = torch.where(pages >= held, -torch.inf, key)
    # A stable sort: equal shares keep their order, lower page first.
    chosen = key.sort(dim=-1, descending=True, stable=True).indices[..., : config.budget_pages]
    chosen = torch.where(chosen < held, chosen, columns).sort(-1).values
    return torch.where(chosen < columns, chosen, -1).to(torch.int32)
