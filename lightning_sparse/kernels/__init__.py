"""Work on gradients that stay on the device: nothing here waits for it, counts and thresholds are tensors on it.

In Triton on CUDA devices where it can be imported, else in plain PyTorch, with the same results.  All tensors of a
call are contiguous and on one device; n is at most 2**31.  Dtypes or shapes other than those stated are a ValueError.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.kernels import ops
from lightning_sparse.kernels.blocks import block16_bytes


@dataclass(frozen=True)
class Found:
    """Elements of a vector [n] that reach a threshold; counts are tensors [] on its device."""

    index: Tensor  # [capacity] int64, rising, then n
    seen: Tensor  # elements that reach it
    near: Tensor  # elements that nearly do, these included
    count: Tensor  # elements in ``index``


@dataclass(frozen=True)
class Hashes:
    """How a count-sketch of R rows turns and flips each block of a vector.

    Attributes:
        offsets: [R, blocks] int64, below the columns.
        signs: [R, blocks] float32, 1 or -1.
    """

    offsets: Tensor
    signs: Tensor

    def encode(self, x: Tensor, out: Tensor) -> Tensor:
        return sketch_encode(x, self, out)

    def estimate(self, table: Tensor, out: Tensor) -> Tensor:
        return sketch_estimate(table, self, out)


def used_for(x: Tensor) -> bool:
    """Whether work on ``x`` is left to these kernels: not on a CPU, where counts are known without waiting."""
    return x.device.type != "cpu"


def select(x: Tensor, threshold: Tensor, capacity: int, near: float = 1.0) -> Found:
    """Find the elements of ``x`` whose magnitude is at least ``threshold``.

    Never zeros, whatever the threshold; always NaN.  Where more than ``capacity`` are found, the *first* are returned,
    not the largest; ``seen`` is larger then.

    Args:
        x: [n] float32.
        threshold: [] float32 or float64.  NaN is reached by all but zeros.
        capacity: indices there is room for.
        near: elements that reach so many times the threshold are counted too.
    """
    _check("x", x, torch.float32, 1)
    index, (seen, nearly) = ops.select(x, threshold.to(torch.float32), near, capacity)
    return Found(index, seen, nearly, seen.clamp(max=capacity))


def scatter(index: Tensor, values: Tensor, count: Tensor, size: int, out: Tensor) -> Tensor:
    """Set ``out`` to a mean over ``size`` ranks: ``values / size`` at ``index``, zero elsewhere; and return it.

    Args:
        index: [m] int64, the first ``count`` strictly rising; what is not in [0, n) is left out.
        values: [m] float32, a sum over the ranks.
        count: [] int32 or int64, how many of ``index`` and ``values`` mean something.
        size: ranks, P.
        out: [n] float32, bfloat16 or float16; what it holds is overwritten.
    """
    _check("index", index, torch.int64, 1)
    _check("values", values, torch.float32, 1)
    _check("out", out, out.dtype, 1)
    if index.numel() != values.numel():
        raise ValueError(f"{index.numel()} indices and {values.numel()} values; they must be as many.")
    ops.scatter(index, values, count, size, out)
    return out


def sketch_encode(x: Tensor, hashed: Hashes, out: Tensor) -> Tensor:
    """The table of ``x`` in ``out``, which is returned: the bits of ``CountSketch.encode``, on any device.

    Args:
        x: [n] float32.
        hashed: of the sketch, for n elements.
        out: [R, c] float32; what it holds is overwritten.
    """
    _check("x", x, torch.float32, 1)
    _check("out", out, torch.float32, 2)
    _check_hashes(hashed, x.numel(), out)
    ops.sketch_encode(x, hashed.offsets, hashed.signs, out)
    return out


def sketch_estimate(table: Tensor, hashed: Hashes, out: Tensor) -> Tensor:
    """Set ``out`` to what ``table`` estimates of each element, and return it: the bits of ``CountSketch.estimate``.

    Args:
        table: [R, c] float32, R odd.
        hashed: of the sketch, for n elements.
        out: [n] float32; what it holds is overwritten.
    """
    _check("table", table, torch.float32, 2)
    _check("out", out, torch.float32, 1)
    _check_hashes(hashed, out.numel(), table)
    ops.sketch_estimate(table, hashed.offsets, hashed.signs, out)
    return out


def encode_indices(index: Tensor, count: Tensor, n: int, out: Tensor) -> Tensor:
    """Write indices to ``out``, which is returned: the bytes of ``wire.INDEX_FORMATS["block16"]``.

    Args:
        index: [capacity] int64, the first ``count`` strictly rising and in [0, n).
        count: [] int32 or int64, at most the capacity.
        n: elements that can be indexed.
        out: [block16.nbytes(n, capacity)] uint8; what it holds is overwritten.
    """
    _check("index", index, torch.int64, 1)
    _check_payload("out", out, n, index.numel())
    ops.encode_indices(index, count, n, out)
    return out


def decode_indices(payload: Tensor, n: int, capacity: int, count: Tensor) -> tuple[Tensor, Tensor]:
    """Read indices from ``payload``: index [capacity] int64, and whether the payload is intact, [] bool.

    Args:
        payload: [block16.nbytes(n, capacity)] uint8.
        n: elements that can be indexed.
        capacity: indices there is room for.
        count: [] int32 or int64, how many were announced.

    Returns:
        The first ``count`` indices, then n.  Where the second tensor is false, ``IndexFormat.decode`` would have
        raised CorruptMessage; the indices are then in no order but still in [0, n].
    """
    _check_payload("payload", payload, n, capacity)
    index, intact = ops.decode_indices(payload, n, capacity, count)
    return index, intact


def _check(name: str, x: Tensor, dtype: torch.dtype, dimensions: int) -> None:
    if x.dtype != dtype or x.dim() != dimensions or not x.is_contiguous():
        raise ValueError(
            f"{name} must be a contiguous {dtype} tensor of {dimensions} dimension{'s'[: dimensions - 1]}; got "
            f"{x.dtype} {list(x.shape)}{'' if x.is_contiguous() else ', not contiguous'}."
        )


def _check_hashes(hashed: Hashes, n: int, table: Tensor) -> None:
    rows, columns = table.shape
    blocks = -(-n // columns)
    if hashed.offsets.shape != (rows, blocks) or hashed.signs.shape != (rows, blocks):
        raise ValueError(
            f"hashes of shape {list(hashed.offsets.shape)} do not fit {n} elements and a table of {rows} x {columns}; "
            f"hashes(sketch, {n}) has [{rows}, {blocks}]."
        )


def _check_payload(name: str, payload: Tensor, n: int, capacity: int) -> None:
    _check(name, payload, torch.uint8, 1)
    expected = block16_bytes(n, capacity)
    if payload.numel() != expected:
        raise ValueError(f"{name} has {payload.numel()} bytes; {capacity} indices below {n} take {expected}.")
