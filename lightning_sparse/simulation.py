"""P ranks in one process, in lockstep: for trying a compressor on gradients, and for testing one without processes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_sparse.comm import Comm, Pending, Rounds, expect_pending, wire_dtype_named
from lightning_sparse.compressors import Compressor, Dense, by_name
from lightning_sparse.compressors.base import take_step
from lightning_sparse.group import Group
from lightning_sparse.sparse import Sparse, dense


@dataclass(frozen=True)
class Simulated:
    """What :func:`simulate` returns.  T = steps, P = ranks, n = elements."""

    mean: Tensor  # [T, n] float32, the averaged gradient of each step, the same on every rank
    unsent: Tensor  # [P, n] float32, what each rank still keeps after the last step
    sent_bytes: Tensor  # [T, P] int64, bytes each rank put on the wire in each step
    picked: Tensor  # [T] int64, distinct elements updated in each step


def simulate(
    compressor: str | Compressor,
    gradients: Tensor,
    weights: Tensor | None = None,
    *,
    wire_dtype: str = "float32",
) -> Simulated:
    """Run ``compressor`` on recorded or made-up gradients, all ranks in this process.

    The ranks take turns message by message.  Every result is filled with NaN until its round has ended, and messages
    that do not match are an assertion that names the ranks, where real processes would hang.

    Args:
        compressor: an instance, or a name in ``COMPRESSORS``.
        gradients: [T, P, n] floating point: of each step, on each rank.
        weights: [n], the parameters' values, for compressors that look at them; zeros if not given.
        wire_dtype: of values on the wire: "float32", "bfloat16", "float16" or "int8".

    Raises:
        ValueError: for shapes that do not fit, an unknown compressor or an unknown ``wire_dtype``.
        AssertionError: if ranks launch different messages, end with different totals, or touch a tensor in flight.

    >>> gradients = torch.ones(3, 4, 8)  # 3 steps, 4 ranks, 8 elements
    >>> simulate("skip_reduce", gradients).mean.shape
    torch.Size([3, 8])
    """
    if gradients.ndim != 3 or gradients.shape[1] == 0 or not gradients.is_floating_point():
        raise ValueError(
            f"gradients is [steps, ranks, elements] in floating point; got {gradients.dtype} {list(gradients.shape)}."
        )
    steps, size, n = gradients.shape
    if weights is None:
        weights = torch.zeros(n, device=gradients.device)
    if weights.shape != (n,):
        raise ValueError(f"weights is [n] = [{n}], one for each element of a gradient; got {list(weights.shape)}.")
    compressor = by_name(compressor)
    if compressor.sends_whole("gradient", n):
        compressor = Dense()
    network = SimNetwork(size, wire_dtype_named(wire_dtype))
    groups = [Group(0, ("gradient",), (weights,)) for _ in range(size)]

    means, sent_bytes, picked = [], [], []
    for gradient in gradients:
        for group, own in zip(groups, gradient, strict=True):
            compressor.accumulate(group, [own], size)
        before = [comm.sent_bytes for comm in network.comms]
        totals = network.run([take_step(compressor, g, c) for g, c in zip(groups, network.comms, strict=True)])
        results = [dense(total, n) for total in totals]
        for rank, result in enumerate(results):
            assert _same_bits(result, results[0]), f"the totals differ: rank {rank}'s is not rank 0's, bit for bit"
        means.append(results[0] / size)
        sent_bytes.append([comm.sent_bytes - b for comm, b in zip(network.comms, before, strict=True)])
        picked.append(int(groups[0].picked))
    return Simulated(
        mean=torch.stack(means) if means else gradients.new_empty((0, n), dtype=torch.float32),
        unsent=torch.stack([group.unsent for group in groups]),
        sent_bytes=torch.tensor(sent_bytes, dtype=torch.int64).reshape(steps, size),
        picked=torch.tensor(picked, dtype=torch.int64),
    )


@dataclass
class _Message(Pending):
    """One rank's part of one message, and what it must find unchanged when the message arrives."""

    kind: str
    rank: int
    number: int  # the how-manieth message of its rank
    given: Tensor  # a copy of what the rank handed over
    unchanged: Tensor | None  # the tensor it handed over; None if the result comes back in it
    result: Tensor
    deliver: Callable[["_Message"], Tensor] = field(repr=False)
    by: int  # ranks a shift goes on
    source: int  # rank a broadcast comes from

    def __str__(self) -> str:
        way = f" by {self.by}" if self.by > 1 else f" from rank {self.source}" if self.kind == "broadcast" else ""
        return f"{self.kind}{way} of {str(self.given.dtype).removeprefix('torch.')} {list(self.given.shape)}"

    def wait(self) -> Tensor:
        """The result, now that every rank has launched this message."""
        return self.deliver(self)


class SimComm(Comm):
    """One rank of a :class:`SimNetwork`."""

    def __init__(self, network: "SimNetwork", rank: int, wire_dtype: torch.dtype) -> None:
        super().__init__(rank, network.size, wire_dtype)
        self._network = network

    def buffer(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Fresh and spoilt, so that nobody leans on what a buffer held before."""
        fresh = torch.empty(elements, dtype=dtype, device=device)
        _spoil(fresh)
        return fresh

    def _all_reduce(self, x: Tensor) -> Pending:
        return self._launch("all_reduce", x, result=x)

    def _all_gather(self, x: Tensor) -> Pending:
        return self._launch("all_gather", x, result=x.new_empty((self.size, *x.shape)))

    def _broadcast(self, x: Tensor, source: int) -> Pending:
        return self._launch("broadcast", x, result=x, source=source)

    def _shift(self, x: Tensor, out: Tensor, by: int) -> Pending:
        return self._launch("shift", x, result=out, by=by)

    def _launch(self, kind: str, x: Tensor, result: Tensor, by: int = 0, source: int = 0) -> Pending:
        given = x.clone()
        _spoil(result)
        sent = self._network.sent[self.rank]
        unchanged = None if result is x else x
        message = _Message(kind, self.rank, len(sent), given, unchanged, result, self._network.deliver, by, source)
        sent.append(message)
        return message


class SimNetwork:
    """P ranks that hand each other messages in one process."""

    def __init__(self, size: int, wire_dtype: torch.dtype = torch.float32) -> None:
        self.size = size
        self.sent: list[list[_Message]] = [[] for _ in range(size)]  # per rank, in the order of launching
        self.comms = [SimComm(self, rank, wire_dtype) for rank in range(size)]

    def run(self, ranks: Sequence[Rounds]) -> list[Tensor | Sparse]:
        """Run one generator a rank to its end, each to its next yield in turn; returns what each returned.

        Raises:
            AssertionError: if the ranks' messages do not match, naming the ranks and what each launched.
        """
        results: list[Tensor | Sparse | None] = [None] * self.size
        waiting: dict[int, Pending | None] = dict.fromkeys(range(self.size))
        while waiting:
            arrived = {rank: None if pending is None else pending.wait() for rank, pending in waiting.items()}
            for rank, value in arrived.items():
                try:
                    waiting[rank] = expect_pending(ranks[rank].send(value))  # type: ignore[arg-type]  # None starts it
                except StopIteration as stop:
                    results[rank] = stop.value
                    del waiting[rank]
        counts = [len(sent) for sent in self.sent]
        assert len(set(counts)) == 1, f"ranks launched different numbers of messages: {dict(enumerate(counts))}"
        for sent in self.sent:
            sent.clear()
        return results  # type: ignore[return-value]  # every rank has returned

    def deliver(self, message: _Message) -> Tensor:
        """The result of ``message``, after checking that every rank launched its part of it."""
        parts = [sent[message.number] if message.number < len(sent) else None for sent in self.sent]
        described = {str(part) if part else "nothing" for part in parts}
        if len(described) > 1:
            each = "; ".join(f"rank {rank}: {part or 'nothing'}" for rank, part in enumerate(parts))
            raise AssertionError(f"ranks disagree on message {message.number}, where real processes hang: {each}")
        if message.unchanged is not None:
            assert _same_bits(message.unchanged, message.given), (
                f"rank {message.rank} changed the tensor it handed to {message} before yielding it"
            )
        given = [part.given for part in parts if part is not None]
        if message.kind == "broadcast":
            return message.result.copy_(given[message.source])
        if message.kind == "shift":
            return message.result.copy_(given[(message.rank - message.by) % self.size])
        if message.kind == "all_gather":
            return message.result.copy_(torch.stack(given))
        total = given[0].clone()
        for other in given[1:]:
            total += other
        return message.result.copy_(total)


def _spoil(result: Tensor) -> None:
    """Fill with what nobody can mistake for a result: NaN, the smallest integer, or bits that are all set."""
    if result.is_floating_point():
        result.fill_(torch.nan)
    else:
        result.fill_(255 if result.dtype in (torch.uint8, torch.bool) else torch.iinfo(result.dtype).min)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
