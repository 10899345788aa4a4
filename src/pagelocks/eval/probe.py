"""The links of each method's choice, on the queries of dense attention: coverage, retention, retrieval heads apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import hf
from ..config import LocksConfig
from ..selectors import SELECTORS, Exact, Selector
from ..selectors.groups import group_rule
from .carriers import LEAST_MASS, Retention, carrier_pages, retrieval_heads
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
        self._looked: list[dict[tuple[int, int], Retention]] = [{} for _ in prompts]  # row -> (step, layer's place)

    def __call__(self, step: hf.SparseStep, selectors: dict[Method, Selector]) -> None:
        """Look at one layer's step, of all rows."""
        number = self._seen[step.layer] = self._seen.get(step.layer, 0) + 1
        if number > self.steps:
            return
        place = list(self._seen).index(step.layer)
        exact = Exact().log_mass(step.query, step.source, step.scale)
        # A choice of each query head's own is no group's to compare.
        # Nor is everything, where a budget covers the sequence, a choice.
        length, size = step.keys.shape[-2], LocksConfig().page_size
        asked = {
            method: each for method, each in selectors.items() if method.rule != "per-head" and length > method.budget
        }
        estimates, known = dict[Method, Tensor](), dict[str, Tensor]()
        for method, selector in asked.items():
            if method.selector in SELECTORS and method.selector in known:  # the same at any budget
                estimates[method] = known[method.selector]
            else:
                estimates[method] = selector.log_mass(step.query, step.source, step.scale)
                known[method.selector] = estimates[method]
        for row in self.rows:
            prompt = self.prompts[row]
            tensors = step.query[row], step.keys[row], step.values[row]
            seen = DecodeRecord(*tensors, step.scale, length, prompt.carriers)
            mass = page_mass(seen, size)
            carriers = carrier_pages(seen, size) if prompt.carriers else None
            for method, estimate in estimates.items():
                key, rule = (number, method), group_rule(method.rule)
                ours, oracle = (choose_pages(m[row], length, method.config, rule) for m in (estimate, exact))
                held = torch.stack([coverage(mass, ours), coverage(mass, oracle)])
                self._coverage[row].setdefault(key, []).append(held.cpu())
                if carriers is not None:
                    kept, best = (kept_pages(pages, len(carriers))[:, carriers] for pages in (ours, oracle))
                    counts = [(kept & best).sum(), best.sum(), kept.sum(), torch.tensor(kept.numel())]
                    self._kept[row].setdefault(key, []).append(torch.tensor([int(count) for count in counts]))
                    looked = mass[..., carriers].sum(-1).cpu()
                    retention = Retention(best.all(-1).cpu(), best.double().mean(-1).cpu(), looked)
                    self._looked[row][number, place] = retention

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
        layers: dict[int, list[Retention]] = {}
        for (number, place), retention in self._looked[row].items():
            if number <= tokens:
                layers.setdefault(place, []).append(retention)
        return torch.stack([retrieval_heads(layers[place], LEAST_MASS) for place in sorted(layers)])
