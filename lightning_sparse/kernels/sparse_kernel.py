# mypy: allow-untyped-decorators
"""Selected elements: taken from a vector, put into one, found in others, and added up.

Each program that adds up writes a block of the sum, zeros first, then what one rank after the other has there, while
the block is in cache.
"""

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from lightning_sparse.kernels.index_kernel import below
from lightning_sparse.kernels.launch import launch

BLOCK = 4096  # elements of a sum a program writes
PICKS = 128  # picks it adds at a time
THREADS = 1024  # picks, or borders, a program works on, where there are no sums


def add_up(index: Tensor, values: Tensor, out: Tensor) -> Tensor:
    """As :func:`lightning_sparse.kernels.reference.add_up`."""
    (rows, capacity), n = index.shape, out.numel()
    blocks = triton.cdiv(n, BLOCK)
    begins = index.new_empty((rows, blocks + 1))
    is_reached, reached = out.new_empty(n, dtype=torch.int8), index.new_empty(blocks)
    launch(
        _borders, (triton.cdiv(blocks + 1, THREADS), rows), index, begins, capacity, blocks,
        BLOCK=BLOCK, THREADS=THREADS, STEPS=capacity.bit_length(),
    )  # fmt: skip
    launch(
        _add_up, (blocks,), index, values, begins, out, is_reached, reached, rows, capacity, blocks, n,
        BLOCK=BLOCK, PICKS=PICKS,
    )  # fmt: skip
    return reached.sum()


def put(index: Tensor, values: Tensor, out: Tensor, onto: bool) -> None:
    """As :func:`lightning_sparse.kernels.reference.put`."""
    m = index.numel()
    launch(_put, (triton.cdiv(m, THREADS),), index, values, out, m, out.numel(), ONTO=onto, THREADS=THREADS)


def pick(index: Tensor, x: Tensor, magnitudes: bool) -> Tensor:
    """As :func:`lightning_sparse.kernels.reference.pick`."""
    m, out = index.numel(), torch.empty_like(index, dtype=x.dtype)
    launch(_pick, (triton.cdiv(m, THREADS),), index, x, out, m, x.numel(), MAGNITUDES=magnitudes, THREADS=THREADS)
    return out


def among(index: Tensor, others: Tensor, n: int) -> Tensor:
    """As :func:`lightning_sparse.kernels.reference.among`."""
    (rows, capacity), out, of_others = index.shape, torch.empty_like(index), others.shape[1]
    launch(
        _among, (triton.cdiv(capacity, THREADS), rows), index, others, out, capacity, of_others, n,
        THREADS=THREADS, STEPS=of_others.bit_length(),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["capacity", "blocks"])
def _borders(
    index: tl.tensor, begins: tl.tensor, capacity: tl.tensor, blocks: tl.tensor,
    BLOCK: tl.constexpr, THREADS: tl.constexpr, STEPS: tl.constexpr,
) -> None:  # fmt: skip
    """Of each row, how many indices are below where each block begins; what fills a row up is at its end."""
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0).to(tl.int64) * THREADS + tl.arange(0, THREADS)
    exists = block <= blocks
    first = below(index + row * capacity, capacity, block * BLOCK, exists, STEPS)
    tl.store(begins + row * (blocks + 1) + block, first, mask=exists)


@triton.jit(do_not_specialize=["rows", "capacity", "blocks"])
def _add_up(
    index: tl.tensor, values: tl.tensor, begins: tl.tensor, out: tl.tensor, is_reached: tl.tensor, reached: tl.tensor,
    rows: tl.tensor, capacity: tl.tensor, blocks: tl.tensor, n: tl.tensor, BLOCK: tl.constexpr, PICKS: tl.constexpr,
) -> None:  # fmt: skip
    block = tl.program_id(0)
    start = block.to(tl.int64) * BLOCK
    element = start + tl.arange(0, BLOCK)
    tl.store(out + element, tl.zeros([BLOCK], tl.float32), mask=element < n)
    tl.store(is_reached + element, tl.zeros([BLOCK], tl.int8), mask=element < n)
    new = tl.zeros([PICKS], tl.int64)
    before = tl.zeros([], tl.int64)  # of the indices of all rows
    for row in range(rows):
        tl.debug_barrier()  # what all threads wrote so far is written before it is read
        last = tl.load(begins + row * (blocks + 1) + block + 1)
        for first in range(tl.load(begins + row * (blocks + 1) + block), last, PICKS):
            pick = first + tl.arange(0, PICKS)
            at = before + pick
            place = tl.load(index + at, mask=pick < last, other=-1)
            mine = (place >= start) & (place < start + BLOCK) & (place < n)  # so that no index writes elsewhere
            value = tl.load(values + at, mask=mine, other=0.0)
            tl.store(out + place, tl.load(out + place, mask=mine, other=0.0) + value, mask=mine)
            new += (mine & (tl.load(is_reached + place, mask=mine, other=1) == 0)).to(tl.int64)
            tl.store(is_reached + place, tl.full([PICKS], 1, tl.int8), mask=mine)
        before += capacity
    tl.store(reached + block, tl.sum(new, axis=0))


@triton.jit(do_not_specialize=["m", "n"])
def _put(
    index: tl.tensor, values: tl.tensor, out: tl.tensor, m: tl.tensor, n: tl.tensor,
    ONTO: tl.constexpr, THREADS: tl.constexpr,
) -> None:  # fmt: skip
    each = tl.program_id(0).to(tl.int64) * THREADS + tl.arange(0, THREADS)
    place = tl.load(index + each, mask=each < m, other=-1)
    mine = (place >= 0) & (place < n)
    value = tl.load(values + each, mask=mine, other=0.0)
    if ONTO:
        value += tl.load(out + place, mask=mine, other=0.0)
    tl.store(out + place, value, mask=mine)


@triton.jit(do_not_specialize=["m", "n"])
def _pick(
    index: tl.tensor, x: tl.tensor, out: tl.tensor, m: tl.tensor, n: tl.tensor,
    MAGNITUDES: tl.constexpr, THREADS: tl.constexpr,
) -> None:  # fmt: skip
    each = tl.program_id(0).to(tl.int64) * THREADS + tl.arange(0, THREADS)
    place = tl.load(index + each, mask=each < m, other=-1)
    value = tl.load(x + place, mask=(place >= 0) & (place < n), other=0.0)
    if MAGNITUDES:
        value = tl.abs(value)
    tl.store(out + each, value, mask=each < m)


@triton.jit(do_not_specialize=["capacity", "of_others", "n"])
def _among(
    index: tl.tensor, others: tl.tensor, out: tl.tensor, capacity: tl.tensor, of_others: tl.tensor, n: tl.tensor,
    THREADS: tl.constexpr, STEPS: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    each = tl.program_id(0).to(tl.int64) * THREADS + tl.arange(0, THREADS)
    place = tl.load(index + row * capacity + each, mask=each < capacity, other=n)
    meant = place < n
    others += row * of_others
    at = below(others, of_others, place, meant, STEPS)
    there = tl.load(others + at, mask=meant & (at < of_others), other=n)
    tl.store(out + row * capacity + each, tl.where(meant & (there == place), place, n), mask=each < capacity)
