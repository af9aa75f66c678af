# mypy: allow-untyped-decorators
"""Select and compact: one pass over the vector, one over a bit an element.

The first kernel writes a bit for each element that is selected and two counts for each block; the second adds up those
of each part of the vector, and where each block's indices begin; the third writes them there.  A block lies in one
part.  No atomics, so every run is the same.
"""

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from lightning_sparse.kernels.launch import launch

BLOCK = 4096  # elements a program works on
WORD = 32  # of them share an int32, a bit each
SUMMED = 1024  # blocks whose counts are added up at a time


def select(
    x: Tensor, threshold: Tensor, near: float, capacity: int, most: int, edges: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As :func:`lightning_sparse.kernels.reference.select`."""
    n, parts = x.numel(), 1 if edges is None else edges.numel() - 1
    blocks = triton.cdiv(n, BLOCK) + parts - 1  # at most, as each part begins one
    bits = x.new_empty(blocks * BLOCK // WORD, dtype=torch.int32)
    counts = x.new_empty((2, blocks), dtype=torch.int32)  # that reach the threshold, and that nearly do
    begins = x.new_empty(blocks, dtype=torch.int64)
    totals = x.new_empty((3, parts), dtype=torch.int64)
    index = x.new_full((parts, capacity), n, dtype=torch.int64)
    of_parts = begins if edges is None else edges
    padded = 0 if edges is None else 1 << (parts - 1).bit_length()
    tile: dict[str, int] = {"PARTS": padded, "WORDS": BLOCK // WORD, "WORD": WORD, "num_warps": 8}
    launch(_mark, (blocks,), x, threshold, of_parts, bits, counts, n, parts, NEAR=near, **tile)
    launch(
        _sum, (parts,), counts, of_parts, begins, totals, blocks, parts, most, PARTS=padded, BLOCK=BLOCK, SUMMED=SUMMED
    )
    launch(_compact, (blocks,), bits, begins, of_parts, index, n, parts, capacity, **tile)
    return index, totals


@triton.jit
def _place(
    block: tl.tensor, edges: tl.tensor, n: tl.tensor, parts: tl.tensor, PARTS: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """Which part a block is of, where it begins, and where the part ends; ``parts`` and an empty one, if of none."""
    if PARTS == 0:
        part, start, stop = block * 0, block.to(tl.int64) * BLOCK, block.to(tl.int64) * 0 + n
    else:
        each = tl.arange(0, PARTS)
        first = tl.load(edges + each, mask=each < parts, other=0)
        last = tl.load(edges + each + 1, mask=each < parts, other=0)
        blocks = (last - first + BLOCK - 1) // BLOCK
        ends = tl.cumsum(blocks, axis=0)
        part = tl.sum(((ends <= block) & (each < parts)).to(tl.int32), axis=0)
        mine = each == part
        before = tl.sum(tl.where(mine, ends - blocks, 0), axis=0)
        start = tl.sum(tl.where(mine, first, 0), axis=0) + (block - before) * BLOCK
        stop = tl.sum(tl.where(mine, last, 0), axis=0)
    return part, start, stop


@triton.jit(do_not_specialize=["parts"])
def _mark(
    x: tl.tensor, threshold: tl.tensor, edges: tl.tensor, bits: tl.tensor, counts: tl.tensor, n: tl.tensor,
    parts: tl.tensor, NEAR: tl.constexpr, PARTS: tl.constexpr, WORDS: tl.constexpr, WORD: tl.constexpr,
) -> None:  # fmt: skip
    block = tl.program_id(0)
    _, start, stop = _place(block, edges, n, parts, PARTS, WORDS * WORD)
    lane = tl.arange(0, WORD)[None, :]
    element = start + tl.arange(0, WORDS)[:, None] * WORD + lane  # [WORDS, WORD]
    value = tl.load(x + element, mask=element < stop, other=0.0)  # beyond the end: zeros, which are never selected
    magnitude = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    limit = tl.load(threshold)
    reached = (magnitude >= _least(limit)).to(tl.int32)
    near = (magnitude >= _least(limit * NEAR)).to(tl.int32)
    tl.store(bits + block.to(tl.int64) * WORDS + tl.arange(0, WORDS), tl.sum(reached << lane, axis=1))
    tl.store(counts + block, tl.sum(tl.sum(reached, axis=1), axis=0))
    tl.store(counts + tl.num_programs(0) + block, tl.sum(tl.sum(near, axis=1), axis=0))


@triton.jit
def _least(threshold: tl.tensor) -> tl.tensor:
    bits = tl.maximum(threshold.to(tl.int32, bitcast=True), 1)
    return tl.where(threshold == threshold, bits, 0x7F800000)


@triton.jit(do_not_specialize=["blocks", "parts", "most"])
def _sum(
    counts: tl.tensor, edges: tl.tensor, begins: tl.tensor, totals: tl.tensor, blocks: tl.tensor, parts: tl.tensor,
    most: tl.tensor, PARTS: tl.constexpr, BLOCK: tl.constexpr, SUMMED: tl.constexpr,
) -> None:  # fmt: skip
    part = tl.program_id(0)
    first, last = part * 0, part * 0 + blocks
    if PARTS > 0:
        each = tl.arange(0, PARTS)
        inside = each < parts
        start = tl.load(edges + each, mask=inside, other=0)
        of_each = ((tl.load(edges + each + 1, mask=inside, other=0) - start + BLOCK - 1) // BLOCK).to(tl.int32)
        first = tl.sum(tl.where(each < part, of_each, 0), axis=0)
        last = first + tl.sum(tl.where(each == part, of_each, 0), axis=0)
    seen = tl.zeros([], tl.int64)
    near = tl.zeros([], tl.int64)
    for some in range(first, last, SUMMED):
        block = some + tl.arange(0, SUMMED)
        found = tl.load(counts + block, mask=block < last, other=0).to(tl.int64)
        tl.store(begins + block, seen + tl.cumsum(found, axis=0) - found, mask=block < last)
        seen += tl.sum(found, axis=0)
        near += tl.sum(tl.load(counts + blocks + block, mask=block < last, other=0).to(tl.int64), axis=0)
    tl.store(totals + part, seen)
    tl.store(totals + parts + part, near)
    tl.store(totals + 2 * parts + part, tl.minimum(seen, most))


@triton.jit(do_not_specialize=["parts", "capacity"])
def _compact(
    bits: tl.tensor, begins: tl.tensor, edges: tl.tensor, index: tl.tensor, n: tl.tensor, parts: tl.tensor,
    capacity: tl.tensor, PARTS: tl.constexpr, WORDS: tl.constexpr, WORD: tl.constexpr,
) -> None:  # fmt: skip
    block = tl.program_id(0)
    part, start, _ = _place(block, edges, n, parts, PARTS, WORDS * WORD)
    if part < parts:
        word = tl.arange(0, WORDS)
        lane = tl.arange(0, WORD)[None, :]
        chosen = (tl.load(bits + block.to(tl.int64) * WORDS + word)[:, None] >> lane) & 1  # [WORDS, WORD]
        in_word = tl.sum(chosen, axis=1)
        before = tl.load(begins + block) + tl.cumsum(in_word, axis=0) - in_word  # the word
        place = before[:, None] + tl.cumsum(chosen, axis=1) - chosen
        at = index + part.to(tl.int64) * capacity + place
        tl.store(at, start + word[:, None] * WORD + lane, mask=(chosen == 1) & (place < capacity))
