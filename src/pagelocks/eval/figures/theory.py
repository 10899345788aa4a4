"""What the paper proves, held against real keys: a bound that is broken is an error, how loose one is a number.

theorem-1-i     |s^ - s| <= ||q_perp|| sqrt(tau) scale, every page and query head, unquantised
theorem-1-ii    the choice keeps exp(-4 eta) of the oracle's coverage of the complete pages, eta as measured
theorem-1-iii   a group's mean output error <= 2 R (1 - exp(-4 eta) gamma*)
eq-1-identity   o - o_S = (1 - gamma_S) (v_dropped - v_kept), to rounding
eq-1-bound      ||o - o_S|| <= 2 R (1 - gamma_S)
proposition-1   a page changed where a calibrated basis is blind: Loki, sketching by it, sees nothing; LOCKS does
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ... import theory
from ...config import LocksConfig
from ...score import log_mass, page_share
from ...selectors import Exact, Locks
from ...selectors.loki import Loki
from ...summary import summarize
from ..decode_record import DecodeRecord
from ..links import choose_pages, estimate_log_mass, kept_pages, log_mass_error, page_mass
from ..outputs import output_bound, output_error, value_radius
from .means import Row
from .retention import principal_components

if TYPE_CHECKING:  # it needs Transformers, and the command line does not
    from ..capture import Captured

BUDGETS = [256]
RANKS = [1, 2, 4, 8, 12]
LEAD = 5.0  # nats by which a blind page's new key outweighs all of the sequence, for one query head
_FP32 = 3e-6  # of the largest |q| |k| scale: what fp32 leaves of a log-mass
_FP64 = 1e-12
_SHARE = 1e-5  # of coverage, added up from shares in fp32


@dataclass
class _Checks:
    """One statement at one rank; `tightness` is value / bound where the bound is not rounding."""

    checked: int = 0
    violated: int = 0
    largest: float = 0.0
    tightness: list[Tensor] = field(default_factory=list)

    def add(self, value: Tensor, bound: Tensor, slack: Tensor | float) -> None:
        excess = (value - bound - slack).flatten()
        self.checked += excess.numel()
        self.violated += int((~(excess <= 0)).sum())  # NaN is one too
        self.largest = max(self.largest, float(value.max()))
        self.tightness.append((value / bound.clamp(min=1e-300))[(bound > 10 * slack) & bound.isfinite()].cpu())

    def row(self) -> Row:
        values = torch.cat(self.tightness).sort().values
        row: Row = {"checked": self.checked, "violated": self.violated, "largest": float(f"{self.largest:.4g}")}
        for name, part in (("median", 0.5), ("p99", 0.99), ("max", 1.0)):
            place = min(len(values) - 1, int(part * len(values)))
            row[f"of_bound_{name}"] = float(f"{float(values[place]):.4g}") if len(values) else None
        return row


def rows(
    records: Iterable[Captured],
    calibration: Mapping[int, Sequence[Tensor]],
    budgets: Sequence[int] = BUDGETS,
    ranks: Sequence[int] = RANKS,
) -> list[Row]:
    """One row for each statement, rank and budget.

    `checked` cases, `violated` ones (beyond rounding), the `largest` value of what is bounded; `of_bound_median`,
    `_p99` and `_max`: the value as a part of its bound.  For the proposition, `violated` are cases in which the sketch
    moved; the other numbers are means or shares of the cases.
    """
    bases, blind, prompts = principal_components(calibration), _Blind(), set[int]()
    checks: dict[tuple[str, int, int | None], _Checks] = {}
    for seen in records:
        prompts.add(seen.prompt)
        for rank in ranks:
            _check(seen.record, rank, budgets, checks)
        for budget in budgets:
            blind.add(seen.record, bases[seen.layer], LocksConfig(budget))
    found = [
        {"statement": statement, "rank": rank, "budget": budget, **check.row()}
        for (statement, rank, budget), check in sorted(
            checks.items(), key=lambda item: (item[0][0], item[0][2] or 0, item[0][1])
        )
    ]
    return [row | {"prompts": len(prompts)} for row in [*found, *blind.rows()]]


def _check(
    record: DecodeRecord, rank: int, budgets: Sequence[int], checks: dict[tuple[str, int, int | None], _Checks]
) -> None:
    """Everything that is proved of one record at one rank."""
    size = LocksConfig.page_size
    pages = record.pages(LocksConfig()).keys()
    exact = theory.exact_log_mass(record.query, pages, record.scale)
    estimate = log_mass(record.query, summarize(pages, theory.unquantised(rank, size)), record.scale)
    error = log_mass_error(estimate, exact)
    norms = [torch.linalg.vector_norm(each.double(), dim=-1).amax() for each in (record.query, pages)]
    slack = float(_FP32 * norms[0] * norms[1] * record.scale)

    def check(statement: str, budget: int | None = None) -> _Checks:
        return checks.setdefault((statement, rank, budget), _Checks())

    bound = theory.log_mass_error_bound(record.query, pages, rank, record.scale)
    check("theorem-1-i").add(error.absolute, bound, slack)
    eta, radius = error.largest.amax(-1), value_radius(record)
    lengths = torch.tensor(record.length, device=exact.device)
    mass = page_mass(record, size)
    for budget in (each for each in budgets if each < record.length):
        config = LocksConfig(budget, rank, size)
        chosen, best = (choose_pages(each, record.length, config) for each in (estimate, exact))
        share = page_share(exact, lengths, config).double()
        share = torch.nn.functional.pad(share, (0, mass.shape[-1] - share.shape[-1]))  # a partial page has none
        kept, possible = theory.coverage(share, chosen), theory.coverage(share, best)
        # Lost coverage, of what the bound allows to be lost.
        check("theorem-1-ii", budget).add(possible - kept, (1 - theory.retention_bound(eta)) * possible, _SHARE)
        output = output_error(record, chosen, size)
        check("theorem-1-iii", budget).add(
            output.error.mean(-1), output_bound(record, exact, eta, config), 2 * float(radius.max()) * _SHARE
        )
        scale = float(radius.max())
        check("eq-1-bound", budget).add(output.error, output.mass_bound, _FP64 * scale)
        check("eq-1-identity", budget).add(output.identity_gap, torch.zeros_like(output.error), _FP64 * scale)


class _Blind:
    """Proposition 1 on real pages, by head: the least wanted page, changed where Loki's calibrated components end."""

    def __init__(self) -> None:
        self._cases: dict[tuple[int, int], list[dict[str, float]]] = {}

    def add(self, record: DecodeRecord, basis: Tensor, config: LocksConfig) -> None:
        """Make one blind page for the first query head of each KV head, and let all choose."""
        if config.budget >= record.length:
            return
        # In fp32: bf16 would round the change off the direction that the basis does not see.
        wide = replace(record, query=record.query.float(), keys=record.keys.float(), values=record.values.float())
        for head in range(record.query.shape[0]):
            case = self._case(wide, head, basis, config)
            self._cases.setdefault((Loki(basis).rank, config.budget), []).append(case)

    @staticmethod
    def _case(record: DecodeRecord, head: int, basis: Tensor, config: LocksConfig) -> dict[str, float]:
        size, query, loki = config.page_size, record.query[head, 0].double(), Loki(basis)
        pages = record.pages(config).keys()
        exact = theory.exact_log_mass(record.query, pages, record.scale)[head]  # (G, P)
        # Among complete pages that are neither sink nor recent.
        page = config.sink_pages + int(exact[0, config.sink_pages : -config.recent_pages].argmin())
        shared = basis[head, :, : loki.rank].double()
        direction = theory.blind_direction(shared, query)
        along = float(query @ direction) * record.scale
        logit = float(query @ pages[head, page, 0].double()) * record.scale
        distance = (float(exact[0].logsumexp(-1)) + LEAD - logit) / along
        keys = record.keys.clone()
        keys[head, page * size : (page + 1) * size] = theory.blind_page(pages[head, page], shared, distance, query)
        changed = replace(record, keys=keys)
        found = {"distance": distance / float(torch.linalg.vector_norm(pages[head].double(), dim=-1).mean())}
        for name, selector in (("exact", Exact()), ("loki", loki), ("locks", Locks())):
            before, after = (estimate_log_mass(each, selector, config) for each in (record, changed))
            found[f"{name}_moved"] = float(after[head, 0, page].double() - before[head, 0, page].double())
            kept = kept_pages(choose_pages(after, record.length, config), config.pages_in(record.length))
            found[f"{name}_reads"] = float(kept[head, page])
        return found

    def rows(self) -> list[Row]:
        """One for each rank of the calibrated basis and budget.

        `moved`: the mean change of the page's log-mass, in nats; `reads`: the share of cases in which it is chosen;
        `distance`: how far a key was moved, in mean norms of a key.
        """
        found: list[Row] = []
        for (rank, budget), cases in self._cases.items():
            moved = sum(abs(case["loki_moved"]) > 1e-3 * abs(case["exact_moved"]) for case in cases)
            row: Row = {"statement": "proposition-1", "rank": rank, "budget": budget}
            row |= {"checked": len(cases), "violated": moved}
            means = {name: sum(case[name] for case in cases) / len(cases) for name in cases[0]}
            found.append(row | {name: float(f"{value:.4g}") for name, value in means.items()})
        return found


def draw(rows: Sequence[Row], figure: Any) -> None:
    """How tight each bound is, by rank; and who sees the blind pages."""
    left, right = figure.subplots(1, 2)
    lines: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("of_bound_median") is not None and row.get("budget") in (None, rows[0].get("budget")):
            lines.setdefault(row["statement"], []).append(row)
    for statement, drawn in lines.items():
        ranks = [row["rank"] for row in drawn]
        (line,) = left.plot(ranks, [row["of_bound_median"] for row in drawn], "o-", label=statement)
        left.plot(ranks, [row["of_bound_max"] for row in drawn], "o:", color=line.get_color(), alpha=0.6)
    left.axhline(1, color="black", linewidth=1)
    left.set_yscale("log")
    left.set_xlabel("rank")
    left.set_title("value / bound (median; dotted: largest)", fontsize=10)
    left.legend(fontsize=7)
    blind = next((row for row in rows if row["statement"] == "proposition-1"), None)
    if blind is not None:
        names = ("exact", "locks", "loki")
        right.bar(names, [blind[f"{name}_reads"] for name in names], color="tab:blue")
        right.set_ylim(0, 1.05)
        right.set_title(f"blind pages chosen, {blind['budget']} tokens, {blind['checked']} pages", fontsize=10)
