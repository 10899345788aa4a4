"""For all tests and whatever they start, one thread each: two that wait for each other crawl on a busy machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Any]:
    """Loads an example of a dataset's task from a file with one row."""
    from dataset_rows import row_of, written

    from pagelocks.eval.datasets import load

    def make(name: str, **changes: Any) -> Any:
        (example,) = load(name, written(tmp_path, row_of(name, **changes)))
        return example

    return make
