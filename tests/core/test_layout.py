"""The record's bytes, decoded by hand from the documented offsets and compared with what the code reads."""

import numpy as np
import pytest
import torch

from pagelocks import PageSummary, summarize
from pagelocks.layout import record_layout

from .helpers import AWKWARD, assert_rejected, awkward_pages, make_config, normal

BITS = [(basis, coefficients) for basis in (2, 4, 8, None) for coefficients in (8, None)]


def up(size, to):
    return (size + to - 1) // to * to


def decode(record, rank, page_size, head_dim, basis_bits, coefficient_bits):
    """keys (page_size, head_dim) and tail of one record: a second reader, from the documentation alone."""
    raw = bytes(record)

    def read(dtype, offset, count):
        return np.frombuffer(raw, dtype, count, offset)

    biased = int(read("<u2", 0, 1)[0])
    if biased == 0:
        return None
    unit = 2.0 ** (biased - 32768)
    tail = float(read("<f4", 4, 1)[0]) * unit**2
    cursor = 8
    basis_scale, token_scale, centroid_scale = np.ones(rank), np.ones(page_size), 1.0
    if basis_bits is not None:
        basis_scale = read("<f2", cursor, rank).astype(np.float64)
        cursor += 2 * rank
    if coefficient_bits is not None:
        centroid_scale = float(read("<f2", 2, 1)[0])
        token_scale = read("<f2", cursor, page_size).astype(np.float64)
        cursor += 2 * page_size
    entry, entry_bytes = ("<f4", 4) if coefficient_bits is None else ("i1", 1)
    cursor = up(cursor, 16)
    centroid = read(entry, cursor, head_dim) * centroid_scale
    cursor = up(cursor + head_dim * entry_bytes, 16)
    basis, coefficients = np.zeros((rank, head_dim)), np.zeros((rank, page_size))
    for column in range(rank):
        if basis_bits is None:
            basis[column] = read("<f4", cursor, head_dim)
            basis_bytes = 4 * head_dim
        elif basis_bits == 8:
            basis[column] = read("i1", cursor, head_dim) * basis_scale[column]
            basis_bytes = head_dim
        else:
            basis_bytes = head_dim * basis_bits // 8
            for index in range(head_dim):
                byte = raw[cursor + index * basis_bits // 8]
                code = byte >> (index * basis_bits % 8) & (2**basis_bits - 1)
                basis[column, index] = (code - 2 ** (basis_bits - 1)) * basis_scale[column]
        coefficients[column] = read(entry, cursor + up(basis_bytes, 4), page_size) * token_scale
        cursor += up(up(basis_bytes, 4) + page_size * entry_bytes, 16)
    assert len(raw) == up(cursor, 32)
    return (centroid + coefficients.T @ basis) * unit, tail


def test_the_documented_offsets_at_rank_8_and_head_size_128():
    layout = record_layout(128, make_config())
    assert (layout.centroid_scale, layout.tail, layout.basis_scale, layout.coefficient_scale) == (2, 4, 8, 24)
    assert (layout.centroid, layout.columns, layout.column_bytes, layout.basis_bytes) == (64, 192, 80, 64)
    assert layout.record_bytes == 832


@pytest.mark.parametrize(
    ("head_dim", "rank", "page_size", "basis_bits", "coefficient_bits", "size"),
    [
        (128, 8, 16, 4, 8, 832),
        (64, 8, 16, 4, 8, 512),
        (128, 4, 16, 4, 8, 512),
        (32, 1, 8, 2, 8, 96),
        (128, 15, 16, None, None, 9184),
        (256, 8, 16, 8, 8, 2496),
    ],
)
def test_record_sizes(head_dim, rank, page_size, basis_bits, coefficient_bits, size):
    config = make_config(rank, page_size, basis_bits, coefficient_bits)
    assert record_layout(head_dim, config).record_bytes == size
    assert summarize(torch.zeros(2, page_size, head_dim), config).pack().shape == (2, size)


@pytest.mark.parametrize(("basis_bits", "coefficient_bits"), BITS)
@pytest.mark.parametrize(
    ("head_dim", "rank", "page_size"), [(128, 8, 16), (64, 15, 16), (32, 1, 8), (40, 5, 11), (256, 12, 64)]
)
def test_a_second_reader_finds_the_same_keys(head_dim, rank, page_size, basis_bits, coefficient_bits):
    config = make_config(rank, page_size, basis_bits, coefficient_bits)
    keys = normal(rank, 3, page_size, head_dim) * torch.tensor([1e-4, 1.0, 1e4])[:, None, None] + 0.1
    summary = summarize(keys, config)
    for page, record in enumerate(summary.pack().numpy()):
        found, tail = decode(record, rank, page_size, head_dim, basis_bits, coefficient_bits)
        close = 2e-6 * keys[page].abs().max().item()
        np.testing.assert_allclose(found, summary.keys()[page].double().numpy(), atol=close, rtol=0)
        np.testing.assert_allclose(tail, summary.tail[page].item(), rtol=1e-12)
        # And they are the page's keys, not merely the same: what rank r leaves out is the tail.
        if basis_bits == coefficient_bits is None:
            missed = ((found - keys[page].double().numpy()) ** 2).sum()
            np.testing.assert_allclose(missed, tail, rtol=1e-3, atol=page_size * head_dim * close**2)


@pytest.mark.parametrize("name", AWKWARD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_second_reader_of_awkward_pages(name, dtype):
    keys = awkward_pages(16, 64, dtype)[name]
    summary = summarize(keys[None], make_config())
    found, tail = decode(summary.pack()[0].numpy(), 8, 16, 64, 4, 8)
    largest = torch.finfo(torch.float32).max
    expected = np.clip(found, -largest, largest)
    close = 2e-6 * np.abs(expected).max()
    np.testing.assert_allclose(summary.keys()[0].double().numpy(), expected, atol=close + 1e-45, rtol=0)
    np.testing.assert_allclose(summary.tail.item(), tail, rtol=1e-12)


@pytest.mark.parametrize(("basis_bits", "coefficient_bits"), BITS)
def test_columns_are_in_order_of_energy(basis_bits, coefficient_bits):
    """So a prefix of c columns scores at rank c: the first columns of rank 8 are those of rank 3."""
    keys = normal(0, 20, 16, 64)
    config = make_config(8, 16, basis_bits, coefficient_bits)
    summary = summarize(keys, config)
    energy = (summary.coefficients_in_page_units().double() ** 2).sum(-1)
    assert (energy[:, :-1] > energy[:, 1:] * 0.98).all()  # 0.98: int8 may swap two that are nearly equal
    record, layout = summary.pack(), record_layout(64, config)
    shorter = make_config(3, 16, basis_bits, coefficient_bits)
    size, start = layout.column_bytes, record_layout(64, shorter).columns
    prefix = record[:, layout.columns : layout.columns + 3 * size].unflatten(-1, (3, size))
    columns = summarize(keys, shorter).pack()[:, start : start + 3 * size].unflatten(-1, (3, size))
    # Token scales depend on the rank, hence so do coefficient codes, but never the basis.
    assert torch.equal(prefix[..., : layout.basis_bytes], columns[..., : layout.basis_bytes])


@pytest.mark.parametrize(("basis_bits", "coefficient_bits"), BITS)
def test_all_padding_is_zero(basis_bits, coefficient_bits):
    """Flipping every bit of the documented parts leaves zeros exactly where the documentation says padding."""
    rank, page_size, head_dim = 5, 11, 40
    config = make_config(rank, page_size, basis_bits, coefficient_bits)
    layout = record_layout(head_dim, config)
    record = summarize(normal(1, 50, page_size, head_dim), config).pack()
    entry = 4 if coefficient_bits is None else 1
    used = torch.zeros(layout.record_bytes, dtype=torch.bool)
    used[0:2] = used[4:8] = True
    used[2:4] = coefficient_bits is not None
    header = 8 + (0 if basis_bits is None else 2 * rank) + (0 if coefficient_bits is None else 2 * page_size)
    used[8:header] = True
    used[layout.centroid : layout.centroid + head_dim * entry] = True
    for column in range(rank):
        start = layout.columns + column * layout.column_bytes
        used[start : start + layout.basis_bytes] = True
        used[start + layout.coefficients : start + layout.coefficients + page_size * entry] = True
    ever = (record != 0).any(0)
    assert not (ever & ~used).any()
    # The last exponent byte and the scales' bytes are always in use; over 50 pages almost every byte is.
    assert (ever & used).sum() >= 0.97 * used.sum()


@pytest.mark.parametrize("head_dim", range(32, 257, 8))
def test_every_supported_head_size(head_dim):
    layout = record_layout(head_dim, make_config())
    assert layout.record_bytes % 32 == 0 and layout.columns % 16 == 0 and layout.column_bytes % 16 == 0
    assert layout.record_bytes - 32 < layout.columns + 8 * layout.column_bytes <= layout.record_bytes


@pytest.mark.parametrize("head_dim", [0, -64, 8, 24, 31, 33, 36, 60, 257, 264, 512, True, 64.0, "64", None], ids=repr)
def test_head_sizes_that_are_not_supported(head_dim):
    assert_rejected(
        lambda: record_layout(head_dim, make_config()),
        f"head_dim={head_dim!r} is not allowed",
        "multiples of 8 from 32 to 256",
        "Serve this model without LOCKS.",
    )


def test_rank_above_the_head_size():
    assert record_layout(32, make_config(rank=32, page_size=64)).record_bytes
    assert_rejected(
        lambda: record_layout(32, make_config(rank=33, page_size=64)),
        "rank=33 is not allowed",
        "at most the head size, 32",
        "Use rank 8.",
    )


@pytest.mark.parametrize(
    "record",
    [(831, torch.uint8), (512, torch.uint8), (832, torch.int8)],
    ids=["a byte short", "another head size", "another dtype"],
)
def test_unpack_refuses_what_it_cannot_read(record):
    record = torch.zeros(3, record[0], dtype=record[1])
    assert_rejected(
        lambda: PageSummary.unpack(record, 128, make_config()),
        f"{record.dtype} records of {record.shape[-1]} bytes",
        "uint8 records of 832 bytes for head_dim=128",
        "Unpack with the configuration the records were made with.",
    )
