"""The two sides of locks_kv.py: each package's kernels behind the same calls, on the same tensors."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

SPLIT = 128
"""Parts that its attention may divide a row's pages into: what its own builder asks for."""


class Locks:
    """What is called of the installed locks-kv."""

    def __init__(self) -> None:
        root = importlib.import_module("locks")
        # Its score asks a module of its vLLM backend for compiler flags, and that package's __init__ imports vLLM; an
        # empty package in its place keeps the module and leaves vLLM out.
        folder = Path(str(root.__file__)).parent / "backend"
        backend = types.ModuleType("locks.backend")
        backend.__path__ = [str(folder)]
        sys.modules.setdefault("locks.backend", backend)
        selection = importlib.import_module("locks.selection")
        score = importlib.import_module("locks.selection.rki4_score_cuda")
        attention = importlib.import_module("locks.attention")
        cuda = importlib.import_module("locks.attention.decode_cuda")
        select = importlib.import_module("locks.selection.select_cuda")
        self._compile, self._compile_attend, self._tile = (score._get, select._get), cuda._get, cuda._gtile_for
        self.version = str(root.__version__)
        self.State = selection.Rki4State
        self.build_bulk, self.build_tail = selection.rki4_build_bulk, selection.rki4_build_tail
        self.derive = selection.derive_page_params
        self.score, self.select = score.rki4_score_only, score.rki4_select_only
        self.Values, self.attention_buffers = attention.ResidentVSource, attention.ensure_stage_b_buffers
        self.attend, self.attend_cuda = attention.sparse_paged_decode_batched, cuda.sparse_paged_decode_batched_cuda

    def compile(self, shape: Any) -> list[str]:
        """Its three CUDA files at once: each takes minutes, and it would compile one after the other, as it needs them.

        Returns the errors; what fails here fails again where it is timed, with less to say.
        """
        attend = partial(self._compile_attend, gtile=self._tile(shape.group), dmax=shape.head_dim, page=16)
        with ThreadPoolExecutor() as pool:
            builds = [pool.submit(work) for work in (*self._compile, attend)]
        return [str(error) for build in builds if (error := build.exception())]


def as_pairs(cache: Any, head_dim: int) -> Any:
    """(blocks, block_size, kv_heads, 2 head_dim) seen as (blocks, 2, block_size, kv_heads, head_dim)."""
    return cache.unflatten(-1, (2, head_dim)).permute(0, 3, 1, 2, 4)


class Peer:
    """locks-kv on the tensors of `layers`, with a state of as many layers as there are buffers of our records."""

    def __init__(self, locks: Locks, layers: Any) -> None:
        shape, config, rows = layers.shape, layers.shape.config, layers.rows
        self.locks, self.layers, self.rows = locks, layers, rows
        self.table, self.lengths = layers.decode_rows.block_table, layers.decode_rows.lengths
        self.keys = list(layers.all_layers.keys)
        device = layers.query.device
        self.state = locks.State(
            device,
            num_layers=len(self.keys),
            num_blocks=layers.caches[0].shape[0],
            n_kv=shape.kv_heads,
            G=shape.group,
            head_dim=shape.head_dim,
            page=config.page_size,
            max_reqs=rows,
            max_pages=self.table.shape[1],
            rank=config.rank,
            budget_pages=config.budget_pages - config.sink_pages - config.recent_pages,  # it counts those beside
            sink_pages=config.sink_pages,
            window_pages=config.recent_pages,
        )
        self.state.D, self.state.scale = shape.head_dim, layers.scale  # left to the caller
        locks.attention_buffers(self.state, device, SPLIT)
        self.pairs = [as_pairs(cache, shape.head_dim) for cache in layers.caches]
        self.values = [locks.Values(pair) for pair in self.pairs]
        self.output = torch.empty_like(layers.query)

    def plan(self) -> None:
        """Once a step."""
        self.locks.derive(self.state, self.lengths, self.rows)

    def build(self, layers: int) -> None:
        """The summaries of every complete page in the first so many layers."""
        pages = self.layers.context // self.state.page
        self.locks.build_bulk(self.state, self.keys[:layers], self.table, self.lengths, self.rows, pages)

    def build_last(self) -> None:
        """The summary of each row's last complete page, in all layers."""
        self.locks.build_tail(self.state, self.keys, self.table, self.lengths, self.rows)

    def fill(self) -> None:
        """Summaries in every layer; all layers hold the same keys."""
        self.build(1)
        for layer in range(1, len(self.keys)):
            for part, first in zip(self.state.layer_state(layer), self.state.layer_state(0), strict=True):
                part.copy_(first)

    def score(self, layer: int) -> None:
        """One layer's scores."""
        query, scale = self.layers.query, self.layers.scale
        self.locks.score(self.state, layer % len(self.keys), query, self.table, self.lengths, self.rows, scale)

    def select(self) -> None:
        """The pages of one layer, from its scores."""
        self.locks.select(self.state, self.rows)

    def attend(self, layer: int, cuda: bool = False) -> None:
        """One layer's attention over the pages that the state lists."""
        i, work = layer % len(self.pairs), self.locks.attend_cuda if cuda else self.locks.attend
        tensors = (self.pairs[i], self.table, self.lengths, self.state, self.output, self.values[i])
        work(self.layers.query, *tensors, scale=self.layers.scale)

    def decode(self, layer: int) -> None:
        """All that one layer launches in a decode step."""
        self.score(layer)
        self.select()
        self.attend(layer)

    def take_pages(self, pages: Any) -> None:
        """List these pages, (rows, kv_heads, pages), as if its select had chosen them."""
        self.state.page_table[: self.rows, :, : pages.shape[-1]].copy_(pages)
        self.state.page_cnt[: self.rows].fill_(pages.shape[-1])


def in_common(ours: Any, table: Any, counts: Any, pages: int) -> Any:
    """Share of our pages that it selected too, (rows, kv_heads).

    Parameters
    ----------
    ours : (rows, kv_heads, budget_pages)
    table, counts : (rows, kv_heads, ..) and (rows, kv_heads)
        Its pages, and how many of them count.
    pages : int
        Of a row.

    Raises
    ------
    ValueError
        If the two sides do not select equally many pages, or either one twice, or one that is none of the row's.
    """
    budget = ours.shape[-1]
    if not bool((counts == budget).all()):
        raise ValueError(f"it selects {sorted(set(counts.flatten().tolist()))} pages, we select {budget}")
    marked = []
    for side, chosen in (("we list", ours), ("it lists", table[..., :budget])):
        chosen = chosen.long()
        if not bool(((chosen >= 0) & (chosen < pages)).all()):
            raise ValueError(f"{side} pages that a row of {pages} has not")
        mask = torch.zeros(*chosen.shape[:-1], pages, dtype=torch.bool, device=chosen.device)
        mask.scatter_(-1, chosen, True)
        if not bool((mask.sum(-1) == budget).all()):
            raise ValueError(f"{side} a page twice")
        marked.append(mask)
    return (marked[0] & marked[1]).sum(-1) / budget


def masses_by_row(log_mass: Any, rows: int, complete: int) -> Any:
    """Our (kv_heads, .., group), `complete` pages of one row after the other, as (rows, kv_heads, group, pages)."""
    return log_mass[:, : rows * complete].unflatten(1, (rows, complete)).permute(1, 0, 3, 2)
