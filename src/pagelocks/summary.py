"""PageSummary: a page's keys as a centroid, a rank-r basis and coefficients; how it is built, packed and read back.

Build (LOCKS, arXiv 2607.24555, Algorithm 1), for a page of B keys k_i of size d:

    mu = mean(k_i);  D = rows(k_i - mu);  D D^T = U S^2 U^T;  C = U_r S_r;  V = D^T U_r S_r^-1;  k_i ~ mu + V c_i

Two departures make the result the same whatever the batch, and safe for any finite key.  Every page is first divided
by a power of two, which is stored, so nothing overflows and every scale fits fp16.  The deviations that enter the Gram
matrix are split into two integers of 21 bits: the float64 sums of their products are then exact, so their order (which
changes with batch, threads and library) cannot change a bit of the record.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .config import LocksConfig, reject
from .layout import RecordLayout, record_layout
from .quantize import pack_codes, power_of_two, quantize, unpack_codes

UNSCORABLE = -32768
"""The exponent of a page without a usable summary: one that holds NaN or infinity, or was never built."""

KEY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_KEY_BITS = 40  # keys as integers of 40 bits: sums of 64 stay exact in float64
_HALF_BITS = 21  # deviations below 1 as two integers of 21 bits: 256 products of them stay exact in float64
_ZERO_COLUMN = 2.0**-22  # singular values below this, beside the largest deviation, are rounding noise


@dataclass(frozen=True)
class PageSummary:
    """Summaries of pages, batched over any leading dimensions; `P` pages, rank `r`, page size `B`, head size `d`.

    Attributes
    ----------
    exponent : int32 (..., P)
        Page units are 2**exponent; `UNSCORABLE` marks a page that cannot be scored.
    centroid : int8 or fp32 (..., P, d), centroid_scale : fp16 (..., P) or None
    basis : int8 or fp32 (..., P, r, d), basis_scale : fp16 (..., P, r) or None
        Columns of V, in order of energy.
    coefficients : int8 or fp32 (..., P, r, B), coefficient_scale : fp16 (..., P, B) or None
    page_tail : fp32 (..., P)
        Spectral tail in page units squared.
    config : LocksConfig
    """

    exponent: Tensor
    centroid: Tensor
    centroid_scale: Tensor | None
    basis: Tensor
    basis_scale: Tensor | None
    coefficients: Tensor
    coefficient_scale: Tensor | None
    page_tail: Tensor
    config: LocksConfig

    @property
    def head_dim(self) -> int:
        """Size of a key."""
        return self.centroid.shape[-1]

    @property
    def scorable(self) -> Tensor:
        """bool (..., P): False where the page must be read exactly because its summary says nothing."""
        return self.exponent != UNSCORABLE

    @property
    def tail(self) -> Tensor:
        """float64 (..., P): sum of the dropped squared singular values; infinite where the page is not scorable."""
        unit = power_of_two(torch.where(self.scorable, self.exponent, 0))
        return torch.where(self.scorable, self.page_tail.to(torch.float64) * unit * unit, torch.inf)

    def centroid_in_page_units(self) -> Tensor:
        """fp32 (..., P, d): the centroid divided by 2**exponent."""
        return _scaled(self.centroid, self.centroid_scale, -1)

    def basis_in_page_units(self) -> Tensor:
        """fp32 (..., P, r, d): the columns of V."""
        return _scaled(self.basis, self.basis_scale, -1)

    def coefficients_in_page_units(self) -> Tensor:
        """fp32 (..., P, r, B): the coefficients divided by 2**exponent."""
        return _scaled(self.coefficients, self.coefficient_scale, -2)

    def keys(self) -> Tensor:
        """fp32 (..., P, B, d): the keys as reconstructed, mu + V c_i; NaN where the page is not scorable."""
        deviations = self.coefficients_in_page_units().mT @ self.basis_in_page_units()
        keys = (self.centroid_in_page_units().unsqueeze(-2) + deviations).to(torch.float64)
        # In float64 first: near the largest bf16 the unit alone may not fit fp32.
        keys = keys * power_of_two(self.exponent)[..., None, None]
        largest = torch.finfo(torch.float32).max
        keys = keys.clamp(-largest, largest).to(torch.float32)
        return torch.where(self.scorable[..., None, None], keys, torch.nan)

    def pack(self) -> Tensor:
        """uint8 (..., P, record_bytes): the records, laid out as in `pagelocks.layout`."""
        layout = record_layout(self.head_dim, self.config)
        shape = self.exponent.shape
        record = torch.zeros(*shape, layout.record_bytes, dtype=torch.uint8, device=self.exponent.device)

        def put(offset: int, part: Tensor) -> None:
            bytes_ = part.contiguous().view(torch.uint8)
            record[..., offset : offset + bytes_.shape[-1]] = bytes_

        put(0, (self.exponent.to(torch.int16) ^ UNSCORABLE).unsqueeze(-1))
        put(layout.tail, self.page_tail.unsqueeze(-1))
        if self.centroid_scale is not None:
            put(layout.centroid_scale, self.centroid_scale.unsqueeze(-1))
        if self.basis_scale is not None:
            put(layout.basis_scale, self.basis_scale)
        if self.coefficient_scale is not None:
            put(layout.coefficient_scale, self.coefficient_scale)
        put(layout.centroid, self.centroid)
        columns = _columns(record, layout, self.config.rank)
        bits = self.config.basis_bits
        basis = self.basis.contiguous().view(torch.uint8) if bits is None else pack_codes(self.basis, bits)
        columns[..., : layout.basis_bytes] = basis
        coefficients = self.coefficients.contiguous().view(torch.uint8)
        columns[..., layout.coefficients : layout.coefficients + coefficients.shape[-1]] = coefficients
        return record

    @classmethod
    def unpack(cls, record: Tensor, head_dim: int, config: LocksConfig) -> PageSummary:
        """Read records back, exactly: `unpack(s.pack(), …)` equals `s`.

        Parameters
        ----------
        record : uint8 (..., P, record_bytes)
        head_dim : int
        config : LocksConfig
            The one the records were made with.

        Raises
        ------
        ValueError
            If the records are not uint8 or not of the size that `head_dim` and `config` give.
        """
        layout = record_layout(head_dim, config)
        if record.dtype != torch.uint8 or record.shape[-1] != layout.record_bytes:
            found = f"{record.dtype} records of {record.shape[-1]} bytes"
            allowed = f"uint8 records of {layout.record_bytes} bytes for head_dim={head_dim} and {config}"
            raise reject("record", found, allowed, "Unpack with the configuration the records were made with.")

        def get(offset: int, count: int, dtype: torch.dtype) -> Tensor:
            return _viewed(record[..., offset : offset + count * dtype.itemsize], dtype)

        entry = torch.float32 if config.coefficient_bits is None else torch.int8
        columns = _columns(record, layout, config.rank)
        basis = columns[..., : layout.basis_bytes]
        coefficients = columns[..., layout.coefficients : layout.coefficients + config.page_size * entry.itemsize]
        half = torch.float16
        quantised_entry, quantised_basis = config.coefficient_bits is not None, config.basis_bits is not None
        return cls(
            exponent=(get(0, 1, torch.int16).squeeze(-1) ^ UNSCORABLE).to(torch.int32),
            centroid=get(layout.centroid, head_dim, entry),
            centroid_scale=get(layout.centroid_scale, 1, half).squeeze(-1) if quantised_entry else None,
            basis=_viewed(basis, torch.float32)
            if config.basis_bits is None
            else unpack_codes(basis, config.basis_bits),
            basis_scale=get(layout.basis_scale, config.rank, half) if quantised_basis else None,
            coefficients=_viewed(coefficients, entry),
            coefficient_scale=get(layout.coefficient_scale, config.page_size, half) if quantised_entry else None,
            page_tail=get(layout.tail, 1, torch.float32).squeeze(-1),
            config=config,
        )


def summarize(keys: Tensor, config: LocksConfig) -> PageSummary:
    """Summarise pages of keys.

    The record is a function of the page's keys alone, to the bit: batch, device threads and page order do not matter.

    Parameters
    ----------
    keys : fp32, bf16 or fp16 (..., P, page_size, head_dim)
        Keys as the cache holds them, after RoPE.
    config : LocksConfig

    Returns
    -------
    PageSummary
        Of `P` pages.  A page that holds NaN or infinity is marked unscorable and spoils no other.

    Raises
    ------
    ValueError
        For another dtype, page size or head size.
    """
    check_keys(keys, config)
    finite = keys.isfinite().flatten(-2).all(-1)
    pages = torch.where(finite[..., None, None], keys, 0).to(torch.float64)
    pages, exponent = _divided_by_power_of_two(pages)
    pages = (pages * 2.0**_KEY_BITS).round() * 2.0**-_KEY_BITS
    centroid = pages.sum(-2) / config.page_size
    basis, coefficients, tail = _decompose(pages - centroid.unsqueeze(-2), config.rank)

    basis_scale = centroid_scale = coefficient_scale = None
    if config.basis_bits is None:
        basis = basis.to(torch.float32)
    else:
        basis, basis_scale = quantize(basis, config.basis_bits, -1)
    if config.coefficient_bits is None:
        centroid, coefficients = centroid.to(torch.float32), coefficients.to(torch.float32)
    else:
        centroid, centroid_scale = quantize(centroid, config.coefficient_bits, -1)
        coefficients, coefficient_scale = quantize(coefficients, config.coefficient_bits, -2)
    return PageSummary(
        exponent=torch.where(finite, exponent, UNSCORABLE).to(torch.int32),
        centroid=centroid,
        centroid_scale=centroid_scale,
        basis=basis,
        basis_scale=basis_scale,
        coefficients=coefficients,
        coefficient_scale=coefficient_scale,
        page_tail=tail.to(torch.float32),
        config=config,
    )


def check_keys(keys: Tensor, config: LocksConfig) -> None:
    """Raise ValueError unless `keys` are pages (..., P, page_size, head_dim) that can be summarised."""
    if keys.dtype not in KEY_DTYPES:
        remedy = "Convert them, or serve with an unquantised KV cache."
        raise reject("keys.dtype", keys.dtype, "float32, bfloat16 or float16", remedy)
    if keys.dim() < 3 or keys.shape[-2] != config.page_size:
        allowed = f"(..., pages, page_size, head_dim) with page_size={config.page_size}"
        raise reject("keys.shape", tuple(keys.shape), allowed, "Reshape the keys into whole pages first.")
    record_layout(keys.shape[-1], config)


def _decompose(deviations: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """V as rows (..., P, r, d), C as columns (..., P, r, B) and the tail (..., P) of centred pages, in float64."""
    deviations, exponent = _divided_by_power_of_two(deviations)
    # A CPU's solver may round by where its matrix lies.  With rows and columns of zeros up to a multiple of four, every
    # matrix of a batch starts at a multiple of 64 bytes.
    tokens = deviations.shape[-2]
    energy, vectors = torch.linalg.eigh(pad(_gram(deviations), (0, -tokens % 4) * 2))  # ascending
    # Rows of `vectors`: u_k over the tokens.
    energy, vectors = energy.flip(-1).clamp(min=0), vectors.flip(-1).mT[..., :tokens]
    kept = energy[..., :rank].sqrt()
    kept = torch.where(kept > _ZERO_COLUMN, kept, 0)
    vectors = vectors[..., :rank, :]
    # A plain loop over the tokens: a matrix product's order of summation, unlike this, may change with the batch.
    projected = torch.zeros(*vectors.shape[:-1], deviations.shape[-1], dtype=vectors.dtype, device=vectors.device)
    for token in range(tokens):
        projected = projected + vectors[..., token, None] * deviations[..., token, :].unsqueeze(-2)
    # An eigenvector's sign is the solver's whim; the largest entry of its column is made positive.
    sign = projected.gather(-1, projected.abs().argmax(-1, keepdim=True)).sign()
    length = kept.unsqueeze(-1)
    basis = torch.where(length > 0, projected * sign / torch.where(length > 0, length, 1), 0)
    unit = power_of_two(exponent)
    coefficients = vectors * sign * length * unit[..., None, None]
    tail = (energy.sum(-1) - kept.square().sum(-1)).clamp(min=0) * unit.square()
    return basis, coefficients, tail


def _gram(deviations: Tensor) -> Tensor:
    """D D^T (..., B, B) of deviations below 1: each product of integers is exact, and they are added in one order."""
    step = 2.0**_HALF_BITS
    high = (deviations * step).round()
    low = ((deviations * step - high) * step).round()
    mixed = high @ low.mT
    return (high @ high.mT) * step**-2 + (mixed + mixed.mT) * step**-3 + (low @ low.mT) * step**-4


def _divided_by_power_of_two(pages: Tensor) -> tuple[Tensor, Tensor]:
    """`pages` with the largest magnitude of each brought into [0.5, 1), and the exponents (..., P)."""
    exponent = torch.frexp(pages.abs().flatten(-2).amax(-1)).exponent
    return pages * power_of_two(-exponent)[..., None, None], exponent


def _scaled(codes: Tensor, scale: Tensor | None, dim: int) -> Tensor:
    values = codes.to(torch.float32)
    return values if scale is None else values * scale.to(torch.float32).unsqueeze(dim)


def _viewed(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as `dtype`; copied first, as a slice of a record need not start where `dtype` may."""
    return part.clone(memory_format=torch.contiguous_format).view(dtype)


def _columns(record: Tensor, layout: RecordLayout, rank: int) -> Tensor:
    """A view (..., P, r, column_bytes) of a record's columns."""
    span = rank * layout.column_bytes
    columns = record[..., layout.columns : layout.columns + span]
    return torch.unflatten(columns, -1, (rank, layout.column_bytes))
