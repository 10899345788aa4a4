"""One prefill, many decodes: a batch of prompts answered by dense attention and by many methods, in Transformers.

The prompts of a batch are alike in length.  They are prefilled once, densely, under the eyes of all selectors that
learn; each method then decodes from that cache, which is cut back to the prompts after it.  So the first token comes
from dense attention, as in a server, and all others from the method.  KVzip is shown the prompt's repetition in
between, on a copy of the cache.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from .. import hf
from ..config import LocksConfig, reject
from ..hf.pages import CachedPages
from ..selectors import REPEATING_SELECTORS, KVzip, PageSource, Selector, Streaming, observes
from ..selectors.groups import group_rule
from ..selectors.history import History, observe_together
from .cache import croppable, join, make_cache
from .calibration import Calibration, make_selector
from .prompt import LEAST_BUDGET

REPEATED = 2048
"""Prompt tokens that are repeated at a time, each time after the whole prompt, as KVzip does."""
PREFILLED = 100_000
"""Prompt tokens that are prefilled at a time: rows are many where prompts are short."""
RESUMED = 8
"""Tokens before them that a later part begins with, so that the model knows where to go on."""


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
    """What one method answered to a batch; lists have an entry a row.

    Attributes
    ----------
    tokens : ids
    pages_read, pages_skipped : over all layers and KV heads, at the steps that the row's answer took
    sparse_share : of those steps and layers, those that were sparse; less than 1 only where `short`, None where the
        first token ended the answer, and of dense attention
    """

    tokens: list[list[int]]
    pages_read: list[int]
    pages_skipped: list[int]
    sparse_share: list[float | None]


class _Reads:
    """What the steps of each row read, while its answer goes on."""

    def __init__(self, rows: int, config: LocksConfig) -> None:
        self._config = config
        self.going = torch.ones(rows, dtype=torch.int64)
        self.steps = torch.zeros(rows, dtype=torch.int64)
        self.sparse, self.read, self.skipped = (torch.zeros(rows, dtype=torch.int64) for _ in range(3))
        self._layers: list[tuple[Tensor, int]] = []  # of the step: pages that each row read, on its device, of so many

    def begin(self, going: Sequence[bool]) -> None:
        """A step, of these rows."""
        self._end()
        self.going = torch.tensor(going).to(torch.int64)
        self.steps += self.going

    def __call__(self, step: hf.SparseStep) -> None:
        """One layer of it."""
        pages = self._config.pages_in(step.keys.shape[-2]) * step.keys.shape[1]
        self.sparse += self.going
        self._layers.append((hf.distinct_pages(step.pages), pages))

    def _end(self) -> None:
        """The last step's numbers: a GPU is waited for once a step, not in each layer."""
        if self._layers:
            read, pages = zip(*self._layers, strict=True)
            in_all = torch.stack(read).sum(0).cpu()
            self.read += self.going * in_all
            self.skipped += self.going * (sum(pages) - in_all)
            self._layers = []

    def answers(self, tokens: list[list[int]], layers: int) -> Answers:
        """All of it, of a model of so many layers that select."""
        self._end()
        counts = zip(self.sparse.tolist(), self.steps.tolist(), strict=True)
        shares = [round(sparse / (steps * layers), 4) if steps else None for sparse, steps in counts]
        return Answers(tokens, self.read.tolist(), self.skipped.tolist(), shares)


class _Ensemble:
    """All selectors of a layer, shown the same steps; by name and budget.

    While the prompts come, and their repetition, what budgets do not matter to is learnt once for all of them.
    """

    def __init__(self, members: dict[Method, Selector]) -> None:
        self.members = members
        self.prefilling = True
        self.looks: int | None = None  # steps after the prompts that somebody looks at; None for all
        self.repeating = False  # what comes is a repetition, for those alone that ask for one
        self._first: dict[Method, Method] = {}  # a method -> the one of its selector that learns for it
        by_name: dict[str, Method] = {}
        for method, member in members.items():
            self._first[method] = by_name.setdefault(method.selector, method) if isinstance(member, History) else method

    def observe(self, query: Tensor, keys: Tensor, scale: float) -> None:
        if not self.prefilling and self.looks is not None:
            self.looks -= 1
            if self.looks <= 0:
                self.members = {}
        learning = set(self._first.values()) if self.prefilling else self.members.keys()
        members = [(method, self.members[method]) for method in self.members if method in learning]
        if self.repeating:
            for method, member in members:
                if method.selector in REPEATING_SELECTORS:
                    assert isinstance(member, KVzip)
                    member.reconstruct(query, keys, scale)
            return
        if self.prefilling:
            observe_together([member for _, member in members if isinstance(member, History)], query, keys, scale)
        for _, member in members:
            if observes(member) and not (self.prefilling and isinstance(member, History)):
                member.observe(query, keys, scale)

    def end_prefill(self, looks: int | None) -> None:
        """From here on each method learns by itself, and nothing after so many steps."""
        self.prefilling, self.looks = False, looks
        for method, first in self._first.items():
            learnt = self.members[first]
            if method is not first and isinstance(learnt, History):
                self.members[method] = learnt.for_budget(method.config)

    def log_mass(self, query: Tensor, pages: PageSource, scale: float) -> Tensor:
        return Streaming().log_mass(query, pages, scale)  # the cheapest: what is chosen is not looked at

    def page_bytes(self, head_dim: int, page_size: int = 16, itemsize: int = 2, group: int = 1) -> float:
        return Streaming().page_bytes(head_dim, page_size, itemsize)


def _both(first: Callable[[hf.SparseStep], None], second: Callable[[hf.SparseStep], None], step: hf.SparseStep) -> None:
    first(step)
    second(step)


class Runner:
    """A model, and the methods it is run with.

    Parameters
    ----------
    model : a causal Transformers model, on its device
    methods : without dense, which always runs
    stop : token ids that end an answer
    chunk : tokens of a prefill's part, where a selector learns from it; without one, prompts go whole
    calibration : for selectors that are calibrated
    request : token ids between a prompt and its repetition, for KVzip: `calibration.repetition_request`
    """

    def __init__(
        self,
        model: Any,
        methods: Sequence[Method],
        stop: Sequence[int],
        chunk: int = 2048,
        calibration: Calibration | None = None,
        request: Sequence[int] = (),
    ) -> None:
        self.model, self.methods, self.stop, self.chunk = model, list(dict.fromkeys(methods)), set(stop), chunk
        self.calibration, self.request = calibration, list(request)
        self.a_layer = 0 if calibration is None else min(calibration.bases)  # one for which every selector can be made
        for method in self.methods:
            if method.selector == "dense":
                raise reject("selector", "dense", "a selector's name", "Leave it out: dense attention always runs.")
            if method.selector in REPEATING_SELECTORS and len(self.request) < 2:
                allowed = f"{method.selector} takes a request of two tokens or more"
                raise reject("request", self.request, allowed, "Make it with calibration.repetition_request.")
            self.selector(method, self.a_layer)
        if model.device.type == "cuda" and find_spec("triton"):
            from . import passes

            passes.use()

    def selector(self, method: Method, layer: int) -> Selector:
        """A new selector for one layer of one batch."""
        return make_selector(method.selector, method.config, layer, self.calibration)

    def run(
        self,
        prompts: Tensor,
        new_tokens: int,
        probe: Callable[[hf.SparseStep, dict[Method, Selector]], None] | None = None,
        methods: Sequence[Method] | None = None,
        watch: Callable[[Method, hf.SparseStep], None] | None = None,
        short: bool = False,
        each: Callable[[Method, Answers, Answers], None] | None = None,
        probe_steps: int | None = None,
    ) -> dict[Method, Answers]:
        """Answer a batch.

        Parameters
        ----------
        prompts : int64 (rows, tokens), without padding
        new_tokens : at most so many a row
        probe : called in each layer at each step that dense attention decodes, with a selector for every method
        methods : of those given to the constructor; all by default
        watch : called in each layer at each step that a method decodes
        short : allow prompts that a budget covers; steps are dense until the sequence outgrows it
        each : called with dense, then each method as it comes, its answers and dense attention's
        probe_steps : of those steps, the first so many that `probe` gets selectors at; all by default

        Returns
        -------
        dense, and each method's answers
        """
        chosen = self.methods if methods is None else list(methods)
        # Choosing costs time at each dense step, so without a probe the budget covers the sequence; with one it is the
        # smallest there is, and the choice itself is not looked at.
        budget = 16 * self.model.config.max_position_embeddings if probe is None else LEAST_BUDGET
        step = None if probe is None else lambda seen: probe(seen, seen_members(seen.layer))
        session = hf.attach(
            self.model,
            LocksConfig(budget=budget, dense_below=0),
            lambda layer: _Ensemble({method: self.selector(method, layer) for method in chosen}),
            attend_all=True,
            only_grows=True,  # here and below: nobody else has the cache, nor its copies
        )

        def seen_members(layer: int) -> dict[Method, Selector]:
            ensemble = session.selectors()[layer][0]
            assert isinstance(ensemble, _Ensemble)
            return ensemble.members

        with torch.inference_mode():
            cache, first = self._prefill(prompts, chosen)
            if any(method.selector in REPEATING_SELECTORS for method in chosen):
                self._repeat(session, cache, prompts)
            for ensemble, _ in session.selectors().values():
                if isinstance(ensemble, _Ensemble):
                    ensemble.end_prefill(0 if probe is None else probe_steps)
            # What a selector has learnt it replaces and never changes, so that a copy keeps it.
            learnt = {
                layer: ({method: copy.copy(member) for method, member in ensemble.members.items()}, tokens)
                for layer, (ensemble, tokens) in session.selectors().items()
                if isinstance(ensemble, _Ensemble)
            }
            summarized = any(method.selector.startswith("locks") for method in chosen)  # and the variants of our own
            pages = self._pages(cache, learnt, summarized)
            session.go_on_with(session.selectors(), pages)
            session.on_step = step  # not before: a prompt's last part may be a single token
            nothing = [0] * len(prompts)
            said = self._decode(cache, first, new_tokens, _Reads(len(prompts), LocksConfig()))
            results = {Method("dense"): Answers(said, nothing, nothing, [None] * len(prompts))}
            if each is not None:
                each(Method("dense"), results[Method("dense")], results[Method("dense")])
            for method in chosen:
                reads = _Reads(len(prompts), method.config)
                session = hf.attach(
                    self.model,
                    method.config,
                    lambda layer, method=method: self.selector(method, layer),  # type: ignore[misc]
                    method.rule,
                    reads if watch is None else partial(_both, reads, partial(watch, method)),
                    only_grows=True,
                )
                members = {layer: (members[method], tokens) for layer, (members, tokens) in learnt.items()}
                session.go_on_with(members, pages)
                said = self._decode(cache, first, new_tokens, reads)
                counts = session.statistics()
                outgrown = not short or prompts.shape[1] + max(map(len, said)) - 1 > method.budget
                missed = max(map(len, said)) > 1 and outgrown and not counts.pages_skipped
                if missed or (counts.rows_dense and not short):
                    found = f"{counts.rows_dense} dense rows, {counts.pages_skipped} pages skipped"
                    raise reject("budget", method.budget, f"less than the prompts; there were {found}", "Use less.")
                results[method] = reads.answers(said, len(learnt))
                if each is not None:
                    each(method, results[method], results[Method("dense")])
        return results

    def _learns(self, method: Method) -> bool:
        return method.selector in REPEATING_SELECTORS or observes(self.selector(method, self.a_layer))

    def _prefill(self, prompts: Tensor, methods: Sequence[Method]) -> tuple[Any, Tensor]:
        """The cache of the prompts, and the token after each, int64 (rows,).

        Selectors that learn see all rows, a chunk at a time, and so it goes where a layer has a window, whose mask
        grows with the square of what is prefilled, or other states than keys and values.  Otherwise some rows go whole,
        which a GPU does several times as fast: attention needs no mask.
        """
        rows, tokens = prompts.shape
        in_chunks = not croppable(make_cache(self.model)) or any(map(self._learns, methods))
        at_once, width = (rows, self.chunk) if in_chunks else (max(1, PREFILLED // tokens), tokens)
        caches, first = [], []
        for some in torch.split(prompts, at_once):
            cache, logits = make_cache(self.model), None
            for part in torch.split(some, width, 1):
                logits = self.model(part, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            assert logits is not None
            caches.append(cache)
            first.append(logits[:, -1].argmax(-1))
        return join(caches), torch.cat(first)

    def _pages(self, cache: Any, layers: Iterable[int], summarized: bool) -> dict[int, CachedPages]:
        """The prompts' complete pages in each layer, for all methods; summarized, if one of them asks for that."""
        pages = {}
        for layer in layers:
            keys = cache.layers[layer].keys
            pages[layer] = CachedPages(LocksConfig(), keys, only_grows=True)
            pages[layer].update(keys)
            if summarized:
                pages[layer].summary()
        return pages

    def _repeat(self, session: hf.Session, cache: Any, prompts: Tensor) -> None:
        """Show the prompts' repetition to the selectors that ask for it; the cache is left as it is."""
        before, in_place = session.selectors(), croppable(cache)
        ensembles = [member for member, _ in before.values() if isinstance(member, _Ensemble)]
        for ensemble in ensembles:
            ensemble.repeating = True
        request = prompts.new_tensor(self.request).expand(len(prompts), -1)
        for start in range(0, prompts.shape[1], REPEATED):
            part = torch.cat([request, prompts[:, max(0, start - RESUMED) : start + REPEATED]], 1)
            scratch = cache if in_place else copy.deepcopy(cache)
            self.model(part, past_key_values=scratch, use_cache=True, logits_to_keep=1)
            if in_place:
                cache.crop(-part.shape[1])
            session.go_on_with(before)
        for ensemble in ensembles:
            ensemble.repeating = False

    def _decode(self, prompt_cache: Any, first: Tensor, new_tokens: int, reads: _Reads) -> list[list[int]]:
        """Greedy tokens of each row up to a stop token; `reads` is told of each step."""
        in_place, tokens = croppable(prompt_cache), prompt_cache.get_seq_length()
        cache = prompt_cache if in_place else copy.deepcopy(prompt_cache)
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
                break
            reads.begin(going)
            logits = self.model(token[:, None], past_key_values=cache, use_cache=True).logits
            token = logits[:, -1].argmax(-1)
        if in_place and (added := cache.get_seq_length() - tokens):  # the prompts' again, for the next method
            cache.crop(-added)
        return rows
