"""Counts what a compressor sends among many ranks: all of them run, in this process, over a network that only counts.

:func:`lightning_sparse.simulate` checks every rank's part of every message against all others and makes every rank's
result anew, which grows with the cube of the ranks.  Here both are done once a message, and what all ranks read off the
same gathered bytes is read once.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from unittest.mock import patch

import torch
from torch import Tensor

from lightning_sparse.comm import Comm, Pending, Rounds, expect_pending
from lightning_sparse.compressors import Compressor, Dense, by_name
from lightning_sparse.compressors.base import take_step
from lightning_sparse.group import Group
from lightning_sparse.streams import draw
from lightning_sparse.wire import PickLayout, Picks

STEPS = 4  # of which the last is counted: then thresholds and partitions are known
FEW_RANKS = 32  # up to so many, every rank takes all steps; more take up where these ended, and take one
MOST_FLOATS = 375_000_000  # of all ranks' gradients together, 1.5 GB: beyond, gradients get shorter
SPREAD = 3.0  # deviation of the logarithm of the elements' scales: of the large, most are large in every step
POOL = 2**20 + 7  # random numbers more than a gradient has elements: each gradient starts at another of them


@dataclass(frozen=True)
class Traffic:
    """What one step of one strategy puts on the wire for one group of gradients.

    Attributes:
        strategy: its name.
        ranks: P.
        elements: n, of the gradient.
        most_bytes: payload sent by the rank that sends most.
        mean_bytes: the mean over the ranks.
        messages: of one rank.
        hops: from rank to rank, one after the other, that these messages need.
    """

    strategy: str
    ranks: int
    elements: int
    most_bytes: int
    mean_bytes: float
    messages: int
    hops: int


def count(compressor: str | Compressor, sizes: Sequence[int], elements: int) -> Iterator[Traffic]:
    """Run ``compressor`` on all ranks, for each number of ranks, and count what a step sends.

    It is a step in which nothing is estimated anew (Ok-Topk does in every 32nd).  The gradients are made up: normally
    distributed, each element with a scale of its own that all ranks share.  Up to ``FEW_RANKS`` ranks take ``STEPS``
    steps, of which the last counts.  More than those take one step, and only rank 0 works on after its last message;
    what they have not sent and know at its start (thresholds, edges of partitions) is what fewer ranks did.

    Args:
        compressor: an instance, or a name in ``COMPRESSORS``.
        sizes: numbers of ranks, each twice the one before.
        elements: n, of the gradient; fewer where P n exceeds ``MOST_FLOATS``.

    Raises:
        ValueError: for an unknown name, or a number that means nothing.
        AssertionError: if the ranks launch different messages.
    """
    name = compressor if isinstance(compressor, str) else repr(compressor)
    made = by_name(compressor)
    if elements < 1:
        raise ValueError(f"elements={elements!r}: a gradient has 1 or more.")
    if not sizes or sizes[0] < 2 or any(b != 2 * a for a, b in pairwise(sizes)):
        raise ValueError(f"sizes={list(sizes)!r}: give numbers of ranks from 2, each twice the one before.")
    at_work = Dense() if made.sends_whole("gradient", elements) else made
    gradients = _Gradients(elements)
    few: list[Group] = []
    known: Group | None = None  # of half as many ranks
    for size in sizes:
        n = min(elements, MOST_FLOATS // size)
        groups = [Group(0, ("gradient",), (gradients.weights[:n],)) for _ in range(size)]
        if size > FEW_RANKS and known is not None:
            _take_up(groups, few, known, gradients)
        else:
            few = groups
            for step in range(STEPS):
                if step:
                    _step(at_work, groups)
                for rank, group in enumerate(groups):
                    gradients.add_to(group.unsent, step, rank)
        yield _counted(name, groups, _step(at_work, groups, all_to_the_end=groups is few))
        known = groups[0]
        del groups  # before there are twice as many


def _step(compressor: Compressor, groups: Sequence[Group], all_to_the_end: bool = True) -> "CountingNetwork":
    """Take a step; what was sent is counted in the network."""
    network = CountingNetwork(len(groups))
    network.run([take_step(compressor, g, c) for g, c in zip(groups, network.comms, strict=True)], all_to_the_end)
    return network


def _counted(name: str, groups: Sequence[Group], network: "CountingNetwork") -> Traffic:
    sent = [comm.sent_bytes for comm in network.comms]
    first = network.comms[0]
    return Traffic(name, len(sent), groups[0].n, max(sent), sum(sent) / len(sent), first.messages, first.hops)


def _take_up(groups: Sequence[Group], few: Sequence[Group], known: Group, gradients: "_Gradients") -> None:
    """Let ``groups`` begin where ``few`` ended, and with what ``known``, of half as many ranks, remembers.

    Sums over ranks must not grow faster than thresholds can follow: from the third copy of the few on, every copy is
    followed by its negative.  Of memory with an entry for each edge between ranks' parts, every part is halved; with
    an entry for each rank, it is left out.
    """
    n, size = groups[0].n, len(groups)
    memory = {}
    for key, kept in known.memory.items():
        if kept.shape == (size // 2 + 1,) and int(kept[-1]) == known.n:
            middles = (kept[:-1] + kept[1:]) // 2
            kept = torch.cat([torch.stack([kept[:-1], middles], dim=1).flatten(), kept[-1:]]) * n // known.n
        if kept.shape[:1] != (size // 2,):
            memory[key] = kept
    for rank, group in enumerate(groups):
        copy, original = divmod(rank, len(few))
        group.unsent.copy_(few[original].unsent[:n])
        gradients.add_to(group.unsent, STEPS, rank if copy < 2 else original)
        if (draw(rank) if copy == 1 else copy) % 2:
            group.unsent.neg_()
        group.memory = {key: kept.clone() for key, kept in memory.items()}
        group.step = STEPS


class _Gradients:
    """Made-up gradients, the same in every run, and weights of zero."""

    def __init__(self, elements: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weights = torch.zeros(elements)
        self._scale = torch.randn(elements, generator=generator).mul_(SPREAD).exp_()
        self._pool = torch.randn(elements + POOL, generator=generator)

    def add_to(self, unsent: Tensor, step: int, rank: int) -> None:
        """Add the gradient of a rank in a step to ``unsent`` [n]."""
        n, start = unsent.numel(), draw(step, rank) % POOL
        unsent.addcmul_(self._scale[:n], self._pool[start : start + n])


@dataclass(slots=True)
class _Message:
    """One message of all ranks."""

    what: tuple[object, ...]  # kind, dtype, shape, and where to or from
    launched: int = 0  # by so many ranks
    parts: dict[int, Tensor] = field(default_factory=dict)  # of a shift and an all-gather: of the ranks
    result: Tensor | None = None  # of the others, and of an all-gather once all parts are there


@dataclass(slots=True)
class _Part(Pending):
    """One rank's part of a message."""

    message: _Message
    network: "CountingNetwork"
    out: Tensor | None = None  # where the result is put; None to hand out the one that all ranks share
    source: int | None = None  # of a shift: whose part arrives

    def wait(self) -> Tensor:
        """The result, now that every rank has launched this message."""
        message, size = self.message, self.network.size
        assert message.launched == size, f"only {message.launched} of {size} ranks launched {message.what}"
        if self.source is not None:
            result = message.parts.pop(self.source)
        elif message.result is not None:
            result = message.result
        else:
            result = message.result = torch.stack([message.parts.pop(rank) for rank in range(size)])
            self.network.gathered.add(result.untyped_storage().data_ptr())
        return result if self.out is None else self.out.copy_(result)


class CountingComm(Comm):
    """One rank of a :class:`CountingNetwork`."""

    def __init__(self, network: "CountingNetwork", rank: int) -> None:
        super().__init__(rank, network.size)
        self._network = network

    def buffer(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Fresh, and gone when its rank's step ends: so many ranks' buffers need not lie side by side."""
        return torch.empty(elements, dtype=dtype, device=device)

    def _all_reduce(self, x: Tensor) -> Pending:
        message = self._launch("all_reduce", x)
        if message.result is None:
            message.result = x.clone()
        else:
            message.result += x
        return _Part(message, self._network, out=x)

    def _all_gather(self, x: Tensor) -> Pending:
        message = self._launch("all_gather", x)
        message.parts[self.rank] = x.clone()
        return _Part(message, self._network)

    def _broadcast(self, x: Tensor, source: int) -> Pending:
        message = self._launch("broadcast", x, source)
        if self.rank == source:
            message.result = x.clone()
        return _Part(message, self._network, out=x)

    def _shift(self, x: Tensor, out: Tensor, by: int) -> Pending:
        message = self._launch("shift", x, by)
        message.parts[self.rank] = x.clone()
        return _Part(message, self._network, out=out, source=(self.rank - by) % self.size)

    def _launch(self, kind: str, x: Tensor, way: int = 0) -> _Message:
        return self._network.launch(self, (kind, x.dtype, x.shape, way))


class CountingNetwork:
    """P = ``size`` ranks that hand each other messages in one process, without the safeguards of ``simulate``."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.comms = [CountingComm(self, rank) for rank in range(size)]
        self.gathered: set[int] = set()  # addresses of what all-gathers of this step resulted in
        self._messages: dict[int, _Message] = {}  # of this step, by how many their rank had launched

    def launch(self, comm: Comm, what: tuple[object, ...]) -> _Message:
        """The message a rank takes part in, which all ranks must mean alike."""
        message = self._messages.get(comm.messages)
        if message is None:
            message = self._messages[comm.messages] = _Message(what)
        assert message.what == what, f"rank {comm.rank} launched {what} where others launched {message.what}"
        message.launched += 1
        return message

    def run(self, rounds: Sequence[Rounds], all_to_the_end: bool = True) -> None:
        """Run one generator a rank, each to its next message in turn; or only until that of rank 0 is at its end.

        Raises:
            AssertionError: if the ranks launch different messages.
        """
        waiting: dict[int, Pending | None] = dict.fromkeys(range(self.size))
        with self._reading_once():
            while waiting and (all_to_the_end or 0 in waiting):
                for rank in list(waiting):
                    pending = waiting.pop(rank)
                    value = None if pending is None else pending.wait()
                    try:
                        waiting[rank] = expect_pending(rounds[rank].send(value))  # type: ignore[arg-type]  # None: start
                    except StopIteration:
                        if rank == 0 and not all_to_the_end:
                            break  # nobody sends any more
        for each in rounds:
            each.close()
        launched = {comm.messages for comm in self.comms}
        assert len(launched) == 1, f"ranks launched different numbers of messages: {sorted(launched)}"
        self._messages.clear()

    @contextmanager
    def _reading_once(self) -> Iterator[None]:
        """Let :meth:`PickLayout.unpack` remember what it read off bytes that were gathered, which all ranks share."""
        read = PickLayout.unpack
        known: dict[tuple[int, PickLayout], Picks] = {}

        def unpack(layout: PickLayout, payload: Tensor) -> Picks:
            if payload.untyped_storage().data_ptr() not in self.gathered:
                return read(layout, payload)
            key = payload.data_ptr(), layout
            if key not in known:
                known[key] = read(layout, payload)
            return known[key]

        with patch.object(PickLayout, "unpack", unpack):
            yield
        self.gathered.clear()
