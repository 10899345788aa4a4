"""The passes of rivals over a prompt: Triton against PyTorch, here in Triton's interpreter, on a GPU as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pagelocks.selectors import H2O, RKV, KVzip, LazyEviction, history
from pagelocks.selectors.history import History

pytest.importorskip("triton")
GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float16)  # the interpreter has no bf16
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not (GPU or INTERPRETED), reason="neither a GPU nor Triton's interpreter")


@pytest.mark.skipif(GPU or INTERPRETED, reason="runs as it is")
def test_in_the_interpreter() -> None:
    """Triton reads the variable when it is imported, so that a process of its own has to set it."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__))]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]


@pytest.fixture
def passes() -> Any:
    from pagelocks.eval import passes

    yield history.Passes(passes.columns, passes.likeness)
    history.passes = None


def step_of(seed: int, group: int, head_dim: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Queries and keys as a model and a cache give them: views, the keys' of a room with NaN after them."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, 2, tokens, head_dim, generator=generator)
    keys = keys + torch.randn(2, 2, 1, head_dim, generator=generator)
    room = torch.full((2, 2, tokens + 9, head_dim), torch.nan, dtype=DTYPE)
    room[..., :tokens, :] = keys.to(DTYPE)
    query = 2 * torch.randn(2, tokens, 2 * group, head_dim, generator=generator).to(DTYPE)
    return query.to(DEVICE).transpose(1, 2).unflatten(1, (2, group)), room.to(DEVICE)[..., :tokens, :]


def learn(member: History, query: Tensor, keys: Tensor, parts: list[int], repeated: int = 0) -> History:
    start = 0
    for steps in parts:
        member.observe(query[..., start : start + steps, :], keys[..., : start + steps, :], 0.125)
        start += steps
    if repeated:
        assert isinstance(member, KVzip)
        member.reconstruct(query[..., start:, :], keys, 0.125)
    return member


CASES = [(1, 64, [70, 100, 33], 0.4), (3, 32, [130, 1, 1], -0.2)]
if GPU:
    CASES += [(7, 64, [64, 200, 65, 1, 1], 0.4), (6, 128, [700, 801], 0.4), (2, 128, [1300], -0.9)]


@needs_interpreter
@pytest.mark.parametrize(("group", "head_dim", "parts", "like"), CASES)
def test_what_is_learnt(passes: Any, group: int, head_dim: int, parts: list[int], like: float) -> None:
    repeated = head_dim + 6  # fewer queries than channels are PyTorch's
    query, keys = step_of(sum(parts), group, head_dim, sum(parts) + repeated)
    seen = query[..., : sum(parts), :], keys[..., : sum(parts), :]
    found = []
    for each in (None, passes):
        history.passes = each
        makers = (H2O, lambda: LazyEviction(threshold=0.02), lambda: RKV(threshold=like))
        members = [learn(make(), *seen, parts) for make in makers]
        found.append((*members, learn(KVzip(repeated=True), query, keys, parts, repeated)))
    (h2o, lazy, rkv, kvzip), (h2o2, lazy2, rkv2, kvzip2) = found
    assert isinstance(lazy, LazyEviction) and isinstance(rkv, RKV)
    assert lazy._gap is not None and lazy._gap.amax() > 20 and rkv._likeness._last.count_nonzero() > 20
    torch.testing.assert_close(h2o2._sum, h2o._sum, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(kvzip2._importance, kvzip._importance, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(rkv2._merit, rkv._merit, rtol=1e-4, atol=1e-6)
    for name in ("_last", "_gap"):  # a weight within rounding of the threshold may fall on either side
        unlike = getattr(lazy2, name) != getattr(lazy, name)
        assert unlike.float().mean() < 0.003
    unlike = rkv2._likeness._last != rkv._likeness._last
    assert unlike.float().mean() < 0.003


@needs_interpreter
def test_together(passes: Any) -> None:
    query, keys = step_of(7, 2, 64, 100)
    history.passes = passes
    alone = [learn(make(), query, keys, [100]) for make in (H2O, LazyEviction)]
    members = [H2O(), LazyEviction()]
    history.observe_together(members, query, keys, 0.125)
    assert torch.equal(members[0]._sum, alone[0]._sum) and torch.equal(members[1]._gap, alone[1]._gap)


@needs_interpreter
@pytest.mark.parametrize("which", ["dtype", "head size", "NaN", "two thresholds"])
def test_what_is_left_to_pytorch(passes: Any, which: str) -> None:
    """The same answers, whatever the numbers."""
    query, keys = step_of(3, 2, 64, 100)
    if which == "dtype":
        query, keys = query.float(), keys.float()
    if which == "head size":
        query, keys = query[..., :48], keys[..., :48]
    if which == "NaN":
        keys[1, 0, 5, 3] = torch.nan
    thresholds = [0.01, 0.05] if which == "two thresholds" else [0.01]
    found = []
    for each in (None, passes):
        history.passes = each
        members = [H2O(), *(LazyEviction(threshold=threshold) for threshold in thresholds), RKV()]
        history.observe_together(members, query, keys, 0.125)
        found.append(members)
    for one, other in zip(*found, strict=True):
        assert torch.allclose(other._score(6), one._score(6), rtol=1e-4, atol=1e-4, equal_nan=False)


def test_before_the_repetition() -> None:
    query, keys = step_of(1, 2, 64, 100)
    member = learn(KVzip(repeated=True), query.float(), keys.float(), [100])
    with pytest.raises(ValueError, match="has not been repeated"):
        member._prompt = 100
        member._score(6)
