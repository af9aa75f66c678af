"""Averages what the ranks' optimizers did, a fragment of the weights at a time."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future as LaneFuture
from concurrent.futures import wait
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # exported at run time only
from torch.futures import Future
from torch.optim import Optimizer

from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.dense import Exact
from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.delivery import gradients_of
from lightning_sparse.engine.exchange import Exchange
from lightning_sparse.engine.lane import Lane, spent
from lightning_sparse.engine.local_steps import LocalSteps
from lightning_sparse.engine.lr_factor import EVERY, LrFactor
from lightning_sparse.engine.optimizers import why_not_alone
from lightning_sparse.engine.replica import Find, Replica
from lightning_sparse.engine.step import Report
from lightning_sparse.engine.untrained import Untrained
from lightning_sparse.engine.weights import Phase, Weights
from lightning_sparse.network.agreement import ranks_having
from lightning_sparse.network.comm import Comm


class LocalExchange(Exchange):
    """Averages weights, a fragment after each step, while DDP gives every rank its own gradients back.

    A step is open from the first forward that trains to the end of the optimizer's step; :class:`Phase` has the states.
    It counts if a backward has been in it that DDP synchronises.  It is settled, with what is due after it, before the
    next forward that trains, or when somebody asks for the average, whichever is first; so the exchange is the same on
    every rank, whatever the optimizers did.  x̄ changes when a step is settled, and never in between.

    Args:
        groups: each group and what averages it, in the order in which they are sent.
        fragments: the fragment of each group.
        comms: the ranks, once for each lane; nobody else may launch messages on them.
        threaded: give each lane a thread of its own; see [Note: who issues messages].
        settings: of local steps.
        warmup_steps: in which every group travels.
        untrained: tensors of the module that no optimizer trains, to be averaged if they change.
        averages: with what frozen parameters among them are averaged.
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
        averages: Compressor | None = None,
    ) -> None:
        super().__init__(groups, comms, threaded=threaded)
        self.settings = settings
        self.phase = Phase.SHOWN
        self.weights = Weights(
            [Replica(group, c, fragment, settings) for (group, c), fragment in zip(groups, fragments, strict=True)]
        )
        self.lr_factor = LrFactor(self.groups)
        self._untrained, self._averages = Untrained(untrained or {}), averages or Exact()
        self._warmup_steps = warmup_steps
        self._in_forward = False
        self._backwards = 0  # since the last step was settled
        self._stepped = False  # an optimizer has, since the last backward
        self._versions: list[int] = []  # of the parameters, after the last backward
        self._in_optimizer = self._backward_in_optimizer = False
        self._exchanged = 0  # the last step after which groups were taken up
        self._due: list[Replica] = []  # taken up, and not applied yet
        self._under_way: list[LaneFuture[None]] = []
        self._set = 0  # a checksum of averages that others than we have set, since the ranks have compared it
        self._comparison: LaneFuture[Tensor] | None = None  # of that and of what has changed, [P, 1 + k] int64
        self._spent_before = spent(self._lanes)

    # - the phases of a step

    def between_steps(self) -> None:
        """Settle the step before; give this rank its own weights back, and send what is due beside the next step."""
        if self.phase is Phase.ENDED:
            raise RuntimeError(
                "the hook on this DistributedDataParallel was closed, so it averages no weights any more; to train on, "
                "make a new DistributedDataParallel and a new hook."
            )
        if self.is_half_made:
            self.phase, self._in_forward = Phase.STEP, True
            return
        self.settle()
        self._hide()
        self._untrained.begin()
        self._stepped = False
        self.phase, self._in_forward = Phase.STEP, True
        if self.settings.overlaps and self._exchanged < self.steps:
            self._send()

    @property
    def is_half_made(self) -> bool:
        """Whether an optimizer needs another forward for its step, as sharpness-aware minimisation (SAM) does.

        It asks its closure again, or has changed the weights for a while, which it will restore.
        """
        if self._in_optimizer and self._backward_in_optimizer:
            return True
        return bool(self._backwards) and not self._stepped and self._versions != self._versions_now()

    def _versions_now(self) -> list[int]:
        return [p._version for group in self.groups for p in group.parameters if p.requires_grad]

    def end_forward(self) -> None:
        """Note the end of a forward."""
        self._in_forward = False
        self._end_step_if_over()

    def hook(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        """DDP's communication hook: gives every rank its own gradients back."""
        del state
        if self.phase is Phase.SHOWN:
            raise RuntimeError(
                "a backward must follow a forward that trains; got one while the parameters hold the average of all "
                "ranks, as in evaluation. Call train() on the DistributedDataParallel for every forward that is "
                "trained on, and eval() on single layers only, such as batch norm."
            )
        if (self.steps + 1) % EVERY == 0:
            self.lr_factor.take_in(gradients_of(bucket.buffer(), bucket.parameters()))
        if bucket.is_last():
            self._backwards += 1
            self._stepped, self._backward_in_optimizer = False, self._in_optimizer
            self._versions = self._versions_now()
            self.phase = Phase.STEP
        future: Future[Tensor] = Future(devices=[self.device] if self.device.type == "cuda" else None)
        future.set_result(bucket.buffer())
        return future

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
        self._in_optimizer, self._backward_in_optimizer = True, False
        if self.phase is Phase.SHOWN:
            self._hide()
            self.phase = Phase.STEP

    def after_optimizer_step(self) -> None:
        """Note that this rank's optimizer has stepped."""
        self._in_optimizer, self._stepped = False, True

    @property
    def lr_factor_now(self) -> float:
        """What the optimizers' learning rates are multiplied by."""
        return self.lr_factor.value if self.settings.lr_factor == "measured" else 1.0

    def end_step(self) -> None:
        """Note that an optimizer has stepped, or skipped a step; to be called on every rank."""
        self._stepped = True
        self._end_step_if_over()

    def _end_step_if_over(self) -> None:
        if self.phase is Phase.STEP and self._stepped and not self._in_forward:
            self.phase = Phase.BETWEEN

    @property
    def within_step(self) -> bool:
        """Whether a step is open, so that the average cannot be shown without a part of it."""
        return self.phase is Phase.STEP

    @property
    def shows_average(self) -> bool:
        """Whether the parameters hold the average, which somebody has asked for since the last forward that trained."""
        return self.weights.shown

    def show_average(self, settle: bool = True) -> None:
        """Have the parameters hold x̄ until the next forward that trains; ``settle=False`` sends nothing.

        Raises:
            RuntimeError: within a forward that trains.
        """
        if self._in_forward:
            raise RuntimeError(
                "show_average() must be called between two steps; got a call within a forward that trains, whose "
                "weights would change under it. Call it after the optimizer's step."
            )
        if settle:
            self.settle()
        with torch.inference_mode(False):  # in which an evaluation may ask for it
            self.weights.show()
        if self.phase is not Phase.ENDED:
            self.phase = Phase.SHOWN

    def _hide(self) -> None:
        self.weights.hide()
        if self.weights.set_by_others:
            self.weights.set_by_others = False
            self._set = (31 * self._set + self.weights.checksum()) % 2**62

    def settle(self) -> None:
        """Do what is due after the last step, if one has ended.  To be called between two steps, on every rank."""
        if not self._backwards:
            return
        self._backwards = 0
        self.steps += 1
        self.timeline.end_backward()
        with torch.inference_mode(False):
            if self.phase is Phase.SHOWN:
                self._hide()
            if not self.settings.overlaps:
                self._send()
            self._receive()
            if self.steps == 1:
                self.compare()

    def count_from(self, steps: int) -> None:
        """Go on after so many ``steps`` of another engine, of which nothing is owed."""
        super().count_from(steps)
        self._exchanged = steps

    @torch.no_grad()
    def merge(self) -> None:
        """Have every rank hold the mean of all ranks' own weights, and owe nothing.  To be called between two steps."""
        self.settle()
        self.compare()
        self._hide()
        for replica in self.weights.replicas:
            replica.take_up(self.size)
            owed = replica.group.unsent
            replica.move(self.ask(lambda comm, owed=owed: comm.all_reduce(owed)), self.size)  # type: ignore[misc]
            owed.zero_()
            replica.apply()
            for place, (tensor, average) in enumerate(zip(replica.tensors(), replica.averages(), strict=True)):
                tensor.copy_(average)
                replica.start_from(place, average)

    # - what no optimizer trains

    def compare(self) -> None:
        """Find out what no optimizer trains and has changed, and average it from now on; to be called on every rank."""
        self._read_comparison()
        if self._untrained.watched or self._set:
            self._begin_comparison()
            self._read_comparison()

    def _begin_comparison(self) -> None:
        """Tell the other ranks what has changed on this one: what no optimizer trains, and the average."""
        self._untrained.begin()
        row = torch.cat([torch.tensor([self._set]), self._untrained.changed()]).to(self.device)
        self._set = 0
        lane = self._lanes[0]
        self._comparison = lane.submit(lambda: lane.comm.all_gather(row).wait())

    def _read_comparison(self) -> None:
        if self._comparison is None:
            return
        rows, self._comparison = self._comparison.result().cpu(), None
        if len(parties := ranks_having(rows[:, 0].tolist())) > 1:
            raise RuntimeError(
                "Weights that are set while the parameters hold the average of all ranks must be set on every rank, to "
                f"the same; got others on {' and on '.join(parties.values())}. Load or change weights on all of them."
            )
        changed = rows[:, 1:].any(0).tolist()
        self._average_also([name for name, moved in zip(list(self._untrained.watched), changed, strict=True) if moved])

    def _average_also(self, names: Sequence[str]) -> None:
        """Average what no optimizer trains, too, starting from the mean over the ranks."""
        for replica in self._replicas_of(names):
            own = replica.average.clone()
            replica.average.copy_(self.ask(lambda comm, own=own: comm.all_reduce(own)) / self.size)  # type: ignore[misc]
            self.weights.add(replica)

    def adopt(self, names: Collection[str]) -> None:
        """Average those among ``names`` that no optimizer trains, starting from what they are on every rank."""
        self._untrained.begin()
        for replica in self._replicas_of([name for name in self._untrained.watched if name in names]):
            self.weights.add(replica)

    def _replicas_of(self, names: Sequence[str]) -> list[Replica]:
        """Make replicas of tensors that no optimizer trains, in the fragment that has least."""
        found = {name: self._untrained.take(name) for name in names}
        made: list[Replica] = []
        for kind, members in groupby(sorted(names, key=lambda name: _kind(found[name]())), lambda n: _kind(found[n]())):
            own = tuple(members)
            group = Group(len(self.groups) + len(made), own, tuple(found[name]().detach() for name in own))
            compressor = self._averages if kind[0] else Exact()
            finds = [found[name] for name in own]
            made.append(Replica(group, compressor, self._lightest_fragment(), self.settings, finds))
        everything = [*zip(self.groups, self.compressors, strict=True), *((r.group, r.compressor) for r in made)]
        self.lay_out(everything)
        return made

    def _lightest_fragment(self) -> int:
        sizes = [0] * self.settings.parts
        for replica in self.weights.replicas:
            sizes[replica.fragment] += replica.group.n
        return sizes.index(min(sizes))

    # - checkpoints

    def rows(self) -> Iterator[tuple[Group, Tensor, dict[str, Tensor]]]:
        """Yield each group, this rank's own weights x_r [n] in it, and what is remembered of it."""
        for replica in self.weights.replicas:
            yield replica.group, *replica.saved(self.weights.own(replica))

    def pack(self) -> None:
        """Lay this rank's own weights into ``unsent`` of each group, where another engine takes them."""
        for group, own, memory in list(self.rows()):
            group.unsent.copy_(own)
            group.memory = memory

    def unpack(self, steps: int | None, names: Collection[str], averages: Mapping[str, Tensor]) -> None:
        """Go on after so many ``steps`` with this rank's own weights in ``unsent``, while the parameters hold x̄.

        Args:
            steps: None: nothing is owed.
            names: of parameters whose own weights are there; nothing is owed of others.
            averages: x̄ of those that the parameters cannot hold exactly, in half precision.
        """
        wait(self._under_way)
        self._due, self._under_way, self._backwards, self._comparison = [], [], 0, None
        own = [self._unpack(replica, names if steps is not None else (), averages) for replica in self.weights.replicas]
        self.weights.hold(own)
        self.phase = Phase.SHOWN
        if steps is not None:
            self.steps, self._exchanged = steps, max(steps - 1, 0)

    def _unpack(self, replica: Replica, names: Collection[str], averages: Mapping[str, Tensor]) -> list[Tensor | None]:
        group = replica.group
        for place, (name, tensor) in enumerate(zip(group.names, replica.tensors(), strict=True)):
            replica.start_from(place, averages.get(name, tensor))
        own = replica.restore(group.unsent.clone())
        group.unsent.zero_()
        return [weights if name in names else None for name, weights in zip(group.names, own, strict=True)]

    @property
    def exact_averages(self) -> Mapping[str, Tensor]:
        """x̄ by name of what a model's parameters cannot hold exactly, in half precision."""
        halves = {torch.bfloat16, torch.float16}
        tensors = {name: p for r in self.weights.replicas for name, p in zip(r.group.names, r.tensors(), strict=True)}
        return {name: average for name, average in self.averages.items() if tensors[name].dtype in halves}

    @property
    def averages(self) -> Mapping[str, Tensor]:
        """x̄ of each parameter by name, of its shape; float32, of tensors in float64 float64."""
        self.weights.take_over()
        return {
            name: average
            for replica in self.weights.replicas
            for name, average in zip(replica.group.names, replica.averages(), strict=True)
        }

    @property
    def own(self) -> Mapping[str, Tensor]:
        """This rank's own weights x_r of each parameter by name, of its shape."""
        return {
            name: weights.detach()
            for replica in self.weights.replicas
            for name, weights in zip(replica.group.names, self.weights.own(replica), strict=True)
        }

    @property
    def shared(self) -> Mapping[Tensor, Tensor]:
        """Each parameter's x̄, of the same shape, as after the last step that was settled."""
        return {
            tensor: shared
            for replica in self.weights.replicas
            for tensor, shared in zip(replica.tensors(), self.weights.shared(replica), strict=True)
        }

    def unsent_at(self, group: Group, places: Tensor) -> Tensor:
        """What this rank owes of ``group`` at ``places`` [m], [m]: x_r - x̄."""
        return self._unsent(self.weights.replicas[group.index])[places]

    def unsent_norm(self) -> float:
        """Euclidean norm of all this rank owes."""
        squares = [self._unsent(replica).square().sum() for replica in self.weights.replicas]
        return float(torch.stack(squares).sum().sqrt()) if squares else 0.0

    def _unsent(self, replica: Replica) -> Tensor:
        owed = replica.unsent(self.weights.own(replica)).float()
        return owed.nan_to_num(0.0, 0.0, 0.0) if replica.is_untrained else owed  # masks owe nothing

    def close(self) -> bool:
        """End the issuing threads; returns whether no message is under way."""
        self.phase, self._in_forward = Phase.ENDED, False
        self._backwards = 0  # what is due cannot be sent any more
        return super().close()

    # - messages

    @property
    def _within_a_step(self) -> bool:
        under_way: list[LaneFuture[Any]] = [*self._under_way, *([self._comparison] if self._comparison else [])]
        return not all(done.done() for done in under_way)

    def _send(self) -> None:
        """Take up the groups whose turn it is and have the lanes average them."""
        step = self._exchanged = self.steps
        self._spent_before = spent(self._lanes)
        due = [i for i, replica in enumerate(self.weights.replicas) if replica.is_due(step, self._warmup_steps)]
        for i in due:
            self.weights.replicas[i].take_up(self.size)
            if self.sample is not None:
                self.sample.before(self.groups[i])
        comparing = step % EVERY == 0 and self.lr_factor.take_up()
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream())
        self._due = [self.weights.replicas[i] for i in due]
        self._under_way = [
            lane.submit(partial(self._unless_failed, partial(self._average, self.weights.replicas[i]), lane))
            for lane, queue in zip(self._lanes, self._queues_of(due), strict=True)
            for i in queue
        ]
        if comparing:
            lane = self._lanes[0]
            self._under_way.append(lane.submit(partial(self._unless_failed, self._compare_gradients, lane)))
        if step % EVERY == 0:
            self._begin_comparison()

    def _average(self, replica: Replica, lane: Lane) -> None:
        replica.move(lane.run(replica.exchange(lane.comm)), self.size)

    def _compare_gradients(self, lane: Lane) -> None:
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
        self._read_comparison()


def _kind(tensor: Tensor) -> tuple[bool, str]:
    """Whether it is a parameter, and its dtype: tensors of one kind travel together."""
    return isinstance(tensor, nn.Parameter), str(tensor.dtype)
