"""Select and attend in one kernel, for steps of few rows; what it computes is what `Select` and `Attend` do."""

from __future__ import annotations

from torch import Tensor

from .compiler import SHARED_MEMORY, Kernel
from .score import Score
from .select import SCORED, Select, largest_cluster, scored, selection_bytes, selection_defines
from .shape import KernelShape

THREADS = 256
KEYS = 4096
"""Pages of a block whose shares fit its shared memory."""
LEAST_CLUSTER = 8
"""Blocks a row and head below which two kernels, which share work over rows, are faster."""
MOST_ATTENDED = 8192
"""Tokens that a row may attend here: for more, `Attend` has more blocks and copies ahead."""


class SelectAttend:
    """The kernel of one shape; it works in `select`'s buffers but leaves no list of pages."""

    def __init__(self, shape: KernelShape, score: Score, select: Select) -> None:
        self.shape, self.score, self._select = shape, score, select
        self._kernels: dict[int, Kernel] = {}
        # A row attends everything up to either of these.
        self._most = max(shape.config.dense_below, shape.config.budget)

    def takes(self, rows: int) -> bool:
        """Whether steps of this many rows are for this kernel."""
        fits = self.shape.group <= 8 and self.shape.head_dim <= 128 and self._most <= MOST_ATTENDED
        return fits and self._cluster(rows) >= LEAST_CLUSTER

    def warm_up(self, rows: int) -> None:
        """Compile what `rows` rows need."""
        self._kernel(self._cluster(rows))

    def _cluster(self, rows: int) -> int:
        return largest_cluster(rows * self.shape.kv_heads, self._select.processors, LEAST_CLUSTER, self._kernel)

    def _kernel(self, cluster: int) -> Kernel:
        shape = self.shape
        if cluster in self._kernels:
            return self._kernels[cluster]
        share = -(-shape.config.budget_pages // cluster)
        stage = 2 * 16 * shape.head_dim * 2
        slices = 4 * shape.group * shape.head_dim + 8 * shape.group * cluster
        fixed = selection_bytes(shape, THREADS, KEYS, cluster) + slices + 4 * share + 128 * 16 + 256
        most = -(-self._most // (16 * cluster))
        stages = min(THREADS // 32, most, (SHARED_MEMORY - fixed) // stage)
        defines = selection_defines(shape, self.score, THREADS, KEYS, cluster)
        defines |= shape.defines("HEAD_DIM")
        shared = fixed + stages * stage
        defines |= {"STAGES": stages, "SHARED_BYTES": shared}
        fields = SCORED + "PPPPPqqqqqf"
        self._kernels[cluster] = Kernel("select_attend", "select_attend", defines, fields, THREADS, shared, cluster)
        return self._kernels[cluster]

    def __call__(
        self,
        stream: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        output: Tensor,
        block_table: Tensor,
        score_start: Tensor,
        lengths: Tensor,
        rows: int,
        scale: float,
    ) -> None:
        """Select pages of the rows that `score_start` counts pages of and attend them.

        Other rows attend everything, or get zeros if they have no tokens.

        Parameters
        ----------
        query, output : (rows, kv_heads * group, head_dim), rows strided
        keys, values : (blocks, block_size, kv_heads, head_dim), same strides, the last 1
        block_table : int32 (rows, blocks of a row)
        score_start : int32 (rows + 1), from `Plan`
        lengths : int32 (rows)
        scale : float
        """
        cluster = self._cluster(rows)
        tensors = (query, keys, values, output, lengths)
        self._kernel(cluster).launch(
            stream,
            (cluster * rows * self.shape.kv_heads, 1),
            *scored(self.shape, self.score, block_table, score_start, self._select.keys, rows),
            *(tensor.data_ptr() for tensor in tensors),
            query.stride(0),
            output.stride(0),
            *keys.stride()[:3],
            scale,
        )
