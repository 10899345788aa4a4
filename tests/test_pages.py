"""The pages of Transformers' cache: what is made of them once, and made again where keys changed."""

from __future__ import annotations

import copy

import pytest
import torch

from pagelocks import LocksConfig
from pagelocks.summary import summarize

pytest.importorskip("transformers")

import pagelocks.hf.pages as cached_pages
from pagelocks.hf.pages import CachedPages


def test_a_cache_that_shrank_did_not_only_grow() -> None:
    keys = torch.randn(1, 2, 80, 32)
    pages = CachedPages(LocksConfig(budget=64), keys, only_grows=True)
    pages.update(keys)
    with pytest.raises(ValueError, match=r"keys='3 complete pages after 5' is not allowed: a cache that only grows"):
        pages.update(keys[:, :, :60])


@pytest.mark.parametrize("only_grows", [True, False])
@pytest.mark.parametrize("numbers", [1, 3 * 4096, 1 << 20])
def test_what_is_said_of_pages_is_kept_by_name(only_grows: bool, numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One description at a time; pages that come are added to it, and changed keys are looked at again."""
    monkeypatch.setattr(cached_pages, "SUMMARIZED", numbers)
    keys, looked = torch.randn(2, 3, 10 * 16 + 5, 32), list[int]()

    def largest(keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
        looked.append(keys.shape[2])
        return keys.amax((-2, -1)), keys.mean(-2)

    def expected(tokens: int) -> list[torch.Tensor]:
        pages = keys[:, :, :tokens].unflatten(2, (-1, 16))
        return [pages.amax((-2, -1)), pages.mean(-2)]

    pages = CachedPages(LocksConfig(budget=64), keys, only_grows)
    for tokens, new in ((100, 6), (100, 0), (130, 8 if not only_grows else 2), (165, 10 if not only_grows else 2)):
        pages.update(keys[:, :, :tokens])
        assert all(map(torch.equal, pages.described("largest", largest), expected(tokens // 16 * 16)))
        assert sum(looked) == new, tokens
        looked.clear()
    other = copy.copy(pages)
    assert all(map(torch.equal, other.described("negative", lambda keys: (-keys.amax((-2, -1)),)), [-expected(160)[0]]))
    pages.described("largest", largest)
    assert not looked, "another's description is its own"
    other.described("largest", largest)
    assert sum(looked) == 10
    if not only_grows:
        keys[1, 2, 40] += 5
        pages.update(keys)
        assert all(map(torch.equal, pages.described("largest", largest), expected(160)))


@pytest.mark.parametrize("numbers", [1, 3 * 4096, 1 << 20])
def test_pages_are_summarized_a_few_at_a_time(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, parts = torch.randn(2, 3, 10 * 16 + 5, 32), list[int]()
    monkeypatch.setattr(cached_pages, "SUMMARIZED", numbers)
    real = cached_pages.summarize
    pages = CachedPages(LocksConfig(budget=64), keys)
    monkeypatch.setattr(cached_pages, "summarize", lambda k, c: parts.append(k.shape[2]) or real(k, c))
    pages.update(keys)
    expected = summarize(keys[:, :, :160].unflatten(2, (10, 16)), LocksConfig(budget=64))
    assert pages.summary().pack().equal(expected.pack())
    most = max(1, numbers // (2 * 3 * 16 * 32))
    assert sum(parts) == 10 and max(parts) == min(10, most)
