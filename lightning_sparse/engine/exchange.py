"""The engine between DDP's buckets and the compressors."""

import concurrent.futures
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # exported at run time only
from torch.futures import Future

from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.base import take_step
from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.delivery import Delivery
from lightning_sparse.engine.lane import Lane, spread
from lightning_sparse.engine.loss_scale import LossScale
from lightning_sparse.engine.sample import Sample
from lightning_sparse.engine.step_report import Report
from lightning_sparse.engine.timeline import Timeline
from lightning_sparse.engine.unused_parameters import UsedParameters
from lightning_sparse.network.comm import Comm, Pending
from lightning_sparse.network.process_groups import ProcessGroups

T = TypeVar("T")


class Exchange:
    """Averages the gradients DDP hands over, in groups of our own, and keeps what was not sent.

    DDP's bucketing only decides when gradients reach us: its buckets change their members after the first step.  Ours
    do not, so every element keeps its place, its ``unsent`` and its order of summation from the first step on.

    Args:
        groups: each group and what averages it, in the order in which they are sent.
        comms: the ranks, once for each lane; nobody else may launch messages on them.
        threaded: give each lane a thread of its own; see [Note: who issues messages].
        node: of this rank, if there are nodes: then ``comms`` are of nodes, and one averages its ranks' gradients.
        may_be_unused: some parameters may get no gradient in a step (DDP's ``find_unused_parameters``).
        loss_scale: what gradients are multiplied by, if they are.

    [Note: who issues messages] Each group is sent on the lane with the fewest elements before it.  A lane is one
    process group and one issuer, which runs its groups one after the other in a fixed order, so that on each process
    group every rank launches the same messages in the same order whatever the timing.  Over Gloo the issuer is a
    thread.  Step time relative to plain DDP, SkipReduce(skip=0.5) on two hosts at 1 Gbit/s
    (docs/benchmarks/2026-11-21-skip-reduce.md):

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
        node: ProcessGroups | None = None,
        may_be_unused: bool = False,
        loss_scale: LossScale | None = None,
    ) -> None:
        self._node = node
        self._share = 1 / node.local_size if node else 1.0  # of a node's sum in its gradient
        self.size = comms[0].size
        self.rank = comms[0].rank
        self.device = next((group.unsent.device for group, _ in groups), torch.device("cpu"))
        self.error: BaseException | None = None  # the first failure of an issuing thread
        self.steps = 0
        self.last: Report | None = None
        self.sample: Sample | None = None  # of what is unsent, while somebody wants to know how long it waits
        self.timeline = Timeline(self.device)
        self.deferred = False  # send nothing before the step's last gradient: for measuring the one without the other
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._lanes = [Lane(comm, threaded) for comm in comms]
        self._lock = threading.Lock()  # around what several lanes change
        self.lay_out(groups)

        # - the step being taken
        self._deliveries: list[Delivery] = []  # not given back yet
        self._arrived: dict[Tensor, tuple[Tensor, Delivery]] = {}  # parameter -> its place in DDP's bucket
        self._handed_over_ns = 0

        # - loss scaling
        self._loss_scale = loss_scale
        self._all_averaged = threading.Event()
        self._overflowed: Pending

        self._used = UsedParameters(self._group_of) if may_be_unused else None

    def lay_out(self, groups: Sequence[tuple[Group, Compressor]]) -> None:
        """Average in ``groups`` from now on, in their order.  To be called between two steps, on every rank."""
        self.groups = [group for group, _ in groups]
        self.compressors = [compressor for _, compressor in groups]
        self._group_of = {p: group for group in self.groups for p in group.parameters}
        self._arriving = [len(group.parameters) for group in self.groups]  # parameters not handed over yet
        self._averaging = len(self.groups)  # groups not averaged yet
        self._lane_of = spread([group.n for group in self.groups], len(self._lanes))
        for number, lane in enumerate(self._lanes):
            lane.groups = [index for index, its in enumerate(self._lane_of) if its == number]
        if self.sample is not None:
            self.sample.lay_out(self.groups)

    def hook(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        """DDP's communication hook: takes a bucket of gradients, gives back a future of the same bucket averaged."""
        del state
        delivery = Delivery(bucket)
        with self._lock:
            if self.error is not None:
                raise self.error
            self._deliveries.append(delivery)
        self._handed_over_ns = time.perf_counter_ns()
        self._take_in(delivery)
        last = not any(self._arriving)
        ready = last or not self.deferred
        complete = [index for lane in self._lanes for index in lane.take_complete(self._arriving)] if ready else []
        if last:  # the step's last bucket: the next hook belongs to the next step
            self._arriving = [len(group.parameters) for group in self.groups]
            for lane in self._lanes:
                lane.next = 0
        if last and self._loss_scale:  # beside the last groups' messages, so that nobody waits for it
            if self._node:
                self._node.sum_inside(self._loss_scale.overflowed).wait()
            self._submit(0, self._ask_for_overflow)
        for index in complete:
            self._submit(self._lane_of[index], partial(self._average, index=index))
        if last and self._loss_scale:
            self._submit(0, self._settle)
        return delivery.future

    def _take_in(self, delivery: Delivery) -> None:
        self.timeline.arrive([parameter for parameter, _ in delivery.gradients])
        if self._loss_scale:
            self._loss_scale.take_in(delivery.buffer)
        if self._node:
            delivery.summed = self._node.sum_inside(delivery.buffer)
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream())
        for parameter, gradient in delivery.gradients:
            self._arrived[parameter] = (gradient, delivery)
            self._arriving[self._group_of[parameter].index] -= 1

    def on_lanes(self, work: Callable[[Lane], T], lanes: int | None = None) -> list[T]:
        """What ``work`` returns on each of the first ``lanes`` lanes, done by their issuers at once, between two steps.

        What it sends is not counted as a step's.
        """
        chosen = self._lanes[:lanes]
        results: list[concurrent.futures.Future[T]] = [concurrent.futures.Future() for _ in chosen]

        def do(result: concurrent.futures.Future[T], lane: Lane) -> None:
            try:
                with self._side_stream():
                    result.set_result(work(lane))
            except BaseException as error:  # to be raised where somebody waits
                result.set_exception(error)
            lane.start_step()

        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream())
        for result, lane in zip(results, chosen, strict=True):
            lane.submit(partial(do, result, lane))
        concurrent.futures.wait(results)
        if self._stream:
            torch.cuda.current_stream().wait_stream(self._stream)
        return [result.result() for result in results]

    def ask(self, launch: Callable[[Comm], Pending]) -> Tensor:
        """The result of one message, launched on the first lane between two steps, on every rank."""
        return self.on_lanes(lambda lane: launch(lane.comm).wait(), lanes=1)[0]

    def close(self) -> bool:
        """End the issuing threads; returns whether no message is under way.  What is unsent stays readable."""
        if self._used is not None:
            self._used.close()
        within_a_step = self.error is not None or bool(self._deliveries)
        closed = [lane.close(within_a_step) for lane in self._lanes]
        return all(closed)

    def unsent_norm(self) -> float:
        """Euclidean norm of all this rank has not sent."""
        return float(torch.stack([group.unsent.norm() for group in self.groups]).norm()) if self.groups else 0.0

    def _submit(self, lane: int, work: Callable[[Lane], object]) -> None:
        """Have a lane's issuer do ``work``; an error is kept for backward to raise."""
        self._lanes[lane].submit(partial(self._do, self._lanes[lane], work))

    def _do(self, lane: Lane, work: Callable[[Lane], object]) -> None:
        try:
            if self.error is None:
                with self._side_stream():
                    work(lane)
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
        if self._loss_scale:
            self._loss_scale.keep(group)
        arrived = [self._arrived.pop(parameter) for parameter in group.parameters]
        for delivery in {delivery for _, delivery in arrived}:
            delivery.wait()
        gradients = [gradient for gradient, _ in arrived]
        put_back = self._add(group, gradients)
        if self.sample is not None:
            self.sample.before(group)
        total = lane.run(take_step(self.compressors[index], group, lane.comm), partial(group.make_way, gradients))
        group.hand_back(total, gradients, self.size)
        put_back()
        busy_ns = time.perf_counter_ns() - start_ns - (lane.network_ns - waited_ns)
        self.timeline.average(group, taken_up, busy_ns / 1e9)
        with self._lock:
            for _, delivery in arrived:
                delivery.missing -= 1
            self._averaging -= 1
            if self._loss_scale:
                if not self._averaging:
                    self._all_averaged.set()
                return
            if not self._averaging:
                self._finish_step()  # before backward can go on and look
            self._give_back()

    def _ask_for_overflow(self, lane: Lane) -> None:
        assert self._loss_scale is not None
        self._overflowed = lane.comm.all_reduce(self._loss_scale.overflowed)

    def _settle(self, lane: Lane) -> None:
        """End a step with a loss scale: as it is, or undone if a rank found a gradient that is not finite."""
        del lane
        loss_scale = self._loss_scale
        assert loss_scale is not None
        undo = bool(self._overflowed.wait())
        while not self._all_averaged.wait(timeout=1):
            if self.error is not None:  # of another lane, which has reported it to backward
                return
        self._all_averaged.clear()
        if undo:
            loss_scale.undo()
        for delivery in self._deliveries:
            if undo:
                delivery.buffer.fill_(torch.inf)  # which every rank's scaler finds
            else:
                loss_scale.give_back(delivery.buffer)
        loss_scale.end_step()
        with self._lock:
            self._finish_step(undone=undo)
            self._give_back()

    def _give_back(self) -> None:
        for done in [d for d in self._deliveries if not d.missing]:
            self._deliveries.remove(done)
            done.give_back()

    def _add(self, group: Group, gradients: Sequence[Tensor]) -> Callable[[], None]:
        """Add the gradients to ``unsent``; returns what must be called when the means are in their place."""
        accumulate = partial(self.compressors[group.index].accumulate, group, size=self.size)
        if self._used is None:
            accumulate(gradients, scale=self._share)
            return lambda: None
        unscale = self._loss_scale.unscale if self._loss_scale else lambda mean: mean
        return self._used.add(group, gradients, unscale, accumulate)

    def _finish_step(self, undone: bool = False) -> None:
        if self.sample is not None and not undone:
            self.sample.end_step()
        self.last = Report.of(self.groups, self._lanes, time.perf_counter_ns() - self._handed_over_ns)
        self.timeline.end_backward()
        for lane in self._lanes:
            lane.start_step()
        if self._used is not None:
            self._used.end_step()
        self._averaging = len(self.groups)
        self.steps += 1
