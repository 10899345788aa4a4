"""The links from keys to an attention output, measured one by one on recorded decode steps, any selector alike.

A score at the end of the chain cannot tell which link failed, so each has a number of its own, against the exact
oracle on the same record (LOCKS, arXiv 2607.24555, section 5).  In the order of the chain, H KV heads, G query heads
a group, P complete pages:

    estimate = estimate_log_mass(record, selector, config)  # once: Random answers differently each time
    exact = exact_log_mass(record.query, record.pages(config).keys(), record.scale)
    errors = log_mass_error(estimate, exact)
    correlation = rank_correlation(estimate, exact, record.length, config)
    chosen = choose_pages(estimate, record.length, config)
    best = choose_pages(estimate_log_mass(record, Exact(), config), record.length, config)
    mass = page_mass(record, config.page_size)
    held, possible = coverage(mass, chosen), coverage(mass, best)
    mean, heads = group_coverage_ratio(held, possible).mean(), summarize_heads(coverage_ratio(held, possible))

Before the score come the keys that a basis holds (`eval.energy`), after the choice the pages that hold the answer
(`eval.carriers`) and the output (`eval.outputs`).  What is measured is float64, whatever the record's dtype, and free
of NaN for every record that `DecodeRecord` accepts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import LocksConfig, reject
from ..score import page_share
from ..select import select_pages
from ..selectors import Selector
from ..selectors.groups import GroupRule
from .decode_record import DecodeRecord


def estimate_log_mass(record: DecodeRecord, selector: Selector, config: LocksConfig) -> Tensor:
    """What a selector takes each complete page's log-mass to be: (H, G, P), natural log, in its own precision.

    A selector that observes must have been shown the steps before this one.
    """
    return selector.log_mass(record.query, record.pages(config), record.scale)


def choose_pages(log_mass: Tensor, length: int, config: LocksConfig, rule: GroupRule = page_share) -> Tensor:
    """The pages that follow from log-masses (H, G, P): shares, budget, sink, recent and ties as served.

    Returns
    -------
    int32 (H, budget_pages)
        Ascending, then -1; (H, G, budget_pages) by a rule that lets each query head choose for itself.
    """
    lengths = torch.tensor(length, device=log_mass.device)
    return select_pages(rule(log_mass, lengths, config), lengths, config)


def logit_error(query: Tensor, pages: Tensor, reconstructed: Tensor, scale: float) -> Tensor:
    """Mean absolute error of a page's logits, mean_i |q . k^_i - q . k_i| * scale.

    Parameters
    ----------
    query : (..., G, d)
    pages, reconstructed : (..., P, B, d)
        Keys and what stands for them: `PageSummary.keys()`, or `eval.energy.reconstruct` for a shared basis.
    scale : float

    Returns
    -------
    float64 (..., G, P)
        In logits.  Every page has as many tokens, so a plain mean of these is the MAE over tokens.
    """
    _check_alike("reconstructed", reconstructed, pages)
    if not bool(reconstructed.isfinite().all()):
        raise reject("reconstructed", "NaN or infinity", "finite keys", "Leave out pages that are not scorable.")
    missed = reconstructed.double() - pages.double()
    return (torch.einsum("...gd,...pbd->...gpb", query.double(), missed) * scale).abs().mean(-1)


@dataclass(frozen=True, eq=False)
class LogMassError:
    """Errors of log-masses, float64, natural log.

    Attributes
    ----------
    absolute : (..., G, P)
        Infinite where the selector named no log-mass but had the page read, or left out, whatever the query.
    plain : (..., G)
        Mean over the other pages, 0 if there are none.  Most pages hold nothing and yet count alike, so a
        representation can win this one and lose coverage.
    weighted : (..., G)
        The same, a page counting by its exact share.
    largest : (..., G)
        Its maximum over a group is Theorem 1's eta (Eq. 6), infinite with any of `absolute`.
    """

    absolute: Tensor
    plain: Tensor
    weighted: Tensor
    largest: Tensor


def log_mass_error(estimate: Tensor, exact: Tensor) -> LogMassError:
    """|s^_g(j) - s_g(j)|: its mean over pages, sum_j m_g(j) |s^_g(j) - s_g(j)| / sum_j m_g(j), and maximum.

    Parameters
    ----------
    estimate, exact : (..., G, P)
        A selector's log-masses, and `theory.exact_log_mass` of the same pages; m_g = softmax_j s_g.

    Returns
    -------
    LogMassError
    """
    _check_alike("estimate", estimate, exact)
    if exact.shape[-1] == 0:
        raise reject("exact.shape[-1]", 0, "one complete page or more", "Leave out records shorter than a page.")
    if not bool(exact.isfinite().all()) or bool(estimate.isnan().any()):
        allowed = "exact log-masses that are finite, and estimates that are numbers"
        raise reject("estimate, exact", "NaN or infinity", allowed, "Leave the record out, and find its origin.")
    absolute = (estimate.double() - exact.double()).abs()
    counted = absolute.isfinite()
    error, share = torch.where(counted, absolute, 0), exact.double().softmax(-1) * counted
    held = share.sum(-1)
    return LogMassError(
        absolute=absolute,
        plain=error.sum(-1) / counted.sum(-1).clamp(min=1),
        weighted=(share * error).sum(-1) / torch.where(held > 0, held, 1),
        largest=absolute.amax(-1),
    )


def spearman(first: Tensor, second: Tensor) -> Tensor:
    """Spearman's rank correlation along the last dimension: Pearson's r of the ranks, equal values sharing their mean.

    Parameters
    ----------
    first, second : (..., n)

    Returns
    -------
    float64 (...)
        -1 to 1; 0 where a side is without any order, all its values equal.
    """
    _check_alike("first", first, second)
    if bool(first.isnan().any()) or bool(second.isnan().any()):
        raise reject("first, second", "NaN", "numbers that have an order", "Leave those pages out.")
    ranks = [_ranks(each) for each in (first, second)]
    deviations = [each - (first.shape[-1] + 1) / 2 for each in ranks]
    norms = [each.square().sum(-1) for each in deviations]
    product = (norms[0] * norms[1]).sqrt()
    return (deviations[0] * deviations[1]).sum(-1) / torch.where(product > 0, product, 1)


def _ranks(values: Tensor) -> Tensor:
    """float64: 1 for the least; equal values have the mean of the ranks that they take up together."""
    values = values.contiguous()
    ascending = values.sort(-1).values
    below = torch.searchsorted(ascending, values)
    not_above = torch.searchsorted(ascending, values, right=True)
    return (below + not_above + 1).double() / 2


def rank_correlation(estimate: Tensor, exact: Tensor, length: int, config: LocksConfig) -> Tensor:
    """Spearman's correlation of estimated and exact page shares (Eq. 5), over a KV head's complete pages.

    Parameters
    ----------
    estimate, exact : (H, G, P)
        Log-masses; their shares are what the group's one ranking is made of.  Pages that a selector has read whatever
        the query rank above all others, and equal.

    Returns
    -------
    float64 (H,)
    """
    _check_alike("estimate", estimate, exact)
    lengths = torch.tensor(length, device=exact.device)
    # In fp32, as the selection sees them: shares that vanish there are ties.
    return spearman(page_share(estimate, lengths, config), page_share(exact, lengths, config))


def page_mass(record: DecodeRecord, page_size: int) -> Tensor:
    """The exact attention mass of each page, softmax over all `length` tokens: float64 (H, G, pages), sums of 1.

    Unlike `page_share`'s, the denominator holds a last, partial page, which is attended too: ceil(length / page_size)
    pages.
    """
    keys = record.keys[:, : record.length].double()
    weight = ((record.query.double() @ keys.mT) * record.scale).softmax(-1)
    weight = torch.nn.functional.pad(weight, (0, -record.length % page_size))
    return torch.unflatten(weight, -1, (-1, page_size)).sum(-1)


def kept_pages(pages: Tensor, count: int) -> Tensor:
    """Page ids (..., k), -1 for none, as a mask: bool (..., count)."""
    if pages.is_floating_point() or (pages.numel() and not -1 <= int(pages.min()) <= int(pages.max()) < count):
        found = f"{pages.dtype} from {pages.min().item()} to {pages.max().item()}"
        allowed = f"page ids from 0 to {count - 1}, and -1 for none"
        raise reject("pages", found, allowed, "Choose pages with the record's own length and page size.")
    mask = torch.zeros(*pages.shape[:-1], count + 1, dtype=torch.bool, device=pages.device)
    return mask.scatter(-1, torch.where(pages >= 0, pages, count).to(torch.int64), True)[..., :count]


def coverage(mass: Tensor, pages: Tensor) -> Tensor:
    """gamma_S(q_g), the exact attention mass of the pages a KV head chose, for each head of its group.

    Parameters
    ----------
    mass : (..., G, pages of the sequence)
        From `page_mass`: over all tokens, so the sink, the recent and a partial page count as they are attended.
    pages : integer (..., k), or (..., G, k) if each head chose for itself
        -1 for none.

    Returns
    -------
    (..., G)
    """
    kept = kept_pages(pages, mass.shape[-1])
    return (mass * (kept if kept.ndim == mass.ndim else kept.unsqueeze(-2))).sum(-1)


def coverage_ratio(chosen: Tensor, oracle: Tensor) -> Tensor:
    """A choice's coverage (..., G) over that of the oracle's choice at the same budget, head by head.

    For the worst head and percentiles.  It may exceed 1: the oracle chooses for a group's average, so some head may do
    better by a worse choice, and by much if the oracle left it little; for a mean, take `group_coverage_ratio`.  It is
    1 where the oracle's choice holds nothing.
    """
    _check_alike("chosen", chosen, oracle)
    return torch.where(oracle > 0, chosen / torch.where(oracle > 0, oracle, 1), 1)


def group_coverage_ratio(chosen: Tensor, oracle: Tensor) -> Tensor:
    """The group's mean coverage over the oracle's, mean_g gamma_S(q_g) / mean_g gamma*(q_g): (..., G) -> (...).

    What Theorem 1 (ii) speaks of.  No shared choice is above 1 in a sequence of complete pages; beside a partial page,
    whose mass the ranking does not know, it may be by little.
    """
    return coverage_ratio(chosen.mean(-1), oracle.mean(-1))


@dataclass(frozen=True)
class HeadSummary:
    """`mean` over all heads, `worst_head` of a group averaged over groups, `percentile_5` and `least` of all heads."""

    mean: float
    worst_head: float
    percentile_5: float
    least: float
    heads: int


def summarize_heads(values: Tensor) -> HeadSummary:
    """Coverages or ratios (..., G), of any number of records, layers and KV heads, in five numbers.

    The worst head, min over g, is the starved-head test of the paper's Table D.17: one choice serves a group, and its
    average hides the head that gets nothing.  The percentile interpolates linearly between heads.
    """
    if values.numel() == 0 or not bool(values.isfinite().all()):
        allowed = "finite numbers, (..., G), at least one"
        raise reject("values", f"shape {tuple(values.shape)}", allowed, "Join records with torch.cat.")
    values = values.double()
    worst, percentile = values.amin(-1).mean(), values.flatten().quantile(0.05)
    return HeadSummary(float(values.mean()), float(worst), float(percentile), float(values.min()), values.numel())


def _check_alike(name: str, tensor: Tensor, other: Tensor) -> None:
    if tensor.shape != other.shape:
        allowed = f"the shape of what it is held against, {tuple(other.shape)}"
        raise reject(f"{name}.shape", tuple(tensor.shape), allowed, "Take both from one record and configuration.")
