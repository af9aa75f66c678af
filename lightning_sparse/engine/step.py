"""One step of one rank: DDP's buckets of it until they are given back, and in the end what it cost."""

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future as LaneFuture
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.futures import Future

from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.lane import Lane, spent
from lightning_sparse.engine.loss_scale import LossScale
from lightning_sparse.network.comm import Pending
from lightning_sparse.network.costs import traffic
from lightning_sparse.network.torch_comm import future_on


class PendingBucket:
    """A bucket handed over, until it is given back averaged."""

    used: Sequence[Tensor] = ()  # of the parameters, where nobody else notes that

    def __init__(self, buffer: Tensor, parameters: Sequence[Tensor]) -> None:
        self.buffer, self.parameters = buffer, parameters
        self.summed: Pending | None = None  # its sum over this rank's node, under way
        self._waiting = threading.Lock()
        self.missing = len(self.parameters)  # parameters whose mean is not in the buffer yet
        self.future: Future[Tensor] = future_on(buffer.device)

    def gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter and its gradient, a view of the buffer."""
        return gradients_of(self.buffer, self.parameters)

    def wait(self) -> None:
        """Wait until its gradients may be read."""
        with self._waiting:  # lanes may have a group each in it
            if self.summed is not None:
                self.summed.wait()
                self.summed = None  # a message is waited for once: over Gloo the second time would not end

    def give_back(self) -> None:
        self.future.set_result(self.buffer)


def gradients_of(buffer: Tensor, parameters: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter and its gradient's place in a bucket, as a view of the parameter's shape and memory order."""
    offset = buffer.storage_offset()
    for parameter in parameters:
        dense = parameter.numel() == 1 + sum(
            (s - 1) * st for s, st in zip(parameter.shape, parameter.stride(), strict=True)
        )
        stride = (
            parameter.stride() if dense else torch.empty(parameter.shape, dtype=parameter.dtype, device="meta").stride()
        )
        yield parameter, buffer.as_strided(parameter.shape, stride, offset)
        offset += parameter.numel()


class Step:
    """All that belongs to one step, from its first bucket to its last mean.

    The ``groups`` are in the order in which they are sent.  Each of ``queues`` has lanes and their groups, by index, in
    an order that is kept.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        queues: Sequence[Sequence[tuple[int, int]]],
        lanes: Sequence[Lane],
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.groups = groups
        self.buckets: list[PendingBucket] = []  # not given back yet
        self.gradients: dict[Tensor, tuple[Tensor, PendingBucket]] = {}  # parameter -> its place in DDP's bucket
        self.averaging = len(groups)  # groups not averaged yet
        self.loss_scale = LossScale(scaler, groups[0].unsent.device) if scaler is not None else None
        self.overflowed: Pending  # with a loss scale, and how many ranks found a gradient that is not finite
        self.averages: list[LaneFuture[None]] = []  # with a loss scale
        self.in_place: torch.dtype | None = None  # the type in which DDP's buckets are summed where they lie
        self.is_undone = False  # with a loss scale, since a rank has overflowed
        self.sends_all = False  # all is summed in float32, so that nothing is unsent after it
        self.unsummed: list[PendingBucket] = []  # of these, what no message has yet
        self.least_bytes = 0  # of the next message; the first is as short as DDP's
        self._arriving = [len(group.parameters) for group in groups]  # parameters not handed over yet
        self._queues = [deque(queue) for queue in queues]
        self._lanes = lanes
        self._spent_before = spent(lanes)
        self._handed_over_ns = time.perf_counter_ns()  # of what was handed over last

    @property
    def has_arrived(self) -> bool:
        return not any(self._arriving)

    def take_in(self, bucket: PendingBucket, group_of: dict[Tensor, Group]) -> None:
        self._handed_over_ns = time.perf_counter_ns()
        for parameter in bucket.parameters:
            self._arriving[group_of[parameter].index] -= 1
        if not self.in_place:
            self.gradients.update((parameter, (gradient, bucket)) for parameter, gradient in bucket.gradients())

    def take_complete(self) -> Iterator[tuple[int, int]]:
        """Yield each lane and group that may be sent now: complete, with none before it in its queue that is not."""
        for queue in self._queues:
            while queue and not self._arriving[queue[0][1]]:
                yield queue.popleft()

    def ask_for_overflow(self, lane: Lane) -> None:
        """Launch the message that says how many ranks found a gradient that is not finite."""
        assert self.loss_scale is not None
        self.overflowed = lane.comm.all_reduce(self.loss_scale.overflowed)

    def count_averaged(self, buckets: Sequence[PendingBucket]) -> None:
        """Count one group as averaged, with a parameter in each of ``buckets``, some perhaps named twice."""
        self.averaging -= 1
        for bucket in buckets:
            bucket.missing -= 1

    def give_back(self) -> None:
        """Let backward have the buckets that are averaged."""
        for done in [d for d in self.buckets if not d.missing]:
            self.buckets.remove(done)
            done.give_back()

    def fail(self, error: BaseException) -> None:
        for waiting in self.buckets:
            waiting.future.set_exception(error)  # type: ignore[arg-type]  # torch annotates it wrongly
        self.buckets.clear()

    def report(self) -> "Report":
        waited_ns = time.perf_counter_ns() - self._handed_over_ns
        report = Report.of(self.groups, self.groups, self._lanes, self._spent_before, waited_ns)
        return replace(report, ms_network=report.ms_wait) if self.in_place else report  # no lane waits for the backend


@dataclass(frozen=True)
class Report:
    """The cost and the effect of one step of one rank."""

    sent_bytes: int
    dense_bytes: int  # what a float32 ring all-reduce of the same gradient sends
    elements: int
    picked: int | Tensor  # distinct elements updated; a tensor is not read until it is logged
    target: int
    mask_bytes: int  # of the bytes sent, those that only said which elements travel
    overflow: int | Tensor  # elements this rank meant to send but kept, for want of room in a message; likewise
    ms_compress: float  # in the compressor's own code
    ms_network: float  # of the issuing thread, waiting for messages
    ms_wait: float  # of training: from the last gradient handed over to the last mean handed back

    @classmethod
    def of(
        cls,
        every: Sequence[Group],
        averaged: Sequence[Group],
        lanes: Sequence[Lane],
        spent_before: Sequence[int],
        waited_ns: int,
    ) -> "Report":
        """Return what a step cost that ``averaged`` some of ``every`` group, and for which training waited.

        ``spent_before`` is what :func:`spent` returned when the step began.
        """
        pairs = zip(spent(lanes), spent_before or [0, 0, 0], strict=True)
        sent_bytes, compress_ns, network_ns = (now - before for now, before in pairs)
        elements = sum(group.n for group in every)
        return cls(
            sent_bytes=sent_bytes,
            dense_bytes=traffic("all_reduce", 4 * elements, lanes[0].comm.size),
            elements=elements,
            picked=sum(group.picked for group in averaged),
            target=sum(group.target for group in averaged),
            mask_bytes=sum(group.mask_bytes for group in averaged),
            overflow=sum(group.overflow for group in averaged),
            ms_compress=compress_ns / 1e6,
            ms_network=network_ns / 1e6,
            ms_wait=waited_ns / 1e6,
        )

    def saves_bytes(self) -> bool:
        """Whether fewer bytes were sent than dense DDP would have sent; also where there was nobody to send to."""
        return self.sent_bytes < self.dense_bytes or not self.dense_bytes
