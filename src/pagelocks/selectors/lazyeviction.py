"""LazyEviction: tokens that have come back before will come back again (Zhang et al., arXiv 2506.15969)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import LocksConfig, reject
from .history import Columns, Gaps, Watching, check_number, grow, protect


class LazyEviction(Watching):
    """s_g(j) = log sum_{i in j} I_g(i), from when token i was attended and how long it was ever left alone.

        T_i = the last step t with a_g(t, i) >= threshold;  M_i = the longest gap between two such steps
        I_g(i) = 2 sigmoid(-(t - T_i) / M_i) + 2 sigmoid(1 - M_i);  0 if no later token attended to token i

    A step is a query's position, and the first gap counts from token i's own.  Pages that hold one of the last `window`
    tokens come first, the latest before all.

    The original counts decoding steps only; here prompt queries are steps as well, or nothing would be known at the
    first one.  It decides every W steps and meanwhile keeps W tokens over the budget; here the budget holds at every
    step and the choice is made anew at each, of pages and not tokens, one set a KV head and not one a query head.  Its
    published code puts 1 + (t - T) / M into the first sigmoid and counts the first gap from the token before; this
    follows the paper.  Reads two numbers a token and query head of the group.

    Parameters
    ----------
    config, permanent : as in `History`
    threshold : float
        1e-4 in the paper for Qwen models and 5e-4 for Llama's.
    window : int
        The paper takes W such that 80% of a model's gaps are shorter, up to 175, in budgets far larger; the default
        suits the small budgets here.
    """

    def __init__(
        self, config: LocksConfig | None = None, *, permanent: bool = True, threshold: float = 1e-4, window: int = 32
    ) -> None:
        super().__init__(config, permanent=permanent)
        check_number("window", window, 0, "recent tokens kept in any case")
        if not 0 < threshold < 1:
            raise reject("threshold", threshold, "attention weights lie between 0 and 1", "Use 1e-4.")
        self._threshold, self._window = threshold, window
        self._last: Tensor | None = None  # fp32 (..., G, T), whole numbers
        self._gap: Tensor | None = None  # fp32 (..., G, T), whole numbers

    def _prepare(self, query: Tensor, tokens: int) -> None:
        self._last, self._gap = grow(self._last, query, tokens), grow(self._gap, query, tokens)
        self._last[..., self._tokens :] = torch.arange(self._tokens, tokens, device=query.device)

    def _add_weights(self, first: int, weights: Tensor) -> None:
        assert self._last is not None and self._gap is not None
        seen = weights.shape[-1]
        last, longest = self._last[..., :seen].flatten(), self._gap[..., :seen].flatten()  # copies, or views of all
        # Few weights reach the threshold: (key, step) of those that do, the steps of a key in order.
        key, step = (weights >= self._threshold).mT.flatten(0, -2).nonzero().unbind(-1)
        step = (step + first).to(last.dtype)
        before = torch.where(key == key.roll(1), step.roll(1), last[key])
        before[:1] = last[key[:1]]  # `roll` brought the last one here
        longest.scatter_reduce_(0, key, step - before, "amax")
        last.scatter_reduce_(0, key, step, "amax")
        self._last[..., :seen] = last.view_as(self._last[..., :seen])
        self._gap[..., :seen] = longest.view_as(self._gap[..., :seen])

    def _gaps(self) -> Gaps | None:
        assert self._last is not None and self._gap is not None
        return Gaps(self._threshold, self._last, self._gap)

    def _add_columns(self, columns: Columns) -> None:
        assert columns.gaps is not None
        self._last, self._gap = columns.gaps.last, columns.gaps.longest

    def _score(self, count: int) -> Tensor:
        assert self._last is not None and self._gap is not None
        idle = self._tokens - 1 - self._last
        alive = 2 * (-idle / self._gap.clamp(min=1)).sigmoid()
        importance = torch.where(self._gap > 0, alive + 2 * (1 - self._gap).sigmoid(), 0)
        mass = self._pages(importance, count).sum(-1).log()
        return protect(mass, max(0, self._tokens - self._window) // self._config.page_size, count)

    def page_bytes(self, head_dim: int, page_size: int = 16, itemsize: int = 2, group: int = 1) -> float:
        """Two int32 a token and query head."""
        return 8 * page_size * group
