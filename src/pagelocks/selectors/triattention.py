"""TriAttention: what the average query will look at from ahead (Mao et al., arXiv 2604.04921)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import LocksConfig, reject
from .history import History, check_number


class TriAttention(History):
    """s(j) = mean_{i in j} max_g z_g(i): z_g are the scores S_g(i), with mean 0 and variance 1 over the tokens.

    Before RoPE, queries lie close to a centre.  With a query as complex numbers q_f, one a frequency w_f, k_f(i) those
    of token i's cached key, n the last position and o = 1, 2, 4, ..., `horizon`:

        S_g(i) = mean_o Re sum_f E[q_f] exp(1j w_f (n + o)) conj(k_f(i))  +  sum_f (E|q_f| - |E q_f|) |k_f(i)|

    which is the average query's logit, from o tokens ahead, and for what is not average the product of the norms.

    The means are those given, measured beforehand on other text as in the original (`query_means`), or without any
    those of all queries observed in this sequence.  The original scores every 128 steps, keeps the prompt and drops
    single tokens; here all is scored at every step, the prompt too, and pages are dropped, by the mean of their tokens'
    scores, since these are no shares of anything.  Keys must be rotated by RoPE, half against half (Llama, Qwen), over
    the whole head, without a rescaling of their length.  Reads one score a token and every key once in 128 steps.

    Parameters
    ----------
    frequencies : (d / 2)
        w_f, radians a position: the model's `inv_freq`, or `rope_frequencies`.
    config, permanent : as in `History`
    horizon : int
        The farthest look ahead; 65,536 as published.
    means : (complex, real), each (kv_heads, G, d / 2), optional
        E[q_f] and E|q_f| of one layer's queries, from `query_means`.
    """

    def __init__(
        self,
        frequencies: Tensor,
        config: LocksConfig | None = None,
        *,
        permanent: bool = True,
        horizon: int = 65_536,
        means: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        super().__init__(config, permanent=permanent)
        check_number("horizon", horizon, 1, "tokens ahead")
        self._frequencies = frequencies.to(torch.float64)  # angles grow to 1e5, of which fp32 keeps two digits
        self._ahead = 2.0 ** torch.arange(horizon.bit_length(), dtype=torch.float64, device=frequencies.device)
        self._means = means
        self._centre: Tensor | None = None  # complex (..., G, d / 2), a sum
        self._norm: Tensor | None = None  # (..., G, d / 2), a sum
        self._scores = torch.zeros(0)  # (..., 1, T)

    def _learn(self, query: Tensor, keys: Tensor, scale: float) -> None:
        tokens = keys.shape[-2]
        if query.shape[-1] != 2 * self._frequencies.shape[0] or self._frequencies.ndim != 1:
            allowed = f"heads of size {query.shape[-1]} need one frequency for each two channels"
            raise reject("frequencies.shape", tuple(self._frequencies.shape), allowed, "Give the model's inv_freq.")
        mean, size = self._averages(query, tokens)
        aim = mean * _turn(self._frequencies, tokens - 1 + self._ahead).mean(-2)
        spread = size - mean.abs()
        keys = keys.to(torch.float32)
        score = torch.cat([aim.real, aim.imag], -1).to(torch.float32) @ keys.mT
        score = score + spread.to(torch.float32) @ _complex(keys).abs().mT  # (..., G, T)
        present = score.isfinite() & ~self._gone(tokens).unsqueeze(-2)
        number = present.sum(-1, keepdim=True).clamp(min=1)
        score = torch.where(present, score - torch.where(present, score, 0).sum(-1, keepdim=True) / number, 0)
        deviation = (score.square().sum(-1, keepdim=True) / number).sqrt()
        self._scores = (score / torch.where(deviation > 0, deviation, 1)).amax(-2, keepdim=True)

    def _averages(self, query: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """E[q_f] and E|q_f|, (..., G, d / 2)."""
        if self._means is not None:
            centre, norm = (mean.to(query.device) for mean in self._means)
            if centre.shape[-3:-1] != query.shape[-4:-2]:
                allowed = f"means of {tuple(centre.shape[-3:-1])} KV heads and their query heads"
                raise reject("query.shape", tuple(query.shape), allowed, "Give the means of the same layer.")
            return centre, norm
        centre, norm = query_means(query, self._frequencies, tokens - query.shape[-2])
        steps = query.shape[-2]
        self._centre = centre * steps if self._centre is None else self._centre + centre * steps
        self._norm = norm * steps if self._norm is None else self._norm + norm * steps
        return self._centre / tokens, self._norm / tokens

    def _score(self, count: int) -> Tensor:
        return self._pages(self._scores, count).mean(-1)

    def page_bytes(self, head_dim: int, page_size: int = 16, itemsize: int = 2, group: int = 1) -> float:
        """One fp32 score a token, and the keys themselves at every 128th step."""
        return page_size * (4 + head_dim * itemsize / 128)


def query_means(query: Tensor, frequencies: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """E[q_f] and E|q_f| of queries before RoPE.

    Parameters
    ----------
    query : (..., G, n, d)
        After RoPE, of tokens that follow one another.
    frequencies : (d / 2)
        As in `TriAttention`.
    first : int
        The first token's position.

    Returns
    -------
    complex128 and fp64 (..., G, d / 2)
    """
    position = torch.arange(first, first + query.shape[-2], dtype=torch.float64, device=query.device)
    upright = _complex(query) * _turn(frequencies, -position)
    return upright.mean(-2), upright.abs().mean(-2)


def _turn(frequencies: Tensor, position: Tensor) -> Tensor:
    """complex (n, d / 2): RoPE's rotations at n positions."""
    angle = position.unsqueeze(-1) * frequencies.to(torch.float64)
    return torch.polar(torch.ones_like(angle), angle)


def rope_frequencies(base: float, head_dim: int) -> Tensor:
    """fp64 (head_dim / 2): base ** (-2 f / head_dim), RoPE without scaling; a model's config calls it rope_theta."""
    return base ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)


def _complex(vectors: Tensor) -> Tensor:
    """(..., d) -> complex (..., d / 2): the first half is real, the second imaginary."""
    real, imaginary = vectors.to(torch.float32).chunk(2, -1)
    return torch.complex(real.contiguous(), imaginary.contiguous())
