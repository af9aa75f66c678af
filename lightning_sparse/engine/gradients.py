"""Averages the gradients of DDP's buckets."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future as LaneFuture
from contextlib import AbstractContextManager, nullcontext
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
from lightning_sparse.engine.discards import Discards
from lightning_sparse.engine.groups import some
from lightning_sparse.engine.in_place import SumsInPlace
from lightning_sparse.engine.lane import Lane, have_caller_wait, wait_for_caller
from lightning_sparse.engine.loss_scale import LossScale
from lightning_sparse.engine.means import Means
from lightning_sparse.engine.step import PendingBucket, Step
from lightning_sparse.engine.unused_parameters import UsedParameters
from lightning_sparse.network.comm import Comm
from lightning_sparse.network.process_groups import ProcessGroups
from lightning_sparse.network.torch_comm import finished
from lightning_sparse.selection.sparse import Sparse


class GradientExchange(SumsInPlace):
    """Averages the gradients DDP hands over, in groups of our own, and keeps what was not sent.

    DDP's bucketing only decides when gradients reach us: its buckets change their members after the first step.  Ours
    do not, so every element keeps its place, its ``unsent`` and its order of summation from the first step on.  Where
    all is summed, in float32 or bfloat16, nothing is unsent and ``may_sum_in_place``, DDP's buckets are summed where
    they lie, as plain DDP or PyTorch's bfloat16 hook does it: sooner by the copies into groups, but from three ranks on
    in an order that changes with buckets, and with rounding errors that nobody keeps.

    Args:
        groups: as for :class:`Exchange`; and so ``comms`` and ``threaded``.
        node: of this rank, if there are nodes: then ``comms`` are of nodes, and one averages its ranks' gradients.
        may_be_unused: some parameters may get no gradient in a step (DDP's ``find_unused_parameters``).
        scaler: what scales the loss, if anything does.
        may_sum_in_place: see :class:`Exchange`.
        held: the parameter that an optimizer has in the place of one of the groups', if it is another.
    """

    def __init__(
        self,
        groups: Sequence[tuple[Group, Compressor]],
        comms: Sequence[Comm],
        *,
        threaded: bool,
        node: ProcessGroups | None = None,
        may_be_unused: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        may_sum_in_place: bool = False,
        held: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        self.may_sum_in_place = may_sum_in_place
        self.discards = Discards(held or {})
        self._node = node
        self._scaler = scaler
        self._means = Means(scaler)
        self._lock = threading.Lock()  # around what several lanes change
        self._step: Step | None = None  # the last one that has begun
        super().__init__(groups, comms, threaded=threaded)
        self._used = UsedParameters(self._group_of) if may_be_unused else None

    def lay_out(self, groups: Sequence[tuple[Group, Compressor]]) -> None:
        super().lay_out(groups)
        self._group_of = {p: group for group in self._groups for p in group.parameters}
        self._queues = self._orders()
        self.discards.lay_out(self._groups, self.compressors)

    def between_steps(self) -> None:
        self.end_step()
        self.discards.begin()

    def note(self, optimizer: Optimizer) -> None:
        self.discards.knows_steps = True

    def begin_backward(self) -> None:
        self.settle()
        self.discards.begin()

    def end_step(self) -> None:
        self._means.are_due = False  # a step ends with its backward

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        self._note_restored(self.discards.before_step({p for group in optimizer.param_groups for p in group["params"]}))

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        self._means.are_due = False
        self.discards.stepped({p for group in optimizer.param_groups for p in group["params"]})

    # - what is thrown away

    def settle(self) -> None:
        if self._unsettled is None:  # else it is not known yet whether the step was undone, and nobody waits for that
            self._undo_discards()

    def _end_scaled_step(self) -> None:
        super()._end_scaled_step()
        self._undo_discards()

    def _note_end(self, loss_scale: LossScale | None, undone: bool) -> None:
        super()._note_end(loss_scale, undone)
        if undone and self._step is not None:
            self._step.is_undone = True
            self.discards.forget()

    def _undo_discards(self) -> None:
        self._note_restored(self.discards.settle())
        if lost := self.discards.take_lost():
            rank_zero_warn(
                f"The gradients of {some(lost)} were thrown away: zeroed after a backward, with no step between. What "
                "had not been sent of them before is lost, this once: from now on what is unsent is copied before each "
                f"backward ({4 * sum(group.n for group in self._groups) / 2**20:,.1f} MiB). To send less, keep such a "
                "backward from reaching them: toggle_optimizer(), or requires_grad_(False) around it."
            )

    @property
    def habits(self) -> dict[str, bool]:
        self.settle()
        throws_away = self.discards.may_throw_away
        return {"throws away": True, "puts together": self.discards.by_hand} if throws_away else {}

    def resume_habits(self, habits: Mapping[str, bool]) -> None:
        self.discards.seen = bool(habits.get("throws away"))
        self.discards.by_hand = bool(habits.get("puts together"))

    def _note_restored(self, groups: Iterable[Group]) -> None:
        for group in groups:
            self.nothing_unsent = False
            for notes in (self._sample, self._record):
                if notes is not None:
                    notes.restored(group)

    def look(self, parameter: Tensor, before: Tensor | None) -> None:
        self.discards.look(parameter, before)

    def handed_back(self) -> None:
        if self._step is not None and not self._step.in_place and not self._step.is_undone:
            self.discards.handed_back()

    # - a step

    @property
    def due_means(self) -> Mapping[str, Tensor]:
        return self._means.due(self._named)

    def kept(self, with_means: bool = True) -> Iterator[Group]:
        for group, compressor in zip(self.groups, self.compressors, strict=True):
            is_whole = with_means and self._means.are_due
            yield group if is_whole else self.discards.without_due(group, compressor)

    def hand_back(self, means: Mapping[str, Tensor]) -> None:
        self._means.resume(means, self._named)

    @property
    def _named(self) -> dict[str, Tensor]:
        return {name: p for group in self.groups for name, p in zip(group.names, group.parameters, strict=True)}

    @property
    def _within_a_step(self) -> bool:
        return self._step is not None and bool(self._step.buckets)

    @property
    def _needs_groups(self) -> bool:
        return self._node is not None or self._scaler is not None or self._used is not None

    def hook(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        if self._means.saved:
            self._means.hand_back(bucket.buffer(), bucket.parameters(), bucket.is_last())
            return finished(bucket.buffer(), self.device)
        return self.hand_over(PendingBucket(bucket.buffer(), bucket.parameters()))

    def hand_over(self, bucket: PendingBucket) -> Future[Tensor]:
        step = self._step
        if step is None or step.has_arrived:
            super()._end_scaled_step()
            step = self._step = Step(self._groups, self._queues, self._lanes, self._scaler)
            step.in_place, step.sends_all = self._next_in_place
            if step.in_place:
                self._lanes[0].check_open()
                self._lanes[0].comm.buffers.reuse()
        with self._lock:
            if self.error is not None:
                raise self.error
            step.buckets.append(bucket)
        self._take_in(step, bucket)
        if step.in_place:
            return self._sum_in_place(step, bucket)
        last = step.has_arrived
        if last and step.loss_scale:  # beside the last groups' messages, so that nobody waits for it
            if self._node:
                with torch.cuda.stream(self._lanes[0].stream):
                    self._node.sum_inside(step.loss_scale.overflowed).wait()
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

    def _take_in(self, step: Step, bucket: PendingBucket) -> None:
        self.timeline.arrive(bucket.parameters)
        if self._used is not None:
            self._used.note(bucket.used)
        if step.loss_scale:
            step.loss_scale.take_in(bucket.buffer)
        wait_for_caller(self._lanes)
        if self._node and bucket.buffer.numel():
            with torch.cuda.stream(self._lanes[0].stream):
                bucket.summed = self._node.sum_inside(bucket.buffer)
                if self._node.nccl:  # one message after the other: see [Note: who issues messages]
                    bucket.wait()
        step.take_in(bucket, self._group_of)

    def close(self) -> bool:
        self.discards.close()
        if self._used is not None:
            self._used.close()
        if self.error is None:
            self._end_scaled_step()
        return super().close()

    # - what lanes do

    def _submit(self, step: Step, lane: int, work: Callable[[Step, Lane], None]) -> "LaneFuture[None]":
        """Have a lane's issuer do ``work``; an error is kept for backward to raise."""
        done = self._lanes[lane].submit(partial(self._unless_failed, work, step, self._lanes[lane]))
        done.add_done_callback(partial(self._note_error, step))
        return done

    def _unless_failed(self, work: Callable[[Step, Lane], None], step: Step, lane: Lane) -> None:
        if self.error is None:
            work(step, lane)

    def _note_error(self, step: Step, done: "LaneFuture[None]") -> None:
        if (error := done.exception()) is not None:
            self._fail(step, error)

    def _fail(self, step: Step, error: BaseException) -> None:
        with self._lock:
            self.error = self.error or error
            step.fail(self.error)

    def _average(self, step: Step, lane: Lane, index: int) -> None:
        taken_up, start_ns, waited_ns = self.timeline.now(), time.perf_counter_ns(), lane.network_ns
        group, compressor = self._groups[index], Dense() if step.sends_all else self.compressors[index]
        if self.discards.settle_group(group, self.compressors[index]):
            self._note_restored([group])
        self.discards.keep(group, self.compressors[index])
        if step.loss_scale:
            step.loss_scale.keep(group)
        arrived = [step.gradients.pop(parameter) for parameter in group.parameters]
        gradients, buckets = [gradient for gradient, _ in arrived], [bucket for _, bucket in arrived]
        for bucket in set(buckets):
            bucket.wait()
        with self._new_in(step, group, gradients, compressor.per_element) as new:
            compressor.accumulate(group, new, self.size, 1 / self._node.local_size if self._node else 1.0)
            for notes in (self._sample, self._record):
                if notes is not None:
                    notes.before(group)
            total = lane.run(take_step(compressor, group, lane.comm), partial(group.zero_gradients_early, gradients))
            if isinstance(total, Sparse) and self.device.type == "cpu" and not total.values.sum().isfinite():
                group.unsent.nan_to_num_(0.0, 0.0, 0.0)  # else it would arrive over many steps, a part in each
            group.hand_back(total, gradients, self.size)
        busy_ns = time.perf_counter_ns() - start_ns - (lane.network_ns - waited_ns)
        self.timeline.average(group, taken_up, busy_ns / 1e9)
        with self._lock:
            step.count_averaged(buckets)
            have_caller_wait(self._lanes)  # a bucket may have groups of several
            if step.loss_scale:  # then `_settle` gives back all
                return
            if not step.averaging:
                self._finish(step)  # before backward can go on and look
            step.give_back()

    def _new_in(
        self, step: Step, group: Group, gradients: Sequence[Tensor], per_element: Sequence[str]
    ) -> AbstractContextManager[Sequence[Tensor | None]]:
        """The part of each of ``gradients`` that this step adds, until the means are in their place."""
        if self._used is None:
            return nullcontext(gradients)
        unscale = step.loss_scale.unscale if step.loss_scale else lambda mean: mean
        return self._used.new_in(group, gradients, unscale, per_element)

    def _settle(self, step: Step, _: Lane) -> None:
        """End a step with a loss scale: as it is, or undone if a rank found a gradient that is not finite."""
        assert step.loss_scale is not None
        overflowed = step.overflowed.wait()
        for average in step.averages:
            average.result()  # raises the error of another lane
        have_caller_wait(self._lanes)
        if self.error is not None:
            return
        for bucket in step.buckets:
            step.loss_scale.give_back(bucket.buffer, overflowed)
        step.averages.clear()
        with self._lock:
            self._finish(step, HostCopy(overflowed))
            step.give_back()

    def _finish(self, step: Step, overflowed: HostCopy | None = None) -> None:
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
        self._means.are_due = True
