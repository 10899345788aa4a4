"""SnapKV: what the prompt's last queries attend to (Li et al., arXiv 2404.14469)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from ..config import LocksConfig, reject
from .history import History, check_number, protect


class SnapKV(History):
    """s_g(j) = log sum_{i in j} pool_i( sum_t a_g(t, i) ): t runs over the prompt's last `window` queries only.

    pool is the mean over `kernel` neighbours, zeros beyond the ends; i runs over the tokens before the window.  The
    prompt ends with the first sparse step, and what was learnt until then stays.  The original keeps the window and all
    that is generated; here their pages come first, the latest before all, and must fit in the budget.

    The original selects tokens, once, for each query head, and its budget is for the prompt alone.  Here pages are
    selected, one set a KV head by the mean of its heads' shares, and the budget holds at every step: generated pages
    push the prompt's out.  Reads one score a token and query head, though one a page would do.

    Parameters
    ----------
    config, permanent : as in `History`
    window : int
        Queries that vote: 32 in the published code.
    kernel : int, odd
        5 in the published code, which pools by the mean too.
    """

    def __init__(
        self, config: LocksConfig | None = None, *, permanent: bool = True, window: int = 32, kernel: int = 5
    ) -> None:
        super().__init__(config, permanent=permanent)
        check_number("window", window, 1, "queries that vote")
        check_kernel(kernel)
        self._window, self._kernel = window, kernel
        self._queries: Tensor | None = None  # (..., G, window or fewer, d)
        self._importance: Tensor | None = None  # (..., G, tokens before the window)

    def _learn(self, query: Tensor, keys: Tensor, scale: float) -> None:
        if self._prompt is not None:
            return
        query = query if self._queries is None else torch.cat([self._queries, query], -2)
        self._queries = query[..., -self._window :, :].clone()
        before = keys.shape[-2] - self._queries.shape[-2]
        votes = keys.new_zeros((*query.shape[:-2], before), dtype=torch.float32)
        for _, weights in self._attention(self._queries, keys, scale):
            votes += weights[..., :before].sum(-2)
        self._importance = votes
        if before:
            rows = votes.reshape(-1, 1, before)
            self._importance = avg_pool1d(rows, self._kernel, 1, self._kernel // 2).view_as(votes)

    def _score(self, count: int) -> Tensor:
        assert self._importance is not None
        first = self._importance.shape[-1] // self._config.page_size
        mass = self._pages(self._importance, min(first, count)).sum(-1).log()
        return protect(mass, first, count)


def check_kernel(kernel: int) -> None:
    """ValueError unless a token has as many pooled neighbours on either side."""
    check_number("kernel", kernel, 1, "neighbours pooled, the token itself among them")
    if kernel % 2 == 0:
        raise reject("kernel", kernel, "an odd number, so that the token is in the middle", f"Use {kernel + 1}.")
