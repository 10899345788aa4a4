"""The steps in order, with the workspace that all layers of an engine share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import reject
from .attend import Attend
from .build import Build
from .caches import Caches
from .plan import Plan
from .score import Score, parts_of
from .select import Select
from .select_attend import SelectAttend
from .shape import KernelShape


@dataclass
class Rows:
    """The rows of one step: where their tokens lie and how many they are.

    Attributes
    ----------
    lengths : int32 (rows)
        Tokens of each row after the step; 0 for padding.
    query_starts : int32 (rows + 1)
    block_table : int32 (rows, blocks of a row)
    count, decode : int
        Rows, and those at the front that have one query token.
    most_completed : int
        The most pages that the step may complete.
    """

    lengths: Tensor
    query_starts: Tensor
    block_table: Tensor
    count: int
    decode: int
    most_completed: int

    def __post_init__(self) -> None:
        for name in ("lengths", "query_starts", "block_table"):
            tensor = getattr(self, name)
            if tensor.dtype != torch.int32 or tensor.stride(-1) != 1:
                found = (tensor.dtype, tensor.stride())
                raise reject(name, found, "dense int32", "Use .to(torch.int32).contiguous().")


class Pipeline:
    """Compiled kernels and their workspace, for one shape.

    Parameters
    ----------
    shape : KernelShape
    max_rows, max_completed : int
        Rows of a step, and pages that it completes, at most.
    capacity : int
        Pages whose scores fit the workspace, over all rows of a step that select; a row past that attends everything.
    device : torch.device
    logical : bool
        Also give the selected pages as numbers of the sequence, for tests and traces.
    joint : bool
        Whether steps of few rows may select and attend in one kernel, which leaves no list of pages.
    """

    def __init__(
        self,
        shape: KernelShape,
        max_rows: int,
        max_completed: int,
        capacity: int,
        device: torch.device,
        logical: bool = False,
        joint: bool = True,
    ) -> None:
        self.shape, self.max_rows, self.max_completed, self.capacity = shape, max_rows, max_completed, capacity
        self.plan_of_step = Plan(shape, max_rows, max_completed, capacity, parts_of(shape, device), device)
        self._build = Build(shape, device)
        self.score = Score(shape, max_rows, capacity, device)
        self.select = Select(shape, self.score, max_rows, logical, device)
        self._attend = Attend(shape, max_rows, device)
        self._select_attend = SelectAttend(shape, self.score, self.select)
        self.joint = joint
        self._completed_count = self.plan_of_step.completed_start[:1]

    def warm_up(self) -> None:
        """Compile for every number of rows, so that no step has to."""
        for rows in range(1, self.max_rows + 1):
            (self._select_attend if self.is_joint(rows) else self.select).warm_up(rows)

    def is_joint(self, rows: int) -> bool:
        """Whether a step of this many decode rows selects and attends in one kernel."""
        return self.joint and self._select_attend.takes(rows)

    def plan(self, stream: int, rows: Rows, dense_below: int | None = None, mark: Caches | None = None) -> None:
        """Once a step, before anything else.

        Parameters
        ----------
        dense_below : int, optional
            Stands in for the configuration's.
        mark : Caches, optional
            Where to mark the records of the pages that the step completes as missing, if they are built after it.
        """
        if rows.count > self.max_rows or rows.most_completed > self.max_completed:
            found = (rows.count, rows.most_completed)
            allowed = f"at most {(self.max_rows, self.max_completed)}"
            raise reject("(rows, pages completed)", found, allowed, "Make a larger pipeline.")
        least = self.shape.config.dense_below if dense_below is None else dense_below
        table = rows.block_table
        self.plan_of_step(stream, rows.lengths, rows.query_starts, table, rows.count, rows.decode, least, mark)
        self._completed_count = self.plan_of_step.completed_start[rows.count :]

    def build(self, stream: int, rows: Rows, caches: Caches, layer: int | None = None) -> None:
        """Records of the pages that the planned step completes.

        In one layer, before its `decode`; or, if `layer` is None, in all of them, after the step.
        """
        self.build_pages(stream, caches, self.plan_of_step.completed, self._completed_count, rows.most_completed, layer)

    def build_pages(
        self, stream: int, caches: Caches, pages: Tensor, count: Tensor, most: int, layer: int | None = None
    ) -> None:
        """Records of the first `count` of `pages`, at most `most`: see `Build`."""
        self._build(stream, caches, layer, pages, count, most)

    def score_pages(self, stream: int, rows: Rows, query: Tensor, records: Tensor, keys: Tensor, scale: float) -> None:
        """Log-masses of the pages of the decode rows that select."""
        plan = self.plan_of_step
        parts = (plan.score_start, plan.score_parts, plan.first_blocks)
        self.score(stream, query, records, rows.block_table, *parts, keys, scale)

    def attend(
        self, stream: int, rows: Rows, query: Tensor, keys: Tensor, values: Tensor, output: Tensor, scale: float
    ) -> None:
        """Attention of the decode rows over the pages that were selected, or all."""
        plan, tensors = self.plan_of_step, (query, keys, values, output, rows.block_table, self.select.pages)
        starts = (plan.score_start, plan.attend_start)
        self._attend(stream, *tensors, *starts, plan.lengths, rows.decode, scale)

    def select_attend(
        self, stream: int, rows: Rows, query: Tensor, keys: Tensor, values: Tensor, output: Tensor, scale: float
    ) -> None:
        """Both at once, for steps that `is_joint` says are few enough rows."""
        plan, tensors = self.plan_of_step, (query, keys, values, output, rows.block_table)
        self._select_attend(stream, *tensors, plan.score_start, plan.lengths, rows.decode, scale)

    def decode(
        self,
        stream: int,
        rows: Rows,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        records: Tensor,
        output: Tensor,
        scale: float,
    ) -> None:
        """Score, select and attend."""
        self.score_pages(stream, rows, query, records, keys, scale)
        if self.is_joint(rows.decode):
            self.select_attend(stream, rows, query, keys, values, output, scale)
        else:
            plan = self.plan_of_step
            self.select(stream, rows.block_table, plan.score_start, plan.lengths, rows.decode)
            self.attend(stream, rows, query, keys, values, output, scale)
