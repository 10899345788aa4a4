"""What several test files share: configurations, pages of every awkward kind, and bitwise comparison."""

import pytest
import torch
from hypothesis import HealthCheck, settings

from pagelocks import LocksConfig

KEY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SUMMARY_FIELDS = (
    "exponent",
    "centroid",
    "centroid_scale",
    "basis",
    "basis_scale",
    "coefficients",
    "coefficient_scale",
    "page_tail",
)

# Fresh inputs at each run; the falsifying example names a seed, so nothing needs to be stored.
fresh = settings(max_examples=30, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])


def make_config(rank=8, page_size=16, basis_bits=4, coefficient_bits=8, budget_pages=4, **others):
    return LocksConfig(
        budget=budget_pages * page_size,
        rank=rank,
        page_size=page_size,
        basis_bits=basis_bits,
        coefficient_bits=coefficient_bits,
        **others,
    )


def plain_config(rank=8, page_size=16, **others):
    """Unquantised."""
    return make_config(rank, page_size, basis_bits=None, coefficient_bits=None, **others)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def normal(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=generator(seed), dtype=dtype)


def same_bits(left, right):
    """Equal to the bit, which -0.0 and 0.0 are not and NaN and NaN may be."""
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
    )


def assert_same_summary(left, right):
    assert left.config == right.config
    for name in SUMMARY_FIELDS:
        mine, yours = getattr(left, name), getattr(right, name)
        if mine is None:
            assert yours is None, name
        else:
            # Bit patterns of a scalar field need a last dimension to be viewed as bytes.
            assert same_bits(mine.unsqueeze(-1), yours.unsqueeze(-1)), name


def assert_rejected(call, *parts):
    """A ValueError whose message holds every part: the value, what is allowed, the remedy."""
    with pytest.raises(ValueError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value), (part, str(caught.value))


def awkward_pages(page_size, head_dim, dtype, seed=0):
    """name -> page (page_size, head_dim): everything a cache may hold that a textbook SVD would not like."""
    draw = generator(seed)
    normal_page = torch.randn(page_size, head_dim, generator=draw)
    uniform = torch.rand(page_size, head_dim, generator=draw) * 2 - 1
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    pages = {
        "zeros": torch.zeros(page_size, head_dim),
        "constant": torch.full((page_size, head_dim), 3.7),
        "one key repeated": normal_page[:1].expand(page_size, head_dim),
        "three keys repeated": normal_page[torch.arange(page_size) % 3],
        "rank two": torch.randn(page_size, 2, generator=draw) @ torch.randn(2, head_dim, generator=draw),
        "plus and minus": normal_page[:1] * (1 - 2 * (torch.arange(page_size) % 2)).unsqueeze(-1),
        "1e-4": normal_page * 1e-4,
        "1e4": normal_page * 1e4,
        "all the largest": torch.full((page_size, head_dim), largest),
        "largest, either sign": torch.where(normal_page > 0, largest, -largest),
        "up to the largest": uniform * largest,
        "denormals": uniform * smallest,
        "smallest denormal": uniform.sign() * smallest * torch.finfo(dtype).eps,
        "constant channel": normal_page + 1e4 * (torch.arange(head_dim) == 7),
    }
    for name, background in (("outlier among ordinary keys", normal_page), ("outlier among zeros", normal_page * 0)):
        page = background.clone()
        page[3, 5] = largest
        pages[name] = page
    page = normal_page * 1e-4
    page[0] *= 1e8
    pages["1e4 beside 1e-4"] = page
    # Through float64, so that nothing meant to be finite overflows on its way to dtype.
    return {name: page.double().clamp(-largest, largest).to(dtype) for name, page in pages.items()}


AWKWARD = tuple(awkward_pages(8, 32, torch.float32))
