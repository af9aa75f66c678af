# mypy: allow-untyped-decorators
"""Values in another floating-point type: a program reads a run of a row once, writes what is sent and what stays."""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from lightning_sparse.kernels.block_kernel import segment
from lightning_sparse.kernels.launch import launch

BLOCK = 1024  # values a program works on


def take_floats(
    values: Tensor, out: Tensor, width: int, start: int, length: int, rotation: int, first: int, count: int
) -> None:
    """As :func:`lightning_sparse.kernels.reference.take_floats`."""
    size, room = out.shape
    launch(
        _take_floats, (triton.cdiv(room, BLOCK), count), values, out, values.numel(), out.stride(0), room, size,
        width, start, length, rotation, first, BLOCK=BLOCK,
    )  # fmt: skip


def read_floats(payloads: Tensor, out: Tensor, width: int, start: int, length: int, rotation: int) -> None:
    """As :func:`lightning_sparse.kernels.reference.read_floats`."""
    size = len(payloads)
    launch(
        _read_floats, (triton.cdiv(length, BLOCK), size), payloads, out, out.numel(), payloads.stride(0), size,
        width, start, length, rotation, BLOCK=BLOCK,
    )  # fmt: skip


def add_floats(payloads: Tensor, out: Tensor, first: int, step: int, count: int, onto: bool) -> None:
    """As :func:`lightning_sparse.kernels.reference.add_floats`."""
    n, size = out.numel(), len(payloads)
    launch(
        _add_floats, (triton.cdiv(n, BLOCK),), payloads, out, n, payloads.stride(0), size,
        first % size, step % size, count, ONTO=onto, BLOCK=BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["size", "rotation", "first"])
def _take_floats(
    values: tl.tensor, out: tl.tensor, total: tl.tensor, stride: tl.tensor, room: tl.tensor, size: tl.tensor,
    width: tl.tensor, start: tl.tensor, length: tl.tensor, rotation: tl.tensor, first: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    owner = (first + tl.program_id(1)) % size
    begin, n = segment(owner, total, size, width, start, length, rotation)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + begin + place, mask=place < n, other=0.0)
    near = value
    if out.dtype.element_ty == tl.float16:
        near = tl.minimum(tl.maximum(value, -65504.0), 65504.0)
    elif out.dtype.element_ty == tl.bfloat16:  # rounded here, since Triton's interpreter cuts off
        bits = value.to(tl.int32, bitcast=True)
        near = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    sent = tl.where(tl.abs(value) < float("inf"), near, value).to(out.dtype.element_ty)
    read = sent.to(tl.float32)
    tl.store(out + owner.to(tl.int64) * stride + place, sent, mask=place < room)
    tl.store(values + begin + place, tl.where(tl.abs(read) < float("inf"), value - read, 0.0), mask=place < n)


@triton.jit(do_not_specialize=["size", "rotation"])
def _read_floats(
    payloads: tl.tensor, out: tl.tensor, total: tl.tensor, stride: tl.tensor, size: tl.tensor,
    width: tl.tensor, start: tl.tensor, length: tl.tensor, rotation: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    owner = tl.program_id(1)
    begin, n = segment(owner, total, size, width, start, length, rotation)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(payloads + owner.to(tl.int64) * stride + place, mask=place < n, other=0.0)
    tl.store(out + begin + place, value.to(tl.float32), mask=place < n)


@triton.jit(do_not_specialize=["size", "first", "step", "count"])
def _add_floats(
    payloads: tl.tensor, out: tl.tensor, n: tl.tensor, stride: tl.tensor, size: tl.tensor,
    first: tl.tensor, step: tl.tensor, count: tl.tensor, ONTO: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(payloads + first.to(tl.int64) * stride + place, mask=place < n, other=0.0).to(tl.float32)
    if ONTO:
        value += tl.load(out + place, mask=place < n, other=0.0)
    for i in range(1, count):
        row = ((first + i * step) % size).to(tl.int64) * stride
        value += tl.load(payloads + row + place, mask=place < n, other=0.0).to(tl.float32)
    tl.store(out + place, value, mask=place < n)
