"""Averages what the ranks' optimizers did, a fragment of the weights at a time."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # exported at run time only
from torch.futures import Future
from torch.optim import Optimizer

from lightning_sparse.compressors import Compressor, Dense
from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.buffers import ModuleBuffers
from lightning_sparse.engine.derived import derive_anew
from lightning_sparse.engine.flight import Flight
from lightning_sparse.engine.local_state import LocalState
from lightning_sparse.engine.local_steps import LocalSteps
from lightning_sparse.engine.optimizers import why_not_alone
from lightning_sparse.engine.phases import Phase, Phases
from lightning_sparse.engine.replica import Find
from lightning_sparse.engine.second_moments import EVERY
from lightning_sparse.engine.step import Report, gradients_of
from lightning_sparse.network.comm import Comm
from lightning_sparse.network.torch_comm import finished


class LocalExchange(LocalState):
    """Averages weights, a fragment after each step, while DDP gives every rank its own gradients back.

    :class:`Phases` says what a step is.  One is settled, with what is due after it, before the next forward that
    trains, or when somebody asks for the average, whichever is first; so the exchange is the same on every rank.  x̄
    changes when a step is settled, and never in between.

    Args:
        groups: as for :class:`Exchange`; and so ``comms`` and ``threaded``.
        fragments: the fragment of each group.
        settings: of local steps.
        warmup_steps: in which every group travels.
        untrained: frozen parameters of the module, to be averaged if they change.
        compressor: with what they are averaged.
        lead_is_given: by who trains; else ranks do not look ahead with optimizers that make it in vain.
        buffers: of the module.
    """

    def __init__(
        self,
        groups: Sequence[tuple[Group, Compressor]],
        fragments: Sequence[int],
        comms: Sequence[Comm],
        *,
        threaded: bool,
        settings: LocalSteps,
        warmup_steps: int = 0,
        untrained: Mapping[str, Find] | None = None,
        compressor: Compressor | None = None,
        lead_is_given: bool = True,
        buffers: ModuleBuffers | None = None,
    ) -> None:
        others = untrained or {}, compressor or Dense(), lead_is_given, buffers or ModuleBuffers(None)
        super().__init__(groups, fragments, comms, threaded, settings, *others)
        self._phases = Phases()
        self._warmup_steps = warmup_steps
        self._exchanged = 0  # the last step after which groups were taken up
        self._flight = Flight(self._lanes)
        self._unsent_gradients: dict[Tensor, Tensor] = {}  # by parameter, until this step has them

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
        """DDP's communication hook: gives every rank its own gradients back, with what was unsent at first."""
        self._phases.check_backward()
        for parameter, gradient in gradients_of(bucket.buffer(), bucket.parameters()) if self._unsent_gradients else ():
            gradient.add_(self._unsent_gradients.pop(parameter, 0.0))
        if bucket.is_last():
            self._phases.backward(self.weights.versions())
        return finished(bucket.buffer(), self.device)

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

    @property
    def is_starting(self) -> bool:
        return self.moments.is_starting

    def metrics(self) -> dict[str, float]:
        return {"sparse/lr_factor": float(self.moments.lr_factor)} if self.moments.is_known else {}

    def end_step(self) -> None:
        self._phases.end_step()

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
            self.weights.show()
            if settle and buffers and self.phase is not Phase.ENDED:
                self._show_buffers()
            derive_anew(self.shared_buffers.module)
        self._phases.show()
        super().show_average(settle)

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

    def count_from(self, steps: int) -> None:
        super().count_from(steps)
        self._exchanged = max(steps - 1, 0)  # as after a resume, so that both go on alike to the last bit

    @torch.no_grad()
    def merge(self) -> None:
        self.settle()
        self.compare()
        self._hide()
        for replica in self.weights.replicas:
            replica.take_up(self.members)
            unsent = replica.group.unsent
            replica.move(self.ask(lambda comm, x=unsent: comm.all_reduce(x)), self.members)  # type: ignore[misc]
            unsent.zero_()
            replica.apply()
            replica.start_anew()
        self._show_buffers()
        self.shared_buffers.keep_shown()

    # - what no optimizer trains

    def compare(self) -> None:
        self._note_what_was_set()
        self._end_comparison()
        if self.phase is not Phase.ENDED:
            self._comparison.begin(self._lanes[0])
            self._end_comparison()

    def compare_averages(self) -> None:
        if self.phase is not Phase.ENDED:
            super().compare_averages()

    # - checkpoints

    def abandon(self, is_loaded: bool) -> None:
        self._flight.wait()
        self._flight, self._comparison.under_way = Flight(self._lanes), None
        self.shared_buffers.drop()
        if is_loaded:
            self.shared_buffers.restart()
            self.weights.forget_unsent_gradients()
            self.weights.restart()
            self._phases.restart()

    def unpack(self, steps: int | None, names: Collection[str], averages: Mapping[str, Tensor], late: bool) -> None:
        """Go on after ``steps`` (None: from nothing), with own weights as :meth:`Weights.restore` takes them."""
        self.weights.restore(names if steps is not None else (), averages, late)
        self._phases.restart()
        if steps is not None:
            self.steps, self._exchanged = steps, max(steps - 1, 0)

    def check_join(self, options: Mapping[str, Any]) -> None:
        raise ValueError(
            "local_steps cannot be combined with join(): a joined rank takes no steps of its own. Give every rank "
            "as many batches."
        )

    def close(self) -> bool:
        self._phases.end()  # what is due cannot be sent any more
        self._rates.give_back()
        return super().close()

    # - messages

    @property
    def _within_a_step(self) -> bool:
        comparing = self._comparison.under_way
        return self._flight.is_under_way or (comparing is not None and not comparing.done())

    def _send(self) -> None:
        """Take up the groups whose turn it is and have the lanes average them."""
        step = self._exchanged = self.steps
        self.set_by_others.look()
        self.moments.read(self.members)  # here, wherever what it reads was received
        self._flight = Flight(self._lanes)
        due = [i for i, replica in enumerate(self.weights.replicas) if replica.is_due(step, self._warmup_steps)]
        for i in due:
            self.weights.replicas[i].take_up(self.members)
            if self.sample is not None:
                self.sample.before(self.groups[i])
        queues = [[due.index(i) for i in queue] for queue in self._queues_of(due)]
        if comparing := self.moments.is_due(step):
            self.moments.take_up()
        self._flight.send([self.weights.replicas[i] for i in due], queues, self.members)
        if comparing:
            self._flight.launch(self._lanes[-1], self.moments.compare)  # beside a group that is alone
        self.shared_buffers.send(self._flight, self._lanes[0], compares=step % EVERY == 0)
        if step % EVERY == 0:
            self._begin_comparison()

    def _receive(self) -> None:
        """Wait for what is under way, and apply it."""
        self.timeline.begin_wait()
        flight, waited_ns = self._flight, self._flight.wait()
        self.timeline.end_wait()
        if self._counts(flight):
            self.set_by_others.look()
            for replica in flight.replicas:
                replica.apply()
            self.set_by_others.accept()
            self.shared_buffers.receive()
            self.moments.receive()
        if self.sample is not None:
            self.sample.end_step()
        self._flight = Flight(self._lanes)
        self._end_comparison()  # before the report, which counts what it sent
        averaged = [replica.group for replica in flight.replicas]
        self.last = Report.of(self.groups, averaged, self._lanes, flight.spent_before, waited_ns)

    def _counts(self, flight: Flight) -> bool:
        """Whether what has arrived is to be applied, on every rank alike; raises the error of a lane."""
        if flight.error is not None:
            self.error = flight.error
            raise self.error
        return True
