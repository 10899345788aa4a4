"""What the tests of the links share: a configuration, selectors that are wrong, plain sums."""

import math

import torch

from pagelocks.selectors import Exact
from pagelocks.theory import exact_log_mass

from .helpers import make_config

CONFIG = make_config(rank=3, page_size=8, budget_pages=4)


class Wrong:
    """The opposite of what is so."""

    def log_mass(self, query, pages, scale):
        return -Exact().log_mass(query, pages, scale)


class Outliers:
    """Exact, but some pages are read and some left out whatever the query."""

    def log_mass(self, query, pages, scale):
        mass = Exact().log_mass(query, pages, scale)
        mass[..., 2], mass[..., 5] = math.inf, -math.inf
        return mass


def exact_of(record, config):
    return exact_log_mass(record.query, record.pages(config).keys(), record.scale)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def log_sum_exp(values):
    peak = max(values)
    return peak + math.log(sum(math.exp(v - peak) for v in values))
