"""What messages are made of: values, sets of indices, and indices as bytes."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from lightning_sparse.wire.indices import IndexFormat


def random_set(n: int, m: int, seed: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:m].sort().values


@st.composite
def sets(draw: st.DrawFn, largest: int = 200_000) -> tuple[int, int, Tensor]:
    """n, capacity, index [m <= capacity]: scattered or clustered, from none to all."""
    n = draw(st.one_of(st.integers(1, min(40, largest)), st.integers(1, largest)))
    m = draw(st.one_of(st.just(n), st.integers(0, min(10, n)), st.integers(0, n)))
    if draw(st.booleans()):
        index = random_set(n, m, draw(st.integers(0, 1000)))
    else:
        index = torch.arange(m) + draw(st.one_of(st.just(n - m), st.integers(0, n - m)))
    return n, draw(st.one_of(st.just(max(1, m)), st.integers(max(1, m), n))), index


def encoded(used: IndexFormat, index: Tensor, n: int, capacity: int) -> Tensor:
    out = torch.full((used.nbytes(n, capacity),), 0xA5, dtype=torch.uint8)
    used.encode(index, n, capacity, out)
    return out


def draw(count: int, seed: int = 0, exponent: float = 0.0) -> torch.Tensor:
    """[count] float32 of about 10**exponent, blocks of very different size."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(-(-count // 64), generator=generator).mul(4).sub(2).repeat_interleave(64)[:count]
    return torch.randn(count, generator=generator) * 10.0 ** (spread + exponent)
