"""KVzip: the most attention a key gets while the model repeats its context (Kim et al., arXiv 2505.23416)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import LocksConfig, reject
from . import history
from .history import History, grow, protect


class KVzip(History):
    """s(j) = log sum_{i in j} max_{g, t} a_g(t, i): t runs over the queries with which the context is repeated.

    Those queries come through `reconstruct`.  Without `repeated`, and until they do, t runs over the prompt's own
    queries, as `observe` gets them: **that stands in for KVzip and is not KVzip**, whose point is that the context is
    read a second time.  Say which of the two a number is of: `pagelocks eval run` calls this `kvzip-prompt`, and
    `kvzip` where it repeats the whole prompt, question and all.

    The context is what was observed before `reconstruct`, or before the first sparse step; its scores stay, since the
    original does not ask what will be asked.  It keeps all tokens after the context; here their pages come first, the
    latest before all, and must fit in the budget.  The original selects tokens, and lets heads and layers compete for
    one budget; here it is pages, as many for each KV head.  It has the repetition attend to the sink, the 2,048 tokens
    that are being repeated and itself; here it attends to the whole context and itself.  Reads one score a token, 64
    bytes a page, though one a page would do.

    Parameters
    ----------
    config, permanent : as in `History`
    repeated : bool
        The repetition will come: nothing is learnt from the prompt's own queries, and to select before it is an error.
    """

    _importance: Tensor | None = None  # (..., 1, T)
    _context: int | None = None  # tokens that were repeated

    def __init__(self, config: LocksConfig | None = None, *, permanent: bool = True, repeated: bool = False) -> None:
        super().__init__(config, permanent=permanent)
        self._repeated = repeated

    def reconstruct(self, query: Tensor, keys: Tensor, scale: float) -> None:
        """Learn from the context's repetition, before the first sparse step; in several parts, if need be.

        Parameters
        ----------
        query : (..., G, n, d)
            Of the n tokens of the instruction and the repetition, at positions after the context's T.
        keys : (..., T + n, d)
            Of the context and of those n; the latter are not part of the sequence, and are forgotten.
        scale : float
        """
        if self._prompt is not None or self._unreadable is None or keys.shape[-2] != self._tokens + query.shape[-2]:
            allowed = (
                f"{self._tokens} tokens, as observed, then the repetition's {query.shape[-2]}, before any selection"
            )
            raise reject("keys.shape[-2]", keys.shape[-2], allowed, "Observe the context, reconstruct, then decode.")
        context = self._unreadable
        new = ~keys[..., self._tokens :, :].isfinite().all(-1)
        self._unreadable = torch.cat([context, new], -1)
        if self._context is None:
            self._importance = None
        self._look(query, keys, scale)
        self._unreadable, self._context = context, self._tokens

    def page_bytes(self, head_dim: int, page_size: int = 16, itemsize: int = 2, group: int = 1) -> float:
        """One fp32 score a token."""
        return 4 * page_size

    def _learn(self, query: Tensor, keys: Tensor, scale: float) -> None:
        if self._prompt is None and self._context is None and not self._repeated:
            self._look(query, keys, scale)

    def _look(self, query: Tensor, keys: Tensor, scale: float) -> None:
        most = grow(self._importance, query[..., :1, :, :], keys.shape[-2])
        plain = self._plain(query, keys, scale)
        columns = history.passes.columns(query, keys, scale, None) if history.passes is not None and plain else None
        if columns is not None:
            most = most.maximum(columns.most.amax(-2, keepdim=True))
        else:
            for _, weights in self._attention(query, keys, scale, plain):
                seen = weights.shape[-1]
                most[..., :seen] = most[..., :seen].maximum(weights.amax((-3, -2)).unsqueeze(-2))
        self._importance = most

    def _score(self, count: int) -> Tensor:
        if self._importance is None:
            remedy = "Make a new one, and call reconstruct before it selects."
            raise reject("selector", "KVzip", "the prompt has not been repeated to it", remedy)
        assert self._prompt is not None
        context = self._prompt if self._context is None else self._context
        first = context // self._config.page_size
        mass = self._pages(self._importance, min(first, count)).sum(-1).log()
        return protect(mass, first, count)
