"""Compact codes for strictly rising indices, in as many bytes as (n, capacity) say, whatever the indices.

Hosts and devices are little-endian.  Codes of bits are planar: byte i of c bytes holds elements i, c + i, 2c + i, ...
from its lowest bits up, so that folding and unfolding are a few passes over contiguous bytes.
"""

from abc import ABC, abstractmethod

import numpy
import torch
from torch import Tensor

LINK_BITS_PER_NS = 1.0  # the reference link of `cheapest`: 1 Gbit/s

_BLOCK_BITS = 16
CAUSE = "the message was corrupted on its way or ranks disagree on its layout"


class CorruptMessage(ValueError):
    """A payload does not hold the indices that were announced."""


class IndexFormat(ABC):
    """How m <= ``capacity`` strictly rising indices below n <= 2**31 are written in ``nbytes(n, capacity)`` bytes.

    m is not among those bytes: it travels beside them.
    """

    name: str
    # Encode plus decode on one core of a server CPU, measured with 1M indices of 100M and 500k of 1M, rounded.
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
        if index.numel():
            self._write(index, n, capacity, out)
        else:  # in every format; numpy's empty arrays have strides that cannot be viewed as bytes
            out.zero_()

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
        index = self._read(payload, n, capacity, count)
        if count:
            self._check(index, n)
        return index

    @abstractmethod
    def _write(self, index: Tensor, n: int, capacity: int, out: Tensor) -> None: ...

    @abstractmethod
    def _read(self, payload: Tensor, n: int, capacity: int, count: int) -> Tensor:
        """[count] int64, or CorruptMessage if ``payload`` holds more or fewer; :meth:`_check` follows."""

    def _check(self, index: Tensor, n: int) -> None:
        falls = (index[1:] <= index[:-1]).sum()
        first, last, fallen = torch.stack([index[0], index[-1], falls]).tolist()  # one transfer from the device
        if fallen:
            raise CorruptMessage(
                f"{self.name}: {fallen} of {index.numel()} indices found not above the one before, 0 expected: {CAUSE}"
            )
        if first < 0 or last >= n:
            raise CorruptMessage(f"{self.name}: indices {first} to {last} found, 0 to {n - 1} expected: {CAUSE}")


class Int32(IndexFormat):
    """4 bytes an index."""

    name = "int32"
    ns_per_index = 1.0

    def nbytes(self, n: int, capacity: int) -> int:
        """4 bytes an index."""
        return 4 * capacity

    def _write(self, index: Tensor, n: int, capacity: int, out: Tensor) -> None:
        used = 4 * index.numel()
        out[:used] = index.to(torch.int32).view(torch.uint8)
        out[used:] = 0

    def _read(self, payload: Tensor, n: int, capacity: int, count: int) -> Tensor:
        return _aligned(payload[: 4 * count], torch.int32).long()


class Block16(IndexFormat):
    """[0, n) cut in blocks of 65,536: how many indices each block holds (int32), then 2 bytes an index."""

    name = "block16"
    ns_per_index = 2.0

    def nbytes(self, n: int, capacity: int) -> int:
        """4 bytes a block, 2 bytes an index."""
        return 4 * _blocks(n) + 2 * capacity

    def _write(self, index: Tensor, n: int, capacity: int, out: Tensor) -> None:
        borders = torch.arange(_blocks(n) + 1, device=index.device) << _BLOCK_BITS
        counts = torch.searchsorted(index, borders).diff()  # [blocks]
        offsets = index.to(torch.int16)  # [m]: the lowest 16 bits
        head, tail = 4 * counts.numel(), 4 * counts.numel() + 2 * offsets.numel()
        out[:head] = counts.to(torch.int32).view(torch.uint8)
        out[head:tail] = offsets.view(torch.uint8)
        out[tail:] = 0

    def _read(self, payload: Tensor, n: int, capacity: int, count: int) -> Tensor:
        head = 4 * _blocks(n)
        counts = _aligned(payload[:head], torch.int32).long()  # [blocks]
        least, found = torch.stack([counts.min(), counts.sum()]).tolist()
        if least < 0:
            raise CorruptMessage(f"{self.name}: a block of {least} indices found, 0 or more expected: {CAUSE}")
        if found != count:
            raise CorruptMessage(f"{self.name}: {count} indices announced, {found} found: {CAUSE}")
        offsets = _aligned(payload[head : head + 2 * count], torch.int16).to(torch.int32) & 0xFFFF  # [count]
        block = torch.repeat_interleave(counts, output_size=count)  # [count]
        return block.bitwise_left_shift_(_BLOCK_BITS).bitwise_or_(offsets)


class Bitmap(IndexFormat):
    """1 bit an element of [0, n)."""

    name = "bitmap"
    ns_per_index = 1.0
    ns_per_element = 1.0

    def nbytes(self, n: int, capacity: int) -> int:
        """1 bit an element."""
        return _folded_bytes(n, 1)

    def _write(self, index: Tensor, n: int, capacity: int, out: Tensor) -> None:
        _fold(_ones_at(index, n), 1, out)

    def _read(self, payload: Tensor, n: int, capacity: int, count: int) -> Tensor:
        return _announced_ones(self.name, _unfold(payload, 1)[:n], count)


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
        return sum(self._sections(n, capacity))

    def _write(self, index: Tensor, n: int, capacity: int, out: Tensor) -> None:
        fields, low = _fields(n, capacity)
        *lows, high = out.split(self._sections(n, capacity))
        index32 = index.to(torch.int32)
        for (start, width), section in zip(fields, lows, strict=True):
            _fold((index32 >> start).to(torch.uint8), width, section)
        position = (index >> low).add_(torch.arange(index.numel(), device=index.device))  # [m]
        _fold(_ones_at(position, capacity + (n >> low)), 1, high)

    def _read(self, payload: Tensor, n: int, capacity: int, count: int) -> Tensor:
        fields, low = _fields(n, capacity)
        *lows, high = payload.split(self._sections(n, capacity))
        position = _announced_ones(self.name, _unfold(high, 1)[: capacity + (n >> low)], count)  # [count]
        index = position.sub_(torch.arange(count, device=payload.device)).bitwise_left_shift_(low)
        for (start, width), section in zip(fields, lows, strict=True):
            index.bitwise_or_(_unfold(section, width)[:count].to(torch.int32) << start)
        return index

    def _sections(self, n: int, capacity: int) -> list[int]:
        """Bytes of each field of low bits, then of the vector of bits, which is capacity + (n >> low) long."""
        fields, low = _fields(n, capacity)
        return [*(_folded_bytes(capacity, width) for _, width in fields), _folded_bytes(capacity + (n >> low), 1)]


INDEX_FORMATS: dict[str, IndexFormat] = {f.name: f for f in (Int32(), Block16(), Bitmap(), EliasFano())}


def cheapest(n: int, capacity: int) -> IndexFormat:
    """The format of least :meth:`~IndexFormat.cost`: the same on every rank, as it depends on nothing else."""
    return min(INDEX_FORMATS.values(), key=lambda f: f.cost(n, capacity))


def _blocks(n: int) -> int:
    return -(-n >> _BLOCK_BITS)


def _fields(n: int, capacity: int) -> tuple[list[tuple[int, int]], int]:
    """The low bits as fields (first bit, width), each width a divisor of 8; and how many low bits there are."""
    low = max(0, (n // max(1, capacity)).bit_length() - 1)  # floor(log2(n / capacity))
    fields, start = [], 0
    for width in [8] * (low // 8) + [w for w in (4, 2, 1) if low & w]:
        fields.append((start, width))
        start += width
    return fields, low


def _aligned(payload: Tensor, dtype: torch.dtype) -> Tensor:
    # clone: a view of another dtype needs its storage to start on a multiple of that dtype's size
    return payload.clone().view(dtype)


def _ones_at(position: Tensor, length: int) -> Tensor:
    """[length] uint8, 1 at each of ``position`` and 0 elsewhere."""
    return torch.zeros(length, dtype=torch.uint8, device=position.device).index_fill_(0, position, 1)


def _announced_ones(name: str, ones: Tensor, count: int) -> Tensor:
    """Where ``ones`` [n] uint8 is 1: [count] int64, or CorruptMessage if that is elsewhere than ``count`` times."""
    position = _positions_on_cpu(ones) if ones.device.type == "cpu" else _positions(ones)
    if position.numel() != count:
        raise CorruptMessage(f"{name}: {count} indices announced, {position.numel()} found: {CAUSE}")
    return position


def _positions(ones: Tensor) -> Tensor:
    return ones.nonzero().squeeze(1)


def _positions_on_cpu(ones: Tensor) -> Tensor:
    return torch.from_numpy(numpy.flatnonzero(ones.view(torch.bool).numpy()))  # 10 times as fast as nonzero


def _folded_bytes(elements: int, width: int) -> int:
    return -(-elements * width // 8)


def _fold(values: Tensor, width: int, out: Tensor) -> None:
    """The lowest ``width`` bits of ``values`` uint8, 8 / width of them in each byte of ``out`` [c]; then zeros."""
    out.zero_()
    for j, part in enumerate(values.split(out.numel())):
        out[: part.numel()] |= (part & (2**width - 1)) << (width * j)


def _unfold(payload: Tensor, width: int) -> Tensor:
    """What :func:`_fold` wrote to ``payload`` [c]: [c * 8 / width] uint8."""
    values = payload.new_empty((8 // width, payload.numel()))
    for j, part in enumerate(values):
        torch.bitwise_right_shift(payload, width * j, out=part)
    return values.bitwise_and_(2**width - 1).flatten()
