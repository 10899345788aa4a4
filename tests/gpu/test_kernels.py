"""Every kernel against the torch core, on fresh random inputs of awkward shapes, with poisoned outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import (
    BF16,
    DEVICE,
    IDS,
    SHAPES,
    Case,
    check_output,
    make_case,
    pipeline_of,
    planned,
    real_keys,
    rows_of,
    shape_of,
    stream,
)

from pagelocks.kernels import select_attend
from pagelocks.score import log_mass, page_share
from pagelocks.select import select_pages
from pagelocks.summary import PageSummary

LENGTHS = [1, 17, 128, 129, 2000, 16, 700, 0, 5000, 144, 4096, 31]


@pytest.mark.parametrize("numbers", SHAPES, ids=IDS)
def test_plan(numbers: tuple[Any, ...]) -> None:
    case = make_case(shape_of(numbers), LENGTHS, 0, build=False)
    for dense_below, capacity in ((0, None), (700, None), (0, 135), (10**6, None)):
        pipeline = planned(case, dense_below, capacity)
        plan, scored, attended = pipeline.plan_of_step, 0, 0
        starts = zip(plan.score_start.tolist(), plan.attend_start.tolist(), strict=True)
        assert next(starts) == (0, 0)
        for length in LENGTHS:
            selects = length > max(128, dense_below) and scored + length // 16 <= pipeline.capacity
            if length > max(128, dense_below) and not selects:
                pipeline.capacity = -1  # no later row fits either
            scored += length // 16 if selects else 0
            attended += 8 if selects else -(-length // 16)
            assert next(starts) == (scored, attended)


def check_scores(case: Case, pipeline: Any) -> None:
    shape, start = case.shape, pipeline.plan_of_step.score_start.tolist()
    for row in range(len(case.lengths)):
        pages = start[row + 1] - start[row]
        got = pipeline.score.log_mass[:, start[row] : start[row + 1]].transpose(1, 2)
        summary = PageSummary.unpack(case.records_of(row)[:, :pages], shape.head_dim, shape.config)
        want = log_mass(case.query[row].unflatten(0, (shape.kv_heads, shape.group)), summary, case.scale)
        if pages:
            assert got.isfinite().equal(want.isfinite())
            where = want.isfinite()
            assert (got - want)[where].abs().max() <= 2e-2


@pytest.mark.parametrize("numbers", SHAPES, ids=IDS)
@pytest.mark.parametrize("size", [0.3, 1.0, 4.0])
def test_score(numbers: tuple[Any, ...], size: float) -> None:
    case = make_case(shape_of(numbers), LENGTHS, 4, size)
    block, slot = case.pages_of(8)
    case.records[block[3], slot[3]] = 0  # a page that nobody built
    pipeline = planned(case)
    pipeline.score_pages(stream(), case.rows, case.query, case.records, case.keys, case.scale)
    check_scores(case, pipeline)


@pytest.mark.parametrize("numbers", SHAPES, ids=IDS)
def test_score_goes_round_its_ring(numbers: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """One block has all pages: every stage is filled again and again, every barrier's phase turns."""
    from pagelocks.kernels import pipeline as made_of
    from pagelocks.kernels import score

    for module in (made_of, score):
        monkeypatch.setattr(module, "parts_of", lambda *_: 1)
    shape = shape_of(numbers)
    heads, warps, stages = score.warps_of(shape)
    rounds = 3 * stages * (warps // heads)
    case = make_case(shape, [rounds * 8 * 16, 300, 4000, 160], 11)
    pipeline = planned(case)
    assert pipeline.score.parts == 1
    pipeline.score_pages(stream(), case.rows, case.query, case.records, case.keys, case.scale)
    check_scores(case, pipeline)


def test_score_of_extreme_logits() -> None:
    """Where exponentials overflow without their maximum, the group is computed again with it."""
    case = make_case(shape_of(SHAPES[0]), [4000, 300], 5, size=60.0)
    pipeline = planned(case)
    pipeline.score_pages(stream(), case.rows, case.query, case.records, case.keys, case.scale)
    start = pipeline.plan_of_step.score_start.tolist()
    summary = PageSummary.unpack(case.records_of(0), 128, case.shape.config)
    want = log_mass(case.query[0].unflatten(0, (4, 8)), summary, case.scale)
    got = pipeline.score.log_mass[:, : start[1]].transpose(1, 2)
    assert want.max() > 300
    assert ((got - want).abs() <= 2e-2 + 1e-3 * want.abs()).all()


@pytest.mark.parametrize("keys", [0, 8192], ids=["keys in global memory", "keys in shared memory"])
@pytest.mark.parametrize("numbers", SHAPES, ids=IDS)
def test_select(numbers: tuple[Any, ...], keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagelocks.kernels import select

    monkeypatch.setattr(select, "KEYS", keys)
    shape = shape_of(numbers, sink_pages=2, recent_pages=2)
    case = make_case(shape, LENGTHS, 6)
    pipeline = planned(case)
    pipeline.score_pages(stream(), case.rows, case.query, case.records, case.keys, case.scale)
    check_selection(case, pipeline, exact=keys == 0)


def check_selection(case: Case, pipeline: Any, exact: bool) -> None:
    """Against torch by shares that the kernel computed itself, where they can be read, and by torch's own."""
    shape, plan, count = case.shape, pipeline.plan_of_step, len(case.lengths)
    rows = case.rows
    pipeline.select(stream(), case.table, plan.score_start, rows.lengths, count)
    start = plan.score_start.tolist()
    config, per = shape.config, shape.pages_a_block
    for row, length in enumerate(case.lengths):
        got = pipeline.select.logical[row]
        if start[row + 1] == start[row]:
            assert (got == -7).all()
            continue
        mass = pipeline.score.log_mass[:, start[row] : start[row + 1]].transpose(1, 2)
        share = page_share(mass, torch.tensor(length, device=DEVICE), config)
        want = select_pages(share, torch.tensor(length, device=DEVICE), config)
        held = -(-length // 16)
        if exact:
            own = pipeline.select.keys[:, start[row] : start[row + 1]]
            own = torch.where(own > 0, own - 1, 0).view(torch.float32)
            fixed = torch.arange(own.shape[1], device=DEVICE)
            fixed = (fixed < config.sink_pages) | (fixed >= held - config.recent_pages)
            assert ((own - share).abs() <= 1e-6 + 1e-3 * share)[:, ~fixed].all()
            want = select_pages(torch.where(fixed, share, own), torch.tensor(length, device=DEVICE), config)
            assert got.equal(want)
        assert (got.diff(dim=-1) > 0).all() and (got >= 0).all() and (got < held).all()
        for head in range(shape.kv_heads):
            ours, theirs = set(got[head].tolist()), set(want[head].tolist())
            cut = min((share[head, p] for p in theirs if p < share.shape[1]), default=torch.tensor(0.0))
            for page in ours ^ theirs:
                assert abs(share[head, page].log() - cut.log()) <= 4e-2
        physical = case.table[row, (got // per).long()] * per + got % per
        assert pipeline.select.pages[row].equal(physical)


@pytest.mark.parametrize(("rows", "row_pages"), [(1, 700), (3, 700), (40, 700), (1, 5000), (3, 5000)])
@pytest.mark.parametrize("kind", ["equal", "few values", "infinite", "one page has all", "nan"])
def test_select_of_hard_shares(kind: str, rows: int, row_pages: int) -> None:
    """Ties go to the lower page; pages that must be read exactly come first."""
    shape = shape_of((64, 4, 4, 16, BF16, 8))
    lengths = [16 * row_pages + 5 * row for row in range(rows)]
    generator = torch.Generator(DEVICE).manual_seed(7)
    case = make_case(shape, lengths, 7, build=False)
    pipeline = planned(case)
    plan = pipeline.plan_of_step
    pipeline.score_pages(stream(), case.rows, case.query, case.records.zero_(), case.keys, case.scale)
    mass = pipeline.score.log_mass
    pages = int(plan.score_start[rows])
    drawn = torch.randint(0, 3, (4, pages, 1), generator=generator, device=DEVICE).float().expand(-1, -1, 4)
    mass[:, :pages] = {"equal": torch.ones_like(drawn), "one page has all": torch.full_like(drawn, -60.0)}.get(
        kind, drawn
    )
    if kind in ("infinite", "nan"):
        where = torch.rand(4, pages, 4, generator=generator, device=DEVICE) < 0.01
        mass[:, :pages][where] = torch.inf if kind == "infinite" else torch.nan
    if kind == "one page has all":
        mass[:, 300::701] = 5.0
    # What the blocks of `score` would have seen of these pages.
    masses = torch.where(mass[:, :pages].isfinite(), mass[:, :pages], -torch.inf) / torch.log(torch.tensor(2.0))
    start = plan.score_start.tolist()
    pipeline.score.partial[..., 0], pipeline.score.partial[..., 1] = -torch.inf, 0.0
    flat = pipeline.score.partial
    for row in range(rows):
        unknown = ~mass[:, start[row] : start[row + 1]].isfinite().all(-1, keepdim=True)
        part = torch.where(unknown, -torch.inf, masses[:, start[row] : start[row + 1]])
        top = part.amax(1)
        useful = min(pipeline.score.parts, -(-pages // 16))
        first = ((start[row] + 1) * useful - 1) // pages  # part `first` begins at pages * first // useful
        slot = (first + row) * pipeline.score.subs
        flat[:, :, slot, 0] = top
        flat[:, :, slot, 1] = (part - top[:, None]).exp2().sum(1)
    check_selection(case, pipeline, exact=False)


@pytest.mark.parametrize("numbers", SHAPES, ids=IDS)
@pytest.mark.parametrize("fused", [True, False], ids=["K beside V", "K apart from V"])
def test_attend(numbers: tuple[Any, ...], fused: bool) -> None:
    """Rows that select and rows that do not, in one launch, twice: counters go back to zero."""
    shape = shape_of(numbers)
    case = make_case(shape, LENGTHS, 8, fused=fused)
    for dense_below in (0, 1000, 10**6):
        pipeline = planned(case, dense_below)
        for _ in range(2):
            output = torch.full_like(case.query, torch.nan)
            arguments = (case.query, case.keys, case.values, case.records, output, case.scale)
            pipeline.decode(stream(), case.rows, *arguments)
            check_output(case, pipeline, output)


JOINT = [(numbers, rows) for numbers in SHAPES for rows in (1, 2, 4) if numbers[2] <= 8 and numbers[1] * rows <= 12]
JOINT = [(*each, 128, 3000) for each in JOINT if each[0][0] <= 128]
JOINT += [(SHAPES[0], rows, *more) for rows in (1, 3) for more in ((128, 0), (2048, 0), (8192, 0))]


@pytest.mark.parametrize(("numbers", "rows", "budget", "dense_below"), JOINT)
def test_select_and_attend_in_one(
    numbers: tuple[Any, ...], rows: int, budget: int, dense_below: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages are those of the two kernels apart; rows that attend everything beside those that select."""
    monkeypatch.setattr(select_attend, "KEYS", 64 if rows == 2 else 4096)  # in global memory, in shared memory
    shape = shape_of(numbers, budget=budget, sink_pages=2, recent_pages=2, dense_below=dense_below)
    for lengths in ([5003, 2100, 40, 2600], [2049, 9000, 3001, 0], [40_000, 300, 5000, 33_333]):
        case = make_case(shape, lengths[:rows], rows, build=False)
        apart, joint = planned(case), planned(case, joint=True)
        assert joint.is_joint(rows)
        whole = rows_of(case.lengths, case.lengths, case.table)
        apart.plan(stream(), whole)
        apart.build(stream(), whole, case.caches)
        seen = []
        for pipeline in (apart, joint, joint):
            output = torch.full_like(case.query, torch.nan)
            pipeline.plan(stream(), case.rows)
            arguments = (case.query, case.keys, case.values, case.records, output, case.scale)
            pipeline.decode(stream(), case.rows, *arguments)
            check_output(case, apart, output)
            seen.append(output)
        assert (joint.select.pages == -7).all()
        assert seen[1].view(torch.int16).equal(seen[2].view(torch.int16))


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 256])
def test_ragged_batches(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    lengths = torch.randint(1, 3000, (rows,), generator=generator).tolist()
    shape = shape_of(SHAPES[rows % 2])
    case = make_case(shape, lengths, rows, build=False)
    pipeline = planned(case)
    everything = rows_of(lengths, lengths, case.table)
    pipeline.plan(stream(), everything)
    pipeline.build(stream(), everything, case.caches)
    pipeline.plan(stream(), case.rows)
    output = torch.full_like(case.query, torch.nan)
    pipeline.decode(stream(), case.rows, case.query, case.keys, case.values, case.records, output, case.scale)
    check_scores(case, pipeline)
    check_output(case, pipeline, output)


def test_a_million_tokens() -> None:
    """Sampled checks at the length the kernels are for; records by the production kernel."""
    shape = shape_of(SHAPES[0], budget=2048)
    lengths = [1_000_003]
    generator = torch.Generator(DEVICE).manual_seed(0)
    blocks = 62_501
    table = torch.randperm(blocks, generator=generator, device=DEVICE).to(torch.int32)[None]
    cache = torch.empty(blocks, 16, 4, 256, dtype=BF16, device=DEVICE)
    for first in range(0, blocks, 4096):
        count = min(4096, blocks - first)
        keys = real_keys(count * 4, 128, generator).view(count, 4, 16, 128).transpose(1, 2)
        cache[first : first + count] = torch.cat([keys, torch.randn_like(keys)], -1).to(BF16)
    records = torch.zeros(blocks, 1, 4, 832, dtype=torch.uint8, device=DEVICE)
    query = torch.randn(1, 32, 128, generator=generator, device=DEVICE).to(BF16)
    keys, values = cache.split(128, -1)
    case = Case(shape, lengths, keys, values, records, query, table, 128**-0.5)
    pipeline = pipeline_of(shape, lengths)
    whole = rows_of(lengths, lengths, table)
    pipeline.plan(stream(), whole)
    pipeline.build(stream(), whole, case.caches)
    assert (records[table[0, :62_500].long()].flatten(1).amax(1) > 0).all()
    pipeline.plan(stream(), case.rows)
    output = torch.full_like(query, torch.nan)
    pipeline.decode(stream(), case.rows, query, keys, values, records, output, case.scale)
    check_scores(case, pipeline)
    check_selection(case, pipeline, exact=False)
    check_output(case, pipeline, output)


def long_rows(lengths: list[int], blocks: int, seed: int) -> Case:
    """Rows of many pages in a cache of `blocks` blocks, the last ones in use; records by the production kernel."""
    shape = shape_of(SHAPES[0], budget=2048)
    generator = torch.Generator(DEVICE).manual_seed(seed)
    needed = [-(-length // 16) for length in lengths]
    order = (blocks - 1 - torch.randperm(sum(needed), generator=generator, device=DEVICE)).to(torch.int32)
    table = torch.zeros(len(lengths), max(needed) + 7, dtype=torch.int32, device=DEVICE)
    first = 0
    for row, count in enumerate(needed):
        table[row, :count] = order[first : first + count]
        first += count
    cache = torch.empty(blocks, 16, 4, 256, dtype=BF16, device=DEVICE)
    for start in range(0, blocks, 4096):
        count = min(4096, blocks - start)
        keys = real_keys(count * 4, 128, generator).view(count, 4, 16, 128).transpose(1, 2)
        cache[start : start + count] = torch.cat([keys, torch.randn_like(keys)], -1).to(BF16)
    records = torch.zeros(blocks, 1, 4, 832, dtype=torch.uint8, device=DEVICE)
    query = torch.randn(len(lengths), 32, 128, generator=generator, device=DEVICE).to(BF16)
    case = Case(shape, lengths, *cache.split(128, -1), records, query, table, 128**-0.5)
    whole = rows_of(lengths, lengths, table)
    pipeline = pipeline_of(shape, lengths)
    pipeline.plan(stream(), whole)
    pipeline.build(stream(), whole, case.caches)
    return case


@pytest.mark.parametrize("joint", [False, True], ids=["apart", "in one"])
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(
    ("lengths", "blocks"),
    [([40_000, 33_001], 6000), ([50_000, 32_769, 70_001, 34_000], 14_000), ([262_145] * 4, 66_000)],
    ids=["2 rows", "4 rows", "4 x 262145, block ids above 65,536"],
)
def test_several_long_rows(lengths: list[int], blocks: int, in_graph: bool, joint: bool) -> None:
    """More pages a row than one block of `select` takes alone, in several rows: clusters, and parts that cross rows."""
    case = long_rows(lengths, blocks, len(lengths))
    pipeline, rows = planned(case, joint=joint), case.rows
    output = torch.full_like(case.query, torch.nan)

    def step() -> None:
        arguments = (case.query, case.keys, case.values, case.records, output, case.scale)
        pipeline.decode(stream(), rows, *arguments)

    if in_graph:
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                step()
        for added in range(4):
            rows.lengths.copy_(torch.tensor([n - added for n in lengths], dtype=torch.int32))
            case.lengths[:] = rows.lengths.tolist()
            pipeline.plan(stream(), rows)
            output.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
    else:
        step()
    check_scores(case, pipeline)
    check_selection(case, pipeline, exact=False)
    check_output(case, pipeline, output)
