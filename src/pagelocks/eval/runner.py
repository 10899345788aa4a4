"""One prefill, many decodes: a batch of prompts answered by dense attention and by many methods, in Transformers.

The prompts of a batch are alike in length.  They are prefilled once, densely, under the eyes of all selectors that
learn; each method then decodes from a copy of that cache.  So the first token comes from dense attention, as in a
server, and all others from the method.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import hf
from ..config import LocksConfig, reject
from ..selectors import Exact, PageSource, Selector, make_selector, observes
from ..selectors.groups import group_rule


@dataclass(frozen=True)
class Method:
    """A selector at a budget; `selector` is "dense" for neither.

    Attributes
    ----------
    selector, rule : names of a selector and of a group rule
    budget : tokens that a KV head attends
    """

    selector: str
    budget: int = 0
    rule: str = "share"

    def __post_init__(self) -> None:
        if self.selector != "dense":
            group_rule(self.rule)
            LocksConfig(budget=self.budget)

    @property
    def config(self) -> LocksConfig:
        """With LOCKS' defaults but the budget; everything longer than it is sparse."""
        return LocksConfig(budget=self.budget, dense_below=0)


@dataclass(frozen=True)
class Answers:
    """What one method answered to a batch: token ids of each row, and pages over all layers, KV heads and rows."""

    tokens: list[list[int]]
    pages_read: int
    pages_skipped: int


class _Ensemble:
    """All selectors of a layer that learn, shown the same steps; by name and budget."""

    def __init__(self, members: dict[Method, Selector]) -> None:
        self.members = members

    def observe(self, query: Tensor, keys: Tensor, scale: float) -> None:
        for member in self.members.values():
            if observes(member):
                member.observe(query, keys, scale)

    def log_mass(self, query: Tensor, pages: PageSource, scale: float) -> Tensor:
        return Exact().log_mass(query, pages, scale)

    def page_bytes(self, head_dim: int, page_size: int = 16, itemsize: int = 2, group: int = 1) -> float:
        return Exact().page_bytes(head_dim, page_size, itemsize)


class Runner:
    """A model, and the methods it is run with.

    Parameters
    ----------
    model : a causal Transformers model, on its device
    methods : without dense, which always runs
    stop : token ids that end an answer
    chunk : tokens of a prefill's part
    """

    def __init__(
        self,
        model: Any,
        methods: Sequence[Method],
        stop: Sequence[int],
        chunk: int = 2048,
    ) -> None:
        self.model, self.methods, self.stop, self.chunk = model, list(dict.fromkeys(methods)), set(stop), chunk
        for method in self.methods:
            if method.selector == "dense":
                raise reject("selector", "dense", "a selector's name", "Leave it out: dense attention always runs.")
            make_selector(method.selector, method.config)

    def run(
        self,
        prompts: Tensor,
        new_tokens: int,
        probe: Callable[[hf.SparseStep, dict[Method, Selector]], None] | None = None,
        methods: Sequence[Method] | None = None,
        watch: Callable[[Method, hf.SparseStep], None] | None = None,
    ) -> dict[Method, Answers]:
        """Answer a batch.

        Parameters
        ----------
        prompts : int64 (rows, tokens), without padding
        new_tokens : at most so many a row
        probe : called in each layer at each step that dense attention decodes, with a selector for every method
        methods : of those given to the constructor; all by default
        watch : called in each layer at each step that a method decodes

        Returns
        -------
        dense, and each method's answers
        """
        chosen = self.methods if methods is None else list(methods)
        # Choosing costs time at each dense step, so without a probe the budget covers the sequence; with one it is the
        # smallest there is, and the choice itself is not looked at.
        budget = 16 * self.model.config.max_position_embeddings if probe is None else 48
        step = None if probe is None else lambda seen: probe(seen, seen_members(seen.layer))
        session = hf.attach(
            self.model,
            LocksConfig(budget=budget, dense_below=0),
            lambda layer: _Ensemble({method: make_selector(method.selector, method.config) for method in chosen}),
            attend_all=True,
        )

        def seen_members(layer: int) -> dict[Method, Selector]:
            ensemble = session.selectors()[layer][0]
            assert isinstance(ensemble, _Ensemble)
            return ensemble.members

        with torch.inference_mode():
            cache, first = self._prefill(prompts)
            learnt = {
                layer: ({method: copy.deepcopy(member) for method, member in ensemble.members.items()}, tokens)
                for layer, (ensemble, tokens) in session.selectors().items()
                if isinstance(ensemble, _Ensemble)
            }
            session.on_step = step  # not before: a prompt's last part may be a single token
            results = {Method("dense"): Answers(self._decode(cache, first, new_tokens), 0, 0)}
            for method in chosen:
                session = hf.attach(
                    self.model,
                    method.config,
                    lambda layer, method=method: make_selector(method.selector, method.config),  # type: ignore[misc]
                    method.rule,
                    None if watch is None else partial(watch, method),
                )
                session.go_on_with({layer: (members[method], tokens) for layer, (members, tokens) in learnt.items()})
                answers = self._decode(cache, first, new_tokens)
                counts = session.statistics()
                if counts.rows_dense or (max(map(len, answers)) > 1 and not counts.pages_skipped):
                    found = f"{counts.rows_dense} dense rows, {counts.pages_skipped} pages skipped"
                    raise reject("budget", method.budget, f"less than the prompts; there were {found}", "Use less.")
                results[method] = Answers(answers, counts.pages_read, counts.pages_skipped)
        return results

    def _prefill(self, prompts: Tensor) -> tuple[Any, Tensor]:
        """The cache of the prompts, and the token after each, int64 (rows,)."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        logits = None
        for part in torch.split(prompts, self.chunk, 1):
            logits = self.model(part, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        assert logits is not None
        return cache, logits[:, -1].argmax(-1)

    def _decode(self, prompt_cache: Any, first: Tensor, new_tokens: int) -> list[list[int]]:
        """Greedy tokens of each row up to a stop token."""
        cache = copy.deepcopy(prompt_cache)
        rows: list[list[int]] = [[] for _ in first]
        going, token = [True] * len(rows), first
        while True:
            for row, value in enumerate(token.tolist()):
                if going[row]:
                    going[row] = value not in self.stop
                    if going[row]:
                        rows[row].append(value)
                        going[row] = len(rows[row]) < new_tokens
            if not any(going):
                return rows
            logits = self.model(token[:, None], past_key_values=cache, use_cache=True).logits
            token = logits[:, -1].argmax(-1)
