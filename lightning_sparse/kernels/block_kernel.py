# mypy: allow-untyped-decorators
"""Blocks of values with a scale: a program reads a few blocks once, and writes their scales, codes and remainders.

A tile is [blocks, bytes, values of a byte].  Bytes and values are those of :mod:`lightning_sparse.wire.values`.

Of 4 bits, of which a byte holds a value of each half of its block, the halves are read and written apart, so that
threads side by side move values side by side.  The upper four bits are extracted in floating point: where rows are
added, LLVM in Triton 3.6 computes an integer shift as zero (tests/kernels/compiled.py looks for that).
"""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from lightning_sparse.kernels.blocks import (
    BELOW_ONE,
    BLOCK,
    FILLER,
    MOST_SCALE,
    SCALE_BITS,
    TINY,
    can_be_viewed,
)
from lightning_sparse.kernels.launch import launch

ROWS = 8  # blocks a program works on
NEAREST = 1.5 * 2.0**23  # a float32 of up to 22 bits that this is added to and taken from is rounded to an integer


def take_blocks(values: Tensor, out: Tensor, bits: int) -> None:
    """As :func:`lightning_sparse.kernels.reference.take_blocks`."""
    blocks = triton.cdiv(values.numel(), BLOCK)
    head, codes = out[: 4 * blocks], out[4 * blocks :]
    scales = head.view(values.dtype) if can_be_viewed(head, values.dtype) else values.new_empty(blocks)
    grid = (triton.cdiv(blocks, ROWS),)
    launch(
        _take, grid, values, scales, codes, values.numel(), blocks, BITS=bits, BLOCK=BLOCK, ROWS=ROWS, **_numbers(bits)
    )
    if not can_be_viewed(head, values.dtype):
        head.copy_(scales.view(out.dtype))


def take_rows(
    values: Tensor, out: Tensor, bits: int, width: int, start: int, length: int, rotation: int, first: int, count: int
) -> None:
    """As :func:`lightning_sparse.kernels.reference.take_rows`."""
    launch(
        _take_rows, (_programs(length), count), values, out.view(values.dtype), out, values.numel(),
        out.stride(0), out.shape[1], len(out), width, start, length, rotation, first,
        FILLER=FILLER, BITS=bits, BLOCK=BLOCK, ROWS=ROWS, **_numbers(bits),
    )  # fmt: skip


def read_rows(payloads: Tensor, out: Tensor, bits: int, width: int, start: int, length: int, rotation: int) -> None:
    """As :func:`lightning_sparse.kernels.reference.read_rows`."""
    size = len(payloads)
    launch(
        _read_rows, (_programs(length), size), payloads.view(out.dtype), payloads, out, out.numel(),
        payloads.stride(0), size, width, start, length, rotation, BITS=bits, BLOCK=BLOCK, ROWS=ROWS,
    )  # fmt: skip


def add_rows(payloads: Tensor, out: Tensor, bits: int, first: int, step: int, count: int, onto: bool) -> None:
    """As :func:`lightning_sparse.kernels.reference.add_rows`."""
    size = len(payloads)
    launch(
        _add_rows, (_programs(out.numel()),), payloads.view(out.dtype), payloads, out, out.numel(),
        payloads.stride(0), size, first % size, step % size, count, ONTO=onto, BITS=bits, BLOCK=BLOCK, ROWS=ROWS,
    )  # fmt: skip


def _programs(n: int) -> int:
    """How many work on ``n`` values."""
    return int(triton.cdiv(triton.cdiv(n, BLOCK), ROWS))


def _numbers(bits: int) -> dict[str, float]:
    share = 1 / max(1, (1 << bits - 1) - 1)
    return {
        "SHARE": share,
        "NEAREST": NEAREST,
        "BELOW_ONE": BELOW_ONE,
        "SCALE_BITS": SCALE_BITS,
        "TINY": TINY,
        "MOST_SCALE": MOST_SCALE,
    }


@triton.jit
def _take(
    values: tl.tensor, scales: tl.tensor, codes: tl.tensor, n: tl.tensor, blocks: tl.tensor,
    SHARE: tl.constexpr, NEAREST: tl.constexpr, BELOW_ONE: tl.constexpr, SCALE_BITS: tl.constexpr, TINY: tl.constexpr,
    MOST_SCALE: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    row, width = _blocks(n, BLOCK, ROWS)
    value = _load(values, row, width, BITS, BLOCK)
    bits = value.to(tl.int32, bitcast=True)
    if BITS == 1:
        total = tl.sum(tl.sum(tl.abs(value).to(tl.float64), axis=2), axis=1)
        scale = (total[:, None] * (1.0 / width.to(tl.float64))).to(tl.float32)
    elif BITS == 2:
        wide = value.to(tl.float64)
        total = tl.sum(tl.sum(wide * wide, axis=2), axis=1)
        scale = (tl.sqrt(total[:, None]) * (1.0 / tl.sqrt(width.to(tl.float64)))).to(tl.float32)
        scale = tl.where((scale > MOST_SCALE) & (scale < float("inf")), MOST_SCALE, scale)
        scale = tl.where(scale <= 4 * TINY, 0.0, scale)
    else:  # as integers magnitudes are ordered as they are, and NaN is above all
        largest = tl.max(tl.max(bits & 0x7FFFFFFF, axis=2), axis=1)
        scale = largest.to(tl.float32, bitcast=True)[:, None] * SHARE
        scale = tl.where(scale < TINY, TINY, scale)
    scale = (scale.to(tl.int32, bitcast=True) & SCALE_BITS).to(tl.float32, bitcast=True)
    if BITS == 1:
        scale = tl.where(scale <= TINY, 0.0, scale)
    tl.store(scales + row, scale, mask=row < blocks)
    scale, k = scale[:, :, None], _places_in_a_byte(BITS)
    if BITS == 1:
        multiple = tl.where(bits < 0, -1.0, 1.0)
        digit = (bits < 0).to(tl.int32) << (7 - k)
    elif BITS == 2:
        level = tl.floor(value * tl.div_rn(1.0, scale))
        level = tl.where(level == level, level, 0.0)
        level = tl.minimum(tl.maximum(level, -2.0), 1.0)
        multiple = level + 0.5
        digit = tl.where(_places(BITS, BLOCK) < width[:, :, None], (level.to(tl.int32) + 2) << (2 * k), 0)
    else:
        multiple = (value * (tl.div_rn(1.0, scale) * BELOW_ONE) + NEAREST) - NEAREST
        multiple = tl.where(multiple == multiple, multiple, 0.0)
        digit = multiple.to(tl.int32)
        if BITS == 4:
            digit = ((digit + 8 * (1 - k)) & 15) << (4 * k)
    rest = tl.where(scale < float("inf"), value - multiple * scale, 0.0)  # none of what is not finite
    _store(values, rest, row, width, BITS, BLOCK)
    byte, exists = _bytes(width, BITS, BLOCK)
    tl.store(codes + row * (BLOCK * BITS // 8) + byte, (tl.sum(digit, axis=2) & 0xFF).to(tl.uint8), mask=exists)


@triton.jit(do_not_specialize=["room", "size", "rotation", "first"])
def _take_rows(
    values: tl.tensor, scales: tl.tensor, codes: tl.tensor, total: tl.tensor, row_bytes: tl.tensor, room: tl.tensor,
    size: tl.tensor, width: tl.tensor, start: tl.tensor, length: tl.tensor, rotation: tl.tensor, first: tl.tensor,
    FILLER: tl.constexpr, SHARE: tl.constexpr, NEAREST: tl.constexpr, BELOW_ONE: tl.constexpr, SCALE_BITS: tl.constexpr,
    TINY: tl.constexpr, MOST_SCALE: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    owner = (first + tl.program_id(1)) % size
    begin, n = segment(owner, total, size, width, start, length, rotation)
    blocks, head = (n + BLOCK - 1) // BLOCK, owner.to(tl.int64) * row_bytes
    _take(
        values + begin, scales + head // 4, codes + head + 4 * blocks, n, blocks,
        SHARE, NEAREST, BELOW_ONE, SCALE_BITS, TINY, MOST_SCALE, BITS, BLOCK, ROWS,
    )  # fmt: skip
    if tl.program_id(0) == 0:
        behind = 4 * blocks + (n * BITS + 7) // 8 + tl.arange(0, FILLER)
        tl.store(codes + head + behind, tl.zeros([FILLER], tl.uint8), mask=behind < room)


@triton.jit(do_not_specialize=["size", "rotation"])
def _read_rows(
    scales: tl.tensor, codes: tl.tensor, out: tl.tensor, total: tl.tensor, row_bytes: tl.tensor, size: tl.tensor,
    width: tl.tensor, start: tl.tensor, length: tl.tensor, rotation: tl.tensor,
    BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    owner = tl.program_id(1)
    begin, n = segment(owner, total, size, width, start, length, rotation)
    blocks, head = (n + BLOCK - 1) // BLOCK, owner.to(tl.int64) * row_bytes
    row, values = _blocks(n, BLOCK, ROWS)
    value = _read(scales + head // 4, codes + head + 4 * blocks, row, values, blocks, BITS, BLOCK)
    _store(out + begin, value, row, values, BITS, BLOCK)


@triton.jit
def segment(
    owner: tl.tensor, total: tl.tensor, size: tl.tensor, width: tl.tensor, start: tl.tensor, length: tl.tensor,
    rotation: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Where a rank's segment begins among all values, and its values."""
    begin = ((owner + rotation) % size).to(tl.int64) * width + start
    return begin, tl.maximum(tl.minimum(begin + length, total) - begin, 0)


@triton.jit(do_not_specialize=["size", "first", "step", "count"])
def _add_rows(
    scales: tl.tensor, codes: tl.tensor, out: tl.tensor, n: tl.tensor, row_bytes: tl.tensor, size: tl.tensor,
    first: tl.tensor, step: tl.tensor, count: tl.tensor,
    ONTO: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    row, width = _blocks(n, BLOCK, ROWS)
    blocks = (n + BLOCK - 1) // BLOCK
    head = first.to(tl.int64) * row_bytes
    value = _read(scales + head // 4, codes + head + 4 * blocks, row, width, blocks, BITS, BLOCK)
    if ONTO:
        value += _load(out, row, width, BITS, BLOCK)
    for i in range(1, count):
        head = ((first + i * step) % size).to(tl.int64) * row_bytes
        value += _read(scales + head // 4, codes + head + 4 * blocks, row, width, blocks, BITS, BLOCK)
    _store(out, value, row, width, BITS, BLOCK)


@triton.jit
def _read(
    scales: tl.tensor, codes: tl.tensor, row: tl.tensor, width: tl.tensor, blocks: tl.tensor,
    BITS: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The values of a tile from its scales and codes: [blocks, bytes, values of a byte] float32."""
    scale = tl.load(scales + row, mask=row < blocks, other=0.0)
    byte, exists = _bytes(width, BITS, BLOCK)
    code = tl.load(codes + row * (BLOCK * BITS // 8) + byte, mask=exists, other=0).to(tl.int32)[:, :, None]
    k = _places_in_a_byte(BITS)
    if BITS == 1:
        multiple = 1 - 2 * ((code >> (7 - k)) & 1)
    elif BITS == 2:
        multiple = ((code >> (2 * k)) & 3).to(tl.float32) - 1.5
    elif BITS == 4:
        # By a product, which is exact where Triton divides approximately; see the module's docstring.
        upper = tl.floor(((code ^ 128) - 128).to(tl.float32) * 0.0625)
        multiple = tl.where(k == 0, (code & 15).to(tl.float32) - 8.0, upper)
    else:
        multiple = ((code + 128) & 255) - 128
    return multiple.to(tl.float32) * scale[:, :, None]


@triton.jit
def _blocks(n: tl.tensor, BLOCK: tl.constexpr, ROWS: tl.constexpr) -> tl.tensor:
    """The numbers of a tile's blocks, and how many of ``n`` values each has: [blocks, 1] both."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    return row, tl.minimum(n - row * BLOCK, BLOCK)


@triton.jit
def _bytes(width: tl.tensor, BITS: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """The bytes of a block [1, bytes], and which of them each block has [blocks, bytes]."""
    byte = tl.arange(0, BLOCK * BITS // 8)[None, :]
    return byte, byte < (width * BITS + 7) // 8


@triton.jit
def _places_in_a_byte(BITS: tl.constexpr) -> tl.tensor:
    """The places of values in a byte, from 0: [1, 1, values of a byte]."""
    return tl.arange(0, 8 // BITS)[None, None, :]


@triton.jit
def _places(BITS: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """Where the values of a byte, which follow each other, lie in their block: [1, bytes, values of a byte]."""
    return tl.arange(0, BLOCK * BITS // 8)[None, :, None] * (8 // BITS) + _places_in_a_byte(BITS)


@triton.jit
def _load(values: tl.tensor, row: tl.tensor, width: tl.tensor, BITS: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """A tile of values [blocks, bytes, values of a byte]; 0 where a block has none."""
    if BITS == 4:
        byte, half = tl.arange(0, BLOCK // 2)[None, :], (width + 1) // 2
        at = values + row * BLOCK + byte
        low = tl.load(at, mask=byte < half, other=0.0)
        tile = tl.join(low, tl.load(at + half, mask=byte < width - half, other=0.0))
    else:
        place = _places(BITS, BLOCK)
        tile = tl.load(values + row[:, :, None] * BLOCK + place, mask=place < width[:, :, None], other=0.0)
    return tile


@triton.jit
def _store(
    values: tl.tensor, tile: tl.tensor, row: tl.tensor, width: tl.tensor, BITS: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Write a tile where its values belong."""
    if BITS == 4:
        byte, half = tl.arange(0, BLOCK // 2)[None, :], (width + 1) // 2
        at = values + row * BLOCK + byte
        low, high = tl.split(tile)
        tl.store(at, low, mask=byte < half)
        tl.store(at + half, high, mask=byte < width - half)
    else:
        place = _places(BITS, BLOCK)
        tl.store(values + row[:, :, None] * BLOCK + place, tile, mask=place < width[:, :, None])
