"""The only door to the network: the messages ranks exchange, counted as they leave."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import TypeVar

from lightning_sparse.selection.sparse import Sparse
from lightning_sparse.wire import FLOAT32, ValueFormat

LATENCY_BYTES = 8 * 1024  # until a link is measured


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
        latency_bytes: what a link carries in the time that a message of no length takes, the same on every rank; what
            sums go by (:meth:`cost_of`).  0 leaves sums of float32 to the backend.
        sent_bytes: since the start; payload only, as :func:`traffic` defines it.
        messages: launched since the start.
    """

    def __init__(self, rank: int, size: int, wire_dtype: ValueFormat = FLOAT32) -> None:
        self.rank = rank
        self.size = size
        self.wire_dtype = wire_dtype
        self.sent_bytes = 0
        self.messages = 0
        self.latency_bytes = LATENCY_BYTES
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
            return self.latency_bytes + (self.size - 1) * payload_bytes
        in_sequence = 2 if way == "two_hops" else hops("all_reduce", self.size)
        return in_sequence * self.latency_bytes + 2 * (self.size - 1) / self.size * payload_bytes

    def in_one_hop(self, payload_bytes: int) -> bool:
        """Whether a sum is sooner in one hop than in two."""
        return self.cost_of("one_hop", payload_bytes) <= self.cost_of("two_hops", payload_bytes)

    def all_reduce(self, x: Tensor) -> Pending:
        """Sum over all ranks, in place: [*s] -> [*s], bit-identical on every rank."""
        direct = self.latency_bytes > 0 and self.in_one_hop(x.nbytes)
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
        if not payload_bytes:
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


@contextmanager
def explained() -> Iterator[None]:
    """Say what it means that a message fails: when it is waited for, or at once if the other rank has already gone.

    Raises:
        RuntimeError: another rank is gone, or did not come in time.
    """
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"a message among the ranks failed: {error}\nAnother rank has ended, hangs, or lost its link; its own "
            "output may say why. The last checkpoint is whole; to go on, start all ranks again from it."
        ) from error


class _Added(Pending):
    """The sum of what was gathered, added in the order of the ranks into ``out``."""

    def __init__(self, gathered: Pending, out: Tensor) -> None:
        self._gathered, self._out = gathered, out

    def wait(self) -> Tensor:
        first, *others = self._gathered.wait()
        self._out.copy_(first)
        for other in others:
            self._out.add_(other)
        return self._out


class Works(Pending):
    """Messages of torch.distributed in flight, and every tensor they read or write."""

    def __init__(self, works: list[dist.Work], result: Tensor, *keep: Tensor) -> None:
        self._works, self._result, self._keep = works, result, keep

    @explained()
    def wait(self) -> Tensor:
        """Wait for all.

        Raises:
            RuntimeError: another rank is gone, or did not come in time.
        """
        for work in self._works:
            work.wait()
        return self._result


class TorchComm(Comm):
    """The ranks of a torch.distributed process group, over Gloo or NCCL.

    On NCCL ``wait`` makes the current CUDA stream wait, not the host.
    """

    def __init__(self, group: dist.ProcessGroup, wire_dtype: ValueFormat = FLOAT32) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), wire_dtype)
        self._group = group
        self._global = dist.get_process_group_ranks(group)
        self._nccl = dist.get_backend(group) == "nccl"
        if self._nccl:  # which chooses among several ways itself
            self.latency_bytes = 0

    def gather(self, x: Tensor) -> Tensor:
        """Return what every rank handed over, [n] -> [P, n] on the CPU of the first rank; [0, n] on the others."""
        rows = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        self._to_first(x)
        dist.gather(x, rows, self._global[0], self._group)
        return torch.stack([row.cpu() for row in rows]) if rows else x.new_empty((0, x.numel()), device="cpu")

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean over all ranks, [n] -> [n] on the CPU; it means something on the first rank only."""
        total = x.clone()
        self._to_first(x)
        dist.reduce(total, self._global[0], group=self._group)
        return total.div_(self.size).cpu()

    def _to_first(self, x: Tensor) -> None:
        self.messages += 1
        self.sent_bytes += 0 if self.rank == 0 else x.nbytes

    def release(self) -> None:
        """Forget the process group too: its sockets are open until nobody refers to it."""
        super().release()
        vars(self).pop("_group", None)

    def _all_reduce(self, x: Tensor, direct: bool) -> Pending:
        if self.size == 1:
            return Works([], x)
        if direct:
            return _Added(self._all_gather(x, x.new_empty((self.size, *x.shape))), x)
        return Works([dist.all_reduce(x, group=self._group, async_op=True)], x)

    @explained()
    def _all_gather(self, x: Tensor, out: Tensor) -> Pending:
        if self._nccl:
            return Works([dist.all_gather(list(out), x, group=self._group, async_op=True)], out, x)
        out[self.rank].copy_(x)
        return Works(self._to_others([x] * self.size, out, range(1, self.size), tag=1), out, x)

    def _broadcast(self, x: Tensor, source: int) -> Pending:
        if self.size == 1:
            return Works([], x)
        return Works([dist.broadcast(x, self._global[source], group=self._group, async_op=True)], x)

    @explained()
    def _shift(self, x: Tensor, out: Tensor, by: int) -> Pending:
        if by % self.size == 0:
            return Works([], out.copy_(x))
        to, source = self._global[self._far(by)], self._global[self._far(-by)]
        # The receive is posted first: on Gloo nothing is buffered for a receiver that is not there yet.
        if self._nccl:
            pair = [
                dist.P2POp(dist.irecv, out, source, self._group),
                dist.P2POp(dist.isend, x, to, self._group),
            ]
            return Works(dist.batch_isend_irecv(pair), out, x)
        received = dist.irecv(out, source, self._group)
        sent = dist.isend(x, to, self._group)
        assert received is not None  # both are None only on a rank outside the group
        assert sent is not None
        return Works([received, sent], out, x)

    @explained()
    def _all_to_all(self, x: Tensor, out: Tensor, by: Sequence[int]) -> Pending:
        if not self._nccl:
            return Works(self._to_others(list(x), out, by, tag=2), out, x)
        pairs = [
            dist.P2POp(dist.irecv, out[self._far(-each)], self._global[self._far(-each)], self._group) for each in by
        ]
        pairs += [dist.P2POp(dist.isend, x[self._far(each)], self._global[self._far(each)], self._group) for each in by]
        return Works(dist.batch_isend_irecv(pairs), out, x)

    def _to_others(self, rows: Sequence[Tensor], out: Tensor, by: Sequence[int], tag: int) -> list[dist.Work]:
        """Send a row to each rank ``by`` further on, receive one from as far back.

        Directly, so that a message makes one hop: Gloo's own all-gather goes round a ring.  By ``tag`` ranks that
        launch different messages fail to meet, where otherwise one would take the other's for its own.
        """
        to, source = [self._far(each) for each in by], [self._far(-each) for each in by]
        works = [dist.irecv(out[other], self._global[other], self._group, tag) for other in source]
        works += [dist.isend(rows[other], self._global[other], self._group, tag) for other in to]
        return [work for work in works if work is not None]  # None only on a rank outside the group

    def _far(self, by: int) -> int:
        """The rank ``by`` further on."""
        return (self.rank + by) % self.size


def world() -> TorchComm:
    """All ranks, for the main thread."""
    everyone = dist.group.WORLD
    assert everyone is not None
    return TorchComm(everyone)
