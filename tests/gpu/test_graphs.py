"""CUDA graphs: replayed with other lengths, a step is what it is launched kernel by kernel."""

from __future__ import annotations

import torch
from cases import SHAPES, check_output, make_case, planned, shape_of, stream


def test_extreme_logits_in_a_graph() -> None:
    """The second way through score, which hardly any group takes, inside a graph."""
    case = make_case(shape_of(SHAPES[0]), [4000, 300], 5, size=60.0)
    pipeline, rows = planned(case), case.rows
    output = torch.full_like(case.query, torch.nan)
    arguments = (case.query, case.keys, case.values, case.records, output, case.scale)
    pipeline.decode(stream(), rows, *arguments)
    eager = output.clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pipeline.decode(stream(), rows, *arguments)
    output.fill_(torch.nan)
    graph.replay()
    assert output.view(torch.int16).equal(eager.view(torch.int16))
    check_output(case, pipeline, output)


def test_graph_replay_equals_eager() -> None:
    """Captured at one batch and replayed with other lengths: the same bits as launched one by one."""
    shape = shape_of(SHAPES[0])
    case = make_case(shape, [3000, 200, 900, 5000], 9)
    pipeline = planned(case)
    rows = case.rows
    output = torch.full_like(case.query, torch.nan)
    arguments = (case.query, case.keys, case.values, case.records, output, case.scale)

    def step() -> None:
        pipeline.decode(stream(), rows, *arguments)

    graph = torch.cuda.CUDAGraph()
    step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    for lengths in ([3000, 200, 900, 5000], [1, 150, 16, 4999], [2999, 0, 0, 33]):
        case.lengths[:] = lengths
        rows.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        rows.query_starts.copy_(torch.tensor([0, *(1 if n else 0 for n in lengths)]).cumsum(0))
        pipeline.plan(stream(), rows)
        output.fill_(torch.nan)
        graph.replay()
        replayed = output.clone()
        output.fill_(torch.nan)
        step()
        assert replayed.view(torch.int16).equal(output.view(torch.int16))
        check_output(case, pipeline, output)


def test_many_replays_agree() -> None:
    """A race would show as an output that moves."""
    case = make_case(shape_of(SHAPES[1]), [5000, 1234, 8000], 10)
    pipeline = planned(case)
    seen = []
    for _ in range(30):
        output = torch.full_like(case.query, torch.nan)
        pipeline.decode(stream(), case.rows, case.query, case.keys, case.values, case.records, output, case.scale)
        seen.append(output.view(torch.int16).clone())
    assert all(each.equal(seen[0]) for each in seen)
