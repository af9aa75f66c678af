"""What travels: values rounded for the wire, in buffers of bytes.  Pure functions."""

from collections.abc import Iterator

import torch
from torch import Tensor

INDEX_LIMIT = 2**31  # indices travel as int32
BLOCK = 256  # int8 values that share a scale
RUN = 2**17  # values worked on together, so that they stay in a core's cache

# A scale is the block's largest magnitude over a little more than 127: 127 times it can then not round up to infinity.
_STEP = 1 / 127.0001


def nbytes(count: int, dtype: torch.dtype) -> int:
    """Bytes of ``count`` values on the wire as ``dtype``: for int8 with a float32 scale for every ``BLOCK`` of them."""
    return count * dtype.itemsize + (4 * _blocks(count) if dtype == torch.int8 else 0)


def take(values: Tensor, out: Tensor, dtype: torch.dtype | None = None) -> None:
    """Move ``values`` [n] float32 onto the wire: ``out`` gets them rounded to ``dtype``, ``values`` keeps the rest.

    ``values before == what read gives + values after`` exactly, so the rounding error stays unsent and nothing is lost.
    A value beyond the range of float16, infinity too, is sent as the largest it can carry; the rest, rounded to
    float32, stays.  As int8 a value is the nearest integer multiple of its block's scale; rounding at random would
    be less biased, but what stays here is sent later, so there is no bias to remove.  A block whose largest magnitude
    is below 1.5e-36 waits.  What is not finite arrives as NaN or infinity, as int8 in all of its block.

    Args:
        values: [n] float32, contiguous.
        out: [nbytes(n, dtype)] uint8; without ``dtype``, [n] float32, bfloat16 or float16.
        dtype: of values on the wire.
    """
    if dtype == torch.int8:
        _take_blocks(values, out)
        return
    rounded = out if dtype is None else _as(out, dtype)
    if rounded.dtype == torch.float16:
        limit = torch.finfo(torch.float16).max
        rounded.copy_(values.clamp(-limit, limit))
    else:
        rounded.copy_(values)
    if rounded.dtype == torch.float32:
        values.zero_()
    else:
        values.sub_(rounded)
    if dtype is not None and _unaligned(out, dtype):
        out.copy_(rounded.view(torch.uint8))


def read(payload: Tensor, out: Tensor, dtype: torch.dtype) -> None:
    """Set ``out`` [n] float32 to the values in ``payload`` [nbytes(n, dtype)] uint8."""
    if dtype != torch.int8:
        out.copy_(_as(payload, dtype))
        return
    for part, scales, steps in _runs(out, *_split(payload, out.numel())):
        part.copy_(steps).mul_(scales)


def add(payload: Tensor, out: Tensor, dtype: torch.dtype) -> None:
    """Add to ``out`` [n] float32 the values in ``payload`` [nbytes(n, dtype)] uint8, as :func:`read` gives them."""
    if dtype != torch.int8:
        out.add_(_as(payload, dtype))
        return
    scratch = _scratch(out)
    for part, scales, steps in _runs(out, *_split(payload, out.numel())):
        part.add_(_like(scratch, part).copy_(steps).mul_(scales))


def _take_blocks(values: Tensor, out: Tensor) -> None:
    """``take`` as int8.  What is taken out is the very product that :func:`read` computes."""
    scales = values.new_empty(_blocks(values.numel()))
    head, steps = out.split([4 * scales.numel(), values.numel()])
    scratch = _scratch(values)
    for part, scale, step in _runs(values, scales, steps.view(torch.int8)):
        rounded = _like(scratch, part)  # [b, width]
        torch.amax(torch.abs(part, out=rounded), 1, keepdim=True, out=scale)
        scale.mul_(_STEP)
        scale.masked_fill_(scale < torch.finfo(torch.float32).tiny, 0)  # NaN stays
        torch.div(part, scale.masked_fill(scale == 0, 1), out=rounded).round_()
        step.copy_(rounded)
        part.sub_(rounded.mul_(scale))
    head.copy_(scales.view(torch.uint8))


def _blocks(count: int) -> int:
    return -(-count // BLOCK)


def _as(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """``payload`` [n * itemsize] uint8 as [n] of ``dtype``: a view, or a copy where it does not start on a multiple."""
    return (payload.clone() if _unaligned(payload, dtype) else payload).view(dtype)


def _unaligned(payload: Tensor, dtype: torch.dtype) -> bool:
    """Whether torch refuses to see ``payload`` as ``dtype``."""
    return payload.storage_offset() % dtype.itemsize != 0


def _split(payload: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The scales [blocks] float32 and the steps [n] int8 of ``count`` values."""
    scales, steps = payload.split([4 * _blocks(count), count])
    return _as(scales, torch.float32), steps.view(torch.int8)


def _runs(values: Tensor, scales: Tensor, steps: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """``values`` [n], ``scales`` [blocks] and ``steps`` [n] in runs of whole blocks: [b, width], [b, 1], [b, width].

    The last block, if shorter, is a run of its own.
    """
    count = values.numel()
    whole = count - count % BLOCK
    length = RUN if values.device.type == "cpu" else max(whole, 1)
    for start in [*range(0, whole, length), *range(whole, count, BLOCK)]:
        stop = min(start + length, whole) if start < whole else count
        shape = (-1, min(BLOCK, stop - start))
        scale = scales[start // BLOCK : _blocks(stop), None]
        yield values[start:stop].view(shape), scale, steps[start:stop].view(shape)


def _scratch(values: Tensor) -> Tensor:
    """Room for the longest run of ``values``, [m] float32."""
    count = values.numel()
    return values.new_empty(min(count, RUN) if values.device.type == "cpu" else count)


def _like(scratch: Tensor, part: Tensor) -> Tensor:
    return scratch[: part.numel()].view(part.shape)
