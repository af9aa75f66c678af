"""A message of selected elements: how many, which, and their values, in a number of bytes that data cannot change."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.wire.indices import CAUSE, INDEX_FORMATS, INDEX_LIMIT, CorruptMessage, IndexFormat, cheapest
from lightning_sparse.wire.values import ValueFormat

HEADER_BYTES = 16  # four int32: elements in the message, `seen`, `near` and `load`
MOST = 2**31 - 1  # that the header can hold
Count = Any  # an integer on the host, a tensor [] on a device
WORD = 8  # each part starts on a multiple of so many bytes, so that it can be looked at as any dtype


@dataclass(frozen=True)
class Selection:
    """Selected elements of a vector [n], and what their receivers should know about the others.

    On the host ``index`` holds them and nothing else, and counts are integers.  On a device nobody waits to know how
    many there are: ``index`` is padded with n, ``values`` with zeros, and counts are tensors [] on it.

    Args:
        index: [m] int64, strictly rising but for the padding.
        values: [m] float32; empty where none are sent.
        seen: elements that reached the threshold; more than were selected where there was no room for all.
        near: elements that reached ``NEAR`` times the threshold, those that were seen included.
        load: of an owner of a part, elements that all ranks together found there; 0 where nobody asks.
        count: elements that were selected; on the host m.
        intact: 1 where the message arrived as it was written, 0 where it did not: a device cannot raise an error.
    """

    index: Tensor
    values: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float32, device="cpu"))
    seen: Count = 0
    near: Count = 0
    load: Count = 0
    count: Count = None
    intact: Count = 1

    def __post_init__(self) -> None:
        if self.count is None:
            object.__setattr__(self, "count", self.index.numel())


@dataclass(frozen=True)
class MessageLayout:
    """Messages of at most ``capacity`` of n elements, every one of ``nbytes`` bytes.

    Args:
        n: elements to select from, at most 2**31.
        capacity: selected elements there is room for, from 1 to n.
        indices: how indices are written.
        values: how values are written; None for messages without.
    """

    n: int
    capacity: int
    indices: IndexFormat
    values: ValueFormat | None = None

    def __post_init__(self) -> None:
        if self.n > INDEX_LIMIT:
            raise ValueError(
                f"a group must have at most 2**31 elements, as many as 32-bit indices can tell apart; got {self.n}. "
                "Cut it into several."
            )

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a message."""
        return HEADER_BYTES + self._value_bytes + whole_words(self.index_bytes)

    @cached_property
    def index_bytes(self) -> int:
        """Bytes of the indices in a message."""
        return self.indices.nbytes(self.n, self.capacity)

    @cached_property
    def _value_bytes(self) -> int:
        return whole_words(self.values.nbytes(self.capacity)) if self.values else 0

    def pack(self, selection: Selection, out: Tensor) -> Tensor:
        """Write a message to ``out`` [nbytes] uint8 and return it; ``selection.values`` keep the rounding errors.

        Raises:
            ValueError: if there are more selected elements than room for them.
        """
        m = selection.index.numel()
        header, value_part, index_part = self.parts(out)
        counts = (min(x, MOST) for x in (m, selection.seen, selection.near, selection.load))
        header.view(torch.int32).copy_(torch.tensor(list(counts), dtype=torch.int32, device="cpu"))
        if self.values is not None:
            used = self.values.nbytes(m)
            self.values.take(selection.values, value_part[:used])
            value_part[used:] = 0
        self.indices.encode(selection.index, self.n, self.capacity, index_part[: self.index_bytes])
        index_part[self.index_bytes :] = 0
        return out

    def unpack(self, payload: Tensor, width: int | None = None) -> Selection:
        """Read a message, ``payload`` [nbytes] uint8, of a vector of ``width`` elements where these are fewer than n.

        Raises:
            CorruptMessage: if it cannot have been written by :meth:`pack` of an equal layout.
        """
        if payload.numel() != self.nbytes:
            raise CorruptMessage(f"a message of {payload.numel()} bytes arrived where {self.nbytes} were expected.")
        header, value_part, index_part = self.parts(payload)
        m, *counts = header.clone().view(torch.int32).tolist()
        if min(counts) < 0:
            raise CorruptMessage(f"counts {counts} of a message's elements arrived, 0 or more expected: {CAUSE}")
        index = self.indices.decode(index_part[: self.index_bytes], self.n, self.capacity, m)
        if width is not None and m and index[-1] >= width:  # they rise
            raise CorruptMessage(f"an index of {int(index[-1])} arrived, below {width} expected: {CAUSE}")
        if self.values is None:
            return Selection(index, index.new_empty(0, dtype=torch.float32), *counts)
        values = index.new_empty(m, dtype=torch.float32)
        self.values.read(value_part[: self.values.nbytes(m)], values)
        return Selection(index, values, *counts)

    def parts(self, message: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Header, values and indices, each with what fills up its last word, of messages: [nbytes] or [P, nbytes]."""
        start = HEADER_BYTES + self._value_bytes
        return message[..., :HEADER_BYTES], message[..., HEADER_BYTES:start], message[..., start:]


def index_format(name: str, n: int, capacity: int) -> IndexFormat:
    """The format called ``name``, or for "auto" the cheapest for ``capacity`` of n elements."""
    return cheapest(n, capacity) if name == "auto" else INDEX_FORMATS[name]


def whole_words(nbytes: int) -> int:
    """``nbytes`` rounded up to whole words."""
    return -(-nbytes // WORD) * WORD
