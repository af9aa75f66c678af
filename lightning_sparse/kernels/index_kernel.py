# mypy: allow-untyped-decorators
"""The block16 format of :mod:`lightning_sparse.wire.indices`, byte by byte, so that a payload may start anywhere."""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from lightning_sparse.kernels.blocks import BLOCK_BITS
from lightning_sparse.kernels.launch import launch
from lightning_sparse.kernels.reference import borders, plausible, sections

BLOCK = 1024  # bytes, or indices, a program works on


def encode_indices(index: Tensor, count: Tensor, n: int, out: Tensor) -> None:
    """As :func:`lightning_sparse.kernels.reference.encode_indices`."""
    begins = borders(index, count, n, 1 << BLOCK_BITS)  # [blocks + 1]
    head = 4 * (begins.numel() - 1)
    grid = (triton.cdiv(out.numel(), BLOCK),)
    launch(_encode, grid, index, begins, count, out, head, out.numel(), BLOCK=BLOCK)


def decode_indices(payload: Tensor, n: int, capacity: int, count: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`lightning_sparse.kernels.reference.decode_indices`."""
    counts, low = sections(payload, n)
    ends = counts.clamp(min=0).cumsum(0)  # [blocks]
    index = ends.new_empty(capacity)
    programs = triton.cdiv(capacity, BLOCK)
    wrong = ends.new_empty(programs)  # indices that are out of place, in each program
    blocks = counts.numel()
    launch(
        _decode, (programs,), low, ends, count, index, wrong, blocks, n, capacity,
        STEPS=blocks.bit_length(), BITS=BLOCK_BITS, BLOCK=BLOCK,
    )  # fmt: skip
    return index, plausible(counts, capacity, count) & (wrong.sum() == 0)


@triton.jit(do_not_specialize=["head", "nbytes"])
def _encode(
    index: tl.tensor, begins: tl.tensor, count: tl.tensor, out: tl.tensor, head: tl.tensor, nbytes: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    announces = byte < head
    begin = tl.load(begins + byte // 4, mask=announces, other=0)
    end = tl.load(begins + byte // 4 + 1, mask=announces, other=0)
    pick = (byte - head) // 2
    found = tl.load(index + pick, mask=(byte >= head) & (byte < nbytes) & (pick < tl.load(count)), other=0)
    of_block = (end - begin) >> (8 * (byte % 4))
    of_index = found >> (8 * ((byte - head) % 2))
    tl.store(out + byte, (tl.where(announces, of_block, of_index) & 0xFF).to(tl.uint8), mask=byte < nbytes)


@triton.jit(do_not_specialize=["blocks", "n", "capacity"], do_not_specialize_on_alignment=["low"])
def _decode(
    low: tl.tensor, ends: tl.tensor, count: tl.tensor, index: tl.tensor, wrong: tl.tensor, blocks: tl.tensor,
    n: tl.tensor, capacity: tl.tensor, STEPS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    pick = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    meant = (pick < capacity) & (pick < tl.load(count))
    found = _index_at(low, ends, pick, meant, blocks, STEPS, BITS)
    before = _index_at(low, ends, pick - 1, meant & (pick > 0), blocks, STEPS, BITS)
    misplaced = meant & ((found >= n) | ((pick > 0) & (found <= before)))
    tl.store(index + pick, tl.where(meant & (found < n), found, n), mask=pick < capacity)
    tl.store(wrong + tl.program_id(0), tl.sum(misplaced.to(tl.int64), axis=0))


@triton.jit
def _index_at(
    low: tl.tensor, ends: tl.tensor, pick: tl.tensor, meant: tl.tensor, blocks: tl.tensor,
    STEPS: tl.constexpr, BITS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    first = tl.zeros_like(pick)
    last = first + blocks
    for _ in range(STEPS):  # to the first block that ends beyond the pick
        middle = (first + last) // 2
        open_ = meant & (first < last)
        further = open_ & (tl.load(ends + middle, mask=open_, other=0) <= pick)
        first = tl.where(further, middle + 1, first)
        last = tl.where(further, last, middle)
    byte0 = tl.load(low + 2 * pick, mask=meant, other=0).to(tl.int64)
    byte1 = tl.load(low + 2 * pick + 1, mask=meant, other=0).to(tl.int64)
    return (first << BITS) | (byte1 << 8) | byte0
