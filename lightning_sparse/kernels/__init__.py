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
    """Elements of R parts of a vector [n] that reach a threshold; counts are tensors [R] on its device."""

    index: Tensor  # [R, capacity] int64, each row rising, then n
    seen: Tensor  # elements that reach it
    near: Tensor  # elements that nearly do, these included
    count: Tensor  # elements to keep of these


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


def select(
    x: Tensor, threshold: Tensor, capacity: int, near: float = 1.0, most: int | None = None, edges: Tensor | None = None
) -> Found:
    """Find the elements of each part of ``x`` whose magnitude is at least ``threshold``.

    Never zeros, whatever the threshold; always NaN.  Where more than ``capacity`` are found, the *first* are returned,
    not the largest; ``seen`` is larger then.

    Args:
        x: [n] float32.
        threshold: [] float32 or float64.  NaN is reached by what is not finite.
        capacity: indices there is room for, of each part.
        near: elements that reach so many times the threshold are counted too.
        most: of each part's elements that are to be kept; ``capacity`` by default.
        edges: [R + 1] int64, rising from 0 to n, where parts begin; without them ``x`` is one part.
    """
    _check("x", x, torch.float32, 1)
    limit = threshold.to(torch.float32)
    index, (seen, nearly, count) = ops.select(x, limit, near, capacity, capacity if most is None else most, edges)
    return Found(index, seen, nearly, count)


def pick(index: Tensor, x: Tensor, magnitudes: bool = False) -> Tensor:
    """The elements ``index`` [*s] int64 of ``x`` [n], or their ``magnitudes``; zero where an index is not in [0, n)."""
    _check("x", x, torch.float32, 1)
    values: Tensor = ops.pick(index, x, magnitudes)
    return values


def among(index: Tensor, others: Tensor, n: int) -> Tensor:
    """``index`` [R, m] with n in place of what is not in the same row of ``others`` [R, l]; both rise to n."""
    _check("index", index, torch.int64, 2)
    _check("others", others, torch.int64, 2)
    both: Tensor = ops.among(index, others, n)
    return both


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
    _check_pairs(index, values)
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


def put(index: Tensor, values: Tensor, out: Tensor, onto: bool = False) -> None:
    """Set elements of ``out``, or add to them if ``onto``.

    Args:
        index: [*s] int64, of which those in [0, n) differ; others are left out.
        values: [*s] float32.
        out: [n] float32, whose other elements stay.
        onto: add.
    """
    _check("out", out, torch.float32, 1)
    _check_pairs(index, values)
    ops.put(index.view(-1), values.view(-1), out, onto)


def add_up(index: Tensor, values: Tensor, out: Tensor) -> Tensor:
    """Set ``out`` [n] to the sum of R sparse vectors, added in their order; return how many elements are in any, [].

    Args:
        index: [R, m] int64, of each strictly rising, then n.
        values: [R, m] float32.
        out: float32; what it holds is overwritten.
    """
    _check("index", index, torch.int64, 2)
    _check("values", values, torch.float32, 2)
    _check("out", out, torch.float32, 1)
    _check_pairs(index, values)
    reached: Tensor = ops.add_up(index, values, out)
    return reached


def encode_indices(
    index: Tensor, count: Tensor, seen: Tensor, near: Tensor, load: Tensor | None, n: int, counts: Tensor, out: Tensor,
    edges: Tensor | None = None,
) -> None:  # fmt: skip
    """Write indices to R rows of ``out``, the bytes of ``wire.INDEX_FORMATS["block16"]`` and then zeros; and counts.

    Args:
        index: [R, capacity] int64, of each row the first ``count`` strictly rising, and in the row's part.
        count: [R] int32 or int64, at most the capacity.
        seen: [R], likewise; so are near and load, which is 0 if it is None.
        near: see there.
        load: see there.
        n: elements of a part, at most; indices are written as they count from where it begins.
        counts: [R, 4] int32, becomes all four, as far as it can hold them.
        out: [R, at least block16.nbytes(n, capacity)] uint8, whose rows need not follow each other.
        edges: [R + 1] int64, between the parts; without them each is [0, n).
    """
    _check("index", index, torch.int64, 2)
    _check_payload("out", out, n, index.shape[1])
    ops.encode_indices(index, count, seen, near, load, n, edges, counts, out)


def decode_indices(
    payloads: Tensor, counts: Tensor, n: int, capacity: int, width: int, edges: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Read indices from R rows of ``payloads``: index [R, capacity] int64, and whether each is intact, [R] int32.

    Args:
        payloads: as :func:`encode_indices` wrote them.
        counts: [R, c] int32, of which the first says how many were announced; all must be at least 0.
        n: elements of a part, at most.
        capacity: indices there is room for.
        width: elements of the vector that has the parts.
        edges: [R + 1] int64, between the parts; without them each is [0, width).

    Returns:
        Of each row as many indices as announced, then ``width``.  Where the second tensor is 0, ``IndexFormat.decode``
        would have raised CorruptMessage, or an index is beyond the part; the indices are then in no order but still
        in [0, width].
    """
    _check_payload("payloads", payloads, n, capacity)
    index, intact = ops.decode_indices(payloads, counts, n, capacity, edges, width)
    return index, intact


def _check(name: str, x: Tensor, dtype: torch.dtype, dimensions: int) -> None:
    if x.dtype != dtype or x.dim() != dimensions or not x.is_contiguous():
        raise ValueError(
            f"{name} must be a contiguous {dtype} tensor of {dimensions} dimension{'s'[: dimensions - 1]}; got "
            f"{x.dtype} {list(x.shape)}{'' if x.is_contiguous() else ', not contiguous'}."
        )


def _check_pairs(index: Tensor, values: Tensor) -> None:
    if index.shape != values.shape:
        raise ValueError(f"{index.numel()} indices and {values.numel()} values; they must be as many.")


def _check_hashes(hashed: Hashes, n: int, table: Tensor) -> None:
    rows, columns = table.shape
    blocks = -(-n // columns)
    if hashed.offsets.shape != (rows, blocks) or hashed.signs.shape != (rows, blocks):
        raise ValueError(
            f"hashes of shape {list(hashed.offsets.shape)} do not fit {n} elements and a table of {rows} x {columns}; "
            f"hashes(sketch, {n}) has [{rows}, {blocks}]."
        )


def _check_payload(name: str, payload: Tensor, n: int, capacity: int) -> None:
    least = block16_bytes(n, capacity)
    if payload.dtype != torch.uint8 or payload.dim() != 2 or payload.stride(1) != 1 or payload.shape[1] < least:
        raise ValueError(
            f"{name} must be rows of at least {least} bytes, which {capacity} indices below {n} take; got "
            f"{payload.dtype} {list(payload.shape)}."
        )
