"""The only door to the network: the messages ranks exchange, counted as they leave."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Generator, Sequence

import torch
from torch import Tensor
from typing_extensions import TypeVar

from lightning_sparse.selection.sparse import Sparse
from lightning_sparse.wire import FLOAT32, ValueFormat

HOP_BYTES = 8 * 1024  # until a link is measured
SEGMENT_BYTES = 512 * 1024  # long messages travel in segments, so that one is on the wire while another is being added


def traffic(message: str, payload_bytes: int, size: int) -> int:
    """Bytes one rank puts on the wire for one message whose payload on each rank has ``payload_bytes`` bytes.

    An all-reduce of the backend goes round a ring and sends 2(P-1)/P of its payload; an all-gather sends what each rank
    contributes P-1 times; of a shift and an all-to-all the payload is what leaves.  Of a broadcast, which all but one
    rank receive once, each rank is charged a P-th: who passes it on depends on the backend.
    """
    if size == 1:
        return 0
    if message == "all_reduce":
        return 2 * (size - 1) * payload_bytes // size
    if message == "all_gather":
        return (size - 1) * payload_bytes
    if message in ("shift", "all_to_all"):
        return payload_bytes
    if message == "broadcast":
        return (size - 1) * payload_bytes // size
    raise ValueError(f"unknown message {message!r}")


def hops(message: str, size: int) -> int:
    """How often a message goes from one rank to the next, one after the other, as Gloo and we send it."""
    if message == "all_reduce":
        return 2 * (size - 1)
    return (size - 1).bit_length() if message == "broadcast" else int(size > 1)  # a broadcast goes down a binary tree


class Pending(ABC):
    """A message on its way.  A compressor yields it and gets its result back: ``sums = yield comm.all_reduce(x)``."""

    @abstractmethod
    def wait(self) -> Tensor:
        """Block until the message has arrived and return its result."""


def expect_pending(launched: object) -> Pending:
    """Return what a compressor yielded, if it is a message under way.

    Raises:
        TypeError: if it is anything else.
    """
    if not isinstance(launched, Pending):
        raise TypeError(f"a compressor yielded {type(launched).__name__}; yield what a method of comm returned.")
    return launched


T = TypeVar("T", default=Tensor | Sparse)
#: A compressor at work, or a part of one: yields each message it waits for, gets its result, and returns a T.
Rounds = Generator[Pending, Tensor, T]


class Comm(ABC):
    """The messages that one rank may send to the others.  P = ``size``.

    Each method launches a message and returns at once; the result is what ``yield`` gives back.  Several may be
    in flight.  Every rank launches the same messages in the same order with the same shapes, whatever its data.
    A tensor handed over must not be touched before its message was yielded.

    Attributes:
        hop_bytes: what a link carries in the time that a message of next to no length takes to all other ranks, the
            same on every rank; sums go by it (:meth:`cost_of`).
        all_reduce_bytes: what it carries in that of an all-reduce of the backend of next to no length.
        by_backend: float32 is always summed by the backend, which chooses among several ways itself.
        sent_bytes: since the start; payload only, as :func:`traffic` defines it.
        messages: launched since the start.
    """

    def __init__(self, rank: int, size: int, wire_dtype: ValueFormat = FLOAT32) -> None:
        self.rank = rank
        self.size = size
        self.wire_dtype = wire_dtype
        self.sent_bytes = 0
        self.messages = 0
        self.hop_bytes, self.all_reduce_bytes = HOP_BYTES, hops("all_reduce", size) * HOP_BYTES
        self.by_backend = False
        self._buffers: dict[tuple[str, int], Tensor] = {}  # bytes, by name and its loans before in the group's step
        self._lent: Counter[str] = Counter()

    def buffer(self, name: str, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Lend a tensor [elements] for messages, uninitialised, until this group's step ends.

        What is lent under a name is the memory that the group before had under it; several loans differ by
        their order.  Fresh memory costs the operating system three times as much as copying into memory in use.
        """
        key, size = (name, self._lent[name]), elements * dtype.itemsize
        self._lent[name] += 1
        if key not in self._buffers or self._buffers[key].numel() < size:
            self._buffers[key] = torch.empty(size, dtype=torch.uint8, device=device)
        return self._buffers[key][:size].view(dtype)

    @property
    def buffer_bytes(self) -> int:
        """Memory all buffers take."""
        return sum(buffer.numel() for buffer in self._buffers.values())

    def reuse_buffers(self) -> None:
        """End the loan of all buffers; the next group gets the same memory."""
        self._lent.clear()

    def release(self) -> None:
        """Give back memory and process groups.  No message may be under way, and none can be sent afterwards."""
        self._buffers.clear()

    def cost_of(self, way: str, payload_bytes: int) -> float:
        """The time of a sum of ``payload_bytes`` from each rank, in bytes that a link carries meanwhile.

        Args:
            way: "one_hop" (to everybody, who adds), "two_hops" (to who adds that slice) or "backend" (round a ring).
            payload_bytes: on the wire.
        """
        if way == "one_hop":
            return self.hop_bytes + (self.size - 1) * payload_bytes
        latency_bytes = 2 * self.hop_bytes if way == "two_hops" else self.all_reduce_bytes
        return latency_bytes + 2 * (self.size - 1) / self.size * payload_bytes

    def in_one_hop(self, payload_bytes: int) -> bool:
        """Whether a sum is sooner in one hop than in two; a long one is not, since it takes room for what all send."""
        short = payload_bytes <= max(SEGMENT_BYTES, self.hop_bytes)
        return short and self.cost_of("one_hop", payload_bytes) <= self.cost_of("two_hops", payload_bytes)

    def all_reduce(self, x: Tensor, direct: bool | None = None) -> Pending:
        """Sum over all ranks, in place: [*s] -> [*s], bit-identical on every rank.

        ``direct`` says whether in one hop, from all to all, and not as the backend does; by default where it is sooner.
        """
        if direct is None:
            direct = not self.by_backend and self.in_one_hop(x.nbytes)
        self._count("all_gather" if direct and x.nbytes else "all_reduce", x.nbytes)
        return self._all_reduce(x, direct)

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Pending:
        """Return what every rank handed over: [*s] -> [P, *s], in ``out`` if given."""
        self._count("all_gather", x.nbytes)
        return self._all_gather(x, x.new_empty((self.size, *x.shape)) if out is None else out)

    def broadcast(self, x: Tensor, source: int) -> Pending:
        """Return what rank ``source`` handed over, in ``x``: [*s] -> [*s].  On the others x is overwritten."""
        self._count("broadcast", x.nbytes)
        return self._broadcast(x, source)

    def shift(self, x: Tensor, out: Tensor | None = None, by: int = 1) -> Pending:
        """Send to the rank ``by`` further on, receive from as far back: [*s] -> [*s], into ``out`` if given."""
        self._count("shift", x.nbytes)
        return self._shift(x, torch.empty_like(x) if out is None else out, by)

    def all_to_all(self, x: Tensor, out: Tensor | None = None, by: Sequence[int] | None = None) -> Pending:
        """Send a row to each rank, receive one of each: [P, *s] -> [P, *s], into ``out`` if given.

        Row p of ``x`` is for rank p, and row p of the result of rank p.  A rank's row for itself stays where it is; so
        does, if ``by`` is given, every row but those for the ranks so much further on, and from those as far back.
        """
        by = range(1, self.size) if by is None else by
        self._count("all_to_all", x.nbytes // self.size * len(by))
        return self._all_to_all(x, torch.empty_like(x) if out is None else out, by)

    def _count(self, message: str, payload_bytes: int) -> None:
        if not payload_bytes and self.size > 1:
            raise ValueError(f"{message} of an empty tensor: not every backend can carry one.")
        self.sent_bytes += traffic(message, payload_bytes, self.size)
        self.messages += 1

    @abstractmethod
    def _all_reduce(self, x: Tensor, direct: bool) -> Pending: ...

    @abstractmethod
    def _all_gather(self, x: Tensor, out: Tensor) -> Pending: ...

    @abstractmethod
    def _broadcast(self, x: Tensor, source: int) -> Pending: ...

    @abstractmethod
    def _shift(self, x: Tensor, out: Tensor, by: int) -> Pending: ...

    @abstractmethod
    def _all_to_all(self, x: Tensor, out: Tensor, by: Sequence[int]) -> Pending: ...
