"""H2O: a page is worth the attention that its tokens have had so far (Zhang et al., arXiv 2306.14048)."""

from __future__ import annotations

from torch import Tensor

from .history import Columns, Watching, grow, protect


class H2O(Watching):
    """s_g(j) = log sum_{i in j} sum_t a_g(t, i): a_g(t, i) is token i's attention from query t, over all t so far.

    With a configuration, half of its budget is for the most recent pages and the rest for those of most attention, the
    "heavy hitters"; without one, pages go by attention alone, which favours early ones: more queries have seen them.

    The original drops single tokens, from the prompt on, one set for each query head.  Here prefill is dense, pages are
    dropped, and a KV head has one set, by the mean of its heads' shares.  Reads one score a token and query head.
    """

    _sum: Tensor | None = None  # (..., G, T)

    def _prepare(self, query: Tensor, tokens: int) -> None:
        self._sum = grow(self._sum, query, tokens)

    def _add_weights(self, first: int, weights: Tensor) -> None:
        assert self._sum is not None
        self._sum[..., : weights.shape[-1]] += weights.sum(-2)

    def _add_columns(self, columns: Columns) -> None:
        assert self._sum is not None
        self._sum = self._sum + columns.sums

    def _score(self, count: int) -> Tensor:
        assert self._sum is not None
        mass = self._pages(self._sum, count).sum(-1).log()
        if self._budget is None:
            return mass
        held = self._config.pages_in(self._tokens + 1)
        return protect(mass, max(0, held - self._budget // 2), count)
