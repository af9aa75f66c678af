"""The engine between DDP's buckets and the compressors."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # exported at run time only
from torch.futures import Future

from lightning_sparse.comm import Comm, Rounds, expect_pending, traffic
from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.base import take_step
from lightning_sparse.group import Group
from lightning_sparse.sparse import Sparse

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
        self.groups = [group for group, _ in groups]
        self.size = comms[0].size
        self.rank = comms[0].rank
        self.error: BaseException | None = None  # the first failure of an issuing thread
        self.steps = 0
        self.last: Report | None = None
        self._compressors = [compressor for _, compressor in groups]
        self._group_of = {p: group for group in self.groups for p in group.parameters}
        self._elements = sum(group.n for group in self.groups)

        # - the step being handed over: only the hook's thread looks
        self._arriving = [len(group.parameters) for group in self.groups]  # parameters not handed over yet

        # - the step being taken
        self._deliveries: list[_Delivery] = []  # not given back yet
        self._arrived: dict[Tensor, tuple[Tensor, _Delivery]] = {}  # parameter -> its place in DDP's bucket
        self._averaging = len(self.groups)  # groups not averaged yet
        self._handed_over_ns = 0
        self._lock = threading.Lock()  # around what several lanes change

        # - parameters without a gradient
        self._used: set[Tensor] | None = set() if may_be_unused else None
        self._handles = (
            [p.register_post_accumulate_grad_hook(self._used.add) for p in self._group_of]
            if self._used is not None
            else []
        )

        device = self.groups[0].unsent.device if self.groups else torch.device("cpu")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._lanes = [
            _Lane(comm, range(first, len(self.groups), len(comms)), self._issue if threaded else None)
            for first, comm in enumerate(comms)
        ]

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
        for parameter, gradient in delivery.gradients:
            self._arrived[parameter] = (gradient, delivery)
            self._arriving[self._group_of[parameter].index] -= 1
        complete = [index for lane in self._lanes for index in lane.take_complete(self._arriving)]
        if not any(self._arriving):  # the step's last bucket: the next hook belongs to the next step
            self._arriving = [len(group.parameters) for group in self.groups]
            for lane in self._lanes:
                lane.next = 0
        for index in complete:
            lane = self._lanes[index % len(self._lanes)]
            if lane.thread:
                lane.inbox.put(index)
            else:
                with torch.cuda.stream(self._stream) if self._stream else nullcontext():
                    self._average(lane, index)
        return delivery.future

    def close(self) -> None:
        """End the issuing threads.  What is unsent stays readable."""
        for handle in self._handles:
            handle.remove()
        for lane in self._lanes:
            if lane.thread and lane.thread.is_alive():
                lane.inbox.put(None)
                lane.thread.join(timeout=0 if self.error else 2)

    def unsent_norm(self) -> float:
        """Euclidean norm of all this rank has not sent."""
        return float(torch.stack([group.unsent.norm() for group in self.groups]).norm()) if self.groups else 0.0

    def _issue(self, lane: "_Lane") -> None:
        """A lane's thread."""
        while (index := lane.inbox.get()) is not None:
            try:
                if self.error is None:
                    self._average(lane, index)
            except BaseException as error:  # whatever it is, backward must hear of it, not wait
                with self._lock:
                    self.error = self.error or error
                    for waiting in self._deliveries:
                        waiting.future.set_exception(self.error)  # type: ignore[arg-type]  # torch annotates it wrongly
                    self._deliveries.clear()

    def _average(self, lane: "_Lane", index: int) -> None:
        group = self.groups[index]
        arrived = [self._arrived.pop(parameter) for parameter in group.parameters]
        held = self._add(group, [gradient for gradient, _ in arrived])
        total = lane.run(take_step(self._compressors[index], group, lane.comm))
        group.hand_back(total, [gradient for gradient, _ in arrived], self.size)
        for slot, kept in held:
            slot.add_(kept)
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


class _Lane:
    """One process group and its issuer: the caller of the hook, or a thread that runs ``work``."""

    def __init__(self, comm: Comm, groups: Sequence[int], work: "Callable[[_Lane], None] | None") -> None:
        self.comm = comm
        self.groups = groups  # indices, in the order in which they are sent
        self.next = 0  # position in `groups` of the one to send next; only the hook's thread looks
        self.inbox: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self.start_step()
        self.thread = (
            threading.Thread(target=work, args=(self,), name="lightning_sparse", daemon=True) if work else None
        )
        if self.thread:
            self.thread.start()

    def take_complete(self, arriving: Sequence[int]) -> list[int]:
        """Groups that may be sent now: complete, and with none before them on this lane that is not."""
        first = self.next
        while self.next < len(self.groups) and not arriving[self.groups[self.next]]:
            self.next += 1
        return list(self.groups[first : self.next])

    def start_step(self) -> None:
        self.compress_ns = 0
        self.network_ns = 0
        self._sent_before = self.comm.sent_bytes

    def sent_bytes(self) -> int:
        return self.comm.sent_bytes - self._sent_before

    def run(self, rounds: Rounds) -> Tensor | Sparse:
        """Run a compressor to its end; counts the time it worked and the time it waited."""
        self.comm.reuse_buffers()
        start_ns = time.perf_counter_ns()
        waited_ns = 0
        try:
            pending = next(rounds)
            while True:
                waiting_ns = time.perf_counter_ns()
                result = expect_pending(pending).wait()
                waited_ns += time.perf_counter_ns() - waiting_ns
                pending = rounds.send(result)
        except StopIteration as stop:
            self.network_ns += waited_ns
            self.compress_ns += time.perf_counter_ns() - start_ns - waited_ns
            total: Tensor | Sparse = stop.value
            return total


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
