"""Averages what the ranks' optimizers did, a fragment of the weights at a time."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future as LaneFuture
from concurrent.futures import wait
from functools import partial

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # exported at run time only
from torch.futures import Future

from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.delivery import gradients_of
from lightning_sparse.engine.exchange import Exchange
from lightning_sparse.engine.lane import Lane, spent
from lightning_sparse.engine.local_steps import LocalSteps
from lightning_sparse.engine.lr_factor import EVERY, LrFactor
from lightning_sparse.engine.replica import Replica
from lightning_sparse.engine.step import Report
from lightning_sparse.network.comm import Comm


class LocalExchange(Exchange):
    """Averages weights, a fragment after each step, while DDP gives every rank its own gradients back.

    A step is what lies between two forwards that train if a backward has been among it.  What is due after a step is
    done before the next forward, before anybody evaluates or saves, and at the end, whichever is first; so it is the
    same on every rank, whatever the optimizers did.

    While the model trains, the parameters hold this rank's own weights; from :meth:`show_average` until the next
    forward that trains they hold the average.  Weights changed by others meanwhile are the new average, of which
    nothing is owed: a checkpoint that was loaded, or those of stochastic weight averaging.

    Args:
        groups: each group and what averages it, in the order in which they are sent.
        fragments: the fragment of each group.
        comms: the ranks, once for each lane; nobody else may launch messages on them.
        threaded: give each lane a thread of its own; see [Note: who issues messages].
        settings: of local steps.
        warmup_steps: in which every group travels.
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
    ) -> None:
        super().__init__(groups, comms, threaded=threaded)
        self.settings = settings
        self.replicas = [
            Replica(group, compressor, fragment, settings)
            for (group, compressor), fragment in zip(groups, fragments, strict=True)
        ]
        self.lr_factor = LrFactor(self.groups)
        self._handles = self.lr_factor.scale_steps() if settings.lr_factor == "measured" else []
        self._warmup_steps = warmup_steps
        self._backwards = 0  # since the last step was settled
        self._resumed = False  # what is owed is in ``unsent``, from a checkpoint
        self._exchanged = 0  # the last step after which groups were taken up
        self._due: list[Replica] = []  # taken up, and not applied yet
        self._under_way: list[LaneFuture[None]] = []
        self._spent_before = spent(self._lanes)
        # Of each parameter this rank's own weights, and its version, while the average is shown.
        self._held: list[tuple[Tensor | None, int]] | None = self._all_shared()

    def hook(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        """DDP's communication hook: gives every rank its own gradients back."""
        del state
        if (self.steps + 1) % EVERY == 0:
            self.lr_factor.take_in(gradients_of(bucket.buffer(), bucket.parameters()))
        self._backwards += bucket.is_last()
        future: Future[Tensor] = Future(devices=[self.device] if self.device.type == "cuda" else None)
        future.set_result(bucket.buffer())
        return future

    def between_steps(self) -> None:
        """Settle the step before; give this rank its own weights back, and send what is due beside the next step."""
        self.settle()
        self._hide_average()
        if self.settings.overlaps and self._exchanged < self.steps:
            self._send()

    def count_from(self, steps: int) -> None:
        """Go on after so many ``steps`` of another engine, of which nothing is owed."""
        super().count_from(steps)
        self._exchanged = steps

    def settle(self) -> None:
        """Do what is due after the last step, if one has ended.  To be called between two steps, on every rank."""
        if not self._backwards:
            return
        self._backwards = 0
        self.steps += 1
        self.timeline.end_backward()
        with torch.inference_mode(False):  # in which an evaluation may ask for the average
            if not self.settings.overlaps:
                self._send()
            self._receive()

    @property
    def shows_average(self) -> bool:
        """Whether the parameters hold the average, which somebody has asked for since the last forward that trained."""
        return self._held is not None

    def show_average(self, settle: bool = True) -> None:
        """Have the parameters hold x̄ until the next forward that trains; ``settle=False`` sends nothing."""
        if settle:
            self.settle()
        if not self.shows_average:
            with torch.inference_mode(False), torch.no_grad():
                self._held = [_exchange_for(average, p) for p, average, _ in self._weights()]

    def _weights(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield each parameter, its x̄ and its part of ``unsent``, of the same shape."""
        for replica in self.replicas:
            group = replica.group
            averages, unsent = group.slots(replica.average), group.slots(group.unsent)
            for p, average, owed in zip(group.parameters, averages, unsent, strict=True):
                yield p, average.view(p.shape), owed.view(p.shape)

    def _all_shared(self) -> list[tuple[Tensor | None, int]]:
        """What is held where the parameters are the average and nothing is owed."""
        return [(None, -1) for _ in self._weights()]

    @torch.no_grad()
    def _hide_average(self) -> None:
        if self._held is None:
            return
        for (p, average, owed), (own, version) in zip(self._weights(), self._held, strict=True):
            if own is None or _has_changed(p, version, average):
                average.copy_(p)
                own = p
            p.copy_(owed if self._resumed else own)
        self._held, self._resumed = None, False

    @torch.no_grad()
    def merge(self) -> None:
        """Have every rank hold the mean of all ranks' own weights, and owe nothing.  To be called between two steps."""
        self.settle()
        self._hide_average()
        for replica in self.replicas:
            replica.take_up(self.size)
            owed = replica.group.unsent
            replica.move(self.ask(lambda comm, owed=owed: comm.all_reduce(owed)), self.size)  # type: ignore[misc]
            owed.zero_()
        for p, average, _ in self._weights():
            p.copy_(average)
        self._held = self._all_shared()

    # - checkpoints

    def pack(self) -> None:
        """Lay this rank's own weights into ``unsent`` of each group, where a checkpoint and another fit take them."""
        self.show_average()
        if self._resumed:
            return
        assert self._held is not None
        for (p, average, place), (own, version) in zip(self._weights(), self._held, strict=True):
            place.copy_(p.detach() if own is None or _has_changed(p, version, average) else own)

    def unpack(self, steps: int | None) -> None:
        """Go on after so many ``steps``: the parameters hold the average, and ``unsent`` this rank's own weights.

        None: nothing is owed.
        """
        wait(self._under_way)
        self._due, self._under_way, self._backwards = [], [], 0
        self._held, self._resumed = self._all_shared(), steps is not None
        if steps is not None:
            self.steps, self._exchanged = steps, steps - 1

    @property
    def shared(self) -> Mapping[Tensor, Tensor]:
        """Each parameter's x̄, of the same shape."""
        self.settle()
        return {p: p if self.shows_average else average for p, average, _ in self._weights()}

    def unsent_at(self, group: Group, places: Tensor) -> Tensor:
        """What this rank owes of ``group`` at ``places`` [m], [m]: x_r - x̄."""
        if self.shows_average:
            return torch.zeros(len(places), device=places.device)
        own = torch.cat([p.detach().reshape(-1).float() for p in group.parameters])
        return own[places] - self.replicas[group.index].average[places]

    def unsent_norm(self) -> float:
        """Euclidean norm of all this rank owes."""
        if self.shows_average:
            return 0.0
        squares = [(p.detach().float() - average).square().sum() for p, average, _ in self._weights()]
        return float(torch.stack(squares).sum().sqrt()) if squares else 0.0

    def close(self) -> bool:
        """End the issuing threads; returns whether no message is under way."""
        self._backwards = 0  # what is due cannot be sent any more
        for handle in self._handles:
            handle.remove()
        return super().close()

    # - messages

    @property
    def _within_a_step(self) -> bool:
        return not all(done.done() for done in self._under_way)

    def _send(self) -> None:
        """Take up the groups whose turn it is and have the lanes average them."""
        step = self._exchanged = self.steps
        self._spent_before = spent(self._lanes)
        due = [i for i, replica in enumerate(self.replicas) if replica.is_due(step, self._warmup_steps)]
        for i in due:
            self.replicas[i].take_up(self.size)
            if self.sample is not None:
                self.sample.before(self.groups[i])
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream())
        self._due = [self.replicas[i] for i in due]
        self._under_way = [
            lane.submit(partial(self._unless_failed, partial(self._average, self.replicas[i]), lane))
            for lane, queue in zip(self._lanes, self._queues_of(due), strict=True)
            for i in queue
        ]
        if step % EVERY == 0 and self.lr_factor.squares.numel():
            lane = self._lanes[0]
            self._under_way.append(lane.submit(partial(self._unless_failed, self._compare, lane)))

    def _average(self, replica: Replica, lane: Lane) -> None:
        replica.move(lane.run(replica.exchange(lane.comm)), self.size)

    def _compare(self, lane: Lane) -> None:
        lane.run(self.lr_factor.sum_up(lane.comm))

    def _unless_failed(self, work: Callable[[Lane], None], lane: Lane) -> None:
        if self.error is None:
            try:
                work(lane)
            except BaseException as error:  # whatever it is, training must hear of it
                self.error = self.error or error

    def _receive(self) -> None:
        """Wait for what is under way, and apply it."""
        start_ns = time.perf_counter_ns()
        wait(self._under_way)
        if self.error is not None:
            raise self.error
        if self._stream:
            torch.cuda.current_stream().wait_stream(self._stream)
        waited_ns = time.perf_counter_ns() - start_ns
        for replica in self._due:
            replica.apply()
        self.lr_factor.read(self.size)
        if self.sample is not None:
            self.sample.end_step()
        averaged = [replica.group for replica in self._due]
        self.last = Report.of(self.groups, averaged, self._lanes, self._spent_before, waited_ns)
        self._due, self._under_way, self._spent_before = [], [], spent(self._lanes)


def _exchange_for(average: Tensor, parameter: Tensor) -> tuple[Tensor, int]:
    """Set ``parameter`` to ``average``; return what it was, and its version now, which changes with its values."""
    own = parameter.detach().clone()
    parameter.copy_(average)
    return own, parameter._version


def _has_changed(parameter: Tensor, version: int, average: Tensor) -> bool:
    """Whether ``parameter``, which was set to ``average``, holds something else now."""
    return parameter._version != version and not torch.equal(parameter.detach(), average.to(parameter.dtype))
