# mypy: allow-untyped-decorators
"""The block16 format of :mod:`lightning_sparse.wire.indices`, byte by byte, so that a payload may start anywhere.

A row of programs works on each payload: as much is launched for one as for those of all ranks.
"""

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from lightning_sparse.kernels.blocks import BLOCK_BITS, block16_bytes
from lightning_sparse.kernels.launch import launch

BLOCK = 1024  # bytes, or indices, a program works on


def encode_indices(
    index: Tensor, count: Tensor, seen: Tensor, near: Tensor, load: Tensor | None, n: int, edges: Tensor | None,
    counts: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """As :func:`lightning_sparse.kernels.reference.encode_indices`."""
    rows, capacity = index.shape
    nbytes = out.shape[1]
    launch(
        _encode, (triton.cdiv(nbytes, BLOCK), rows), index, count, seen, near, count if load is None else load,
        count if edges is None else edges, counts, out, counts.stride(0), out.stride(0), capacity,
        block16_bytes(n, 0), nbytes,
        LOAD=load is not None, OF_PARTS=edges is not None, STEPS=capacity.bit_length(), BITS=BLOCK_BITS, BLOCK=BLOCK,
    )  # fmt: skip


def decode_indices(
    payloads: Tensor, counts: Tensor, n: int, capacity: int, edges: Tensor | None, width: int
) -> tuple[Tensor, Tensor]:
    """As :func:`lightning_sparse.kernels.reference.decode_indices`."""
    rows, blocks = len(payloads), block16_bytes(n, 0) // 4
    ends = payloads.new_empty((rows, blocks), dtype=torch.int64)
    index = payloads.new_empty((rows, capacity), dtype=torch.int64)
    intact = payloads.new_empty(rows, dtype=torch.int32)
    stride, announced = payloads.stride(0), counts.stride(0)
    launch(
        _survey, (rows,), payloads, counts, ends, intact, stride, announced, counts.shape[1], blocks, capacity,
        BLOCK=BLOCK,
    )  # fmt: skip
    launch(
        _decode, (triton.cdiv(capacity, BLOCK), rows), payloads, ends, counts, ends if edges is None else edges,
        index, intact, stride, announced, blocks, capacity, width,
        OF_PARTS=edges is not None, STEPS=blocks.bit_length(), BITS=BLOCK_BITS, BLOCK=BLOCK,
    )  # fmt: skip
    return index, intact


@triton.jit(do_not_specialize=["announced", "stride", "capacity", "head", "nbytes"])
def _encode(
    index: tl.tensor, count: tl.tensor, seen: tl.tensor, near: tl.tensor, load: tl.tensor, edges: tl.tensor,
    counts: tl.tensor, out: tl.tensor, announced: tl.tensor, stride: tl.tensor, capacity: tl.tensor, head: tl.tensor,
    nbytes: tl.tensor, LOAD: tl.constexpr, OF_PARTS: tl.constexpr, STEPS: tl.constexpr, BITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    m = tl.load(count + row).to(tl.int64)
    if tl.program_id(0) == 0:
        said = counts + row * announced
        tl.store(said, m.to(tl.int32))
        tl.store(said + 1, _bounded(tl.load(seen + row)))
        tl.store(said + 2, _bounded(tl.load(near + row)))
        if LOAD:
            tl.store(said + 3, _bounded(tl.load(load + row)))
        else:
            tl.store(said + 3, 0)
    start = m * 0
    if OF_PARTS:
        start = tl.load(edges + row)
    index += row * capacity
    byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    announces = byte < head
    number = tl.zeros([BLOCK], tl.int64)
    if tl.program_id(0) * BLOCK < head:
        bound = start + ((byte // 4) << BITS)
        begin = below(index, m, bound, announces, STEPS)
        number = (below(index, m, bound + (1 << BITS), announces, STEPS) - begin) >> (8 * (byte % 4))
    pick = (byte - head) // 2
    found = tl.load(index + pick, mask=(byte >= head) & (byte < nbytes) & (pick < m), other=start) - start
    number = tl.where(announces, number, found >> (8 * ((byte - head) % 2)))
    tl.store(out + row * stride + byte, (number & 0xFF).to(tl.uint8), mask=byte < nbytes)


@triton.jit
def _bounded(count: tl.tensor) -> tl.tensor:
    """What the header holds of a count."""
    return tl.minimum(count.to(tl.int64), 0x7FFFFFFF).to(tl.int32)


@triton.jit
def below(index: tl.tensor, m: tl.tensor, bound: tl.tensor, asked: tl.tensor, STEPS: tl.constexpr) -> tl.tensor:
    """How many of the first ``m`` of ``index``, which rise, are below each ``bound``."""
    first = tl.zeros_like(bound)
    last = first + m
    for _ in range(STEPS):
        middle = (first + last) // 2
        open_ = asked & (first < last)
        further = open_ & (tl.load(index + middle, mask=open_, other=0) < bound)
        first = tl.where(further, middle + 1, first)
        last = tl.where(further, last, middle)
    return first


@triton.jit(do_not_specialize=["stride", "announced", "columns", "blocks", "capacity"])
def _survey(
    payloads: tl.tensor, counts: tl.tensor, ends: tl.tensor, intact: tl.tensor, stride: tl.tensor,
    announced: tl.tensor, columns: tl.tensor, blocks: tl.tensor, capacity: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Where the indices of each block end, and whether these are as many as announced."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([], tl.int64)
    least = tl.zeros([], tl.int32)
    for first in range(0, blocks, BLOCK):
        block = first + tl.arange(0, BLOCK)
        exists = block < blocks
        at = payloads + row * stride + 4 * block
        found = tl.load(at, mask=exists, other=0).to(tl.int32)
        for byte in tl.static_range(1, 4):
            found |= tl.load(at + byte, mask=exists, other=0).to(tl.int32) << (8 * byte)
        least = tl.minimum(least, tl.min(found, axis=0))
        some = tl.maximum(found, 0).to(tl.int64)
        tl.store(ends + row * blocks + block, total + tl.cumsum(some, axis=0), mask=exists)
        total += tl.sum(some, axis=0)
    count = tl.load(counts + row * announced)
    for column in range(1, columns):
        least = tl.minimum(least, tl.load(counts + row * announced + column))
    good = (least >= 0) & (total == count) & (count <= capacity)
    tl.store(intact + row, good.to(tl.int32))


@triton.jit(do_not_specialize=["stride", "announced", "blocks", "capacity", "width"])
def _decode(
    payloads: tl.tensor, ends: tl.tensor, counts: tl.tensor, edges: tl.tensor, index: tl.tensor, intact: tl.tensor,
    stride: tl.tensor, announced: tl.tensor, blocks: tl.tensor, capacity: tl.tensor, width: tl.tensor,
    OF_PARTS: tl.constexpr, STEPS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    start, limit = row * 0, row * 0 + width
    if OF_PARTS:
        start = tl.load(edges + row)
        limit = tl.load(edges + row + 1) - start
    low = payloads + row * stride + 4 * blocks
    ends += row * blocks
    pick = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    meant = (pick < capacity) & (pick < tl.load(counts + row * announced))
    found = _index_at(low, ends, pick, meant, blocks, STEPS, BITS)
    before = _index_at(low, ends, pick - 1, meant & (pick > 0), blocks, STEPS, BITS)
    misplaced = meant & ((found >= limit) | ((pick > 0) & (found <= before)))
    place = tl.where(meant & (found < limit), found + start, width)
    tl.store(index + row * capacity + pick, place, mask=pick < capacity)
    tl.store(intact + row, 0, mask=tl.sum(misplaced.to(tl.int32), axis=0) > 0)


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
