"""Finds accesses to memory of a fake device that no event orders.

Each stream has a vector clock: how much of every stream is done before what it does next.  Waiting for an event takes
over the clock of when it was recorded; what the host waits for is done before all that is launched afterwards.  Every
access to memory, in bytes, is compared with those before it: two of which one writes must be ordered.  Memory that is
freed is lent again to what its own stream does next, so all that other streams did to it must be done by then.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.fake_cuda import FakeCuda, Stream, place

Clock = dict[int, int]  # of each stream, by number, how many of its operations are done


@dataclass(frozen=True)
class Access:
    """What an operation did to bytes [begin, end) of some memory."""

    what: str
    stream: int
    number: int  # among the operations of its stream
    begin: int
    end: int
    writes: bool

    def is_before(self, clock: Clock) -> bool:
        return clock.get(self.stream, 0) >= self.number

    def __str__(self) -> str:
        return f"{self.what} {'writes' if self.writes else 'reads'} on stream {self.stream}"


@dataclass
class Memory:
    """What was done to memory since it was allocated."""

    alive: StorageWeakRef
    stream: int  # whose it is
    accesses: list[Access] = field(default_factory=list)


class HappensBefore(FakeCuda):
    """A fake device that notes every access.

    Attributes:
        unordered: pairs of accesses that no event orders, in words.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unordered: list[str] = []
        self.accesses = 0
        self._clocks: dict[int, Clock] = {}
        self._host: Clock = {}
        self._memories: dict[int, Memory] = {}
        self._shared: set[int] = set()  # memory that another stream than its own has used
        self._freed: dict[int, list[Memory]] = {}  # such memory, of each stream, that it may lend to what it does next

    # - clocks

    def moment(self, stream: Stream) -> Any:
        return super().moment(stream), dict(self._clocks.get(stream.number, {}))

    def wait(self, stream: Stream, moment: Any) -> None:
        if moment is not None:  # of an event that was never recorded
            _join(self._clocks.setdefault(stream.number, {}), moment[1])

    def host_waits(self, how: str, moment: Any) -> None:
        super().host_waits(how, moment[0])
        _join(self._host, moment[1])

    # - memory

    def allocate(self, x: Tensor) -> None:
        self._memory(x)

    def touch(self, name: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        stream = self.stream.number
        clock = self._clocks.setdefault(stream, {})
        _join(clock, self._host)
        clock[stream] = clock.get(stream, 0) + 1
        what = f"{name} ({place()})"
        self._find_freed()
        for memory in self._freed.pop(stream, []):  # any of it may be lent to this operation
            for before in memory.accesses:
                if not before.is_before(clock):
                    self._note(f"{before}, {what} on stream {stream} may be lent its memory: nothing orders them")
        for tensors, writes in ((read, False), (written, True)):
            for x in tensors:
                begin, end = _bytes(x)
                if begin < end:
                    self._access(x, Access(what, stream, clock[stream], begin, end, writes), clock)

    def host_reads(self, x: Tensor) -> None:
        begin, end = _bytes(x)
        now = Access(f"the host ({place()})", -1, 0, begin, end, False)
        for before in self._memory(x).accesses:
            self._compare(before, now, self._host)

    def _access(self, x: Tensor, now: Access, clock: Clock) -> None:
        memory = self._memory(x)
        self.accesses += 1
        if now.stream != memory.stream:
            self._shared.add(_key(x))
        for before in memory.accesses:
            if before.number != now.number or before.stream != now.stream:
                self._compare(before, now, clock)
        memory.accesses = [
            before for before in memory.accesses
            if not (now.begin <= before.begin and before.end <= now.end and (now.writes or before.stream == now.stream))
            or (before.writes and not now.writes)
        ]  # fmt: skip
        memory.accesses.append(now)

    def _compare(self, before: Access, now: Access, clock: Clock) -> None:
        apart = before.end <= now.begin or now.end <= before.begin
        if not apart and (before.writes or now.writes) and not before.is_before(clock):
            self._note(f"{before}, {now}: nothing orders them")

    def _find_freed(self) -> None:
        for key in [key for key in self._shared if self._memories[key].alive.expired()]:
            self._free(self._memories.pop(key))
            self._shared.remove(key)

    def _free(self, memory: Memory) -> None:
        self._freed.setdefault(memory.stream, []).append(memory)

    def _note(self, found: str) -> None:
        if found not in self.unordered:
            self.unordered.append(found)

    def _memory(self, x: Tensor) -> Memory:
        key = _key(x)
        memory = self._memories.get(key)
        if memory is None or memory.alive.expired():
            if memory is not None and key in self._shared:
                self._free(memory)
                self._shared.remove(key)
            memory = self._memories[key] = Memory(StorageWeakRef(x.untyped_storage()), self.stream.number)
        return memory


def _join(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)


def _key(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _bytes(x: Tensor) -> tuple[int, int]:
    """The first and the last byte between which ``x`` lies in its memory."""
    begin = x.storage_offset()
    if not x.numel():
        return begin, begin
    last = begin + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return begin * x.itemsize, (last + 1) * x.itemsize
