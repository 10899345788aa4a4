"""Rank by precision: what bits of the basis and its rank buy, in coverage, carriers kept and log-mass.

Coefficients and centroid are int8 throughout, so that the basis alone differs.  8, 4 and 2 bits are `LocksConfig`'s;
16 is the unquantised basis rounded to bf16, which no record stores, so that its bytes are counted and not laid out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...config import LocksConfig, reject
from ...layout import record_layout
from ...score import log_mass
from ...summary import PageSummary, summarize
from ...theory import exact_log_mass
from ..carriers import carriers_kept
from ..links import choose_pages, coverage, group_coverage_ratio, log_mass_error, page_mass
from .means import Means, Row, line_panels

if TYPE_CHECKING:  # it needs Transformers, and the command line does not
    from ..capture import Captured

BUDGETS = [128]
RANKS = [1, 2, 4, 8, 12, 15]
BITS = [16, 8, 4, 2]


def summary_of(pages: Tensor, rank: int, bits: int) -> PageSummary:
    """Summaries of pages (H, P, B, d) whose basis has 16, 8, 4 or 2 bits."""
    if bits not in BITS:
        raise reject("bits", bits, "16, 8, 4 or 2", "Use 4.")
    size = pages.shape[-2]
    summary = summarize(pages, LocksConfig(3 * size, rank, size, basis_bits=None if bits == 16 else bits))
    return summary if bits < 16 else replace(summary, basis=summary.basis.to(torch.bfloat16).to(torch.float32))


def bytes_of(head_dim: int, rank: int, bits: int, page_size: int = LocksConfig.page_size) -> int:
    """Bytes of a record; at 16 bits, of one whose basis takes half the bytes of fp32."""
    config = LocksConfig(3 * page_size, rank, page_size, basis_bits=None if bits == 16 else bits)
    return record_layout(head_dim, config).record_bytes - (2 * head_dim * rank if bits == 16 else 0)


def rows(
    records: Iterable[Captured],
    budgets: Sequence[int] = BUDGETS,
    ranks: Sequence[int] = RANKS,
    bits: Sequence[int] = BITS,
) -> list[Row]:
    """One row for each budget, rank and bits.

    `coverage_ratio` to the oracle's; `retention`, of the carrier pages that the oracle keeps, where a prompt has
    carriers; `log_mass_mae` and `log_mass_weighted`, by exact share, in nats; `bytes` a page.
    """
    means = Means("budget", "bits", "rank")
    for seen in records:
        record = seen.record
        pages, mass = record.pages(LocksConfig()).keys(), page_mass(record, LocksConfig.page_size)
        exact = exact_log_mass(record.query, pages, record.scale)
        for each in bits:
            for rank in ranks:
                estimate = log_mass(record.query, summary_of(pages, rank, each), record.scale)
                error = log_mass_error(estimate, exact)
                for budget in budgets:
                    config = LocksConfig(budget)
                    chosen, best = (choose_pages(m, record.length, config) for m in (estimate, exact))
                    values = {}
                    if record.carriers:
                        values["retention"] = carriers_kept(record, chosen, best, LocksConfig.page_size)
                    means.add(
                        (budget, each, rank),
                        seen.prompt,
                        bytes=bytes_of(pages.shape[-1], rank, each),
                        coverage_ratio=group_coverage_ratio(coverage(mass, chosen), coverage(mass, best)),
                        log_mass_mae=error.plain,
                        log_mass_weighted=error.weighted,
                        **values,
                    )
    return means.rows(["coverage_ratio", "retention"])


def draw(rows: Sequence[Row], figure: Any) -> None:
    """Coverage and weighted log-mass error against rank, a line for each number of bits, at the first budget."""
    titles = {
        "coverage_ratio": f"coverage / oracle's, {rows[0]['budget']} tokens",
        "log_mass_weighted": "log-mass error, nats, by share",
    }
    line_panels(rows, figure, titles, "rank", "bits", "{} bits", "rank")
