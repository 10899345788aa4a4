"""Drift: sparse steps write keys and values that later steps read; how far that leads away from dense attention.

Dense attention writes the answers; each method then gets the same tokens, one by one, from a cache of its own that its
own steps fill (`Forced`), and once more writes answers itself (`Free`).  A step that goes wrong is not yet drift: so
the same step is also taken on dense attention's keys and values (`fresh`), and what grows beyond it is what the cache
has carried along.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import hf
from ..config import LocksConfig, reject
from ..selectors import make_selector, observes
from .runner import Method

CHUNK = 2048
"""Tokens of a turn that are prefilled at a time."""
JUDGED = 512
"""Tokens whose logits are held at a time where what was answered is judged."""
REPORT = 256
"""Tokens of dense attention's answers after which what was found so far is reported."""


@dataclass(frozen=True)
class Script:
    """What a model is told: turns, each int64 (1, n), and how many tokens it answers to each."""

    turns: tuple[Tensor, ...]
    new_tokens: int

    def __post_init__(self) -> None:
        if not self.turns or any(turn.ndim != 2 or len(turn) != 1 or turn.shape[1] < 2 for turn in self.turns):
            shapes = [tuple(turn.shape) for turn in self.turns]
            raise reject("turns", shapes, "one turn or more of shape (1, n), n at least 2", "Write longer turns.")
        if self.new_tokens < 2:
            raise reject("new_tokens", self.new_tokens, "2 or more: the first is always dense", "Use 256.")


@dataclass(frozen=True)
class Sampler:
    """The next token: the likeliest, or drawn at a temperature, with the same noise at the same place for all methods.

    A draw is the maximum of logits / temperature + Gumbel noise; so methods whose logits agree draw the same token.

    Attributes
    ----------
    seed : int
    temperature : float
        0 for the likeliest token.
    never : token ids that are not chosen: those that would end an answer
    """

    seed: int = 0
    temperature: float = 0.0
    never: tuple[int, ...] = ()

    def pick(self, logits: Tensor, place: int) -> int:
        """A token for logits (vocabulary,) at this place of the conversation."""
        logits = logits.to("cpu", torch.float32, copy=True)
        logits[list(self.never)] = -torch.inf
        if self.temperature:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + place) % 2**63)
            uniform = torch.rand(logits.shape, generator=generator, dtype=torch.float64).clamp(min=1e-300)
            logits = logits / self.temperature - (-uniform.log()).log()
        return int(logits.argmax())


@dataclass
class Forced:
    """A method on dense attention's tokens.  Lists have an entry for every distribution after the first token.

    Attributes
    ----------
    position : tokens answered before, over all turns
    turn : from 0
    kl : KL(dense || method) of the next token, nats
    agreement : 1 where both find the same token likeliest
    nll_difference : -log p of dense attention's token, the method's less dense attention's
    kl_fresh, agreement_fresh : the same step on dense attention's keys and values; empty where that cannot be
    keys, values : ||method's - dense's|| / ||dense's|| of what the step wrote, over layers and heads; in a later turn's
        first entry, of all tokens of the turn
    """

    position: list[int] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)
    nll_difference: list[float] = field(default_factory=list)
    kl_fresh: list[float] = field(default_factory=list)
    agreement_fresh: list[float] = field(default_factory=list)
    keys: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Free:
    """Answers that a method wrote from its own tokens, with the pages it read.

    Attributes
    ----------
    tokens : ids, of all turns
    pages_read, pages_skipped : over all layers and KV heads
    nll : -log p of each token but the first, nats, by dense attention that reads the same conversation: how likely the
        model itself finds what the method wrote; over all tokens, and at temperature 1 whatever they were drawn at
    """

    tokens: list[int]
    pages_read: int
    pages_skipped: int
    nll: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Drift:
    """Of one script: dense attention's answers, end to end, and each method's numbers, free ones as far as they are.

    `nll` is as in `Free`, of dense attention's own answers; empty until free ones are begun.
    """

    dense: list[int]
    forced: dict[Method, Forced]
    free: dict[Method, Free]
    nll: list[float] = field(default_factory=list)


class _Stream:
    """A conversation under one method.

    With `only_grows` no token that its session has seen is taken back; else pages are compared at every step.
    """

    def __init__(self, model: Any, method: Method, only_grows: bool = True) -> None:
        from transformers import DynamicCache

        self._model = model
        self.learns = method.selector != "dense" and observes(make_selector(method.selector, method.config))
        # Dense attention through the same code: a budget for more than any sequence.
        whole = LocksConfig(budget=16 * model.config.max_position_embeddings, dense_below=0)
        config = whole if method.selector == "dense" else method.config
        name = "exact" if method.selector == "dense" else method.selector
        self.session = hf.attach(model, config, name, method.rule, only_grows=only_grows)
        self.cache: Any = DynamicCache(config=model.config)

    def feed(self, ids: Tensor) -> Tensor:
        """Logits of the next token, (vocabulary,), after tokens (1, n): one is decoded, more are prefilled."""
        hf.use(self._model, self.session)
        logits: Tensor | None = None
        # Parts of like size: a last part of one token would be a decode step.
        for part in ids.tensor_split(math.ceil(ids.shape[1] / CHUNK), 1):
            logits = self._model(part, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits
        assert logits is not None
        last: Tensor = logits[0, -1]
        return last

    def open(self, ids: Tensor, dense: _Opening) -> Tensor:
        """The first turn: prefilled anew where the selector must see it, else taken over."""
        if self.learns:
            return self.feed(ids)
        self.cache = copy.deepcopy(dense.cache)
        return dense.logits


@dataclass(frozen=True)
class _Opening:
    cache: Any
    logits: Tensor


def measure(
    model: Any,
    script: Script,
    methods: Sequence[Method],
    sampler: Sampler,
    advance: Callable[[], None] = lambda: None,
    report: Callable[[Drift], None] = lambda so_far: None,
    free_only: bool = False,
) -> Drift:
    """Dense attention's conversation, and every method's beside it; the model has dense attention afterwards.

    Dense attention reads every conversation again at its end, all its own and each method's, for `Free.nll`.

    Parameters
    ----------
    model : a causal Transformers model
    script : Script
    methods : sequence of Method
        Selectors that are neither calibrated nor shown a repetition.  A budget may cover the sequence: then nothing
        is skipped, and nothing drifts.
    sampler : Sampler
    advance : callable
        Called after each token of dense attention, and of each method that answers freely.
    report : callable
        Called with what there is after every `REPORT` tokens of dense attention, after all of them, and after each
        method's free answer: a long run that is stopped has shown that much.
    free_only : bool
        Leave `forced` out, which takes most of the time.
    """
    try:
        with torch.inference_mode():
            dense, opening, forced = _force(model, script, [] if free_only else methods, sampler, advance, report)
            found = Drift(dense, forced, {}, _judge(model, script, dense))
            for method in methods:
                found.free[method] = _answer(model, script, method, sampler, opening, advance)
                report(found)
    finally:
        hf.detach(model)
    return found


def _force(
    model: Any,
    script: Script,
    methods: Sequence[Method],
    sampler: Sampler,
    advance: Callable[[], None],
    report: Callable[[Drift], None],
) -> tuple[list[int], _Opening, dict[Method, Forced]]:
    lead = _Stream(model, Method("dense"))
    streams = {method: _Stream(model, method) for method in methods}
    opening = _Opening(lead.cache, lead.feed(script.turns[0]))
    opening = _Opening(copy.deepcopy(lead.cache), opening.logits)
    # A selector that learns could not be told that the key it learnt from was taken back.
    fresh = {
        method: _Stream(model, method, only_grows=False)
        for method in methods
        if not streams[method].learns and _grows(lead.cache)
    }
    found = {method: Forced() for method in methods}
    spans: list[tuple[int, int]] = []  # of the cache: what each entry's step wrote
    said: list[int] = []
    for number, turn in enumerate(script.turns):
        ids = turn
        for step in range(script.new_tokens):
            if step or number:
                if not step:  # the last answer's last token was not fed yet
                    ids = torch.cat([ids.new_tensor([[said[-1]]]), turn.to(ids.device)], 1)
                before = _length(lead.cache)
                again = {} if ids.shape[1] > 1 else {m: _again(each, ids, lead.cache) for m, each in fresh.items()}
                logits = lead.feed(ids)
                spans.append((before, _length(lead.cache)))
                token = sampler.pick(logits, len(said))
                for method, stream in streams.items():
                    entry = found[method]
                    theirs = stream.feed(ids)
                    kl, agreement, difference = _compare(logits, theirs, token)
                    entry.position.append(len(said))
                    entry.turn.append(number)
                    entry.kl.append(kl)
                    entry.agreement.append(agreement)
                    entry.nll_difference.append(difference)
                    if method in fresh:  # a prefill is dense: on dense attention's cache nothing differs
                        kl, agreement, _ = _compare(logits, again.get(method, logits), token)
                        entry.kl_fresh.append(kl)
                        entry.agreement_fresh.append(agreement)
            else:
                for stream in streams.values():
                    stream.open(ids, opening)
                token = sampler.pick(opening.logits, 0)
            said.append(token)
            ids = turn.new_tensor([[token]])
            advance()
            if len(said) % REPORT == 0 or len(said) == len(script.turns) * script.new_tokens:
                for method, stream in streams.items():
                    found[method].keys, found[method].values = _written(lead.cache, stream.cache, spans)
                report(Drift(said, found, {}))
    return said, opening, found


def _answer(
    model: Any, script: Script, method: Method, sampler: Sampler, opening: _Opening, advance: Callable[[], None]
) -> Free:
    stream = _Stream(model, method)
    said: list[int] = []
    for number, turn in enumerate(script.turns):
        ids = torch.cat([turn.new_tensor([[said[-1]]]), turn], 1) if number else turn
        for step in range(script.new_tokens):
            logits = stream.feed(ids) if number or step else stream.open(ids, opening)
            said.append(sampler.pick(logits, len(said)))
            ids = turn.new_tensor([[said[-1]]])
            advance()
    counts = stream.session.statistics()
    return Free(said, counts.pages_read, counts.pages_skipped, _judge(model, script, said))


def _judge(model: Any, script: Script, said: Sequence[int]) -> list[float]:
    """-log p of each answered token but the first, by dense attention that reads the conversation as one prompt."""
    pieces, answered = list[Tensor](), list[Tensor]()
    for number, turn in enumerate(script.turns):
        answer = said[number * script.new_tokens : (number + 1) * script.new_tokens]
        pieces += [turn, turn.new_tensor([answer])]
        answered += [torch.zeros(turn.shape[1], dtype=torch.bool), torch.ones(len(answer), dtype=torch.bool)]
    ids, asked = torch.cat(pieces, 1), torch.cat(answered)
    stream, nll = _Stream(model, Method("dense")), list[Tensor]()
    hf.use(model, stream.session)
    before, follow = ids[:, :-1], ids[0, 1:]
    parts = math.ceil(len(follow) / JUDGED)
    for part, next_ids in zip(before.tensor_split(parts, 1), follow.tensor_split(parts), strict=True):
        likely = model(part, past_key_values=stream.cache, use_cache=True).logits[0].float().log_softmax(-1)
        nll.append(-likely.gather(-1, next_ids.unsqueeze(-1)).squeeze(-1).double().cpu())
    found: list[float] = torch.cat(nll)[asked[1:]].tolist()
    return found[1:]


def _again(stream: _Stream, ids: Tensor, cache: Any) -> Tensor:
    """The method's step on dense attention's cache, which is left as it was."""
    stream.cache = cache
    logits = stream.feed(ids)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[..., :-1, :], layer.values[..., :-1, :]
    return logits


def _grows(cache: Any) -> bool:
    """Whether all layers keep every token, so that the last one can be taken back."""
    return not any(map(_slides, cache.layers))


def _slides(layer: Any) -> bool:
    return getattr(layer, "is_sliding", False)


def _length(cache: Any) -> int:
    return int(cache.get_seq_length())


def _compare(dense: Tensor, theirs: Tensor, token: int) -> tuple[float, float, float]:
    """KL(dense || theirs), whether the likeliest token is the same, difference of -log p of a token."""
    ours, other = dense.double().log_softmax(-1), theirs.double().log_softmax(-1)
    kl = (ours.exp() * (ours - other)).sum().clamp(min=0)
    numbers = torch.stack([kl, (ours.argmax() == other.argmax()).double(), ours[token] - other[token]])
    first, second, third = numbers.tolist()
    return first, second, third


def _written(dense: Any, theirs: Any, spans: Sequence[tuple[int, int]]) -> tuple[list[float], list[float]]:
    """Relative differences of the keys and of the values in these spans of two caches, layers that slide left out."""
    layers = [pair for pair in zip(dense.layers, theirs.layers, strict=True) if not _slides(pair[0])]
    found = []
    for name in ("keys", "values"):
        off = norm = torch.zeros(_length(dense), dtype=torch.float64)
        for pair in layers:
            first, second = (getattr(layer, name)[0].double() for layer in pair)
            off = off + (second - first).square().sum((0, 2)).cpu()
            norm = norm + first.square().sum((0, 2)).cpu()
        shares = [float((off[first:after].sum() / norm[first:after].sum()).sqrt()) for first, after in spans]
        found.append(shares)
    return found[0], found[1]
