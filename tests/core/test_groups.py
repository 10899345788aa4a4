"""Rules for a group's pages, against loops over heads and pages."""

from __future__ import annotations

import math

import pytest
import torch

from pagelocks import LocksConfig
from pagelocks.selectors.groups import GROUP_RULES, group_rule

CONFIG = LocksConfig(budget=64)


def loops(rule: str, mass: torch.Tensor, complete: int) -> list[list[float]]:
    """Shares by the definitions: one list a head for per-head, else one."""
    group = mass.shape[0]
    unknown = [j for j in range(complete) if any(math.isinf(mass[g, j]) for g in range(group))]
    known = [j for j in range(complete) if j not in unknown]
    shares = [[0.0] * mass.shape[1] for _ in range(group)]
    for g in range(group):
        top = max((mass[g, j].item() for j in known), default=0.0)
        weights = {j: math.exp(mass[g, j].item() - top) for j in known}
        for j in known:
            shares[g][j] = weights[j] / (max(weights.values()) if rule == "peak" else sum(weights.values()))
        own = unknown if rule != "per-head" else [j for j in range(complete) if math.isinf(mass[g, j])]
        for j in own:
            shares[g][j] = math.inf
    if rule == "per-head":
        return shares
    join = {"share": lambda x: sum(x) / group, "max": max, "peak": sum}[rule]
    return [[join([shares[g][j] for g in range(group)]) for j in range(mass.shape[1])]]


@pytest.mark.parametrize("rule", list(GROUP_RULES))
@pytest.mark.parametrize(("group", "pages", "length"), [(1, 5, 80), (3, 9, 9 * 16 - 1), (7, 12, 7 * 16)])
def test_rules_are_their_definitions(rule: str, group: int, pages: int, length: int) -> None:
    mass = torch.randn(group, pages, generator=torch.Generator().manual_seed(group)) * 4
    found = GROUP_RULES[rule](mass, torch.tensor(length), CONFIG)
    expected = torch.tensor(loops(rule, mass, min(pages, length // 16)))
    torch.testing.assert_close(found, expected if rule == "per-head" else expected[0])


@pytest.mark.parametrize("rule", ["share", "max", "peak"])
def test_a_page_unknown_to_one_head_comes_first(rule: str) -> None:
    mass = torch.randn(2, 6)
    mass[1, 3] = torch.inf
    found = GROUP_RULES[rule](mass, torch.tensor(96), CONFIG)
    assert found[3] == torch.inf and found.isfinite().sum() == 5


def test_leading_dimensions_and_no_pages() -> None:
    mass, lengths = torch.randn(2, 3, 4, 6), torch.tensor([[96, 50, 16], [96, 95, 0]])
    for name, rule in GROUP_RULES.items():
        found = rule(mass, lengths, CONFIG)
        for a in range(2):
            for b in range(3):
                torch.testing.assert_close(found[a, b], rule(mass[a, b], lengths[a, b], CONFIG), msg=name)
        assert rule(mass[..., :0], lengths, CONFIG).numel() == 0


def test_peak_favours_diffuse_heads_and_share_does_not() -> None:
    """One head is sure of page 0; the other spreads over the rest, and a sum over peaks counts each of them in full."""
    mass = torch.tensor([[10.0, 0, 0, 0, 0, 0], [-10.0, 1, 1, 1, 1, 1]])
    length = torch.tensor(96)
    assert GROUP_RULES["share"](mass, length, CONFIG).argmax() == 0
    assert GROUP_RULES["peak"](mass, length, CONFIG)[1:].min() > 0.999  # as high as the page that a head is sure of
    assert GROUP_RULES["share"](mass, length, CONFIG)[1:].max() < 0.11


def test_unknown_rule() -> None:
    with pytest.raises(ValueError, match=r"group_rule='mean' is not allowed: one of share, max, peak, per-head"):
        group_rule("mean")
