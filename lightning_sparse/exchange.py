"""The engine between DDP's buckets and the compressors."""

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # exported at run time only
from torch.futures import Future

from lightning_sparse.comm import Comm, Rounds, traffic
from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.base import take_step
from lightning_sparse.group import Group


@dataclass(frozen=True)
class Report:
    """What one step of one rank cost and did."""

    sent_bytes: int
    dense_bytes: int  # what a float32 ring all-reduce of the same gradient sends
    elements: int
    picked: int | Tensor  # distinct elements updated; a tensor is not read until it is logged
    target: int
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
        comm: the ranks; nobody else may launch messages on it.
        threaded: issue messages from a thread of this object's own; see [Note: who issues messages].
        may_be_unused: some parameters may get no gradient in a step (DDP's ``find_unused_parameters``).

    [Note: who issues messages] All messages of a rank are launched by one issuer, group after group in a fixed order,
    so that the order is the same on every rank whatever the timing.  The candidates are the thread that runs backward
    (in DDP's hook) and a thread of our own.
    """

    def __init__(
        self,
        groups: Sequence[tuple[Group, Compressor]],
        comm: Comm,
        *,
        threaded: bool,
        may_be_unused: bool = False,
    ) -> None:
        self.groups = [group for group, _ in groups]
        self.comm = comm
        self.error: BaseException | None = None  # the first failure of the issuing thread
        self.steps = 0
        self.last: Report | None = None
        self._compressors = [compressor for _, compressor in groups]
        self._slots = {
            p: (g, slot) for g in self.groups for p, slot in zip(g.parameters, g.slots(g.unsent), strict=True)
        }
        elements = sum(group.n for group in self.groups)
        self._dense_bytes = traffic("all_reduce", 4 * elements, comm.size)

        # - the step being taken
        self._deliveries: list[_Delivery] = []  # not given back yet
        self._arrived: dict[Tensor, tuple[Tensor, _Delivery]] = {}  # parameter -> its place in DDP's bucket
        self._next = 0  # the group to send next
        self._meter = _Meter(comm)
        self._handed_over_ns = 0

        # - parameters without a gradient
        self._used: set[Tensor] | None = set() if may_be_unused else None
        self._held: dict[Tensor, Tensor] = {}  # what an unused parameter's slot held before the step
        self._handles = [
            p.register_post_accumulate_grad_hook(self._used.add) for p in self._slots if self._used is not None
        ]

        device = self.groups[0].unsent.device if self.groups else torch.device("cpu")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._inbox: queue.SimpleQueue[_Delivery | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._issue, name="lightning_sparse", daemon=True) if threaded else None
        if self._thread:
            self._thread.start()

    def hook(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        """DDP's communication hook: takes a bucket of gradients, gives back a future of the same bucket averaged."""
        del state
        delivery = _Delivery(bucket)
        self._handed_over_ns = time.perf_counter_ns()
        if self._thread:
            self._inbox.put(delivery)
        else:
            self._take(delivery)
        return delivery.future

    def close(self) -> None:
        """End the issuing thread.  What is unsent stays readable."""
        for handle in self._handles:
            handle.remove()
        if self._thread and self._thread.is_alive():
            self._inbox.put(None)
            self._thread.join(timeout=0 if self.error else 10)

    def unsent_norm(self) -> float:
        """Euclidean norm of all this rank has not sent."""
        return float(torch.stack([group.unsent.norm() for group in self.groups]).norm()) if self.groups else 0.0

    # - the issuing thread

    def _issue(self) -> None:
        while (delivery := self._inbox.get()) is not None:
            try:
                if self.error is None:
                    self._take(delivery)
                else:
                    self._deliveries.append(delivery)
            except BaseException as error:  # whatever it is, backward must hear of it, not wait
                self.error = error
            if self.error is not None:
                for waiting in self._deliveries:
                    waiting.future.set_exception(self.error)  # type: ignore[arg-type]  # torch annotates it wrongly
                self._deliveries.clear()

    def _take(self, delivery: _Delivery) -> None:
        self._deliveries.append(delivery)
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            for parameter, gradient in delivery.gradients:
                self._add(parameter, gradient)
                self._arrived[parameter] = (gradient, delivery)
            while self._next < len(self.groups) and self._complete(self.groups[self._next]):
                self._average(self._next)
                self._next += 1
            if self._next == len(self.groups):
                self._finish_step()  # before backward can go on and look
            for done in [d for d in self._deliveries if not d.missing]:
                self._deliveries.remove(done)
                done.future.set_result(done.buffer)

    def _add(self, parameter: Tensor, gradient: Tensor) -> None:
        _, slot = self._slots[parameter]
        if self._used is not None and parameter not in self._used:
            # Nobody may use it this step, and DDP then throws the mean away: send nothing, keep everything.
            self._held[parameter] = slot.clone()
            slot.zero_()
        else:
            slot.view(parameter.shape).add_(gradient)

    def _complete(self, group: Group) -> bool:
        return all(p in self._arrived for p in group.parameters)

    def _average(self, index: int) -> None:
        group = self.groups[index]
        mean = self._meter.run(take_step(self._compressors[index], group, self.comm))
        for parameter, slot in zip(group.parameters, group.slots(mean), strict=True):
            gradient, delivery = self._arrived.pop(parameter)
            gradient.copy_(slot.view(parameter.shape))
            if parameter in self._held:
                self._slots[parameter][1].add_(self._held.pop(parameter))
            delivery.missing -= 1

    def _finish_step(self) -> None:
        done_ns = time.perf_counter_ns()
        self._next = 0
        if self._used is not None:
            self._used.clear()
        self.last = Report(
            sent_bytes=self._meter.sent_bytes(),
            dense_bytes=self._dense_bytes,
            elements=sum(group.n for group in self.groups),
            picked=sum(group.picked for group in self.groups),
            target=sum(group.target for group in self.groups),
            ms_compress=self._meter.compress_ns / 1e6,
            ms_network=self._meter.network_ns / 1e6,
            ms_wait=(done_ns - self._handed_over_ns) / 1e6,
        )
        self._meter = _Meter(self.comm)
        self.steps += 1


class _Meter:
    """Runs generators to their end, and counts what a step took."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._before = comm.sent_bytes
        self.compress_ns = 0
        self.network_ns = 0

    def sent_bytes(self) -> int:
        return self._comm.sent_bytes - self._before

    def run(self, rounds: Rounds) -> Tensor:
        start = time.perf_counter_ns()
        waited = 0
        try:
            pending = next(rounds)
            while True:
                if not hasattr(pending, "wait"):
                    raise TypeError(f"a compressor yielded {type(pending).__name__}; yield what a method of comm gave.")
                waiting = time.perf_counter_ns()
                result = pending.wait()
                waited += time.perf_counter_ns() - waiting
                pending = rounds.send(result)
        except StopIteration as stop:
            self.network_ns += waited
            self.compress_ns += time.perf_counter_ns() - start - waited
            mean: Tensor = stop.value
            return mean


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
