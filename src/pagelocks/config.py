"""LocksConfig: every number that a user may choose, checked once, when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MIN_PAGE_SIZE, MAX_PAGE_SIZE = 8, 64
BASIS_BITS = (2, 4, 8, None)
COEFFICIENT_BITS = (8, None)


def reject(name: str, value: object, allowed: str, remedy: str) -> ValueError:
    """The one form of a bad-value error: the value, what is allowed, the remedy."""
    return ValueError(f"{name}={value!r} is not allowed: {allowed}. {remedy}")


@dataclass(frozen=True)
class LocksConfig:
    """How pages are summarised and how many of them a decode step reads.

    Parameters
    ----------
    budget : int
        Tokens that one KV head attends at a decode step, sink and recent pages included; a multiple of `page_size`
        and at least one page more than those two together.
    rank : int
        Columns of a page's basis, 1 to `page_size` - 1 (and at most the head size, which `summarize` checks).
    page_size : int
        Tokens a page, 8 to 64.
    sink_pages, recent_pages : int
        Pages at the start (0 or more) and at the end (1 or more) of a sequence that are always attended.  The recent
        page is the one that holds the last token, full or partial.
    basis_bits : {2, 4, 8, None}
        Bits of a basis entry; None keeps fp32.
    coefficient_bits : {8, None}
        Bits of a coefficient and of a centroid entry; None keeps fp32.
    dense_below : int
        A request of this many tokens or fewer attends everything.  The core's functions ignore it: it is for what
        drives them, such as the vLLM plugin.

    Raises
    ------
    ValueError
        With the value, what is allowed and the remedy.
    """

    budget: int = 2048
    rank: int = 8
    page_size: int = 16
    sink_pages: int = 1
    recent_pages: int = 1
    basis_bits: int | None = 4
    coefficient_bits: int | None = 8
    dense_below: int = 0

    def __post_init__(self) -> None:
        for name in ("budget", "rank", "page_size", "sink_pages", "recent_pages", "dense_below"):
            value: Any = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise reject(name, value, "a whole number is needed", f"Write {name} as an integer.")
        if not MIN_PAGE_SIZE <= self.page_size <= MAX_PAGE_SIZE:
            allowed = f"pages hold {MIN_PAGE_SIZE} to {MAX_PAGE_SIZE} tokens"
            raise reject("page_size", self.page_size, allowed, "Use 16 unless you study page sizes.")
        if not 1 <= self.rank < self.page_size:
            allowed = f"rank runs from 1 to page_size - 1 = {self.page_size - 1}"
            raise reject("rank", self.rank, allowed, "Use 8, or 2 or 4 for a smaller summary.")
        for name, least in (("sink_pages", 0), ("recent_pages", 1), ("dense_below", 0)):
            if getattr(self, name) < least:
                raise reject(name, getattr(self, name), f"the least is {least}", f"Use {least} or more.")
        # `in` would take True for 1 and 4.0 for 4, hence the types too; they come first, as an array may not compare.
        if type(self.basis_bits) not in (int, type(None)) or self.basis_bits not in BASIS_BITS:
            raise reject("basis_bits", self.basis_bits, "2, 4, 8 or None (fp32)", "Use 4.")
        if type(self.coefficient_bits) not in (int, type(None)) or self.coefficient_bits not in COEFFICIENT_BITS:
            raise reject("coefficient_bits", self.coefficient_bits, "8 or None (fp32)", "Use 8.")
        least = (self.sink_pages + self.recent_pages + 1) * self.page_size
        if self.budget < least or self.budget % self.page_size:
            allowed = f"the budget is a multiple of page_size = {self.page_size}, and at least {least} tokens here: "
            allowed += f"{self.sink_pages} sink and {self.recent_pages} recent pages count inside it, and one more"
            nearest = max(least, (self.budget + self.page_size - 1) // self.page_size * self.page_size)
            raise reject("budget", self.budget, allowed, f"Use {nearest}.")

    @property
    def budget_pages(self) -> int:
        """Pages that one KV head attends at a decode step."""
        return self.budget // self.page_size

    def pages_in(self, tokens: int) -> int:
        """Pages that `tokens` tokens touch, the last one perhaps partial."""
        return -(-tokens // self.page_size)


def check_lengths(shape: tuple[int, ...], lead: tuple[int, ...]) -> None:
    """Raise ValueError unless lengths of this shape are one number, or have a dimension for each leading one.

    Fewer dimensions would broadcast from the right: lengths of a batch, say, against KV heads.
    """
    if shape and (len(shape) != len(lead) or any(n not in (1, m) for n, m in zip(shape, lead, strict=True))):
        allowed = f"one number, or a shape that broadcasts to {lead} with as many dimensions"
        raise reject("lengths.shape", shape, allowed, "Add dimensions of size 1 with unsqueeze.")


def lengths_on(lengths: Tensor, device: torch.device) -> Tensor:
    """`lengths` on this device; one number of the CPU's goes there without a wait, more do not."""
    if lengths.ndim == 0 and lengths.device != device and lengths.device.type == "cpu":
        return lengths.new_full((), int(lengths), device=device)
    return lengths.to(device)
