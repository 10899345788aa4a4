"""One recorded decode step, and its pages as a selector is given them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import LocksConfig, reject
from ..summary import KEY_DTYPES, PageSummary, summarize


@dataclass(frozen=True, eq=False)
class DecodeRecord:
    """What one layer saw at one decode step.

    Parameters
    ----------
    query : fp32, bf16 or fp16 (H, G, d)
        After RoPE, the G query heads of each KV head.
    keys, values : fp32, bf16 or fp16 (H, T, d)
        As cached; tokens past `length` are not looked at.
    scale : float
        Logits per unit of q . k.
    length : int
        Tokens that the query attends, 1 to T, its own included.
    carriers : tuple of (first, one after the last)
        Spans of the tokens that hold the answer, within `length`.

    Raises
    ------
    ValueError
        For shapes that do not fit, another dtype, a length or span out of range, or NaN or infinity within `length`:
        no metric has a meaning there.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    scale: float
    length: int
    carriers: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        shapes = tuple(self.query.shape), tuple(self.keys.shape)
        fits = all(len(shape) == 3 and 0 not in shape for shape in shapes)
        if not fits or (shapes[0][0], shapes[0][2]) != (shapes[1][0], shapes[1][2]):
            allowed = "query (kv_heads, G, d) and keys (kv_heads, T, d), none of them empty"
            raise reject("query.shape, keys.shape", shapes, allowed, "Give one layer and one decode step a record.")
        if self.values.shape != self.keys.shape:
            allowed = f"the keys' shape, {shapes[1]}"
            raise reject("values.shape", tuple(self.values.shape), allowed, "Pass the K and V of the same tokens.")
        tokens = shapes[1][1]
        if type(self.length) is not int or not 1 <= self.length <= tokens:
            raise reject("length", self.length, f"1 to {tokens} tokens, as recorded", "Count the query's own token.")
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise reject("scale", self.scale, "a positive number", "Use 1 / sqrt(head_dim), or what the model uses.")
        for name, part in (("query", self.query), ("keys", self.keys), ("values", self.values)):
            if part.dtype not in KEY_DTYPES:
                allowed = "float32, bfloat16 or float16"
                raise reject(f"{name}.dtype", part.dtype, allowed, "Record what the cache holds.")
            if not bool((part if name == "query" else part[:, : self.length]).isfinite().all()):
                raise reject(name, "NaN or infinity", "finite numbers", "Leave the record out, and find its origin.")
        for first, after in self.carriers:
            if not 0 <= first < after <= self.length:
                allowed = f"0 <= first < one after the last <= length = {self.length}"
                raise reject("carriers", (first, after), allowed, "Count tokens from the start of the prompt.")

    def pages(self, config: LocksConfig) -> DensePages:
        """The complete pages within `length`."""
        return DensePages(self.keys[:, : self.length], config)


class DensePages:
    """A `PageSource` over keys (..., T, d) in memory: what every selector is given.

    The tokens of a last, partial page are left out; summaries are made with `config` when they are first asked for.
    """

    def __init__(self, keys: Tensor, config: LocksConfig) -> None:
        whole = keys.shape[-2] // config.page_size
        self._keys: Tensor = torch.unflatten(keys[..., : whole * config.page_size, :], -2, (whole, config.page_size))
        self._config = config
        self._summary: PageSummary | None = None

    @property
    def count(self) -> int:
        """Complete pages, P."""
        return self._keys.shape[-3]

    def summary(self) -> PageSummary:
        """Summaries of the (..., P) pages."""
        if self._summary is None:
            self._summary = summarize(self._keys, self._config)
        return self._summary

    def keys(self) -> Tensor:
        """(..., P, page_size, d), in the cache's dtype."""
        return self._keys
