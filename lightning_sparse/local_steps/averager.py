"""Averages what the ranks' optimizers did, a fragment of the weights at a time."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future as LaneFuture
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # exported at run time only
from torch.futures import Future
from torch.optim import Optimizer

from lightning_sparse.compressors import Compressor, Dense
from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.averager import Averager
from lightning_sparse.engine.bucket import Report, gradients_of
from lightning_sparse.engine.groups import carry_over
from lightning_sparse.engine.lanes import Lane, Lanes
from lightning_sparse.local_steps.buffers import ModuleBuffers, derive_anew
from lightning_sparse.local_steps.optimizers import Rates, why_not_alone
from lightning_sparse.local_steps.replica import Find, Replica, Scratch
from lightning_sparse.local_steps.second_moments import EVERY, MeanMoments, SecondMoments
from lightning_sparse.local_steps.set_by_others import SetByOthers
from lightning_sparse.local_steps.settings import LocalSteps
from lightning_sparse.local_steps.untrained import Comparison, Untrained, replicas_of
from lightning_sparse.local_steps.weights import Phase, Phases, Weights
from lightning_sparse.network.agreement import differing
from lightning_sparse.network.comm import Comm
from lightning_sparse.network.torch_comm import TorchComm, finished


class LocalAverager(Averager):
    """Averages weights, a fragment after each step, while DDP or FSDP2 gives every member its own gradients.

    :class:`Phases` says what a step is.  A step is settled before the next forward that trains, or earlier if somebody
    asks for the average: what is due after it is done then, at the same point on every rank.  x̄ changes when a step is
    settled, and never in between.

    The way of a weight: after a step :meth:`_send` has the lanes average the groups whose turn it is; beside the next
    one they do so, each as :class:`Replica` says; and when that one is settled :meth:`_receive` applies what has come.

    Args:
        groups: as for :class:`Averager`, and so ``lanes``.
        fragments: the fragment of each group.
        settings: of local steps.
        warmup_steps: in which every group travels.
        untrained: frozen parameters of the module, to be averaged if they change.
        compressor: with what they are averaged.
        lead_is_given: by who trains; else ranks do not look ahead with optimizers that make it in vain.
        buffers: of the module.
        inside: the ranks of this member, which train the same weights together, for the thread that trains; None where
            it is one rank, or FSDP2 shards the model and does what is done inside.
        make_ready: to be called before parameters are set.
    """

    def __init__(
        self,
        groups: Sequence[tuple[Group, Compressor]],
        fragments: Sequence[int],
        lanes: Lanes,
        *,
        settings: LocalSteps,
        warmup_steps: int = 0,
        untrained: Mapping[str, Find] | None = None,
        compressor: Compressor | None = None,
        lead_is_given: bool = True,
        buffers: ModuleBuffers | None = None,
        inside: TorchComm | None = None,
        make_ready: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(groups, lanes)
        self._inside = inside
        self.settings = settings
        self._rates = Rates(settings.lead or 1.0, lead_is_given)
        of = zip(groups, fragments, strict=True)
        scratch = Scratch()
        replicas = [Replica(group, c, i, settings, scratch=scratch) for (group, c), i in of]
        self.weights = Weights(replicas, inside, make_ready)
        self.set_by_others = SetByOthers(self.weights)
        self.shared_buffers = buffers or ModuleBuffers(None)
        self.moments = SecondMoments(self.groups if settings.second_moments == "mean" else ())
        self.mean_moments = MeanMoments(self.moments)
        self.untrained = Untrained(untrained or {})  # what no optimizer trains, and has not changed so far
        self._comparison = Comparison(self.untrained, self.device)
        self._compressor = compressor or Dense()
        self._phases = Phases()
        self._warmup_steps = warmup_steps
        self._warned_of_own = False
        self._exchanged = 0  # the last step after which groups were taken up
        self._pending = PendingExchange(self.lanes)
        self._unsent_gradients: dict[Tensor, Tensor] = {}  # by parameter, until this step has them

    @property
    def local(self) -> "LocalAverager":  # type: ignore[override]  # where gradients are averaged, None
        """Itself, since ranks have weights of their own."""
        return self

    @property
    def members(self) -> int:
        """Who averages now; the ranks, all of them."""
        return self.lanes[0].comm.size

    # - a step

    @property
    def phase(self) -> Phase:
        return self._phases.now

    @property
    def within_step(self) -> bool:
        return self.phase is Phase.STEP

    @property
    def is_half_made(self) -> bool:
        return self._phases.is_half_made(self.weights.versions())

    @property
    def is_starting(self) -> bool:
        return self.moments.is_starting

    def between_steps(self) -> None:
        self._rates.give_back()
        half_made = self.is_half_made
        if not half_made:
            self.settle()
            self._hide()
            self.untrained.begin()
        self._unsent_gradients = self.weights.unsent_gradients()
        self._phases.begin_forward(half_made)
        if not half_made and self.settings.overlap and self._exchanged < self.steps:
            self._send()

    def end_forward(self) -> None:
        self._phases.end_forward()

    def hook(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        """DDP's communication hook: gives every member its own gradients back, with what was unsent at first."""
        self.check_backward()
        for parameter, gradient in gradients_of(bucket.buffer(), bucket.parameters()) if self._unsent_gradients else ():
            if (unsent := self._unsent_gradients.pop(parameter, None)) is not None:
                self.cut.own(gradient).add_(unsent, alpha=self.cut.count)  # of which the mean inside keeps one
        if bucket.is_last():
            self.end_backward()
        if self._inside is not None and bucket.buffer().numel():
            if not self.lanes.keeps_order:  # [Note: one order of launches]
                self.lanes.have_caller_wait()
            return self._inside.mean_of_bucket(bucket.buffer(), self._fail)
        return finished(bucket.buffer(), self.device)

    def check_backward(self) -> None:
        self._phases.check_backward()

    def end_backward(self) -> None:
        self._phases.backward(self.weights.versions())

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Have an optimizer of these parameters step this rank's own weights.

        Raises:
            ValueError: a rank alone cannot take a step of it.
        """
        if reason := why_not_alone(optimizer):
            raise ValueError(
                f"local_steps cannot be combined with {type(optimizer).__name__}, which {reason}. Give another "
                "optimizer, or leave out local_steps."
            )
        self._comparison.leads_in_vain |= self._rates.are_in_vain(optimizer)
        self._hide()
        self.set_by_others.begin(optimizer)
        self._phases.begin_optimizer()

    def before_update(self, optimizer: Optimizer) -> None:
        self.set_by_others.look_within(optimizer)
        self.mean_moments.before_update(optimizer)
        self._rates.scale(optimizer)

    def after_update(self, optimizer: Optimizer | None = None, stepped: bool = False) -> None:
        self._rates.give_back(optimizer, stepped)
        self.set_by_others.accept(optimizer) if stepped else self.set_by_others.ask(optimizer)  # which may set others

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        self._rates.give_back(optimizer)
        self.mean_moments.after_update(optimizer)
        self.set_by_others.end(optimizer)
        self._phases.end_optimizer()

    def end_step(self) -> None:
        self._phases.end_step()

    def settle(self) -> None:
        if not self._phases.backwards:
            return
        self._phases.settle()
        self.weights.forget_unsent_gradients()
        self.steps += self._advance()
        self.timeline.end_backward()
        with torch.inference_mode(False):
            self._hide()
            if not self.settings.overlap and self._exchanged < self.steps:
                self._send()
            self._receive()
            if not self.settings.overlap:
                self.moments.read(self.members)
            if self.steps == 1 and self.untrained.watched:
                self.compare()

    def _advance(self) -> int:
        """By how much the step that is being settled takes the schedule of exchanges forward."""
        return 1

    # - an exchange

    def _send(self) -> None:
        """Take up the groups whose turn it is and have the lanes average them."""
        step = self._exchanged = self.steps
        self.set_by_others.look()
        self.moments.read(self.members)  # here, so that no rank reads it at another step
        self._pending = PendingExchange(self.lanes)
        due = [replica for replica in self.weights.replicas if replica.is_due(step, self._warmup_steps)]
        for replica in due:
            replica.snapshot(self.members)
            if self.sample is not None:
                self.sample.before(replica.group)
        if comparing := self.moments.is_due(step):
            self.moments.snapshot()
        self._pending.send(due, self.members)
        if comparing:
            self._pending.launch(self.lanes[-1], self.moments.compare)  # beside a group that is alone
        self.shared_buffers.send(self._pending.launch, self.lanes[0], compares=step % EVERY == 0)
        if step % EVERY == 0:
            self._begin_comparison()

    def _receive(self) -> None:
        """Wait for what is under way, and apply it."""
        self.timeline.begin_wait()
        pending, waited_ns = self._pending, self._pending.wait()
        self.timeline.end_wait()
        if self._counts(pending):
            self.set_by_others.look()
            self.weights.apply_moves(pending.replicas)
            self.set_by_others.accept()
            self.shared_buffers.receive()
            self.moments.receive(self._inside)
        if self.sample is not None:
            self.sample.end_step()
        self._pending = PendingExchange(self.lanes)
        self._end_comparison()  # before the report, which counts what it sent
        averaged = [replica.group for replica in pending.replicas]
        self.last = Report.of(self.groups, averaged, self.lanes, pending.spent_before, waited_ns)

    def _counts(self, pending: "PendingExchange") -> bool:
        """Whether what has arrived is to be applied, on every rank alike; raises the error of a lane."""
        if pending.error is not None:
            self.error = pending.error
            raise self.error
        return True

    @property
    def _within_a_step(self) -> bool:
        comparing = self._comparison.under_way
        return self._pending.is_under_way or (comparing is not None and not comparing.done())

    # - how far ranks look ahead

    def note(self, optimizer: Optimizer) -> None:
        own = {p for group in self.groups for p in group.parameters}
        is_ours = any(p in own for group in optimizer.param_groups for p in group["params"])
        if is_ours and self._rates.may_end and self._rates.are_in_vain(optimizer):
            self._comparison.leads_in_vain = True
            if not self.steps:  # else messages may be under way, and ranks compare first
                self._end_lead()

    def _end_lead(self) -> None:
        """Look ahead no more; to be called on every rank, with no message under way."""
        if self._rates.may_end:
            self._rates.give_back()
            self._rates.factor, self.settings = 1.0, replace(self.settings, lead=1.0)
            for replica in self.weights.replicas:
                replica.lead = 1.0
            rank_zero_info(
                "lightning_sparse: local steps do not look ahead (lead=1): the steps of an optimizer do not grow with "
                "its learning rate."
            )

    # - whose weights and buffers the module holds

    def show_average(self, settle: bool = True, buffers: bool = True) -> None:
        """Have the parameters hold x̄ until the next forward that trains; ``settle=False``, at the end, sends nothing.

        With ``buffers`` these are the same on all ranks as well; to be called on all, as often, where there are any.

        Raises:
            RuntimeError: within a forward that trains, but for the end.
        """
        if settle:
            self._phases.check_show()
            self.settle()
        with torch.inference_mode(False), torch.no_grad():  # in which an evaluation may ask for it
            self.set_by_others.look()
            if self._inside is not None and not settle and not self.weights.shown:
                self._warn_of_own_weights()
            else:
                self.weights.show()
            if settle and buffers and self.phase is not Phase.ENDED:
                self._show_buffers()
            derive_anew(self.shared_buffers.module)
        self._phases.show()
        super().show_average(settle)

    def _warn_of_own_weights(self) -> None:
        if not self._warned_of_own:
            self._warned_of_own = True
            rank_zero_warn(
                "lightning_sparse: The parameters hold what this machine has trained, not the average of all: its "
                "ranks have a slice each of that, and one of them may be gone."
            )

    def _show_buffers(self) -> None:
        self.shared_buffers.show(self.lanes.on_first, self.members)

    def _hide(self) -> None:
        self._note_what_was_set()
        self.shared_buffers.hide()
        if self.weights.shown:
            self.weights.hide()
            self.set_by_others.accept()

    def _note_what_was_set(self) -> None:
        self.weights.take_over()
        if self.weights.set_by_others:
            self.weights.set_by_others = False
            self._comparison.note(self.weights.checksum())

    # - what ranks compare: averages that somebody has set, and what no optimizer trains

    def compared(self) -> Mapping[Tensor, Tensor]:
        self.settle()
        self.compare()
        return self.shared

    def compare(self) -> None:
        """Find out what no optimizer trains and has changed, and differs between ranks; to be called on every rank."""
        self._note_what_was_set()
        self._end_comparison()
        if self.phase is not Phase.ENDED:
            self._begin_comparison()
            self._end_comparison()

    def _begin_comparison(self) -> None:
        self._comparison.begin(self.lanes[0], self.weights.checksum_of_own)

    def _end_comparison(self) -> None:
        """Average what has changed, too, starting from the mean over the ranks, and look ahead if that is of use."""
        for replica in self._replicas_of(self._comparison.end()):
            own = replica.average.clone()
            replica.average.copy_(self.lanes.sum_over_members(own) / self.members)  # of this rank's slices
            self.weights.add(replica)
        if self._comparison.lead_ends:
            self._end_lead()

    def compare_averages(self) -> None:
        if self.phase is Phase.ENDED:
            return
        trained = {name for each in self.weights.replicas if not each.is_untrained for name in each.group.names}
        sums = {name: x for name, x in self.weights.checksums(self.weights.averages()).items() if name in trained}
        if not sums:
            return
        own = torch.stack(list(sums.values())).to(self.device)
        every = self.lanes.run_message(lambda comm: comm.all_gather(own)).cpu()  # [P, k]
        members = self.lanes[0].comm.members
        columns = [every[column] for column in members.columns]  # of ranks that have the same slices
        differ = [name for i, name in enumerate(sums) if any((rows[:, i] != rows[0, i]).any() for rows in columns)]
        if differ:
            parties = differing([tuple(row) for row in every.tolist()], members.columns)
            raise RuntimeError(
                "Weights that are set after the last step must be set on every rank, to the same, as they are the "
                f"average of all ranks then; got others on {parties}: {differ[0]}"
                f"{f' and {len(differ) - 1} more' if len(differ) > 1 else ''}. Set them on all ranks, or set them in a "
                "copy of the model."
            )

    def adopt(self, groups: Iterable[Collection[str]]) -> None:
        for names in groups:
            for replica in self._replicas_of(names):
                self.weights.add(replica)

    def _replicas_of(self, names: Collection[str]) -> list[Replica]:
        found = self.untrained.take(names)
        made = replicas_of(found, self._compressor, self.settings, self.weights.replicas, self.cut)
        if made:
            self.lay_out([(each.group, each.compressor) for each in (*self.weights.replicas, *made)])
        return made

    # - from one averager to another

    def take_over(self, before: Averager, memories: bool) -> None:
        assert isinstance(before, LocalAverager)
        names, steps = {name for group in before.groups for name in group.names}, before.steps
        averages = {name: average.clone() for name, average in before.averages.items()}
        self.adopt([group.names for group in before.groups])
        carry_over(list(before.kept()), list(zip(self.groups, self.compressors, strict=True)), memories)
        self.unpack(steps, names, averages, late=False)
        self.untrained.resume(before.untrained.seen)
        self.shared_buffers.take_over(before.shared_buffers)
        if set(before.moments) == set(self.moments):  # else, as where a layer is frozen, they are compared anew
            before.moments.read(self.members)
            self.mean_moments.resume(before.mean_moments.state(), before.sampled, self.members)

    def add_to_next(self, groups: Sequence[Group]) -> None:
        carry_over(groups, list(zip(self.groups, self.compressors, strict=True)), memories=False)
        for replica in self.weights.replicas:
            replica.unsent_gradient = replica.group.unsent.clone()
            replica.group.unsent.zero_()

    @torch.no_grad()
    def merge(self) -> None:
        self.settle()
        self.compare()
        self._hide()
        for replica in self.weights.replicas:
            replica.snapshot(self.members)
            unsent = replica.group.unsent
            replica.set_move(self.lanes.sum_over_members(unsent), self.members)
            unsent.zero_()
            replica.apply_move()
            replica.start_anew()
        self.weights.share(self.weights.replicas)
        self._show_buffers()
        self.shared_buffers.keep_shown()

    def count_from(self, steps: int) -> None:
        super().count_from(steps)
        self._exchanged = max(steps - 1, 0)  # as after a resume, so that both go on alike to the last bit

    # - checkpoints

    def kept(self, with_means: bool = True) -> Iterator[Group]:
        return self.weights.kept()

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        return self.shared_buffers.own()

    def hold(self, own: Mapping[str, Tensor], late: Collection[str]) -> None:
        self.shared_buffers.hold(own, late)

    @property
    def not_averaged(self) -> Mapping[str, Tensor]:
        return {name: find() for name, find in self.untrained.watched.items()}

    @property
    def sampled(self) -> Tensor | None:
        return self.mean_moments.sampled

    def state(self, inside: Comm | None = None) -> dict[str, Any]:
        self.moments.read(self.members)
        averages = self.weights.whole_averages(inside)
        return {
            "moments": {key: x.cpu() for key, x in self.mean_moments.state().items()},
            "checksums": self.weights.checksums(averages) | self.shared_buffers.checksums(),
            "seen": {name: x.cpu() for name, x in self.untrained.seen.items()},
            "averages": self.weights.beyond_parameters(averages),
            "differing": list(self.shared_buffers.differing),
        }

    def resume(self, state: Mapping[str, Any], sampled: Tensor | None) -> None:
        self.untrained.resume(state["seen"])
        self.shared_buffers.differing = list(state.get("differing", []))
        self.mean_moments.resume(state["moments"], sampled, self.members)

    def unpack(self, steps: int | None, names: Collection[str], averages: Mapping[str, Tensor], late: bool) -> None:
        self.weights.restore(names if steps is not None else (), averages, late)
        self._phases.restart()
        if steps is not None:
            self.steps, self._exchanged = steps, max(steps - 1, 0)

    def abandon(self, is_loaded: bool) -> None:
        self._pending.wait()
        self._pending, self._comparison.under_way = PendingExchange(self.lanes), None
        self.shared_buffers.drop()
        if is_loaded:
            self.shared_buffers.restart()
            self.weights.forget_unsent_gradients()
            self.weights.restart()
            self._phases.restart()

    # - what others look at

    @property
    def averages(self) -> Mapping[str, Tensor]:
        return self.weights.averages()

    @property
    def own(self) -> Mapping[str, Tensor]:
        """This rank's own weights x_r by name, of what it owns of each parameter."""
        return self.weights.named(self.weights.own)

    @property
    def shared(self) -> Mapping[Tensor, Tensor]:
        return self.weights.shared_by_parameter()

    def unsent_of(self, group: Group) -> Tensor:
        return self.weights.unsent(self.weights.replicas[group.index])

    def metrics(self) -> dict[str, float]:
        return {"sparse/lr_factor": float(self.moments.lr_factor)} if self.moments.is_known else {}

    @property
    def round(self) -> int:
        return self.settings.steps

    def check_join(self, options: Mapping[str, Any]) -> None:
        raise ValueError(
            "local_steps cannot be combined with join(): a joined rank takes no steps of its own. Give every rank "
            "as many batches."
        )

    def close(self) -> bool:
        self._phases.end()  # what is due cannot be sent any more
        self._rates.give_back()
        return super().close()


class PendingExchange:
    """The exchange after one step: replicas that were taken up, are averaged by ``lanes``, and not applied yet."""

    def __init__(self, lanes: Lanes) -> None:
        self.error: BaseException | None = None  # the first failure of a lane
        self.replicas: Sequence[Replica] = ()
        self.spent_before = lanes.spent()
        self._lanes = lanes
        self._works: list[LaneFuture[None]] = []

    @property
    def is_under_way(self) -> bool:
        """Whether a message may be: a lane is at work, or has failed."""
        return self.error is not None or not all(work.done() for work in self._works)

    def send(self, replicas: Sequence[Replica], size: int) -> None:
        """Have the lanes average ``replicas`` over ``size`` ranks, in an order that all ranks keep to."""
        self.replicas = replicas
        self._lanes.wait_for_caller()
        for order in self._lanes.orders_of([each.group.elements for each in replicas]):
            for lane, i in order:
                self.launch(self._lanes[lane], partial(_average, replicas[i], size))

    def launch(self, lane: Lane, work: Callable[[Lane], None], always: bool = False) -> None:
        """Have ``lane`` do ``work`` after all else, unless a lane has failed; or ``always``."""
        self._works.append(lane.submit(partial(self._unless_failed, work, lane, always)))

    def wait(self) -> int:
        """Wait until all has arrived; returns for how many nanoseconds."""
        start_ns = time.perf_counter_ns()
        wait(self._works)
        self._lanes.have_caller_wait()
        return time.perf_counter_ns() - start_ns

    def _unless_failed(self, work: Callable[[Lane], None], lane: Lane, always: bool) -> None:
        if always or self.error is None:
            try:
                work(lane)
            except BaseException as error:  # whatever it is, training must hear of it
                self.error = self.error or error


def _average(replica: Replica, size: int, lane: Lane) -> None:
    replica.set_move(lane.run(replica.reduce(lane.comm)), size)
