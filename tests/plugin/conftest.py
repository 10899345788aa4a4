"""Fixtures for the tests that start vLLM."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import close_shared, tiny_model


@pytest.fixture(scope="module", autouse=True)
def _end_of_shared_child() -> Iterator[None]:
    yield
    close_shared()


@pytest.fixture(scope="session")
def smollm2() -> str:
    """SmolLM2-135M-Instruct, fetched once."""
    from pagelocks.models import fetch

    return str(fetch("SmolLM2-135M-Instruct"))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two layers of full attention."""
    return tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def tiny_gemma3(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Sliding and full layers in turn."""
    return tiny_model(tmp_path_factory.mktemp("models"), "gemma3")
