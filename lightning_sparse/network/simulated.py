"""A network of P ranks in one process, in lockstep, that checks what real processes would hang on."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor

from lightning_sparse.network.comm import Comm, Meter, Pending, Rounds, expect_pending, without_autocast
from lightning_sparse.network.costs import HOP_BYTES, Costs, hops
from lightning_sparse.selection.sparse import Sparse
from lightning_sparse.wire import FLOAT32, ValueFormat


@dataclass(slots=True)
class _Part(Pending):
    """One rank's part of a message, and what it must find unchanged when the message arrives."""

    kind: str
    number: int  # its position among its rank's messages
    given: Tensor  # a copy of what the rank handed over
    unchanged: Tensor | None  # the tensor it handed over; None if the result comes back in it
    result: Tensor  # where the result goes
    by: tuple[int, ...]  # how many ranks further on a shift or the rows of an all-to-all go
    source: int  # rank a broadcast comes from
    hops: int  # of its rank once it has arrived
    comm: "SimComm" = field(repr=False)

    @property
    def rank(self) -> int:
        return self.comm.rank

    def __str__(self) -> str:
        way = f" by {self.by}" if self.by else f" from rank {self.source}" if self.kind == "broadcast" else ""
        return f"{self.kind}{way} of {str(self.given.dtype).removeprefix('torch.')} {list(self.given.shape)}"

    def wait(self) -> Tensor:
        """The result, now that every rank has launched this message."""
        return self.comm.arrived(self)


@dataclass
class _Message:
    """The parts that all ranks launched at the same position among their messages."""

    parts: dict[int, _Part] = field(default_factory=dict)  # by rank
    result: Tensor | None = None  # of an all-reduce or an all-gather, which is the same for all
    delivered: int = 0


@dataclass
class _SimMeter(Meter):
    """What one rank has launched and waited for, see :class:`SimComm`."""

    hops: int = 0


class SimComm(Comm):
    """One rank of a :class:`SimNetwork`."""

    def __init__(self, network: "SimNetwork", rank: int, hop_bytes: int) -> None:
        super().__init__(rank, network.size)
        self.costs = Costs(network.size, hop_bytes)
        self._meter: _SimMeter = _SimMeter()
        self._network = network

    @property
    def hops(self) -> int:
        """Hops that have followed one another so far: what each message waited for had to arrive."""
        return self._meter.hops

    def arrived(self, part: _Part) -> Tensor:
        self._meter.hops = max(self.hops, part.hops)
        return self._network.deliver(part)

    def buffer(self, name: str, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Fresh, and spoilt where it is checked that nobody leans on what a buffer held before."""
        fresh = torch.empty(elements, dtype=dtype, device=device)
        if self._network.checks:
            _spoil(fresh)
        return fresh

    def _all_reduce(self, x: Tensor, direct: bool) -> Pending:
        return self._launch("all_reduce", x, result=x, goes_as="all_gather" if direct else "")

    def _all_gather(self, x: Tensor, out: Tensor) -> Pending:
        return self._launch("all_gather", x, result=out)

    def _broadcast(self, x: Tensor, source: int) -> Pending:
        return self._launch("broadcast", x, result=x, source=source)

    def _shift(self, x: Tensor, out: Tensor, by: int) -> Pending:
        return self._launch("shift", x, result=out, by=(by,))

    def _all_to_all(self, x: Tensor, out: Tensor, by: Sequence[int]) -> Pending:
        return self._launch("all_to_all", x, result=out, by=tuple(by))

    def _launch(
        self, kind: str, x: Tensor, result: Tensor, by: tuple[int, ...] = (), source: int = 0, goes_as: str = ""
    ) -> Pending:
        given, checks = x.clone(), self._network.checks
        if checks:
            _spoil(result)
        unchanged = x if checks and result is not x else None
        number = self._network.launched[self.rank]
        done = self.hops + hops(goes_as or kind, self.size)
        return self._network.add(_Part(kind, number, given, unchanged, result, by, source, done, self))


class SimNetwork:
    """P ranks that hand each other messages in one process.

    Args:
        size: P.
        wire_dtype: of values on the wire.
        hop_bytes: as in :class:`Costs`; an all-reduce of the backend goes round a ring in 2(P-1) hops.
        checks: fill results with NaN until they arrive, and assert that nobody changes what is under way.
    """

    def __init__(
        self, size: int, wire_dtype: ValueFormat = FLOAT32, hop_bytes: int = HOP_BYTES, checks: bool = True
    ) -> None:
        self.size, self.checks = size, checks
        self.launched = [0] * size  # messages, by rank
        self._messages: dict[int, _Message] = {}  # under way, by number
        self.comms = [SimComm(self, rank, hop_bytes).in_format(wire_dtype) for rank in range(size)]

    @without_autocast()
    def run(self, ranks: Sequence[Rounds]) -> list[Tensor | Sparse]:
        """Run one generator a rank to its end, each to its next yield in turn; returns what each returned.

        Raises:
            AssertionError: if the ranks' messages do not match, naming the ranks and what each launched.
        """
        results: list[Tensor | Sparse | None] = [None] * self.size
        waiting: dict[int, Pending | None] = dict.fromkeys(range(self.size))
        while waiting:
            for rank in list(waiting):
                pending = waiting.pop(rank)
                value = None if pending is None else pending.wait()
                try:
                    waiting[rank] = expect_pending(ranks[rank].send(value))  # type: ignore[arg-type]  # None starts it
                except StopIteration as stop:
                    results[rank] = stop.value
        counts = self.launched
        assert len(set(counts)) == 1, f"ranks launched different numbers of messages: {dict(enumerate(counts))}"
        self.launched = [0] * self.size
        self._messages.clear()
        return results  # type: ignore[return-value]  # every rank has returned

    def add(self, part: _Part) -> Pending:
        """Take a rank's part of a message that it launches."""
        self.launched[part.rank] += 1
        self._messages.setdefault(part.number, _Message()).parts[part.rank] = part
        return part

    def deliver(self, part: _Part) -> Tensor:
        """The result of a message for one rank, after checking that every rank launched its part of it."""
        message = self._messages[part.number]
        if not message.delivered:
            self._check(part.number, message.parts)
        if part.unchanged is not None:
            assert same_bits(part.unchanged, part.given), (
                f"rank {part.rank} changed the tensor it handed to {part} before yielding it"
            )
        message.delivered += 1
        if message.delivered == self.size:
            del self._messages[part.number]
        if part.kind == "broadcast":
            arrived = message.parts[part.source].given
        elif part.kind == "all_to_all":
            for by in part.by:
                source = (part.rank - by) % self.size
                part.result[source] = message.parts[source].given[part.rank]
            return part.result
        elif part.kind == "shift":
            arrived = message.parts[(part.rank - part.by[0]) % self.size].given
        else:
            if message.result is None:
                given = [message.parts[rank].given for rank in range(self.size)]
                message.result = torch.stack(given) if part.kind == "all_gather" else reduce(torch.add, given)
            arrived = message.result
        return part.result.copy_(arrived)

    def _check(self, number: int, parts: dict[int, _Part]) -> None:
        """Raise an AssertionError unless all ranks have launched the same."""
        texts = {rank: str(parts.get(rank, "nothing")) for rank in range(self.size)}
        if len(set(texts.values())) > 1:
            each = "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())
            raise AssertionError(f"ranks disagree on message {number}, where real processes hang: {each}")


def _spoil(result: Tensor) -> None:
    """Fill with what nobody can mistake for a result: NaN, the smallest integer, or bits that are all set."""
    if result.is_floating_point():
        result.fill_(torch.nan)
    else:
        result.fill_(255 if result.dtype in (torch.uint8, torch.bool) else torch.iinfo(result.dtype).min)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether ``a`` and ``b`` hold the same bytes; NaN equals itself here."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
