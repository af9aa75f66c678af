"""A message of picked elements: how many, which, and their values, in a number of bytes that data cannot change."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lightning_sparse.wire import values as coding
from lightning_sparse.wire.indices import CAUSE, INDEX_FORMATS, CorruptMessage, IndexFormat, cheapest
from lightning_sparse.wire.values import INDEX_LIMIT

HEADER_BYTES = 16  # four int32: picks in the message, `seen`, `near`, and one to spare
MOST = 2**31 - 1  # that the header can tell
WORD = 8  # each part starts on a multiple of so many bytes, so that it can be looked at as any dtype


@dataclass(frozen=True)
class Picks:
    """Picked elements, and what their receivers should know about the others.

    Args:
        index: [m] int64, strictly rising.
        values: [m] float32; empty in messages without values.
        seen: elements that reached the threshold; more than m where there was no room for all.
        near: elements that nearly did.
    """

    index: Tensor
    values: Tensor
    seen: int = 0
    near: int = 0


@dataclass(frozen=True)
class PickLayout:
    """Messages of at most ``capacity`` of n elements, every one of ``nbytes`` bytes.

    Args:
        n: elements to pick from, at most 2**31.
        capacity: picks there is room for, from 1 to n.
        indices: how indices travel.
        dtype: of values on the wire; None for messages without values.
    """

    n: int
    capacity: int
    indices: IndexFormat
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.n > INDEX_LIMIT:
            raise ValueError(f"a group of {self.n} elements is too large for 32-bit indices; 2**31 is the limit.")

    def with_capacity(self, capacity: int) -> "PickLayout":
        """The same but for the room there is."""
        return replace(self, capacity=capacity)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a message."""
        return HEADER_BYTES + self._value_bytes + _whole_words(self.index_bytes)

    @cached_property
    def index_bytes(self) -> int:
        """Of them, those of the indices."""
        return self.indices.nbytes(self.n, self.capacity)

    @cached_property
    def _value_bytes(self) -> int:
        return _whole_words(coding.nbytes(self.capacity, self.dtype)) if self.dtype else 0

    def pack(self, picks: Picks, out: Tensor) -> Tensor:
        """Write a message to ``out`` [nbytes] uint8 and return it; ``picks.values`` keep what rounding left.

        Raises:
            ValueError: if there are more picks than room for them.
        """
        m = picks.index.numel()
        header, value_part, index_part = self.parts(out)
        header.view(torch.int32).copy_(
            torch.tensor([m, min(picks.seen, MOST), min(picks.near, MOST), 0], dtype=torch.int32)
        )
        if self.dtype is not None:
            used = coding.nbytes(m, self.dtype)
            coding.take(picks.values, value_part[:used], self.dtype)
            value_part[used:] = 0
        self.indices.encode(picks.index, self.n, self.capacity, index_part[: self.index_bytes])
        index_part[self.index_bytes :] = 0
        return out

    def unpack(self, payload: Tensor) -> Picks:
        """Read a message, ``payload`` [nbytes] uint8.

        Raises:
            CorruptMessage: if it cannot have been written by :meth:`pack` of an equal layout.
        """
        if payload.numel() != self.nbytes:
            raise CorruptMessage(f"a message of {payload.numel()} bytes arrived where {self.nbytes} were expected.")
        header, value_part, index_part = self.parts(payload)
        m, seen, near, _ = header.clone().view(torch.int32).tolist()
        if seen < 0 or near < 0:
            raise CorruptMessage(f"{seen} elements seen and {near} nearly, 0 or more expected: {CAUSE}")
        index = self.indices.decode(index_part[: self.index_bytes], self.n, self.capacity, m)
        if self.dtype is None:
            return Picks(index, index.new_empty(0, dtype=torch.float32), seen, near)
        values = index.new_empty(m, dtype=torch.float32)
        coding.read(value_part[: coding.nbytes(m, self.dtype)], values, self.dtype)
        return Picks(index, values, seen, near)

    def parts(self, message: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Header, values and indices, each with what fills up its last word, of messages: [nbytes] or [P, nbytes]."""
        start = HEADER_BYTES + self._value_bytes
        return message[..., :HEADER_BYTES], message[..., HEADER_BYTES:start], message[..., start:]


def joined(parts: Sequence[Picks], starts: Sequence[int], n: int) -> Tensor:
    """The indices of consecutive parts of [0, n), each counted from the start of its part: [m] int64, rising.

    Raises:
        CorruptMessage: if one of them lies in another part, or beyond ``n``.
    """
    index = torch.cat([part.index for part in parts])
    last = -1
    moved = index.split([part.index.numel() for part in parts])
    for part, start in zip(moved, starts, strict=False):
        part += start
        if part.numel():  # it rises
            first, before, last = int(part[0]), last, int(part[-1])
            if first <= before or last >= n:
                raise CorruptMessage(f"indices {first} to {last} after {before}, in parts of 0 to {n - 1}: {CAUSE}")
    return index


def index_format(name: str, n: int, capacity: int) -> IndexFormat:
    """The format called ``name``, or for "auto" the cheapest for ``capacity`` of n elements."""
    return cheapest(n, capacity) if name == "auto" else INDEX_FORMATS[name]


def check_index_format(compressor: object, name: str) -> None:
    """Raise a ValueError that names the compressor and the value unless ``name`` is "auto" or a format's name."""
    if not isinstance(name, str) or (name != "auto" and name not in INDEX_FORMATS):
        raise ValueError(
            f"{type(compressor).__name__}(indices={name!r}): how indices travel is one of auto, "
            f"{', '.join(INDEX_FORMATS)}."
        )


def _whole_words(nbytes: int) -> int:
    return -(-nbytes // WORD) * WORD
