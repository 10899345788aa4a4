"""The shape that kernels are compiled for: a model's heads, the cache's blocks, the record."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..config import LocksConfig, reject
from ..layout import RecordLayout, record_layout

HEAD_DIMS = (32, 64, 128, 256)
MAX_RANK = 8


@dataclass(frozen=True)
class KernelShape:
    """What the kernels must know when they are compiled.

    Parameters
    ----------
    head_dim : int
        32, 64, 128 or 256.
    kv_heads, group : int
        KV heads, and query heads of each.
    block_size : int
        Tokens of a block of the KV cache: a multiple of 16.
    dtype : torch.dtype
        Of queries, keys, values and outputs: bf16 or fp16.
    config : LocksConfig
        Pages of 16 tokens, rank at most 8, an int4 basis, int8 coefficients.

    Raises
    ------
    ValueError
        For a shape that the kernels do not take: the value, what is allowed, the remedy.
    """

    head_dim: int
    kv_heads: int
    group: int
    block_size: int
    dtype: torch.dtype
    config: LocksConfig

    def __post_init__(self) -> None:
        remedy = "Serve this model without LOCKS."
        if self.head_dim not in HEAD_DIMS:
            raise reject("head_dim", self.head_dim, f"the GPU kernels take {', '.join(map(str, HEAD_DIMS))}", remedy)
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise reject("dtype", self.dtype, "the GPU kernels take bfloat16 and float16", "Use --dtype bfloat16.")
        if self.kv_heads < 1 or self.group < 1:
            raise reject("heads", (self.kv_heads, self.group), "at least one KV head and one query head", remedy)
        if self.block_size < 16 or self.block_size % 16:
            raise reject("block_size", self.block_size, "a multiple of 16", "Use --block-size 16.")
        config = self.config
        if config.page_size != 16:
            raise reject("page_size", config.page_size, "the GPU kernels take pages of 16 tokens", "Use 16.")
        if config.rank > MAX_RANK:
            raise reject("rank", config.rank, f"the GPU kernels take ranks up to {MAX_RANK}", f"Use {MAX_RANK}.")
        if config.basis_bits != 4 or config.coefficient_bits != 8:
            bits = (config.basis_bits, config.coefficient_bits)
            raise reject("(basis_bits, coefficient_bits)", bits, "the GPU kernels take (4, 8)", "Leave both out.")

    @property
    def layout(self) -> RecordLayout:
        """Where a record's parts lie."""
        return record_layout(self.head_dim, self.config)

    @property
    def pages_a_block(self) -> int:
        """Pages of a block."""
        return self.block_size // 16

    @property
    def record_defines(self) -> dict[str, int]:
        """The record, for a kernel's source."""
        layout = self.layout
        return {
            "RANK": self.config.rank,
            "RECORD_BYTES": layout.record_bytes,
            "CENTROID": layout.centroid,
            "COLUMNS": layout.columns,
            "COLUMN_BYTES": layout.column_bytes,
            "COEFFICIENTS": layout.coefficients,
            "BASIS_SCALE": layout.basis_scale,
            "COEFFICIENT_SCALE": layout.coefficient_scale,
        }

    def defines(self, *names: str) -> dict[str, int]:
        """The named numbers and the element type, for a kernel's source."""
        known = {
            "HEAD_DIM": self.head_dim,
            "KV_HEADS": self.kv_heads,
            "GROUP": self.group,
            "PAGES_A_BLOCK": self.pages_a_block,
        }
        element = {"FP16": 1} if self.dtype == torch.float16 else {}
        return {name: known[name] for name in names} | element
