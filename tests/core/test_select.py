"""select_pages against a selection in plain Python, and its rules one at a time."""

import math

import pytest
import torch

from pagelocks import page_share, select_pages, summarize
from pagelocks.score import log_mass

from .helpers import make_config, normal

NAN, INF = float("nan"), float("inf")


def loop_select(share, length, config):
    """The page ids for one row, in plain Python."""
    pages = math.ceil(length / config.page_size)
    padded = list(share) + [0.0] * pages
    always = [page for page in range(pages) if page < config.sink_pages or page >= pages - config.recent_pages]
    others = [page for page in range(pages) if page not in always]
    others.sort(key=lambda page: (-padded[page], page))
    chosen = sorted((always + others)[: config.budget_pages])
    return chosen + [-1] * (config.budget_pages - len(chosen))


@pytest.mark.parametrize("levels", [2, 4, 10_000], ids=["mostly ties", "some ties", "hardly a tie"])
@pytest.mark.parametrize(
    ("page_size", "sink", "recent", "budget_pages"),
    [(16, 1, 1, 3), (16, 1, 1, 8), (8, 0, 1, 2), (16, 2, 3, 6), (32, 0, 4, 9), (16, 5, 1, 40)],
)
def test_agrees_with_a_loop(levels, page_size, sink, recent, budget_pages):
    config = make_config(4, page_size, budget_pages=budget_pages, sink_pages=sink, recent_pages=recent)
    generator = torch.Generator().manual_seed(levels)
    lengths = torch.randint(0, 30 * page_size, (60,), generator=generator)
    lengths[:5] = torch.tensor([0, 1, page_size - 1, page_size, page_size + 1])
    for columns in (1, 5, 25, 60):  # fewer than the sequence has pages, and more
        share = torch.randint(0, levels, (len(lengths), columns), generator=generator) / levels
        share[torch.rand(share.shape, generator=generator) < 0.1] = INF
        found = select_pages(share, lengths, config)
        assert found.dtype == torch.int32 and found.shape == (len(lengths), budget_pages)
        for row, length in enumerate(lengths.tolist()):
            assert found[row].tolist() == loop_select(share[row].tolist(), length, config), (length, columns)


def test_best_others_ascending_within_the_budget():
    share = torch.tensor([0.0, 0.1, 0.4, 0.2, 0.3, 0.0])
    assert select_pages(share, torch.tensor(96), make_config(budget_pages=4)).tolist() == [0, 2, 4, 5]


def test_ties_go_to_the_lower_page():
    share = torch.full((2, 1000), 0.001)
    chosen = select_pages(share, torch.tensor([16000, 15999]), make_config(budget_pages=5))
    assert chosen.tolist() == [[0, 1, 2, 3, 999]] * 2
    share = torch.tensor([0.0, 0.1, 0.3, 0.1, 0.3, 0.3, 0.1, 0.0])
    assert select_pages(share, torch.tensor(128), make_config(budget_pages=4)).tolist() == [0, 2, 4, 7]
    assert select_pages(share, torch.tensor(128), make_config(budget_pages=6)).tolist() == [0, 1, 2, 4, 5, 7]


@pytest.mark.parametrize("length", [81, 95, 96])
def test_the_recent_page_holds_the_last_token_full_or_partial(length):
    share = torch.tensor([0.0, 0.5, 0.4, 0.1, 0.0, 0.0])
    assert select_pages(share, torch.tensor(length), make_config(budget_pages=3)).tolist() == [0, 1, 5]


def test_a_token_later_the_recent_page_is_the_new_one():
    share = torch.tensor([0.0, 0.5, 0.4, 0.1, 0.0, 0.0])
    assert select_pages(share, torch.tensor(97), make_config(budget_pages=3)).tolist() == [0, 1, 6]


def test_sink_and_recent_count_inside_the_budget_even_at_share_zero():
    share = torch.tensor([0.0, 0.5, 0.4, 0.1, 0.0, 0.0, 0.0, 0.0])
    config = make_config(budget_pages=5, sink_pages=2, recent_pages=2)
    assert select_pages(share, torch.tensor(128), config).tolist() == [0, 1, 2, 6, 7]


def test_an_infinite_share_comes_before_any_other_but_sink_and_recent():
    share = torch.tensor([0.0, 0.9, 0.0, INF, 0.1, INF, INF, 0.0])
    for budget_pages, expected in ((3, [0, 3, 7]), (4, [0, 3, 5, 7]), (5, [0, 3, 5, 6, 7]), (6, [0, 1, 3, 5, 6, 7])):
        chosen = select_pages(share, torch.tensor(128), make_config(budget_pages=budget_pages))
        assert chosen.tolist() == expected


def test_poisoned_keys_are_selected_first_from_end_to_end():
    config = make_config(budget_pages=4)
    keys = normal(0, 10, 16, 64)
    keys[7, 3, 2], keys[4, 0, 0] = NAN, -INF
    share = page_share(log_mass(normal(1, 3, 64), summarize(keys, config), 0.125), torch.tensor(160), config)
    assert torch.equal(share == INF, torch.tensor([page in (4, 7) for page in range(10)]))
    torch.testing.assert_close(share[share != INF].sum(), torch.tensor(1.0))
    assert select_pages(share, torch.tensor(160), config).tolist() == [0, 4, 7, 9]


def test_shares_past_the_sequence_are_not_read():
    share = torch.tensor([0.1, 0.2, 0.3, INF, NAN, 7.0])
    assert select_pages(share, torch.tensor(40), make_config(budget_pages=4)).tolist() == [0, 1, 2, -1]


def test_pages_past_the_columns_count_as_share_zero():
    share = torch.tensor([0.5, 0.0, 0.1])
    assert select_pages(share, torch.tensor(160), make_config(budget_pages=4)).tolist() == [0, 1, 2, 9]
    assert select_pages(torch.zeros(0), torch.tensor(160), make_config(budget_pages=4)).tolist() == [0, 1, 2, 9]


def test_short_sequences_are_whole():
    share = torch.zeros(5, 8)
    chosen = select_pages(share, torch.tensor([0, 1, 16, 17, 64]), make_config(budget_pages=4))
    assert chosen.tolist() == [[-1] * 4, [0, -1, -1, -1], [0, -1, -1, -1], [0, 1, -1, -1], [0, 1, 2, 3]]


def test_one_length_serves_all_heads():
    share = torch.rand(2, 3, 10)
    config = make_config(budget_pages=4)
    lengths = torch.tensor([[160], [70]])
    chosen = select_pages(share, lengths, config)
    assert torch.equal(chosen, select_pages(share, lengths.expand(2, 3), config))
    assert chosen.shape == (2, 3, 4)
