# mypy: allow-untyped-decorators
"""Scatter: each program writes a block of the output, zeros first and then its picks, while the block is in cache."""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from lightning_sparse.kernels.launch import launch
from lightning_sparse.kernels.reference import borders

BLOCK = 4096  # elements of the output a program writes
PICKS = 128  # picks it writes at a time


def scatter(index: Tensor, values: Tensor, count: Tensor, size: int, out: Tensor) -> None:
    """As :func:`lightning_sparse.kernels.reference.scatter`."""
    n = out.numel()
    begins = borders(index, count, n, BLOCK)  # [blocks + 1]
    launch(_scatter, (triton.cdiv(n, BLOCK),), index, values, begins, out, n, float(size), BLOCK=BLOCK, PICKS=PICKS)


@triton.jit
def _scatter(
    index: tl.tensor, values: tl.tensor, begins: tl.tensor, out: tl.tensor, n: tl.tensor, size: tl.tensor,
    BLOCK: tl.constexpr, PICKS: tl.constexpr,
) -> None:  # fmt: skip
    block = tl.program_id(0)
    start = block.to(tl.int64) * BLOCK
    element = start + tl.arange(0, BLOCK)
    tl.store(out + element, tl.zeros([BLOCK], tl.float32), mask=element < n)
    tl.debug_barrier()  # the zeros of all threads are written before any of the values
    last = tl.load(begins + block + 1)
    for first in range(tl.load(begins + block), last, PICKS):
        pick = first + tl.arange(0, PICKS)
        meant = pick < last
        place = tl.load(index + pick, mask=meant, other=-1)
        value = tl.load(values + pick, mask=meant, other=0.0)
        mine = (place >= start) & (place < start + BLOCK) & (place < n)  # so that no index writes elsewhere
        tl.store(out + place, tl.div_rn(value, size), mask=mine)
