"""What a page of `pagelocks inspect` shows: a prompt's text by pages, and the pages chosen for each generated token."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import hf
from ..config import reject
from ..selectors import Exact
from .decode_record import DecodeRecord
from .links import choose_pages, coverage, kept_pages, page_mass
from .runner import Method

Span = tuple[int, int]


@dataclass(frozen=True)
class Reading:
    """A prompt with the place of each token in its text.

    Attributes
    ----------
    text : str
    token_ids : tuple of int
    starts : tuple of int
        Where in the text a token begins, ascending; its text ends where the next one's begins.
    facts : tuple of (first, one after the last)
        What the answer takes, in characters of `text`.
    fact_tokens : tuple of int
        The tokens that hold a character of a fact.
    """

    text: str
    token_ids: tuple[int, ...]
    starts: tuple[int, ...]
    facts: tuple[Span, ...]
    fact_tokens: tuple[int, ...]


def read_prompt(
    tokenizer: Any, request: str, prefix: str = "", facts: Sequence[Span] = (), raw: bool = False
) -> Reading:
    """A request as a user's turn in the model's chat template, if it has one, and the first words of the answer.

    Parameters
    ----------
    tokenizer : a fast Transformers tokenizer
    request, prefix : the user's turn, the beginning of the assistant's
    facts : (first, one after the last) characters of `request`
    raw : whether to leave the template out
    """
    if not getattr(tokenizer, "is_fast", False):
        raise reject("tokenizer", type(tokenizer).__name__, "one that tells where tokens stand", "Use a fast one.")
    text, shift, special = request + prefix, 0, True
    if tokenizer.chat_template is not None and not raw:
        turn = [{"role": "user", "content": request}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) + prefix
        special, bare = False, request.strip()  # some templates strip a turn
        shift = text.index(bare) - request.index(bare)
    encoding = tokenizer(text, return_offsets_mapping=True, add_special_tokens=special)
    places = encoding["offset_mapping"]
    moved = tuple((first + shift, after + shift) for first, after in facts)
    starts, end = list[int](), 0
    for first, after in places:
        # A token that the tokenizer added stands nowhere; the parts of one character all stand where it does.
        starts.append(max(first, starts[-1] if starts else 0) if after > first else end)
        end = max(end, after)
    holders = (
        number
        for number, (first, after) in enumerate(places)
        if any(first < fact[1] and after > fact[0] for fact in moved)
    )
    return Reading(text, tuple(encoding["input_ids"]), tuple(starts), moved, tuple(holders))


def pieces(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """The text that each token adds; of a character's parts the last one has it."""
    said, found = "", list[str]()
    for count in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:count])
        whole = not text.endswith("\ufffd")
        found.append(text[len(said) :] if whole else "")
        said = text if whole else said
    return found


class Choices:
    """What a method and the exact oracle choose from the same query and keys, step by step; one row.

    Give `watch` to `Runner.run`.  The oracle has the method's budget and takes the group's mean share; coverage is the
    exact attention mass of the chosen pages, the mean over the heads of a group.
    """

    def __init__(self) -> None:
        self._layers: dict[int, list[list[Tensor]]] = {}
        self.group = 0

    def watch(self, method: Method, step: hf.SparseStep) -> None:
        """Look at one layer's step."""
        size, length = method.config.page_size, step.keys.shape[-2]
        record = DecodeRecord(step.query[0], step.keys[0], step.values[0], step.scale, length)
        exact = Exact().log_mass(step.query, step.source, step.scale)[0]
        ours, oracle = step.pages[0], choose_pages(exact, length, method.config)
        mass, self.group = page_mass(record, size), step.query.shape[2]
        found = [kept_pages(pages, mass.shape[-1]) for pages in (ours, oracle)]
        held = [coverage(mass, pages).mean(-1) for pages in (ours, oracle)]
        self._layers.setdefault(step.layer, []).append([part.cpu() for part in (*found, *held)])

    @property
    def steps(self) -> int:
        """How many were seen."""
        return min((len(steps) for steps in self._layers.values()), default=0)

    def kept(self, side: int) -> Tensor:
        """bool (steps, layers, kv_heads, pages of the last step): 0 for the method's choice, 1 for the oracle's."""
        pages = max(steps[-1][side].shape[-1] for steps in self._layers.values())
        return torch.stack(
            [
                torch.stack([torch.nn.functional.pad(seen[side], (0, pages - seen[side].shape[-1])) for seen in layer])
                for layer in self._layers.values()
            ],
            1,
        )

    def coverage(self, side: int) -> Tensor:
        """Of the same choice: float64 (steps, layers, kv_heads)."""
        layers = self._layers.values()
        return torch.stack([torch.stack([seen[2 + side] for seen in layer]) for layer in layers], 1)

    def layers(self) -> list[int]:
        """Those that select pages, by number."""
        return list(self._layers)


def page_data(reading: Reading, answer: Sequence[str], choices: Choices, page_size: int) -> dict[str, Any]:
    """What the page's script reads: every text once, every choice a bit.

    Parameters
    ----------
    reading : the prompt
    answer : the text of each generated token, from `pieces`

    Returns
    -------
    dict
        `pages`: their texts, up to the last token that a step attended; `marks`: [page, first, after, kind] in
        characters of a page's text, kind 0 for a fact and 1 for the answer; `fact_pages`; `chosen`, by the method
        and by the oracle: base64 of bits, (steps, layers, heads) sets of `width` bytes, the lowest bit the lowest page;
        `coverage`, of both: whole numbers of 1e-4, in the same order.
    """
    prompt, steps = len(reading.token_ids), choices.steps
    cuts, text = [*reading.starts], reading.text
    marks = [(first, after, 0) for first, after in reading.facts]
    for piece in answer[:steps]:
        cuts.append(len(text))
        marks.append((len(text), len(text) + len(piece), 1))
        text += piece
    bounds = [0, *cuts[page_size::page_size], len(text)]
    spans = list(pairwise(bounds))
    return {
        "pages": [text[first:after] for first, after in spans],
        "marks": [
            [page, max(first, start) - start, min(after, end) - start, kind]
            for page, (start, end) in enumerate(spans)
            for first, after, kind in marks
            if first < end and after > start
        ],
        "fact_pages": sorted({token // page_size for token in reading.fact_tokens}),
        "prompt_tokens": prompt,
        "page_size": page_size,
        "steps": steps,
        "layers": choices.layers(),
        "heads": choices.kept(0).shape[2],
        "group": choices.group,
        "width": -(-len(spans) // 8),
        "chosen": [_bits(choices.kept(side)) for side in (0, 1)],
        "coverage": [(choices.coverage(side) * 1e4).round().int().flatten().tolist() for side in (0, 1)],
    }


def _bits(kept: Tensor) -> str:
    return base64.b64encode(np.packbits(kept.numpy(), -1, "little").tobytes()).decode()
