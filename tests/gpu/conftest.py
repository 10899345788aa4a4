"""The GPU suite: `make test-gpu`.  It needs a card of compute capability 9.0 and PyTorch with CUDA; vLLM only where a
test says so."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if Path(item.fspath).parent == Path(__file__).parent:
                item.add_marker(pytest.mark.skip(reason="no GPU: run `make test-gpu` on a machine that has one"))
