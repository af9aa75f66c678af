"""Averages the gradients of DDP's buckets: buckets in, means out."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future as LaneFuture
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # exported at run time only
from torch.futures import Future
from torch.optim import Optimizer

from lightning_sparse.compressors import Compressor, Dense
from lightning_sparse.compressors.base import take_step
from lightning_sparse.compressors.group import Group, HostCopy
from lightning_sparse.engine.averager import Averager, lanes_of
from lightning_sparse.engine.bucket import PendingBucket, Report
from lightning_sparse.engine.groups import carry_over, some
from lightning_sparse.engine.inside import mean_of_slices, share
from lightning_sparse.engine.lanes import Lane, Lanes
from lightning_sparse.engine.observers import GradientRecord, Sample
from lightning_sparse.engine.timeline import Moment
from lightning_sparse.gradients.discards import Discards
from lightning_sparse.gradients.in_place import SumsInPlace
from lightning_sparse.gradients.loss_scale import LossScale
from lightning_sparse.gradients.unused_parameters import UsedParameters
from lightning_sparse.network.comm import Comm, Pending
from lightning_sparse.network.torch_comm import explained
from lightning_sparse.selection.sparse import Sparse


class GradientAverager(Averager):
    """Averages the gradients DDP hands over, in groups of our own, and keeps what was not sent.

    DDP's bucketing only decides when gradients reach us: its buckets change their members after the first step.  Ours
    do not, so every element keeps its place, its ``unsent`` and its order of summation from the first step on.  Where
    all is summed, in float32 or bfloat16, and nothing is unsent, DDP's buckets may be summed where they lie instead
    (:class:`SumsInPlace`).

    The way of a gradient: :meth:`hook` takes a bucket, :meth:`hand_over` submits each group that is complete to its
    lane, and there :meth:`_average` runs the compressor and gives the buckets back whose means are all there.  Where a
    member has several ranks, these first make of their gradients the member's, of which each has a slice; the
    compressor runs on slices, and their means are shared inside.

    Args:
        groups: as for :class:`Averager`.
        comms: the ranks, or columns of members, once for each lane.
        threaded: give each lane a thread of its own.
        may_be_unused: some parameters may get no gradient in a step (DDP's ``find_unused_parameters``).
        scaler: what scales the loss, if anything does.
        may_sum_in_place: sums may depend on DDP's buckets, which a checkpoint does not keep.
        held: of sharded models the parameter that an optimizer has, by the shard that the groups have.

    Attributes:
        in_place: sums of DDP's buckets where they lie.
        nothing_unsent: on any rank, as far as is known.
    """

    def __init__(
        self,
        groups: Sequence[tuple[Group, Compressor]],
        comms: Sequence[Comm],
        *,
        threaded: bool,
        may_be_unused: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        may_sum_in_place: bool = False,
        held: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        lanes = lanes_of(groups, comms, threaded)
        needs_groups = scaler is not None or may_be_unused
        self.in_place = SumsInPlace(lanes[0].comm, may_sum_in_place and not needs_groups)
        self.nothing_unsent = False
        self.discards = Discards(held or {})
        self._scaler = scaler
        self._resumed = ResumedMeans(scaler)
        self._lock = threading.Lock()  # around what several lanes change
        self._step: Step | None = None  # the last one that has begun
        self._unsettled: tuple[LossScale, HostCopy] | None = None  # the last step, until it is known if it overflowed
        self._record: GradientRecord | None = None  # while somebody wants one
        self._deferred = False
        super().__init__(groups, lanes)
        self._used = UsedParameters(self._group_of) if may_be_unused else None

    def lay_out(self, groups: Sequence[tuple[Group, Compressor]]) -> None:
        super().lay_out(groups)
        self._group_of = {p: group for group in self._groups for p in group.parameters}
        self._queues = self.lanes.orders_of([group.elements for group in self._groups])
        self.in_place.lay_out(self._groups, self.compressors)
        self.nothing_unsent = False
        self.discards.lay_out(self._groups, self.compressors)

    # - what a step in which a rank overflowed has left is undone before anybody looks

    @property
    def groups(self) -> list[Group]:
        """The groups, in the order in which they are sent, as the last step left them."""
        self._end_scaled_step()
        return self._groups

    @groups.setter
    def groups(self, groups: list[Group]) -> None:
        self._groups = groups

    @property
    def sample(self) -> Sample | None:
        """A sample of what is unsent, as the last step left it, while somebody wants to know how long it waits."""
        self._end_scaled_step()
        return self._sample

    @sample.setter
    def sample(self, sample: Sample | None) -> None:
        self._sample = sample

    @property
    def _observers(self) -> list[Sample | GradientRecord]:
        return [each for each in (self._sample, self._record) if each is not None]

    def record_gradients(self, elements: int) -> None:
        """Record about so many elements of this rank's gradients from the next step on."""
        self._record = GradientRecord(self.groups, elements)

    def take_record(self) -> GradientRecord | None:
        """End the recording, and return the record if there is one, the last step included."""
        self._end_scaled_step()
        record, self._record = self._record, None
        return record

    def defer(self, deferred: bool) -> None:
        """Send nothing before a step's last gradient from now on, or as always: so that one can be timed alone."""
        self._deferred = deferred

    # - around a step

    def between_steps(self) -> None:
        self.end_step()
        self.discards.begin()

    def note(self, optimizer: Optimizer) -> None:
        self.discards.knows_steps = True

    def begin_backward(self) -> None:
        self.settle()
        self.discards.begin()

    def look(self, parameter: Tensor, before: Tensor | None) -> None:
        """Note what ``.grad`` of a parameter held ``before`` what backward adds to it now."""
        self.discards.look(parameter, before)

    def handed_back(self) -> None:
        if self._resumed.means:
            self._resumed.end()
        elif self._step is not None and not self._step.in_place and not self._step.is_undone:
            self.discards.handed_back()

    def end_step(self) -> None:
        self._resumed.are_due = False  # a step ends with its backward

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        self._note_restored(self.discards.before_step({p for group in optimizer.param_groups for p in group["params"]}))

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        self._resumed.are_due = False
        self.discards.stepped({p for group in optimizer.param_groups for p in group["params"]})

    # - what is thrown away

    def settle(self) -> None:
        if self._unsettled is None:  # else the host does not know yet if a rank overflowed, and does not wait
            self._undo_discards()

    def _undo_discards(self) -> None:
        self._note_restored(self.discards.settle())
        if lost := self.discards.take_lost():
            rank_zero_warn(
                f"lightning_sparse: The gradients of {some(lost)} were thrown away: zeroed after a backward, with no "
                "step between. What had not been sent of them before is lost, this once: from now on what is unsent "
                f"is copied before each backward ({4 * sum(group.n for group in self._groups) / 2**20:,.1f} MiB). To "
                "send less, keep such a backward from reaching them: toggle_optimizer(), or requires_grad_(False) "
                "around it."
            )

    def _note_restored(self, groups: Iterable[Group]) -> None:
        for group in groups:
            self.nothing_unsent = False
            for observer in self._observers:
                observer.restored(group)

    @property
    def habits(self) -> dict[str, bool]:
        self.settle()
        throws_away = self.discards.may_throw_away
        return {"throws away": True, "puts together": self.discards.by_hand} if throws_away else {}

    def resume_habits(self, habits: Mapping[str, bool]) -> None:
        self.discards.seen = bool(habits.get("throws away"))
        self.discards.by_hand = bool(habits.get("puts together"))

    # - a step: buckets in

    @property
    def _within_a_step(self) -> bool:
        return self._step is not None and bool(self._step.buckets)

    def hook(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        return self.hand_over(PendingBucket(bucket.buffer(), bucket.parameters()))

    def hand_over(self, bucket: PendingBucket) -> Future[Tensor]:
        """Take up a bucket of gradients; returns a future of the means in their place."""
        if self._resumed.means:
            self._resumed.hand_back(bucket.gradients())
            bucket.give_back()
            return bucket.future
        step = self._step
        if step is None or step.has_arrived:
            step = self._begin_step()
        with self._lock:
            if self.error is not None:
                raise self.error
            step.buckets.append(bucket)
        self._take_in(step, bucket)
        if step.in_place:
            self.in_place.sum(bucket, step.has_arrived, step.in_place, partial(self._end_in_place, step))
            return bucket.future
        last = step.has_arrived
        if last and step.loss_scale:  # beside the last groups' messages, so that nobody waits for it
            self._submit(step, 0, Step.ask_for_overflow)
        averages = [
            self._submit(step, lane, partial(self._average, index=index))
            for lane, index in (step.take_complete() if last or not self._deferred else ())
        ]
        if step.loss_scale:
            step.averages += averages
        if last and step.loss_scale:
            self._submit(step, 0, self._settle)
        return bucket.future

    def _begin_step(self) -> "Step":
        self._undo_if_overflowed()
        step = self._step = Step(self._groups, self._queues, self.lanes, self._scaler)
        step.in_place, step.sends_all = self.in_place.next_step(self.nothing_unsent, self._deferred)
        if step.in_place:
            self.lanes[0].check_open()
            self.in_place.begin_step()
        return step

    def _take_in(self, step: "Step", bucket: PendingBucket) -> None:
        self.timeline.arrive(bucket.parameters)
        if self._used is not None:
            self._used.note(bucket.used)
        if step.loss_scale:
            step.loss_scale.take_in(bucket.buffer)
        self.lanes.wait_for_caller()
        step.take_in(bucket, self._group_of)

    def _submit(self, step: "Step", lane: int, work: Callable[["Step", Lane], None]) -> "LaneFuture[None]":
        """Have a lane's issuer do ``work``; an error is kept for backward to raise."""
        done = self.lanes[lane].submit(partial(self._unless_failed, work, step, self.lanes[lane]))
        done.add_done_callback(partial(self._note_error, step))
        return done

    def _unless_failed(self, work: Callable[["Step", Lane], None], step: "Step", lane: Lane) -> None:
        if self.error is None:
            work(step, lane)

    def _note_error(self, step: "Step", done: "LaneFuture[None]") -> None:
        if (error := done.exception()) is not None:
            self._fail(step, error)

    def _fail(self, step: "Step", error: BaseException) -> None:
        with self._lock:
            self.error = self.error or error
            step.fail(self.error)

    # - a step: what lanes do, and means out

    def _average(self, step: "Step", lane: Lane, index: int) -> None:
        taken_up, start_ns, waited_ns = self.timeline.now(), time.perf_counter_ns(), lane.network_ns
        group, compressor = self._groups[index], Dense() if step.sends_all else self.compressors[index]
        if self.discards.settle_group(group, self.compressors[index]):
            self._note_restored([group])
        self.discards.keep(group, self.compressors[index])
        if step.loss_scale:
            step.loss_scale.keep(group)
        arrived = [step.gradients.pop(parameter) for parameter in group.parameters]
        gradients, buckets = [gradient for gradient, _ in arrived], [bucket for _, bucket in arrived]
        own = [group.cut.own(gradient) for gradient in gradients]
        group.inside = lane.comm.inside
        with ExitStack() as stack:
            new = stack.enter_context(self._new_in(step, lane, group, gradients, compressor.per_element))
            compressor.accumulate(group, new, self.size)
            for observer in self._observers:
                observer.before(group)
            step.share_last()
            total = lane.run(take_step(compressor, group, lane.comm), partial(group.zero_gradients_early, own))
            if isinstance(total, Sparse) and self.device.type == "cpu" and not total.values.sum().isfinite():
                group.unsent.nan_to_num_(0.0, 0.0, 0.0)  # else it would arrive over many steps, a part in each
            group.hand_back(total, own, self.size)
            put_back = stack.pop_all()
        averaged = Averaged(group, gradients, buckets, put_back, taken_up, start_ns + lane.network_ns - waited_ns)
        if lane.comm.inside is None or self.lanes.threaded or step.averaging == 1:
            self._share(step, lane, averaged)
        else:  # [Note: one order of launches]
            step.unshared = partial(self._submit, step, lane.number, partial(self._share, averaged=averaged))

    def _share(self, step: "Step", lane: Lane, averaged: "Averaged") -> None:
        """Share the means of a group inside the member, and give back the buckets whose means are all there."""
        group, waited_ns = averaged.group, lane.network_ns
        with averaged.put_back:
            if lane.comm.inside is not None:
                lane.run(share(averaged.gradients, group.cut, lane.comm.inside))
        busy_ns = time.perf_counter_ns() - averaged.start_ns - (lane.network_ns - waited_ns)
        self.timeline.average(group, averaged.taken_up, busy_ns / 1e9)
        with self._lock:
            step.count_averaged(averaged.buckets)
            self.lanes.have_caller_wait()  # a bucket may have groups of several
            if step.loss_scale:  # then `_settle` gives back all
                return
            if not step.averaging:
                self._finish(step)  # before backward can go on and look
            step.give_back()

    @contextmanager
    def _new_in(
        self, step: "Step", lane: Lane, group: Group, gradients: Sequence[Tensor], per_element: Sequence[str]
    ) -> Iterator[Sequence[Tensor | None]]:
        """The part of each of ``gradients`` that this step adds, until the means are in their place."""

        def joined(new: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
            if lane.comm.inside is None:
                return new
            return lane.run(mean_of_slices(new, gradients, group.cut, lane.comm.inside, self._used is not None))

        if self._used is None:
            yield joined(gradients)
            return
        unscale = step.loss_scale.unscale if step.loss_scale else lambda mean: mean
        with self._used.new_in(group, gradients, unscale, per_element, joined) as new:
            yield new

    def _end_in_place(self, step: "Step", buckets: Sequence[PendingBucket], sums: Future[list[Tensor]]) -> None:
        """Give back buckets that were summed where they lay, on a thread of the backend."""
        try:
            with explained():
                means = sums.value()
        except RuntimeError as error:
            self._fail(step, error)
            return
        with self._lock:
            for each, mean in zip(buckets, means, strict=True):
                each.buffer, each.missing = mean, 0
            if step.has_arrived and not any(each.missing for each in step.buckets):
                for group in self._groups:
                    group.end_dense_step()
                self._finish(step)
            step.give_back()

    def _finish(self, step: "Step", overflowed: HostCopy | None = None) -> None:
        """End a step, of which every mean has arrived."""
        if step.in_place and self._sample is not None:
            self._sample.end_dense_step()
        if not step.in_place:
            self._end_if_known(step.loss_scale, overflowed)
        self.nothing_unsent = bool(step.in_place) or step.sends_all
        self.last = step.report()
        self.timeline.end_backward()
        if self._used is not None:
            self._used.end_step()
        self.steps += 1
        self._resumed.are_due = True

    # - a step with a loss scale, of which the host knows only later whether a rank overflowed in it

    def _settle(self, step: "Step", _: Lane) -> None:
        """End a step with a loss scale: as it is, or undone if a rank found a gradient that is not finite."""
        assert step.loss_scale is not None
        overflowed = step.overflowed.wait()
        for average in step.averages:
            average.result()  # raises the error of another lane
        self.lanes.have_caller_wait()
        if self.error is not None:
            return
        for bucket in step.buckets:
            step.loss_scale.give_back(bucket.buffer, overflowed)
        step.averages.clear()
        with self._lock:
            self._finish(step, HostCopy(overflowed))
            step.give_back()

    def _end_if_known(self, loss_scale: LossScale | None, overflowed: HostCopy | None) -> None:
        """End a step now, or where it must be waited for to know how, later."""
        if loss_scale is not None and overflowed is not None and self.device.type != "cpu":
            self._unsettled = loss_scale, overflowed
        else:
            self._note_end(loss_scale, overflowed is not None and bool(overflowed.read()))

    def _undo_if_overflowed(self) -> None:
        """Undo the last step if a rank overflowed in it; on a device the host knows that only after the step."""
        if self._unsettled is not None:
            (loss_scale, overflowed), self._unsettled = self._unsettled, None
            undone = bool(overflowed.read())
            self.lanes.on_first(lambda lane: self._note_end(loss_scale, undone))

    def _end_scaled_step(self) -> None:
        """Have what is unsent be as the last step left it: to be called before somebody looks."""
        self._undo_if_overflowed()
        self._undo_discards()

    def _note_end(self, loss_scale: LossScale | None, undone: bool) -> None:
        if loss_scale is not None:
            loss_scale.end_step(undone)
        for observer in () if undone else self._observers:
            observer.end_step()
        if undone and self._step is not None:
            self._step.is_undone = True
            self.discards.forget()

    # - from another averager, and checkpoints

    def take_over(self, before: Averager, memories: bool) -> None:
        self.resume_habits(before.habits)
        carry_over(list(before.kept()), list(zip(self.groups, self.compressors, strict=True)), memories)
        self.note_resumed()

    def note_resumed(self) -> None:
        if self.in_place.may:
            self.ask_for_unsent()

    def ask_for_unsent(self) -> bool:
        """Note and return whether nothing is unsent on any rank; to be called on every rank, between two steps."""
        norm = torch.tensor([self.unsent_norm()], dtype=torch.float32, device=self.device)
        self.nothing_unsent = not bool(self.lanes.run_message(lambda comm: comm.all_gather(norm)).any())
        return self.nothing_unsent

    def kept(self, with_means: bool = True) -> Iterator[Group]:
        for group, compressor in zip(self.groups, self.compressors, strict=True):
            is_whole = with_means and self._resumed.are_due
            yield group if is_whole else self.discards.without_due(group, compressor)

    @property
    def due_means(self) -> Mapping[str, Tensor]:
        return self._resumed.due({name: self.discards.gradient_of(p) for name, p in self._named.items()})

    def hand_back(self, means: Mapping[str, Tensor]) -> None:
        self._resumed.resume(means, self._named)

    @property
    def _named(self) -> dict[str, Tensor]:
        return {name: p for group in self.groups for name, p in zip(group.names, group.parameters, strict=True)}

    @property
    def sees_hidden_messages(self) -> bool:
        in_place, _ = self.in_place.next_step(self.nothing_unsent, self._deferred)
        return super().sees_hidden_messages and in_place is None

    def close(self) -> bool:
        self.discards.close()
        if self._used is not None:
            self._used.close()
        if self.error is None:
            self._end_scaled_step()
        return super().close()


@dataclass
class Averaged:
    """A group of which this rank has the mean of its slices, until the whole means are given back."""

    group: Group
    gradients: Sequence[Tensor]  # whole, of each parameter
    buckets: Sequence[PendingBucket]  # in which they are
    put_back: ExitStack  # what was laid aside for this step
    taken_up: Moment
    start_ns: int  # when the processor took it up, moved by how long it has waited since


class Step:
    """All that belongs to one step, from its first bucket to its last mean.

    The ``groups`` are in the order in which they are sent.  Each of ``queues`` has lanes and their groups, by index, in
    an order that is kept.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        queues: Sequence[Sequence[tuple[int, int]]],
        lanes: Lanes,
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
        self.unshared: Callable[[], object] | None = None  # shares inside what was averaged last, if that is left to do
        self.sends_all = False  # all is summed in float32, so that nothing is unsent after it
        self._arriving = [len(group.parameters) for group in groups]  # parameters not handed over yet
        self._queues = [deque(queue) for queue in queues]
        self._lanes = lanes
        self._spent_before = lanes.spent()
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

    def share_last(self) -> None:
        """Share inside the member the group that was averaged last, if that was left to do."""
        unshared, self.unshared = self.unshared, None
        if unshared is not None:
            unshared()

    def ask_for_overflow(self, lane: Lane) -> None:
        """Launch the message that says how many ranks found a gradient that is not finite."""
        assert self.loss_scale is not None
        self.overflowed = lane.comm.everyone.all_reduce(self.loss_scale.overflowed)

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


class ResumedMeans:
    """The means of the last backward, while no optimizer has stepped: a resume makes that step again, and gets them."""

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self.are_due = False  # a backward has ended, and no optimizer has stepped since
        self._scaler = scaler
        self.means: dict[Tensor, Tensor] = {}  # of a step that was saved, to be handed back

    @property
    def _scale(self) -> float:
        return self._scaler.get_scale() if self._scaler is not None else 1.0

    def due(self, means: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """The ``means`` that are in ``.grad``, in float32 and without a loss scale, if they are due."""
        if not self.are_due:
            return {}
        states = self._scaler._per_optimizer_states.values() if self._scaler is not None else ()
        scale = 1.0 if any(state["stage"].name == "UNSCALED" for state in states) else self._scale
        return {name: x.detach().float().cpu() / scale for name, x in means.items() if x is not None}

    def resume(self, means: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        """Have the next backward hand back these ``means``, whatever gradients it has."""
        self.means = {p: means[name] for name, p in parameters.items() if name in means}

    def hand_back(self, gradients: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Set the gradients of a bucket to the means of the step that was saved."""
        for parameter, gradient in gradients:
            mean = self.means.get(parameter)
            gradient.zero_() if mean is None else gradient.copy_(mean * self._scale)

    def end(self) -> None:
        """Note that the backward has ended."""
        self.means, self.are_due = {}, True
