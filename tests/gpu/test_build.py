"""The build kernel, and the plan's list of what to build, against the torch core."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import BF16, DEVICE, FP16, IDS, SHAPES, make_case, pipeline_of, real_keys, rows_of, shape_of, stream

from pagelocks.kernels import Caches
from pagelocks.summary import PageSummary, summarize


@pytest.mark.parametrize("numbers", SHAPES, ids=IDS)
@pytest.mark.parametrize("size", [1.0, 1e-6, 300.0])
def test_build(numbers: tuple[Any, ...], size: float) -> None:
    shape = shape_of(numbers)
    lengths = [5, 16, 333, 1000, 48, 2048]
    if shape.dtype == FP16 and size != 1.0:
        size = 20.0 if size > 1 else 1e-2
    case = make_case(shape, lengths, 1, size)
    reference = case.records.clone()
    case.records.fill_(0xA5)
    pipeline = pipeline_of(shape, lengths)
    rows = rows_of(lengths, lengths, case.table)
    pipeline.plan(stream(), rows)
    pipeline.build(stream(), rows, case.caches)
    for row in range(len(lengths)):
        pages = case.pages_of(row)
        if not len(pages[0]):
            continue
        built = PageSummary.unpack(case.records[pages].transpose(0, 1), shape.head_dim, shape.config)
        wanted = PageSummary.unpack(reference[pages].transpose(0, 1), shape.head_dim, shape.config)
        keys = case.tokens_of(row)[0][:, : len(pages[0]) * 16].unflatten(1, (-1, 16)).double()
        assert built.exponent.equal(wanted.exponent)
        energy = (keys - keys.mean(-2, keepdim=True)).square().sum((-1, -2))
        assert ((built.tail - wanted.tail).abs() <= 1e-3 * energy).all()
        errors = [(s.keys().double() - keys).square().sum((-1, -2)).sqrt() for s in (built, wanted)]
        assert (errors[0] <= errors[1] * 1.02 + 1e-6 * keys.square().sum((-1, -2)).sqrt()).all()
        assert errors[0].mean() <= errors[1].mean() * 1.01
    # Nothing else was written.
    owned = torch.zeros(case.records.shape[:2], dtype=torch.bool, device=DEVICE)
    for row in range(len(lengths)):
        owned[case.pages_of(row)] = True
    assert (case.records[~owned] == 0xA5).all()


def test_completed_pages_are_listed_and_marked() -> None:
    """Which pages a mixed step completes, and that their records read as missing in every layer."""
    shape = shape_of((64, 2, 4, 32, BF16, 8))
    lengths, queries = [160, 33, 0, 32, 1000, 48], [1, 1, 0, 1, 700, 48]
    cases = [make_case(shape, lengths, seed, build=False) for seed in (1, 2, 3)]
    table = cases[0].table
    caches = Caches([case.keys for case in cases], [case.records for case in cases])
    pipeline = pipeline_of(shape, lengths)
    rows = rows_of(lengths, queries, table, decode=4)
    pipeline.plan(stream(), rows, mark=caches)
    wanted = [
        int(table[row, page // 2]) * 2 + page % 2
        for row, (length, count) in enumerate(zip(lengths, queries, strict=True))
        for page in range((length - count) // 16, length // 16)
    ]
    start = pipeline.plan_of_step.completed_start.tolist()
    assert start[-1] == len(wanted) and pipeline.plan_of_step.completed[: start[-1]].tolist() == wanted
    for case in cases:
        missing = (case.records[..., :2] == 0).all(-1).all(-1).flatten().nonzero().flatten()
        assert missing.tolist() == sorted(wanted)
        assert (case.records[..., 2:] == 0xA5).all()
    # Afterwards all layers are built at once, each as if alone.
    pipeline.build(stream(), rows, caches)
    together = [case.records.clone() for case in cases]
    for layer, case in enumerate(cases):
        case.records.fill_(0xA5)
        pipeline.build(stream(), rows, caches, layer)
        where = torch.zeros(case.records.shape[0] * 2, dtype=torch.bool, device=DEVICE)
        where[wanted] = True
        assert case.records.flatten(0, 1)[where].equal(together[layer].flatten(0, 1)[where])
        assert (case.records.flatten(0, 1)[~where] == 0xA5).all()


def degenerate_pages(head_dim: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(5)
    usual = real_keys(1, head_dim, generator)[0]
    one = torch.randn(1, head_dim, generator=generator, device=DEVICE)
    pages = {
        "zeros": torch.zeros_like(usual),
        "all the same": one.expand(16, -1).clone(),
        "one differs": one.expand(16, -1).clone(),
        "one direction": torch.randn(16, 1, generator=generator, device=DEVICE) * one,
        "two values": torch.where(torch.arange(16, device=DEVICE)[:, None] % 2 == 0, one, -one),
        "tiny": usual * 1e-30,
        "large": usual * 1e30,
        "one huge channel": usual.clone(),
        "orthogonal": torch.eye(16, head_dim, device=DEVICE),
        "nan": usual.clone(),
        "inf": usual.clone(),
        "subnormal": usual * 1e-39,
    }
    pages["one differs"][3, 5] += 1
    pages["one huge channel"][:, 1] = 3e4
    pages["nan"][7, 2] = torch.nan
    pages["inf"][0, 0] = torch.inf
    return pages


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_build_of_degenerate_pages(head_dim: int) -> None:
    pages = degenerate_pages(head_dim)
    shape = shape_of((head_dim, 1, 1, 16, BF16, 8))
    lengths = [16 * len(pages)]
    case = make_case(shape, lengths, 2, build=False)
    block, _ = case.pages_of(0)
    keys = torch.stack(list(pages.values())).to(BF16)
    case.keys[block, :, 0] = keys
    rows = rows_of(lengths, lengths, case.table)
    pipeline = pipeline_of(shape, lengths)
    pipeline.plan(stream(), rows)
    pipeline.build(stream(), rows, case.caches)
    built = PageSummary.unpack(case.records_of(0)[0], head_dim, shape.config)
    wanted = summarize(keys.cpu(), shape.config)
    assert built.exponent.tolist() == wanted.exponent.tolist()
    wide = keys.double().cpu()
    largest = wide.nan_to_num(0, 0, 0).abs().flatten(1).amax(1)
    for name, got, want, exact, top in zip(pages, built.keys().cpu(), wanted.keys(), wide, largest, strict=True):
        if name in ("nan", "inf"):
            assert got.isnan().all()
            continue
        errors = [((each.double() - exact) / max(top, 1e-300)).square().sum().sqrt() for each in (got, want)]
        assert errors[0] <= errors[1] * 1.01 + 1e-5, (name, errors)


def test_record_does_not_depend_on_its_neighbours() -> None:
    """The same page, built alone and among others, in either half of a warp, is the same to the byte."""
    shape = shape_of((128, 2, 4, 16, BF16, 8))
    lengths = [16 * 40]
    case = make_case(shape, lengths, 3, build=False)
    whole = rows_of(lengths, lengths, case.table)
    pipeline = pipeline_of(shape, lengths)
    pipeline.plan(stream(), whole)
    pipeline.build(stream(), whole, case.caches)
    together = case.records_of(0).clone()
    for page in range(40):
        case.records.zero_()
        alone = rows_of([16 * page + 16], [1], case.table)
        pipeline.plan(stream(), alone)
        pipeline.build(stream(), alone, case.caches)
        assert case.records_of(0)[:, page].equal(together[:, page])
        assert (case.records != 0).any(-1).sum() == 2  # two heads of one page
