"""The engine between DDP's buckets and the compressors."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # exported at run time only
from torch.futures import Future

from lightning_sparse.comm import Comm, traffic
from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.base import take_step
from lightning_sparse.group import Group
from lightning_sparse.lane import Lane
from lightning_sparse.timeline import Timeline

T = TypeVar("T")
LANES = 2  # over Gloo; one sends while the other adds


@dataclass(frozen=True)
class Report:
    """What one step of one rank cost and did."""

    sent_bytes: int
    dense_bytes: int  # what a float32 ring all-reduce of the same gradient sends
    elements: int
    picked: int | Tensor  # distinct elements updated; a tensor is not read until it is logged
    target: int
    mask_bytes: int  # of the bytes sent, those that only said which elements travel
    overflow: int  # elements this rank meant to send but kept, for want of room in a message
    ms_compress: float  # in the compressor's own code
    ms_network: float  # of the issuing thread, waiting for messages
    ms_wait: float  # of training: from the last gradient handed over to the last mean handed back


class _Delivery:
    """One of DDP's buckets: where its gradients lie, and the future that gives it back."""

    def __init__(self, bucket: GradBucket) -> None:
        self.buffer = bucket.buffer()
        self.gradients = list(_gradients(bucket))
        self.missing = len(self.gradients)  # parameters whose mean is not in the buffer yet
        device = self.buffer.device
        self.future: Future[Tensor] = Future(devices=None if device.type == "cpu" else [device])


class Exchange:
    """Averages the gradients DDP hands over, in groups of our own, and keeps what was not sent.

    DDP's bucketing only decides when gradients reach us: its buckets change their members after the first step.  Ours
    do not, so every element keeps its place, its ``unsent`` and its order of summation from the first step on.

    Args:
        groups: each group and what averages it, in the order in which they are sent.
        comms: the ranks, once for each lane; nobody else may launch messages on them.
        threaded: give each lane a thread of its own; see [Note: who issues messages].
        may_be_unused: some parameters may get no gradient in a step (DDP's ``find_unused_parameters``).

    [Note: who issues messages] Group i is sent on lane i mod the number of lanes.  A lane is one process group and one
    issuer, which runs its groups one after the other in a fixed order, so that on each process group every rank
    launches the same messages in the same order whatever the timing.  Over Gloo the issuer is a thread.  Step time
    relative to plain DDP, SkipReduce(skip=0.5) on two hosts at 1 Gbit/s (docs/benchmarks/2026-11-21-skip-reduce.md):

    =================================================================  ================  =================
    issuer                                                             groups of 25 MiB  one group a layer
    =================================================================  ================  =================
    a thread a lane, two lanes                                         0.70              0.62
    one thread                                                         0.73              0.64
    backward's thread steps every generator once, in each DDP hook     0.73              0.61
    backward's thread waits in each DDP hook                           0.81              0.85
    =================================================================  ================  =================

    Stepping is as fast only while hooks follow each other; a thread goes on where none is called.  On NCCL, where
    waiting blocks a stream and not the host, and several communicators need one order of launching, there is one lane,
    and its issuer is the caller of the hook, on a stream of our own.
    """

    def __init__(
        self,
        groups: Sequence[tuple[Group, Compressor]],
        comms: Sequence[Comm],
        *,
        threaded: bool,
        may_be_unused: bool = False,
    ) -> None:
        self.size = comms[0].size
        self.rank = comms[0].rank
        self.device = next((group.unsent.device for group, _ in groups), torch.device("cpu"))
        self.error: BaseException | None = None  # the first failure of an issuing thread
        self.steps = 0
        self.last: Report | None = None
        self.timeline = Timeline(self.device)
        self.deferred = False  # send nothing before the step's last gradient: for measuring the one without the other
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._lanes = [Lane(comm, threaded) for comm in comms]
        self._lock = threading.Lock()  # around what several lanes change
        self.lay_out(groups)

        # - the step being taken
        self._deliveries: list[_Delivery] = []  # not given back yet
        self._arrived: dict[Tensor, tuple[Tensor, _Delivery]] = {}  # parameter -> its place in DDP's bucket
        self._handed_over_ns = 0

        # - parameters without a gradient
        self._used: set[Tensor] | None = set() if may_be_unused else None
        self._handles = (
            [p.register_post_accumulate_grad_hook(self._used.add) for p in self._group_of]
            if self._used is not None
            else []
        )

    def lay_out(self, groups: Sequence[tuple[Group, Compressor]]) -> None:
        """Average in ``groups`` from now on, in their order.  To be called between two steps, on every rank."""
        self.groups = [group for group, _ in groups]
        self._compressors = [compressor for _, compressor in groups]
        self._group_of = {p: group for group in self.groups for p in group.parameters}
        self._elements = sum(group.n for group in self.groups)
        self._arriving = [len(group.parameters) for group in self.groups]  # parameters not handed over yet
        self._averaging = len(self.groups)  # groups not averaged yet
        for first, lane in enumerate(self._lanes):
            lane.groups = range(first, len(self.groups), len(self._lanes))

    def hook(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        """DDP's communication hook: takes a bucket of gradients, gives back a future of the same bucket averaged."""
        del state
        delivery = _Delivery(bucket)
        with self._lock:
            if self.error is not None:
                raise self.error
            self._deliveries.append(delivery)
        self._handed_over_ns = time.perf_counter_ns()
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream())
        self.timeline.arrive([parameter for parameter, _ in delivery.gradients])
        for parameter, gradient in delivery.gradients:
            self._arrived[parameter] = (gradient, delivery)
            self._arriving[self._group_of[parameter].index] -= 1
        last = not any(self._arriving)
        if last or not self.deferred:
            complete = [index for lane in self._lanes for index in lane.take_complete(self._arriving)]
        else:
            complete = []
        if last:  # the step's last bucket: the next hook belongs to the next step
            self._arriving = [len(group.parameters) for group in self.groups]
            for lane in self._lanes:
                lane.next = 0
        for index in complete:
            lane = self._lanes[index % len(self._lanes)]
            lane.submit(partial(self._issue, lane, index))
        return delivery.future

    def on_lanes(self, work: Callable[[Lane], T], lanes: int | None = None) -> list[T]:
        """What ``work`` returns on each of the first ``lanes`` lanes, done by their issuers at once, between two steps.

        What it sends is not counted as a step's.
        """
        chosen = self._lanes[:lanes]
        results: queue.SimpleQueue[tuple[int, T | None, BaseException | None]] = queue.SimpleQueue()

        def do(number: int, lane: Lane) -> None:
            try:
                with self._side_stream():
                    results.put((number, work(lane), None))
            except BaseException as error:  # to be raised where somebody waits
                results.put((number, None, error))
            lane.start_step()

        for number, lane in enumerate(chosen):
            lane.submit(partial(do, number, lane))
        done = sorted((results.get() for _ in chosen), key=lambda result: result[0])
        for _, _, error in done:
            if error is not None:
                raise error
        return [value for _, value, _ in done]  # type: ignore[misc]  # None only beside an error

    def close(self) -> None:
        """End the issuing threads.  What is unsent stays readable."""
        for handle in self._handles:
            handle.remove()
        for lane in self._lanes:
            lane.close(patience_s=0 if self.error else 2)

    def unsent_norm(self) -> float:
        """Euclidean norm of all this rank has not sent."""
        return float(torch.stack([group.unsent.norm() for group in self.groups]).norm()) if self.groups else 0.0

    def _issue(self, lane: Lane, index: int) -> None:
        """Average a group; an error is kept for backward to raise."""
        try:
            if self.error is None:
                with self._side_stream():
                    self._average(lane, index)
        except BaseException as error:  # whatever it is, backward must hear of it, not wait
            with self._lock:
                self.error = self.error or error
                for waiting in self._deliveries:
                    waiting.future.set_exception(self.error)  # type: ignore[arg-type]  # torch annotates it wrongly
                self._deliveries.clear()

    def _side_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream else nullcontext()

    def _average(self, lane: Lane, index: int) -> None:
        taken_up, start_ns, waited_ns = self.timeline.now(), time.perf_counter_ns(), lane.network_ns
        group = self.groups[index]
        arrived = [self._arrived.pop(parameter) for parameter in group.parameters]
        held = self._add(group, [gradient for gradient, _ in arrived])
        total = lane.run(take_step(self._compressors[index], group, lane.comm))
        group.hand_back(total, [gradient for gradient, _ in arrived], self.size)
        for slot, kept in held:
            slot.add_(kept)
        busy_ns = time.perf_counter_ns() - start_ns - (lane.network_ns - waited_ns)
        self.timeline.average(group, taken_up, busy_ns / 1e9)
        with self._lock:
            for _, delivery in arrived:
                delivery.missing -= 1
            self._averaging -= 1
            if not self._averaging:
                self._finish_step()  # before backward can go on and look
            for done in [d for d in self._deliveries if not d.missing]:
                self._deliveries.remove(done)
                done.future.set_result(done.buffer)

    def _add(self, group: Group, gradients: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Add the gradients to ``unsent``.  Returns slots emptied for this step, and what they held."""
        if self._used is None:
            group.add(gradients)
            return []
        used = [parameter in self._used for parameter in group.parameters]
        group.add([gradient if yes else None for gradient, yes in zip(gradients, used, strict=True)])
        # Nobody may use the others this step, and DDP then throws the mean away: send nothing, keep everything.
        held = [(slot, slot.clone()) for slot, yes in zip(group.slots(group.unsent), used, strict=True) if not yes]
        for slot, _ in held:
            slot.zero_()
        return held

    def _finish_step(self) -> None:
        self.last = Report(
            sent_bytes=sum(lane.sent_bytes() for lane in self._lanes),
            dense_bytes=traffic("all_reduce", 4 * self._elements, self.size),
            elements=self._elements,
            picked=sum(group.picked for group in self.groups),
            target=sum(group.target for group in self.groups),
            mask_bytes=sum(group.mask_bytes for group in self.groups),
            overflow=sum(group.overflow for group in self.groups),
            ms_compress=sum(lane.compress_ns for lane in self._lanes) / 1e6,
            ms_network=sum(lane.network_ns for lane in self._lanes) / 1e6,
            ms_wait=(time.perf_counter_ns() - self._handed_over_ns) / 1e6,
        )
        for lane in self._lanes:
            lane.start_step()
        if self._used is not None:
            self._used.clear()
        self._averaging = len(self.groups)
        self.steps += 1


def _gradients(bucket: GradBucket) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter and its gradient's place in the bucket, as a view of the parameter's shape and memory order."""
    buffer = bucket.buffer()
    offset = buffer.storage_offset()
    for parameter in bucket.parameters():
        dense = parameter.numel() == 1 + sum(
            (s - 1) * st for s, st in zip(parameter.shape, parameter.stride(), strict=True)
        )
        stride = parameter.stride() if dense else torch.empty(parameter.shape, device="meta").stride()
        yield parameter, buffer.as_strided(parameter.shape, stride, offset)
        offset += parameter.numel()
