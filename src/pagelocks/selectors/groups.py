"""How the query heads of a KV head's group agree on pages: from each head's log-mass to one ranking, or one a head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..config import LocksConfig, check_lengths, reject
from ..score import page_share

GroupRule = Callable[[Tensor, Tensor, LocksConfig], Tensor]
"""(log_mass (..., G, P), lengths (...), config) -> fp32 (..., P); per head (..., G, P)."""


def share(log_mass: Tensor, lengths: Tensor, config: LocksConfig) -> Tensor:
    """m(j) = mean_g softmax_j s_g(j): what LOCKS does (Eq. 5), the best mean coverage of any shared choice."""
    return page_share(log_mass, lengths, config)


def largest(log_mass: Tensor, lengths: Tensor, config: LocksConfig) -> Tensor:
    """m(j) = max_g softmax_j s_g(j): a page that matters much to one head is not voted down by the others."""
    return per_head(log_mass, lengths, config).amax(-2)


def peak(log_mass: Tensor, lengths: Tensor, config: LocksConfig) -> Tensor:
    """m(j) = sum_g exp(s_g(j) - max_i s_g(i)): heads weigh by their peaks, so that diffuse heads count for more.

    What the public package locks-kv 0.1.4 does instead of Eq. 5.
    """
    shares = per_head(log_mass, lengths, config)
    finite = torch.where(shares.isinf(), 0, shares)  # a page to be read exactly is no head's peak
    top = finite.amax(-1, keepdim=True) if shares.shape[-1] else finite
    return (shares / torch.where(top > 0, top, 1)).sum(-2)


def per_head(log_mass: Tensor, lengths: Tensor, config: LocksConfig) -> Tensor:
    """m_g(j) = softmax_j s_g(j): every query head has pages of its own, and the group reads all of them."""
    check_lengths(tuple(lengths.shape), tuple(log_mass.shape[:-2]))
    heads = lengths.unsqueeze(-1) if lengths.ndim else lengths
    return page_share(log_mass.unsqueeze(-2), heads, config)


GROUP_RULES: dict[str, GroupRule] = {"share": share, "max": largest, "peak": peak, "per-head": per_head}
"""Name of a rule -> the rule."""


def group_rule(name: str) -> GroupRule:
    """The rule of this name; ValueError if there is none."""
    if name not in GROUP_RULES:
        raise reject("group_rule", name, f"one of {', '.join(GROUP_RULES)}", 'Use "share", which is what LOCKS does.')
    return GROUP_RULES[name]
