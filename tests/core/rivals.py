"""What the tests of rival selectors share: pages of given keys, plain loops."""

import math

import torch

from pagelocks import summarize
from pagelocks.selectors import RocketKV

from .helpers import make_config, normal

INF = float("inf")
SCALE = 0.125


class Pages:
    """Pages of these keys."""

    def __init__(self, keys):
        self._keys, self.count = keys, keys.shape[-3]

    def keys(self):
        return self._keys

    def summary(self):
        return summarize(self._keys, make_config(page_size=self._keys.shape[-2]))


def basis_of(seed, heads, head_dim):
    """A random orthonormal basis for each head."""
    return torch.linalg.qr(normal(seed, heads, head_dim, head_dim)).Q


def rows(*tensors):
    """The tensors' entries at each index of their leading two dimensions, which they share."""
    for i in range(tensors[0].shape[0]):
        for j in range(tensors[0].shape[1]):
            yield tuple(tensor[i, j].double().numpy() for tensor in tensors)


def log_sum_exp(values):
    return math.log(sum(math.exp(v - max(values)) for v in values)) + max(values)


def observed(config, *steps, **options):
    selector = RocketKV(config, **options)
    for query, keys in steps:
        selector.observe(query, keys, SCALE)
    return selector
