"""RocketKV: the prompt's pages are thinned once, then boxes rank the rest (Behnam et al., arXiv 2502.14051)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d, pad

from ..config import LocksConfig, reject
from .base import PageSource
from .history import chunk_on
from .quest import box_of


class RocketKV:
    """Stage 1, once a prompt: keep the pages its last queries attend.  Stage 2, each step: rank those by partial boxes.

    1. a_i = sum over the group's heads and the prompt's last w queries of softmax(q . k_i * scale);
       A(j) = sum_{i in j} max_{|l - i| <= K / 2} a_l.  With S tokens seen and a budget of t, c = S / t, the pages of
       greatest A are kept, S / c^rho tokens in all, rho = min(0.2 + 0.06 log2 c, 0.8); others get s_g(j) = -inf.
       Pages of the last w tokens, later ones, and those that hold NaN or infinity stay; no prompt, no eviction.
    2. C = the n channels of greatest sum_g |q_g|;  b_c = max_i k_ic where sum_g q_gc >= 0, else min_i k_ic;
       s_g(j) = sum_{c in C} q_gc b_c * scale / sqrt(|q_gC|_1 / |q_g|_1) + log B.

    Reads n numbers of each kept page, 2 n bytes in bf16, and nothing of the others.  As in the original: window 32,
    pooling K = 63, the split between the stages, one choice of tokens, channels and signs for a group (so the box does
    not bound a head that disagrees with its group), the divisor of the paper's code (SparQ's; the paper only says
    "score"), the group's shares added up.  Otherwise:

    * The original evicts tokens and pages what is left, ceil(c^((1 - rho) / 2)) tokens a page, and ends by choosing
      tokens; here pages are pages of the cache, and are evicted and chosen whole.
    * Its c^(1 - rho) left for stage 2, at most 6.4 up to c = 10,000, is page size times d / n.  Our pages alone are
      coarser, so n is free; its own splits give about half of the channels at c = 64 to 1,024, the default here.
    * Its t counts the traffic of stage 2's scores too, half and half; here t is what is attended, as for all selectors.
    * A further prompt thins all pages anew, as its multi-turn variant RocketKV-MT does.

    Parameters
    ----------
    config : LocksConfig, optional
        For the budget and the page size.
    channels : int, optional
        n, at least 1; half of the head size if left out.
    window, kernel : int
        w, at least 1, and K, odd.
    """

    def __init__(
        self, config: LocksConfig | None = None, channels: int | None = None, window: int = 32, kernel: int = 63
    ) -> None:
        if channels is not None and (type(channels) is not int or channels < 1):
            raise reject("channels", channels, "a whole number, 1 or more", "Leave it out for half of the head size.")
        if type(window) is not int or window < 1:
            raise reject("window", window, "a whole number, 1 or more", "Use 32.")
        if type(kernel) is not int or kernel < 1 or kernel % 2 == 0:
            raise reject("kernel", kernel, "an odd whole number, 1 or more", "Use 63.")
        self._config = config or LocksConfig()
        self._channels, self._window, self._kernel = channels, window, kernel
        self._queries: Tensor | None = None  # (..., G, <= w, d), the prompt's last
        self._seen = 0
        self.kept: Tensor | None = None
        """bool (..., V): of the prompt's first V pages, those that stage 1 kept; None before a prompt."""

    def observe(self, query: Tensor, keys: Tensor, scale: float) -> None:
        """Thin the prompt's pages: query (..., G, n, d), keys (..., T, d); a step of one token is no prompt."""
        total, steps = keys.shape[-2], query.shape[-2]
        if steps == 1:
            return
        recent = query[..., -self._window :, :].to(torch.float32)
        if self._queries is not None and self._seen == total - steps:  # a prompt's next chunk
            recent = torch.cat([self._queries, recent], dim=-2)
        self._queries, self._seen = recent[..., -self._window :, :].clone(), total  # a view would keep the whole chunk
        votes = _votes(self._queries, keys.to(torch.float32), scale)
        size = self._config.page_size
        count = votes.shape[-1] // size
        finite = torch.unflatten(keys[..., : count * size, :].isfinite().all(-1), -1, (count, size)).all(-1)
        if count:
            padded = pad(votes, (self._kernel // 2,) * 2).unsqueeze(0).flatten(0, -2)
            votes = max_pool1d(padded, self._kernel, 1).view(votes.shape)
        votes = torch.unflatten(votes[..., : count * size], -1, (count, size)).sum(-1)
        votes = torch.where(finite, votes, torch.inf)
        room = math.ceil(self._capacity(total) / size) - (self._config.pages_in(total) - count)
        order = votes.sort(dim=-1, descending=True, stable=True).indices
        kept = torch.zeros_like(votes, dtype=torch.bool).scatter(-1, order[..., : max(0, room)], True)
        self.kept = kept | ~finite

    def log_mass(self, query: Tensor, pages: PageSource, scale: float) -> Tensor:
        """query (..., G, d) -> fp32 (..., G, P); -inf for evicted pages, +inf where a page holds NaN or infinity."""
        low, high, size = box_of(pages)
        query = query.to(torch.float32)
        head_dim = query.shape[-1]
        channels = max(1, head_dim // 2) if self._channels is None else min(self._channels, head_dim)
        weight = query.abs().sum(-2, keepdim=True)  # (..., 1, d)
        chosen = torch.zeros_like(weight, dtype=torch.bool).scatter(-1, weight.topk(channels, -1).indices, True)
        part = torch.where(chosen, query, 0)
        box = torch.where(query.sum(-2, keepdim=True) >= 0, high, low)
        covered = part.abs().sum(-1, keepdim=True) / query.abs().sum(-1, keepdim=True)
        # A head of nothing but zeros, or of nothing in the group's channels, has scores of 0 whatever the divisor.
        mass = part @ box.mT * scale / torch.where(covered > 0, covered, 1).sqrt() + size.unsqueeze(-2)
        finite = (low.isfinite() & high.isfinite()).all(-1).unsqueeze(-2) & mass.isfinite()
        mass = torch.where(finite, mass, torch.inf)
        if self.kept is None:
            return mass
        keys = pages.keys()  # of which the shape alone is looked at
        if self.kept.shape[:-1] != mass.shape[:-2] or keys.shape[-2] != self._config.page_size:
            allowed = f"it has seen a prompt of {tuple(self.kept.shape[:-1])} in pages of {self._config.page_size}"
            raise reject("pages", tuple(keys.shape), allowed, "Use one instance for one layer of one batch.")
        kept = pad(self.kept[..., : mass.shape[-1]], (0, max(0, mass.shape[-1] - self.kept.shape[-1])), value=True)
        return torch.where(kept.unsqueeze(-2), mass, -torch.inf)

    def page_bytes(self, head_dim: int, page_size: int = 16, itemsize: int = 2, group: int = 1) -> float:
        """The chosen channels' least or largest, of a page that was kept; an evicted one costs nothing."""
        return (max(1, head_dim // 2) if self._channels is None else min(self._channels, head_dim)) * itemsize

    def _capacity(self, tokens: int) -> float:
        """Tokens that stage 1 keeps of so many."""
        ratio = max(1.0, tokens / self._config.budget)
        return tokens / math.pow(ratio, min(0.2 + 0.06 * math.log2(ratio), 0.8))


def _votes(query: Tensor, keys: Tensor, scale: float) -> Tensor:
    """fp32 (..., T - w): attention that the last w queries (..., G, w, d) pay to the tokens before them."""
    window, total = query.shape[-2], keys.shape[-2]
    votes = keys.new_zeros(*keys.shape[:-2], total - window)
    at_once = max(1, chunk_on(keys) // max(1, query.shape[:-2].numel() * total))
    for start in range(0, window, at_once):
        part = query[..., start : start + at_once, :]
        # Heads and queries as one dimension: broadcasting over heads would copy the keys for each.
        logits = torch.unflatten(part.flatten(-3, -2) @ keys.mT * scale, -2, (query.shape[-3], -1))  # (..., G, m, T)
        after = torch.ones(part.shape[-2], total, dtype=torch.bool, device=keys.device)
        # What is not finite takes no attention here: its page is kept anyway.
        logits = logits.masked_fill(after.triu(total - window + start + 1) | ~logits.isfinite(), -torch.inf)
        votes += logits.softmax(-1).nan_to_num(0)[..., : total - window].sum((-3, -2))
    return votes
