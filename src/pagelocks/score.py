"""From summaries to each page's share of the attention mass, without reading a key."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import LocksConfig, check_lengths, lengths_on, reject
from .quantize import power_of_two
from .summary import PageSummary

_LARGEST_LOGIT = 1e38
"""Logits are clamped to this, so that finite input leaves neither infinity nor NaN in fp32."""


def log_mass(query: Tensor, summary: PageSummary, scale: float) -> Tensor:
    """Each page's log-mass, the log-sum-exp of its reconstructed logits (Eq. 4).

        s_g(j) = logsumexp_i( (q_g . mu_j + (V_j^T q_g) . c_i) * scale )

    Parameters
    ----------
    query : (..., G, d)
        The G query heads of a KV head's group.
    summary : PageSummary of (..., P) pages
    scale : float
        Logits per unit of q . k, usually 1 / sqrt(d).

    Returns
    -------
    fp32 (..., G, P)
        Natural log; +inf where the page is not scorable, so that it is read exactly.
    """
    if query.shape[-1] != summary.head_dim:
        allowed = f"the summaries hold keys of size {summary.head_dim}"
        raise reject("query.shape[-1]", query.shape[-1], allowed, "Score with the summaries of the same layer.")
    query = query.to(torch.float64)
    query_exponent = torch.frexp(query.abs().amax(-1)).exponent  # (..., G)
    query = (query * power_of_two(-query_exponent).unsqueeze(-1)).to(torch.float32)
    centre = query @ summary.centroid_in_page_units().mT  # (..., G, P)
    basis = summary.basis_in_page_units()  # (..., P, r, d)
    pages, rank, _ = basis.shape[-3:]
    projection = torch.unflatten(query @ basis.flatten(-3, -2).mT, -1, (pages, rank))  # (..., G, P, r)
    # Batched over pages: (P, G, r) @ (P, r, B).
    logits = projection.transpose(-3, -2) @ summary.coefficients_in_page_units()
    logits = logits + centre.transpose(-2, -1).unsqueeze(-1)  # (..., P, G, B)
    page_exponent = torch.where(summary.scorable, summary.exponent, 0)
    exponent = page_exponent.unsqueeze(-1) + query_exponent.unsqueeze(-2)
    logits = (logits * (power_of_two(exponent) * scale).unsqueeze(-1)).clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT)
    mass = logits.to(torch.float32).logsumexp(-1)  # (..., P, G)
    return torch.where(summary.scorable.unsqueeze(-1), mass, torch.inf).transpose(-2, -1)


def page_share(log_mass: Tensor, lengths: Tensor, config: LocksConfig) -> Tensor:
    """Each page's share of the attention mass, averaged over the group's heads (Eq. 5).

        m(j) = mean_g softmax_j s_g(j),  over the pages that are complete within the length, the sink included

    Parameters
    ----------
    log_mass : (..., G, P)
    lengths : integer (...)
        Tokens in the sequence; one number, or as many dimensions as lead.
    config : LocksConfig

    Returns
    -------
    fp32 (..., P)
        0 for pages that are not complete; +inf for a complete page whose log-mass is +inf or NaN in any head: it is
        to be read exactly and stays out of the denominator.
    """
    check_lengths(tuple(lengths.shape), tuple(log_mass.shape[:-2]))
    if log_mass.shape[-1] == 0:  # no complete page yet
        return log_mass.new_zeros((*log_mass.shape[:-2], 0), dtype=torch.float32)
    pages = torch.arange(log_mass.shape[-1], device=log_mass.device)
    lengths = lengths_on(lengths, log_mass.device)
    complete = (pages + 1) * config.page_size <= lengths.unsqueeze(-1)  # (..., P)
    unknown = (log_mass.isnan() | (log_mass == torch.inf)).any(-2)
    scored = (complete & ~unknown).unsqueeze(-2)
    masked = torch.where(scored, log_mass.to(torch.float32), -torch.inf)
    peak = masked.amax(-1, keepdim=True)
    weight = torch.where(scored, (masked - torch.where(peak == -torch.inf, 0, peak)).exp(), 0)
    total = weight.sum(-1, keepdim=True)
    share = (weight / torch.where(total > 0, total, 1)).mean(-2)
    return torch.where(complete & unknown, torch.inf, share)
