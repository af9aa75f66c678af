# mypy: allow-untyped-decorators
"""Count-sketches: a thread owns a bucket and adds up its elements, or owns an element and looks up its buckets.

Blocks are added in the order of :meth:`lightning_sparse.selection.sketch.CountSketch.encode`, so that the table has
the same bits.
"""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from lightning_sparse.kernels import reference
from lightning_sparse.kernels.launch import launch

BLOCK = 1024  # buckets, or elements, a program works on


def sketch_encode(x: Tensor, offsets: Tensor, signs: Tensor, out: Tensor) -> None:
    """As :func:`lightning_sparse.kernels.reference.sketch_encode`."""
    rows, columns = out.shape
    grid = (triton.cdiv(columns, BLOCK), rows)
    launch(_encode, grid, x, offsets, signs, out, x.numel(), offsets.shape[1], columns, BLOCK=BLOCK)


def sketch_estimate(table: Tensor, offsets: Tensor, signs: Tensor, out: Tensor) -> None:
    """As :func:`lightning_sparse.kernels.reference.sketch_estimate`."""
    rows, columns = table.shape
    if rows not in (1, 3, 5):
        reference.sketch_estimate(table, offsets, signs, out)
        return
    blocks = offsets.shape[1]
    tiles = triton.cdiv(columns, BLOCK)  # of a block
    launch(
        _estimate, (blocks * tiles,), table, offsets, signs, out, out.numel(), blocks, columns, tiles,
        ROWS=rows, BLOCK=BLOCK,
    )  # fmt: skip


@triton.jit
def _encode(
    x: tl.tensor, offsets: tl.tensor, signs: tl.tensor, table: tl.tensor, n: tl.tensor, blocks: tl.tensor,
    columns: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros([BLOCK], tl.float32)
    for block in range(blocks):
        place = column - tl.load(offsets + row * blocks + block)
        place = tl.where(place < 0, place + columns, place)
        element = place + block * columns
        value = tl.load(x + element, mask=inside & (element < n), other=0.0)
        total += value * tl.load(signs + row * blocks + block)
    tl.store(table + row * columns + column, total, mask=inside)


@triton.jit
def _estimate(
    table: tl.tensor, offsets: tl.tensor, signs: tl.tensor, out: tl.tensor, n: tl.tensor, blocks: tl.tensor,
    columns: tl.tensor, tiles: tl.tensor, ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    block = tl.program_id(0) // tiles
    place = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    element = place + block * columns
    inside = (place < columns) & (element < n)
    offsets += block
    signs += block
    estimate = _row_estimate(table, offsets, signs, place, inside, columns)
    if ROWS > 1:
        b = _row_estimate(table + columns, offsets + blocks, signs + blocks, place, inside, columns)
        c = _row_estimate(table + 2 * columns, offsets + 2 * blocks, signs + 2 * blocks, place, inside, columns)
        if ROWS == 3:
            estimate = _median3(estimate, b, c)
        else:
            d = _row_estimate(table + 3 * columns, offsets + 3 * blocks, signs + 3 * blocks, place, inside, columns)
            e = _row_estimate(table + 4 * columns, offsets + 4 * blocks, signs + 4 * blocks, place, inside, columns)
            below = _larger(_smaller(estimate, b), _smaller(c, d))  # as lightning_sparse.kernels.reference.median
            above = _smaller(_larger(estimate, b), _larger(c, d))
            estimate = _median3(below, above, e)
    tl.store(out + element, estimate, mask=inside)


@triton.jit
def _row_estimate(
    row: tl.tensor, offset: tl.tensor, sign: tl.tensor, place: tl.tensor, inside: tl.tensor, columns: tl.tensor
) -> tl.tensor:
    bucket = place + tl.load(offset)
    bucket = tl.where(bucket >= columns, bucket - columns, bucket)
    return tl.load(row + bucket, mask=inside, other=0.0) * tl.load(sign)


@triton.jit
def _median3(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tensor:
    return _larger(_smaller(a, b), _smaller(_larger(a, b), c))


@triton.jit
def _smaller(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
