"""Compact codes for strictly rising indices, in as many bytes as (n, capacity) say, whatever the indices.

Written and read by the host, with numpy: it takes a tenth of torch's time for the short vectors a message holds.  A
device codes by itself (:mod:`lightning_sparse.kernels`).  Hosts are little-endian.  Bits lie in bytes from the lowest
up; fields of 2 or 4 bits are planar: byte i of c holds elements i, c + i, ..., so that a few passes over contiguous
bytes write and read them.
"""

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparse.kernels.blocks import BLOCK_BITS, block16_bytes

Bytes = NDArray[np.uint8]
Indices = NDArray[np.int64]

LINK_BITS_PER_NS = 1.0  # the reference link of `cheapest`: 1 Gbit/s

INDEX_LIMIT = 2**31  # indices are sent as int32
CAUSE = "the message was corrupted on its way or ranks disagree on its layout"


class CorruptMessage(ValueError):
    """A payload does not hold the indices that were announced."""


class IndexFormat(ABC):
    """How m <= ``capacity`` strictly rising indices below n <= 2**31 are written in ``nbytes(n, capacity)`` bytes.

    m is not among those bytes: it is sent beside them.
    """

    name: str
    # Encode plus decode on one core of a server CPU, measured with 10k indices of 1M and 1M of 100M, rounded.
    ns_per_index: float
    ns_per_element: float = 0.0  # of [0, n)

    @abstractmethod
    def nbytes(self, n: int, capacity: int) -> int:
        """Bytes of a payload."""

    def cost(self, n: int, capacity: int) -> float:
        """Nanoseconds to encode, send over the reference link, and decode ``capacity`` indices below ``n``."""
        wire = 8 * self.nbytes(n, capacity) / LINK_BITS_PER_NS
        return wire + self.ns_per_index * capacity + self.ns_per_element * n

    def encode(self, index: Tensor, n: int, capacity: int, out: Tensor) -> None:
        """Write ``index`` [m] int64, strictly rising and below ``n``, to ``out`` [nbytes(n, capacity)] uint8.

        Every byte of ``out`` is written, so equal indices make equal payloads.

        Raises:
            ValueError: if m > ``capacity``.
        """
        if index.numel() > capacity:
            raise ValueError(f"{self.name}: {index.numel()} indices, at most {capacity} fit.")
        on_host = out if out.device.type == "cpu" else torch.empty_like(out, device="cpu")
        if index.numel():
            self._write(index.cpu().numpy(), n, capacity, on_host.numpy())
        else:  # in every format; numpy's empty arrays have strides that cannot be viewed as bytes
            on_host.zero_()
        if on_host is not out:
            out.copy_(on_host)

    def decode(self, payload: Tensor, n: int, capacity: int, count: int) -> Tensor:
        """The indices in ``payload`` [nbytes(n, capacity)] uint8: [count] int64, strictly rising, below ``n``.

        Raises:
            CorruptMessage: if ``payload`` does not hold that, whatever its bytes.
        """
        if not 0 <= count <= capacity:
            raise CorruptMessage(f"{self.name}: {count} indices announced, 0 to {capacity} expected: {CAUSE}")
        expected = self.nbytes(n, capacity)
        if payload.numel() != expected:
            raise CorruptMessage(f"{self.name}: {payload.numel()} bytes found, {expected} expected: {CAUSE}")
        index = self._read(payload.cpu().numpy(), n, capacity, count)
        if count:
            self._check(index, n)
        return torch.from_numpy(index).to(payload.device)

    @abstractmethod
    def _write(self, index: Indices, n: int, capacity: int, out: Bytes) -> None: ...

    @abstractmethod
    def _read(self, payload: Bytes, n: int, capacity: int, count: int) -> Indices:
        """[count], or CorruptMessage if ``payload`` holds more or fewer; :meth:`_check` follows."""

    def _check(self, index: Indices, n: int) -> None:
        if fallen := np.count_nonzero(index[1:] <= index[:-1]):
            raise CorruptMessage(
                f"{self.name}: {fallen} of {index.size} indices found not above the one before, 0 expected: {CAUSE}"
            )
        first, last = index[0], index[-1]
        if first < 0 or last >= n:
            raise CorruptMessage(f"{self.name}: indices {first} to {last} found, 0 to {n - 1} expected: {CAUSE}")


class Int32(IndexFormat):
    """4 bytes an index."""

    name = "int32"
    ns_per_index = 1.0

    def nbytes(self, n: int, capacity: int) -> int:
        return 4 * capacity

    def _write(self, index: Indices, n: int, capacity: int, out: Bytes) -> None:
        used = 4 * index.size
        out[:used] = index.astype(np.int32).view(np.uint8)
        out[used:] = 0

    def _read(self, payload: Bytes, n: int, capacity: int, count: int) -> Indices:
        return _numbers(payload[: 4 * count], np.int32)


class Block16(IndexFormat):
    """[0, n) cut in blocks of 65,536: how many indices each block holds (int32), then 2 bytes an index."""

    name = "block16"
    ns_per_index = 2.0

    def nbytes(self, n: int, capacity: int) -> int:
        return block16_bytes(n, capacity)

    def _write(self, index: Indices, n: int, capacity: int, out: Bytes) -> None:
        borders = np.arange(_blocks(n) + 1) << BLOCK_BITS
        counts = np.diff(np.searchsorted(index, borders))  # [blocks]
        head, tail = 4 * counts.size, 4 * counts.size + 2 * index.size
        out[:head] = counts.astype(np.int32).view(np.uint8)
        out[head:tail] = index.astype(np.uint16).view(np.uint8)  # the lowest 16 bits
        out[tail:] = 0

    def _read(self, payload: Bytes, n: int, capacity: int, count: int) -> Indices:
        head = 4 * _blocks(n)
        counts = _numbers(payload[:head], np.int32)  # [blocks]
        if (least := counts.min()) < 0:
            raise CorruptMessage(f"{self.name}: a block of {least} indices found, 0 or more expected: {CAUSE}")
        if (found := counts.sum()) != count:
            raise CorruptMessage(f"{self.name}: {count} indices announced, {found} found: {CAUSE}")
        starts = np.arange(counts.size) << BLOCK_BITS
        return np.repeat(starts, counts) | _numbers(payload[head : head + 2 * count], np.uint16)


class Bitmap(IndexFormat):
    """1 bit an element of [0, n)."""

    name = "bitmap"
    ns_per_index = 1.0
    ns_per_element = 1.0

    def nbytes(self, n: int, capacity: int) -> int:
        return _folded_bytes(n, 1)

    def _write(self, index: Indices, n: int, capacity: int, out: Bytes) -> None:
        out[:] = _bits_at(index, n)

    def _read(self, payload: Bytes, n: int, capacity: int, count: int) -> Indices:
        return _announced_bits(self.name, payload, n, count)


class EliasFano(IndexFormat):
    """The low bits of each index as they are, its high bits in a vector of bits (Elias 1974, Fano 1971).

    Index i, of rank r among the indices, sets bit (i >> low) + r.  With 2**low near n / capacity that takes at most
    0.6 bits an index more than the entropy of a random set, up to a tenth of n (Vigna, "Quasi-succinct indices",
    WSDM 2013).
    """

    name = "elias_fano"
    ns_per_index = 8.0

    def nbytes(self, n: int, capacity: int) -> int:
        """About log2(n / capacity) + 2 bits an index."""
        _, low, start = _fields(n, capacity)
        return start + _folded_bytes(capacity + (n >> low), 1)

    def _write(self, index: Indices, n: int, capacity: int, out: Bytes) -> None:
        fields, low, start = _fields(n, capacity)
        for field in fields:
            _fold(np.right_shift(_bytes_of(index, field.bit), field.bit % 8), field.width, out[field.place])
        out[start:] = _bits_at((index >> low) + np.arange(index.size), capacity + (n >> low))

    def _read(self, payload: Bytes, n: int, capacity: int, count: int) -> Indices:
        fields, low, start = _fields(n, capacity)
        index = _announced_bits(self.name, payload[start:], capacity + (n >> low), count)
        index -= np.arange(count)
        index <<= low
        for field in fields:
            own = _bytes_of(index, field.bit)
            own |= _unfold(payload[field.place], field.width)[:count] << field.bit % 8
        return index


INDEX_FORMATS: dict[str, IndexFormat] = {f.name: f for f in (Int32(), Block16(), Bitmap(), EliasFano())}


@lru_cache
def cheapest(n: int, capacity: int) -> IndexFormat:
    """The format of least :meth:`~IndexFormat.cost`: the same on every rank, as it depends on nothing else."""
    return min(INDEX_FORMATS.values(), key=lambda f: f.cost(n, capacity))


def _blocks(n: int) -> int:
    return -(-n >> BLOCK_BITS)


class _Field(NamedTuple):
    """Some low bits of every index, and where in the payload they lie."""

    bit: int  # the lowest
    width: int  # a divisor of 8
    place: slice


@lru_cache
def _fields(n: int, capacity: int) -> tuple[list[_Field], int, int]:
    """The fields of low bits, how many low bits there are, and where the vector of high bits begins."""
    low = max(0, (n // max(1, capacity)).bit_length() - 1)  # floor(log2(n / capacity))
    fields, bit, start = [], 0, 0
    for width in [8] * (low // 8) + [w for w in (4, 2, 1) if low & w]:
        end = start + _folded_bytes(capacity, width)
        fields.append(_Field(bit, width, slice(start, end)))
        bit, start = bit + width, end
    return fields, low, start


def _numbers(payload: Bytes, dtype: Any) -> Indices:
    numbers: Indices = payload.view(dtype).astype(np.int64)  # numpy also reads what is not aligned
    return numbers


def _bytes_of(index: Indices, bit: int) -> Bytes:
    """The byte of each index that holds ``bit``, as a view."""
    return index.view(np.uint8)[bit // 8 :: 8]


def _bits_at(position: Indices, length: int) -> Bytes:
    """``length`` bits, 1 at each of ``position`` and 0 elsewhere, as bytes."""
    ones = np.zeros(length, dtype=np.bool_)
    ones[position] = True
    return np.packbits(ones, bitorder="little")


def _announced_bits(name: str, payload: Bytes, length: int, count: int) -> Indices:
    """Which of the first ``length`` bits are 1: [count], or CorruptMessage if as many are not."""
    position = np.flatnonzero(np.unpackbits(payload, count=length, bitorder="little").view(np.bool_))
    if position.size != count:
        raise CorruptMessage(f"{name}: {count} indices announced, {position.size} found: {CAUSE}")
    return position


def _folded_bytes(elements: int, width: int) -> int:
    return -(-elements * width // 8)


def _fold(values: Bytes, width: int, out: Bytes) -> None:
    """The lowest ``width`` bits of ``values``, 8 / width of them in each byte of ``out`` [c]; then zeros."""
    planes = np.zeros((8 // width, out.size), np.uint8)
    planes.reshape(-1)[: values.size] = values & (2**width - 1)
    np.bitwise_or.reduce(planes << _shifts(width), axis=0, out=out)


def _unfold(payload: Bytes, width: int) -> Bytes:
    """What :func:`_fold` wrote to ``payload`` [c]: [c * 8 / width]."""
    planes = payload >> _shifts(width)
    planes &= 2**width - 1
    return planes.reshape(-1)


def _shifts(width: int) -> Bytes:
    return np.arange(0, 8, width, dtype=np.uint8)[:, np.newaxis]  # [8 / width, 1]
