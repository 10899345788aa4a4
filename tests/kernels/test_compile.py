"""The kernels without a GPU: that they compile for the card they are for, and that Python's idea of their parameters is
C++'s.  What they compute is `make test-gpu`'s business."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch

from pagelocks import LocksConfig
from pagelocks.kernels import KernelShape, attend, build, compiler, pipeline, plan, score, select, select_attend

SHAPES = [
    KernelShape(128, 4, 8, 16, torch.bfloat16, LocksConfig()),
    KernelShape(64, 3, 3, 48, torch.float16, LocksConfig(rank=5)),
    KernelShape(256, 1, 20, 16, torch.bfloat16, LocksConfig(rank=7)),
    KernelShape(32, 2, 2, 16, torch.bfloat16, LocksConfig(rank=4)),
]
MAX_SHARED = 232_448
"""Bytes that a block may have on sm_90; what is static in the kernels counts as well, hence some slack below."""


class Recorded:
    """Stands in for `Kernel`: notes what would be compiled."""

    made: list[tuple[str, str, dict[str, int], str, int, int]]

    def __init__(self, name: str, function: str, defines: Any, parameters: str, threads: int, *more: int) -> None:
        shared, cluster = (*more, *(0, 1)[len(more) :])
        type(self).made.append((name, function, defines, parameters, threads, shared))
        self.at_once = {16: 7, 8: 15}.get(cluster, 132 // cluster)  # an H200's


@pytest.fixture(scope="module", params=SHAPES, ids=lambda s: f"{s.head_dim}-{s.kv_heads}-{s.group}")
def kernels(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    """What the wrappers of one shape compile, and how they launch it, without a device."""
    shape = request.param
    Recorded.made = []
    device = torch.device("cpu")
    properties = type("Properties", (), {"multi_processor_count": 132})
    modules = [
        patch.object(module, "Kernel", Recorded) for module in (plan, build, score, select, attend, select_attend)
    ]
    card = patch.object(torch.cuda, "get_device_properties", lambda device: properties)
    for each in (*modules, card):
        each.start()
    try:
        plan.Plan(shape, 4, 64, 100, score.parts_of(shape, device), device)
        build.Build(shape, device)
        scored = score.Score(shape, 4, 100, device)
        chosen = select.Select(shape, scored, 4, False, device)
        joint = select_attend.SelectAttend(shape, scored, chosen)
        for rows in (1, 4, 200):  # clusters of 16 blocks, of fewer, of one
            chosen.warm_up(rows)
            if joint.takes(rows):
                joint.warm_up(rows)
        attend.Attend(shape, 4, device)
        yield Recorded.made
    finally:
        for each in (*modules, card):
            each.stop()


def test_they_compile_with_parameters_of_the_size_that_python_packs(kernels: list[Any]) -> None:
    import struct

    made = {name: defines for name, _, defines, *_ in kernels}
    expected = {"plan", "build", "score", "select", "attend"}
    if made["attend"]["GROUP"] <= 8 and made["attend"]["HEAD_DIM"] <= 128:
        expected.add("select_attend")
    assert set(made) == expected
    for name, function, defines, parameters, threads, shared in kernels:
        size = struct.calcsize(f"@{parameters}")
        size = -(-size // 8) * 8  # C pads a struct with pointers to eight bytes, struct does not
        check = f'\nstatic_assert(sizeof(Params) == {size}, "Python packs {size} bytes");\n'
        with patch.object(compiler, "source_of", lambda n, d, check=check, real=compiler.source_of: real(n, d) + check):
            compiler._compile.cache_clear()
            code = compiler.compile_kernel(name, defines)
        compiler._compile.cache_clear()
        assert code[:4] == b"\x7fELF" and function.encode() in code, name
        assert threads % 32 == 0 and threads <= 1024 and shared <= MAX_SHARED, name


def test_score_has_nothing_in_local_memory(kernels: list[Any]) -> None:
    """An array that is indexed by a loop's variable goes there, and cost a tenth of the time."""
    from cuda.bindings import nvrtc

    defines = next(defines for name, _, defines, *_ in kernels if name == "score")
    if defines["GROUP"] > 16:
        pytest.skip("20 query heads of 256 dimensions do not fit into 255 registers")
    source = compiler.source_of("score", defines).encode()
    _, program = nvrtc.nvrtcCreateProgram(source, b"score.cu", 0, [], [])
    options = [*compiler.options_for("sm_90a"), b"--ptxas-options=-v"]
    nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
    nvrtc.nvrtcGetProgramLog(program, log)
    assert (
        log.count(b"stack frame") == log.count(b" 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == 1
    )


def test_parameters_are_in_the_order_of_the_struct(kernels: list[Any]) -> None:
    """Field by field: pointers as P, 64-bit numbers as q, 32-bit ones as i, floats as f."""
    kinds = {"i64": "q", "int": "i", "float": "f"}
    for name, _, defines, parameters, *_ in kernels:
        source = compiler.source_of(name, defines)
        structs = dict(re.findall(r"struct (Params|Scored) \{(.*?)\n\};", source, re.S))
        found = ""
        for line in structs["Params"].replace("  Scored scored;", structs.get("Scored", "")).splitlines():
            for declaration in re.sub(r"//.*", "", line).split(";"):
                words = declaration.strip()
                if words:
                    count = words.count(",") + 1
                    found += "P" * count if "*" in words else kinds[words.split()[0]] * count
        assert found == parameters, name


@pytest.mark.parametrize(
    ("group", "head_dim", "rows", "changes", "taken"),
    [
        (8, 128, 1, {}, True),
        (8, 128, 3, {"dense_below": 8192}, True),
        (8, 128, 4, {}, False),  # 16 clusters of 8 blocks, and 15 run at a time
        (8, 128, 5, {}, False),  # clusters of four blocks
        (9, 128, 1, {}, False),
        (8, 256, 1, {}, False),
        (8, 128, 1, {"budget": 8208}, False),
        (8, 128, 1, {"dense_below": 8193}, False),
    ],
)
def test_what_the_joint_kernel_takes(
    group: int, head_dim: int, rows: int, changes: dict[str, int], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    Recorded.made = []
    for module in (score, select_attend):
        monkeypatch.setattr(module, "Kernel", Recorded)
    shape, device = KernelShape(head_dim, 4, group, 16, torch.bfloat16, LocksConfig(**changes)), torch.device("cpu")
    scored = score.Score(shape, 8, 100, device)
    joint = select_attend.SelectAttend(shape, scored, select.Select(shape, scored, 8, False, device))
    assert joint.takes(rows) == taken


@pytest.mark.parametrize("shape", SHAPES)
def test_workspace_has_its_own_types(shape: KernelShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM makes layers, and so the workspace, while PyTorch's default type is the model's."""
    properties = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for module in (plan, build, score, select, attend, select_attend):
        monkeypatch.setattr(module, "Kernel", lambda *args: None)
    monkeypatch.setattr(pipeline.Pipeline, "warm_up", lambda self: None)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        made = pipeline.Pipeline(shape, 4, 64, 100, torch.device("cpu"), logical=True)
    finally:
        torch.set_default_dtype(default)
    parts = (made.plan_of_step, made.score, made.select, made._attend)
    tensors = [value for part in parts for value in vars(part).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) >= 13
    assert {tensor.dtype for tensor in tensors} == {torch.float32, torch.int32}


def test_a_kernel_that_does_not_compile_says_so() -> None:
    with pytest.raises(compiler.CudaError, match=r"(?s)score\.cu does not compile for sm_90a.*HEAD_DIM"):
        compiler.compile_kernel("score", {})


def test_without_the_bindings_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    compiler._compile.cache_clear()
    with pytest.raises(compiler.CudaError, match=r"need cuda-bindings .*pip install 'pagelocks\[gpu\]'"):
        compiler.compile_kernel("plan", {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 96}, r"head_dim=96 is not allowed: the GPU kernels take 32, 64, 128, 256"),
        ({"dtype": torch.float32}, r"dtype=torch\.float32 is not allowed"),
        ({"block_size": 24}, r"block_size=24 is not allowed: a multiple of 16"),
        ({"kv_heads": 0}, r"heads=\(0, 8\) is not allowed"),
        ({"config": LocksConfig(rank=9)}, r"rank=9 is not allowed: the GPU kernels take ranks up to 8"),
        ({"config": LocksConfig(basis_bits=8)}, r"basis_bits.*\(8, 8\) is not allowed: the GPU kernels take \(4, 8\)"),
        ({"config": LocksConfig(page_size=32)}, r"page_size=32 is not allowed"),
    ],
)
def test_shapes_that_the_kernels_do_not_take(changes: dict[str, Any], message: str) -> None:
    usual: dict[str, Any] = {"head_dim": 128, "kv_heads": 4, "group": 8, "block_size": 16, "dtype": torch.bfloat16}
    with pytest.raises(ValueError, match=message):
        KernelShape(**{**usual, "config": LocksConfig(), **changes})


@pytest.mark.parametrize("shape", SHAPES)
def test_the_ring_of_score_fits(shape: KernelShape) -> None:
    heads, warps, stages = score.warps_of(shape)
    assert shape.kv_heads % heads == 0 and warps % heads == 0 and stages > warps // heads
    assert heads * stages * score.GROUP_PAGES * shape.layout.record_bytes + 4096 <= MAX_SHARED
