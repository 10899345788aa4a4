"""The links of each method's choice, on the queries of dense attention: coverage, retention, retrieval heads apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import hf
from ..config import LocksConfig
from ..selectors import SELECTORS, Exact, Selector
from ..selectors.groups import group_rule
from .carriers import LEAST_MASS, carrier_pages
from .decode_record import DecodeRecord
from .links import choose_pages, coverage, coverage_ratio, group_coverage_ratio, kept_pages, page_mass, summarize_heads
from .prompt import Prompt
from .runner import Method


class Probe:
    """Coverage and retention of each method's choice, against the oracle's at the same budget and rule.

    Retention is of the carrier pages that the oracle kept, over all KV heads: most heads do not look for the answer,
    and what they keep of it by chance says nothing.

    Parameters
    ----------
    prompts : the rows
    steps : of the first answer tokens, how many to look at
    rows : of the prompts, which to look at; all by default
    """

    def __init__(self, prompts: Sequence[Prompt], steps: int, rows: Sequence[int] | None = None) -> None:
        self.prompts, self.steps = prompts, steps
        self.rows = range(len(prompts)) if rows is None else rows
        self._seen: dict[int, int] = {}  # layer -> steps
        # Row -> (step, method) -> what each layer adds: coverage by the choice and by the oracle's, (2, H, G); counts.
        self._coverage: list[dict[tuple[int, Method], list[Tensor]]] = [{} for _ in prompts]
        self._kept: list[dict[tuple[int, Method], list[Tensor]]] = [{} for _ in prompts]
        # Row -> (step, layer's place) -> exact mass on the carrier pages, (H, G).
        self._looked: list[dict[tuple[int, int], Tensor]] = [{} for _ in prompts]

    def __call__(self, step: hf.SparseStep, selectors: dict[Method, Selector]) -> None:
        """Look at one layer's step, of all rows together."""
        number = self._seen[step.layer] = self._seen.get(step.layer, 0) + 1
        if number > self.steps:
            return
        rows, length, size = list(self.rows), step.keys.shape[-2], LocksConfig().page_size
        # A choice of each query head's own is no group's to compare.
        # Nor is everything, where a budget covers the sequence, a choice.
        asked = {
            method: each for method, each in selectors.items() if method.rule != "per-head" and length > method.budget
        }
        if not asked:
            return
        records = [
            DecodeRecord(
                step.query[row], step.keys[row], step.values[row], step.scale, length, self.prompts[row].carriers
            )
            for row in rows
        ]
        mass = torch.stack([page_mass(record, size) for record in records])  # (R, H, G, pages)
        nowhere = torch.zeros(mass.shape[-1], dtype=torch.bool, device=mass.device)
        carriers = torch.stack([carrier_pages(each, size) if each.carriers else nowhere for each in records])
        place = list(self._seen).index(step.layer)
        looked = (mass * carriers[:, None, None]).sum(-1).cpu()
        for at, row in enumerate(rows):
            if self.prompts[row].carriers:
                self._looked[row][number, place] = looked[at]
        exact = Exact().log_mass(step.query, step.source, step.scale)[rows]
        estimates, oracles = dict[str, Tensor](), dict[tuple[int, str], Tensor]()
        for method, selector in asked.items():
            if method.selector in SELECTORS and method.selector in estimates:  # the same at any budget
                estimate = estimates[method.selector]
            else:
                estimate = estimates[method.selector] = selector.log_mass(step.query, step.source, step.scale)[rows]
            rule = group_rule(method.rule)
            ours = choose_pages(estimate, length, method.config, rule)
            budget = method.budget, method.rule
            if budget not in oracles:
                oracles[budget] = choose_pages(exact, length, method.config, rule)
            oracle = oracles[budget]
            held = torch.stack([coverage(mass, ours), coverage(mass, oracle)], 1).cpu()  # (R, 2, H, G)
            kept, best = (kept_pages(pages, mass.shape[-1]) & carriers[:, None] for pages in (ours, oracle))
            pairs = carriers.sum(-1) * kept.shape[1]
            counts = torch.stack([(kept & best).sum((1, 2)), best.sum((1, 2)), kept.sum((1, 2)), pairs], -1).cpu()
            for at, row in enumerate(rows):
                self._coverage[row].setdefault((number, method), []).append(held[at])
                if self.prompts[row].carriers:
                    self._kept[row].setdefault((number, method), []).append(counts[at])

    def links(self, row: int, method: Method, tokens: int) -> dict[str, float] | None:
        """Over layers, KV heads and the steps of an answer of so many tokens.

        `coverage_ratio` is the mean over groups; `worst`, the worst head of a group, and `p5`, the 5th percentile, are
        of single query heads, whose ratio may exceed 1, as the oracle chooses for the group.  Where the record says
        where its answer stands, `coverage_ratio_retrieval` and `coverage_ratio_rest` are those of the query heads that
        look for it (`carriers.LEAST_MASS`, on the mean over the steps) and of all others, each the sum of coverages
        over the oracle's sum, and `retrieval_heads` is the share of heads that do.  None if nothing was seen, or each
        query head has pages of its own.
        """

        def gathered(found: dict[tuple[int, Method], list[Tensor]]) -> list[Tensor]:
            return [each for step in range(1, tokens + 1) for each in found.get((step, method), [])]

        coverages, kept = gathered(self._coverage[row]), gathered(self._kept[row])
        if not coverages:
            return None
        held, possible = torch.stack(coverages).unbind(1)  # (steps * layers, H, G)
        heads = summarize_heads(coverage_ratio(held, possible))
        links = {"coverage_ratio": float(group_coverage_ratio(held, possible).mean())}
        links |= {"worst": heads.worst_head, "p5": heads.percentile_5}
        if kept:
            both, oracle, ours, pairs = torch.stack(kept).sum(0).tolist()
            links |= {"carriers_kept": ours / pairs, "carriers_kept_by_oracle": oracle / pairs}
            if oracle:
                links["retention"] = both / oracle
            looking = self._retrieval(row, tokens)
            looking = looking.repeat(len(held) // len(looking), 1, 1)
            links["retrieval_heads"] = float(looking.double().mean())
            for name, chosen in (("retrieval", looking), ("rest", ~looking)):
                if chosen.any():
                    links[f"coverage_ratio_{name}"] = float(held[chosen].sum() / possible[chosen].sum())
        return {name: round(value, 6) for name, value in links.items()}

    def _retrieval(self, row: int, tokens: int) -> Tensor:
        """bool (layers, H, G), in the order in which layers were seen."""
        layers: dict[int, list[Tensor]] = {}
        for (number, place), mass in self._looked[row].items():
            if number <= tokens:
                layers.setdefault(place, []).append(mass)
        return torch.stack([torch.stack(layers[place]).mean(0) >= LEAST_MASS for place in sorted(layers)])
