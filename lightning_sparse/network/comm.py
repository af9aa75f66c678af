"""The only door to the network: the messages ranks exchange, counted as they leave."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Self, TypeVar

from lightning_sparse.network.costs import Costs, traffic
from lightning_sparse.network.members import Members, alone
from lightning_sparse.selection.sparse import Sparse
from lightning_sparse.wire import FLOAT32, ValueFormat


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


@contextmanager
def without_autocast() -> Iterator[None]:
    """Compute in the types that tensors have within, also where a user's ``torch.autocast`` is entered."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


T = TypeVar("T", default=Tensor | Sparse)
#: A compressor at work, or a part of one: yields each message it waits for, gets its result, and returns a T.
Rounds = Generator[Pending, Tensor, T]


def completed(rounds: Rounds[T]) -> T:
    """Run what yields messages to its end, and return its result."""
    try:
        pending = next(rounds)
        while True:
            pending = rounds.send(pending.wait())
    except StopIteration as stop:
        result: T = stop.value
        return result


@dataclass
class Meter:
    """What one rank has launched since the start."""

    sent_bytes: int = 0
    messages: int = 0

    def count(self, sent_bytes: int) -> None:
        self.sent_bytes += sent_bytes
        self.messages += 1


class Buffers:
    """Memory for messages: tensors by name, lent until a group's step ends; the next group gets the same."""

    def __init__(self) -> None:
        # Bytes, by name, device, and the loans before in the group's step.
        self._kept: dict[tuple[str, torch.device, int], Tensor] = {}
        self._lent: Counter[tuple[str, torch.device]] = Counter()

    def lend(self, name: str, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Lend a tensor [elements], uninitialised; several loans under a name differ by their order."""
        key, size = (name, device, self._lent[name, device]), elements * dtype.itemsize
        self._lent[name, device] += 1
        if key not in self._kept or self._kept[key].numel() < size:
            self._kept[key] = torch.empty(size, dtype=torch.uint8, device=device)
        return self._kept[key][:size].view(dtype)

    def reuse(self) -> None:
        self._lent.clear()

    def free(self) -> None:
        self._kept.clear()


class Comm(ABC):
    """The messages that one rank may send to the others.  P = ``size``.

    Where members have several ranks these are the ranks of a column, of each member the one that has the same slice.

    Each method launches a message and returns at once; the result is what ``yield`` gives back.  Several may be
    in flight.  Every rank launches the same messages in the same order with the same shapes, whatever its data.
    A tensor handed over must not be touched before its message was yielded.

    Attributes:
        buffers: memory for messages.
        costs: what sums go by.
        inside: the ranks of this rank's member; None where it is alone in it, or FSDP2 sends what is sent inside.
        members: which of :attr:`everyone` are together.
        member: the number of this rank's member, the same on all its ranks; its rank, where it is alone in it.
        keeps_order: messages of these ranks and of :attr:`inside` may be under way at once.
    """

    keeps_order = True

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.member = rank
        self.inside: Comm | None = None
        self.members = alone(size)
        self._everyone: Comm | None = None
        self.buffers = Buffers()
        self.costs = Costs(size)
        self._meter = Meter()
        self._wire_dtype: ValueFormat = FLOAT32

    def within(self, inside: "Comm | None", everyone: "Comm", members: Members, member: int) -> None:
        """Be a column of ``members``, of which number ``member`` has the ranks ``inside``, of ``everyone``.

        None is ``inside`` of who sends nothing there.
        """
        self.inside, self._everyone, self.members, self.member = inside, everyone, members, member

    @property
    def everyone(self) -> "Comm":
        """All ranks of all members."""
        return self._everyone or self

    @property
    def wire_dtype(self) -> ValueFormat:
        """The format of values on the wire."""
        return self._wire_dtype

    def in_format(self, wire_dtype: ValueFormat) -> Self:
        """Return the same ranks, messages, buffers and counts, with values in another format."""
        other = copy(self)  # what changes lies in objects that both have
        other._wire_dtype = wire_dtype
        return other

    @property
    def sent_bytes(self) -> int:
        """Since the start; payload only, as :func:`~lightning_sparse.network.costs.traffic` defines it."""
        return self._meter.sent_bytes

    @property
    def messages(self) -> int:
        return self._meter.messages

    def buffer(self, name: str, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Lend a tensor [elements] for messages, uninitialised, until this group's step ends.

        What is lent under a name is the memory that the group before had under it; several loans differ by
        their order.  Fresh memory costs the operating system three times as much as copying into memory in use.
        """
        return self.buffers.lend(name, elements, dtype, device)

    def release(self) -> None:
        """Give back memory and process groups.  No message may be under way, and none can be sent afterwards."""
        self.buffers.free()
        for other in (self.inside, self._everyone):
            if other is not None:
                other.release()

    def all_reduce(self, x: Tensor, direct: bool | None = None) -> Pending:
        """Sum over all ranks, in place: [*s] -> [*s], bit-identical on every rank.

        ``direct`` says whether in one hop, from all to all, and not as the backend does; by default where it is sooner.
        """
        if direct is None:
            direct = not self.costs.by_backend and self.costs.in_one_hop(x.nbytes)
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

        Row p of ``x`` is for rank p, and row p of the result of rank p.  If ``by`` is given, only rows for the ranks so
        much further on are sent, and those of the ranks as far back arrive.  The result's other rows, a rank's own
        among them, are not to be read.
        """
        by = range(1, self.size) if by is None else by
        self._count("all_to_all", x.nbytes // self.size * len(by))
        return self._all_to_all(x, torch.empty_like(x) if out is None else out, by)

    def _count(self, message: str, payload_bytes: int) -> None:
        if not payload_bytes and self.size > 1:
            raise ValueError(f"{message} of an empty tensor: not every backend can carry one.")
        self._meter.count(traffic(message, payload_bytes, self.size))

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
