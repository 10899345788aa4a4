"""R-KV: keep what is attended and not said twice (Cai et al., arXiv 2505.24133)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d, normalize, pad

from ..config import LocksConfig, reject
from . import history
from .history import History, check_number, chunk_on, protect
from .snapkv import check_kernel


class RKV(History):
    """s(j) = mean_{i in j} Z(i), shifted and scaled to mean 0 and variance 1 over the pages.

        Z(i) = balance I(i) - (1 - balance) R(i)
        I = pool( mean_t softmax_i( max_g q_gt . k_i * scale ) ): t are the last `window` queries, i all tokens before
        R = softmax_i( mean_l C(l, i) ): C is the cosine of keys l and i, but 0 for l = i, and for each l at the last
            token i other than l with C > threshold

    pool takes the largest of `kernel` neighbours.  Shifting and scaling keep the order, and Z, of 1 / tokens, is too
    small for a softmax to tell pages apart.  Pages that hold one of the last `window` tokens come first.

    The original decides every 128 steps, when the cache is 128 tokens over its budget; here the budget holds at every
    step and the choice is made anew at each, of pages by the mean of their tokens' Z.  It reads: one score a token, and
    every key once in 128 steps.  `observe` costs another product of the new keys with all keys.

    Parameters
    ----------
    config, permanent : as in `History`
    window, kernel, balance, threshold
        8, 7, 0.1 and 0.5 as published.
    """

    def __init__(
        self,
        config: LocksConfig | None = None,
        *,
        permanent: bool = True,
        window: int = 8,
        kernel: int = 7,
        balance: float = 0.1,
        threshold: float = 0.5,
    ) -> None:
        super().__init__(config, permanent=permanent)
        check_number("window", window, 1, "queries that vote")
        check_kernel(kernel)
        if not 0 <= balance <= 1:
            raise reject("balance", balance, "a share of importance, 0 to 1, the rest being redundancy", "Use 0.1.")
        if not -1 <= threshold <= 1:
            raise reject("threshold", threshold, "cosines, and so their bound, are -1 to 1", "Use 0.5.")
        self._window, self._kernel, self._balance, self._threshold = window, kernel, balance, threshold
        self._queries: Tensor | None = None  # (..., G, window or fewer, d)
        self._likeness = Likeness(threshold)
        self._merit = torch.zeros(0)  # (..., 1, tokens before the window)

    def _learn(self, query: Tensor, keys: Tensor, scale: float) -> None:
        query = query if self._queries is None else torch.cat([self._queries, query], -2)
        self._queries = query[..., -self._window :, :].clone()
        tokens, gone = keys.shape[-2], self._gone(keys.shape[-2])
        before = tokens - self._queries.shape[-2]
        redundancy = self._redundancy(keys, gone)[..., :before]
        past, absent = keys[..., :before, :].to(torch.float32), gone[..., :before]
        logits = self._queries.to(torch.float32).flatten(-3, -2) @ past.mT * scale
        logits = (
            torch.unflatten(logits, -2, self._queries.shape[-3:-1])
            .amax(-3)
            .masked_fill(absent.unsqueeze(-2), -torch.inf)
        )
        importance = logits.softmax(-1).nan_to_num(0).mean(-2)
        if before:
            pooled = max_pool1d(importance.reshape(-1, 1, before), self._kernel, 1, self._kernel // 2)
            importance = pooled.view_as(importance)
        self._merit = (self._balance * importance - (1 - self._balance) * redundancy).unsqueeze(-2)

    def _redundancy(self, keys: Tensor, gone: Tensor) -> Tensor:
        if self._evicted is None or not self._evicted.any():
            self._likeness = self._likeness.with_tokens(keys, gone)
            mean = self._likeness.mean()
        else:
            # Tokens that are gone take no part, as if the sequence were the rest alone; few are left, so start anew.
            left = gone.sort(dim=-1, stable=True).indices[..., : int((~gone).sum(-1).max())]
            rest = keys.gather(-2, left.unsqueeze(-1).expand(*left.shape, keys.shape[-1]))
            likeness = Likeness(self._threshold).with_tokens(rest, gone.gather(-1, left))
            mean = torch.zeros_like(gone, dtype=torch.float32).scatter(-1, left, likeness.mean())
        return mean.masked_fill(gone, -torch.inf).softmax(-1).nan_to_num(0)

    def _score(self, count: int) -> Tensor:
        first = self._merit.shape[-1] // self._config.page_size
        mass = self._pages(self._merit, min(first, count)).mean(-1)
        if mass.shape[-1]:
            mass = mass - mass.mean(-1, keepdim=True)
            deviation = mass.square().mean(-1, keepdim=True).sqrt()
            mass = mass / torch.where(deviation > 0, deviation, 1)
        return protect(mass, first, count)

    def page_bytes(self, head_dim: int, page_size: int = 16, itemsize: int = 2, group: int = 1) -> float:
        """One fp32 score a token, and the keys themselves at every 128th step."""
        return page_size * (4 + head_dim * itemsize / 128)


class Likeness:
    """The mean over l of C(l, i), kept up to date as tokens arrive: T d operations for each, 3 T numbers kept."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._total: Tensor | None = None  # (..., T): sum over l of the cosines
        self._last: Tensor | None = None  # int64 (..., T): 1 + the last like token, or 0
        self._cosine: Tensor | None = None  # (..., T): the cosine with it

    def with_tokens(self, keys: Tensor, gone: Tensor) -> Likeness:
        """With all tokens' keys (..., T, d); those seen before are known by their number.

        `gone`, bool (..., T), take no part.
        """
        lead, tokens = keys.shape[:-2], keys.shape[-2]
        total, last, cosine = self._total, self._last, self._cosine
        if total is None or last is None or cosine is None:
            total = cosine = keys.new_zeros((*lead, 0), dtype=torch.float32)
            last = total.to(torch.int64)
        grown = Likeness(self._threshold)
        if history.passes is not None:
            inverse = keys.norm(dim=-1, dtype=torch.float32).clamp(min=1e-12).reciprocal().masked_fill(gone, 0)
            found = history.passes.likeness(keys, inverse, self._threshold, (total, last.int(), cosine))
            if found is not None:
                grown._total, grown._last, grown._cosine = found[0], found[1].long(), found[2]
                return grown
        unit = normalize(keys.to(torch.float32).masked_fill(gone.unsqueeze(-1), 0), dim=-1)
        rows = max(1, chunk_on(unit) // max(1, lead.numel() * tokens))
        for start in range(total.shape[-1], tokens, rows):
            stop = min(start + rows, tokens)
            cosines = unit[..., start:stop, :] @ unit[..., :stop, :].mT  # (..., m, stop)
            cosines.diagonal(start, -2, -1).zero_()
            total = pad(total, (0, stop - start)) + cosines.sum(-2)
            total[..., start:] += cosines[..., :start].sum(-1)
            number = torch.arange(1, stop + 1, dtype=torch.int32, device=unit.device)
            like = cosines > self._threshold
            # A new token's last like one among the old, then everyone's among the new, which come later.
            old = pad(torch.where(like[..., :start], number[:start], 0), (1, 0)).amax(-1).long()
            last = torch.cat([last, old], -1)
            cosine = torch.cat([cosine, cosines.gather(-1, (old - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)], -1)
            new = torch.where(like, number[start:].unsqueeze(-1), 0).amax(-2).long()
            place = (new - 1 - start).clamp(min=0).unsqueeze(-2)
            last, cosine = (
                torch.where(new > 0, new, last),
                torch.where(new > 0, cosines.gather(-2, place).squeeze(-2), cosine),
            )
        grown._total, grown._last, grown._cosine = total, last, cosine
        return grown

    def mean(self) -> Tensor:
        """(..., T)"""
        assert self._total is not None and self._last is not None and self._cosine is not None
        spared = torch.where(self._last > 0, self._cosine, 0)
        spared = torch.zeros_like(self._total).scatter_add(-1, (self._last - 1).clamp(min=0), spared)
        return (self._total - spared) / max(1, self._total.shape[-1])
