"""The engine between a training and its compressors: groups, lanes that send them, and what a step did."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # exported at run time only
from torch.futures import Future

from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.around import Around
from lightning_sparse.engine.compression_error import delivered
from lightning_sparse.engine.gradient_record import GradientRecord
from lightning_sparse.engine.groups import carry_over
from lightning_sparse.engine.lane import Answer, Lane, have_caller_wait, spread, wait_for_caller
from lightning_sparse.engine.sample import Sample
from lightning_sparse.engine.step import PendingBucket, Report
from lightning_sparse.engine.timeline import Timeline
from lightning_sparse.network.agreement import everywhere
from lightning_sparse.network.comm import Comm, Pending
from lightning_sparse.settings import as_text

T = TypeVar("T")


class Exchange(Around, ABC):
    """Averages groups of parameters over the ranks, on lanes, and keeps what was not sent.

    Args:
        groups: each group and what averages it, in the order in which they are sent.
        comms: the ranks, once for each lane; nobody else may launch messages on them.
        threaded: give each lane a thread of its own; see [Note: who issues messages].

    [Note: who issues messages] Each group is sent on the lane with the fewest elements before it.  A lane is one
    process group and one issuer, which runs its groups one after the other in a fixed order, so that on each process
    group every rank launches the same messages in the same order whatever the timing.  Over Gloo the issuer is a
    thread, which goes on where no hook is called: two such lanes took 0.70 of plain DDP's step where one took 0.73, and
    backward's thread, waiting in each hook, 0.81 (docs/benchmarks/2026-11-21-skip-reduce.md).  On NCCL, where waiting
    blocks a stream and not the host, the issuer is the caller of the hook, and both lanes are on one communicator:
    each has a stream of its own, so that one compresses while the other waits for a message.  Its groups are launched
    in the one order of all, whichever are complete first: a replica of a sharded model that skips a layer has its
    gradients later than others have.  See [Note: one order of launches].
    """

    may_sum_in_place = False  # sums may depend on DDP's buckets, which a checkpoint does not keep

    def __init__(self, groups: Sequence[tuple[Group, Compressor]], comms: Sequence[Comm], *, threaded: bool) -> None:
        self.size = comms[0].size
        self.rank = comms[0].rank
        self.device = next((group.unsent.device for group, _ in groups), torch.device("cpu"))
        self.error: BaseException | None = None  # the first failure of a lane
        self.steps = 0
        self.last: Report | None = None
        self.sample: Sample | None = None  # of what is unsent, while somebody wants to know how long it waits
        self.nothing_unsent = False  # on any rank, as far as is known
        self.timeline = Timeline(self.device)
        self._record: GradientRecord | None = None  # while somebody wants one
        self._deferred = False
        self._threaded = threaded
        self._lanes = [Lane(comm, threaded, self.device) for comm in comms]
        self.lay_out(groups)

    def lay_out(self, groups: Sequence[tuple[Group, Compressor]]) -> None:
        """Average in ``groups`` from now on, in their order.  To be called between two steps, on every rank."""
        self.groups = [group for group, _ in groups]
        self.compressors = [compressor for _, compressor in groups]
        if self.sample is not None:
            self.sample.lay_out(self.groups)

    def regroup(self, groups: Sequence[tuple[Group, Compressor]], memories: bool = True) -> None:
        """As :meth:`lay_out`, if anything changes by it; what is unsent goes along, as :func:`carry_over` says."""
        old = zip(self.groups, self.compressors, strict=True)
        if [(group.names, as_text(c)) for group, c in old] != [(group.names, as_text(c)) for group, c in groups]:
            carry_over(self.groups, groups, memories)
            self.lay_out(groups)

    def _queues_of(self, groups: Sequence[int]) -> list[list[int]]:
        """Return which of ``groups``, by index, each lane sends, in this order."""
        lane_of = spread([self.groups[i].n for i in groups], len(self._lanes))
        return [[i for i, its in zip(groups, lane_of, strict=True) if its == lane] for lane in range(len(self._lanes))]

    def _orders(self) -> list[list[tuple[int, int]]]:
        """Return lanes and their groups in each order that ranks keep to: a lane's, or where there is one, of all."""
        queues = self._queues_of(range(len(self.groups)))
        orders = [[(lane, i) for i in queue] for lane, queue in enumerate(queues)]
        return orders if self._threaded else [sorted(chain(*orders), key=itemgetter(1))]

    @abstractmethod
    def hook(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        """DDP's communication hook: takes a bucket of gradients, gives back a future of the same bucket."""

    def hand_over(self, bucket: PendingBucket) -> Future[Tensor]:
        """Take up gradients that are not DDP's; returns a future of the means in their place."""
        raise NotImplementedError

    @abstractmethod
    def between_steps(self) -> None:
        """Do what is due before a forward that trains.  To be called on every rank."""

    @property
    def group_step(self) -> int:
        """The step that the groups' compressors are at, the furthest; 0 where there are no groups."""
        return max((group.step for group in self.groups), default=0)

    # - what others may ask for, between two steps, on every rank

    def defer(self, deferred: bool) -> None:
        """Send nothing before a step's last gradient from now on, or as always: so that one can be timed alone."""
        self._deferred = deferred

    def record_gradients(self, elements: int) -> None:
        """Record about so many elements of this rank's gradients from the next step on that averages groups."""
        self._record = GradientRecord(self.groups, elements)

    def take_record(self) -> GradientRecord | None:
        """End the recording, and return the record if there is one."""
        record, self._record = self._record, None
        return record

    def watch_unsent(self) -> None:
        """Look at a sample of what is unsent in every step from now on."""
        self.sample = Sample(self.groups)

    def go_on_from(self, before: "Exchange") -> None:
        """Stand in the place of another engine, of which nothing is unsent."""
        self.count_from(before.steps)
        self.set_latencies(*before.latencies)
        self.resume_habits(before.habits)
        if before.sample is not None:
            self.watch_unsent()

    def take_over(self, before: "Exchange", memories: bool) -> None:
        """Go on with what each rank has not sent in ``before``, of parameters of the same name and shape.

        Both are of gradients or both of local steps; ``memories`` as for :func:`carry_over`.
        """
        names, steps = {name for group in before.groups for name in group.names}, before.steps
        averages = {name: average.clone() for name, average in before.averages.items()}
        self.resume_habits(before.habits)
        self.adopt([group.names for group in before.groups])
        carry_over(list(before.kept()), list(zip(self.groups, self.compressors, strict=True)), memories)
        self.unpack(steps, names, averages, late=False)

    def add_to_next(self, groups: Sequence[Group]) -> None:
        """Have each rank add what it has not sent of gradients, in these ``groups``, to its own next gradients."""
        raise NotImplementedError

    @property
    def can_sum_in_place(self) -> bool:
        """Whether DDP's buckets can be summed where they lie, if the link makes that the soonest."""
        return False

    def sums_in_place(self, compressor: Compressor) -> bool:
        """Whether what ``compressor`` averages is summed where DDP has it, not in groups, once nothing is unsent.

        Its rounding errors, in bfloat16, are then kept by nobody.
        """
        return False

    def compared(self) -> Mapping[Tensor, Tensor]:
        """Settle the last step, and return ``shared``; to be called on every rank, between two steps."""
        self.settle()
        self.compare()
        return self.shared

    def kept(self, with_means: bool = True) -> Iterator[Group]:
        """Yield each group as a checkpoint keeps it for this rank, beside the means that are due or without them."""
        yield from self.groups

    def count_from(self, steps: int) -> None:
        """Go on after so many ``steps`` of another engine."""
        self.steps = steps
        for group in self.groups:
            group.step = steps

    def on_lanes(self, work: Callable[[Lane], T], lanes: int | None = None) -> list[T]:
        """Return what ``work`` returns on each of the first ``lanes`` lanes; to be called between two steps.

        What it sends is not counted as a step's.
        """
        wait_for_caller(self._lanes)
        results = [lane.submit(partial(work, lane)) for lane in self._lanes[:lanes]]
        wait(results)
        have_caller_wait(self._lanes)
        return [result.result() for result in results]

    @property
    def latencies(self) -> tuple[int, int, int]:
        """What sums go by, as ``Costs`` has it."""
        return self._lanes[0].comm.costs.latencies

    def set_latencies(self, hop_bytes: int, all_reduce_bytes: int, message_bytes: int = 0) -> None:
        """Have sums go by these from now on.  To be called between two steps, with the same on every rank."""
        for lane in self._lanes:
            lane.comm.costs.latencies = hop_bytes, all_reduce_bytes, message_bytes

    def ask(self, launch: Callable[[Comm], Pending]) -> Tensor:
        """The result of one message, launched on the first lane between two steps, on every rank."""
        return self.on_lanes(lambda lane: launch(lane.comm).wait(), lanes=1)[0]

    def gather_text(self, text: str) -> list[str]:
        """Return what each rank says, by rank; to be called between two steps, on every rank."""
        return self.on_lanes(lambda lane: everywhere(text, lane.comm, self.device), lanes=1)[0]

    def ask_beside(self, launch: Callable[[Comm], Pending]) -> Answer:
        """As :meth:`ask`, within a step and without waiting: once the first lane has done what it was given so far.

        ``launch`` makes what it sends, on the lane's stream: the message may be under way when the caller forgets it.
        """
        return Answer(self._lanes[0], launch)

    @property
    def round(self) -> int:
        """The steps in which everything travels once."""
        return 1

    @property
    def sees_hidden_messages(self) -> bool:
        """Whether :meth:`messages` are all messages, also those under way beside computing."""
        return self.device.type == "cpu"

    def messages(self) -> Callable[[], float]:
        """What tells, later, for how many seconds messages of the last step were under way, or waited for."""
        if self.device.type == "cpu":
            return partial(float, self.last.ms_network / 1e3 if self.last else math.nan)
        return self.timeline.wait()

    def close(self) -> bool:
        """End the issuing threads; returns whether no message is under way.  What is unsent stays readable."""
        within_a_step = self.error is not None or self._within_a_step
        closed = [lane.close(within_a_step) for lane in self._lanes]
        return all(closed)

    @property
    @abstractmethod
    def _within_a_step(self) -> bool:
        """Whether messages may be under way."""

    def unsent_of(self, group: Group) -> Tensor:
        """What is unsent of ``group`` on this rank [n]."""
        return group.unsent

    def delivered(self) -> float:
        """The part of what was unsent on all ranks that the last step delivered, as a squared norm of a sample.

        To be called on every rank between two steps, while there is a sample.
        """
        assert self.sample is not None
        sums = self.sample.unsent_and_left(lambda group, places: self.unsent_of(group)[places])
        before, left = self.ask(lambda comm: comm.all_reduce(sums)).square().sum(1).tolist() if sums.numel() else (0, 0)
        return delivered(before, left)

    def ask_for_unsent(self) -> bool:
        """Note and return whether nothing is unsent on any rank; to be called on every rank, between two steps."""
        norm = torch.tensor([self.unsent_norm()], dtype=torch.float32, device=self.device)
        self.nothing_unsent = not bool(self.ask(lambda comm: comm.all_gather(norm)).any())
        return self.nothing_unsent

    def sent_in_vain(self) -> str:
        """Say that the last step sent as much as dense DDP, if it was one of the compressor proper; else nothing."""
        if self.last is None or self.last.saves_bytes():
            return ""
        steps = zip(self.compressors, self.groups, strict=True)
        compressor = next((c for c, group in steps if c.compresses(group.step - 1)), None)
        if compressor is None:
            return ""
        return (
            f"{compressor} sent {self.last.sent_bytes:,} bytes in a step, where dense DDP sends "
            f"{self.last.dense_bytes:,}: nothing is saved. Choose settings that send less, such as a lower density or "
            "wire_dtype='bfloat16', or train with strategy='ddp'."
        )

    def unsent_norm(self) -> float:
        norms = [self.unsent_of(group).norm() for group in self.groups]
        return float(torch.stack(norms).norm()) if norms else 0.0
