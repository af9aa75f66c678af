"""What every averager can be asked, whether it averages gradients or what the ranks' optimizers did."""

# ruff: noqa: B027 -- what has something to do for one of the two alone does nothing for the other

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # exported at run time only
from torch.futures import Future
from torch.optim import Optimizer

from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.bucket import Report
from lightning_sparse.engine.groups import carry_over
from lightning_sparse.engine.lanes import Lanes
from lightning_sparse.engine.observers import Sample
from lightning_sparse.engine.timeline import Timeline
from lightning_sparse.network.comm import Comm
from lightning_sparse.network.cut import WHOLE, Cut
from lightning_sparse.settings import as_text


class LocalState(Protocol):
    """What else there is to ask where ranks have weights of their own; see ``LocalAverager``.

    x_r are this rank's weights and x̄ the average of all ranks.
    """

    # - around a step

    @property
    def is_starting(self) -> bool:
        """Whether steps have work that later ones do not have, so that their times say nothing of these."""

    @property
    def within_step(self) -> bool:
        """Whether x_r are in use, so that x̄ cannot be shown now."""

    @property
    def is_half_made(self) -> bool:
        """Whether an optimizer needs another forward for the step that is open."""

    def end_forward(self) -> None:
        """Note the end of a forward that trains."""

    def check_backward(self) -> None:
        """Raise a RuntimeError if the weights of a backward are the average, of which no rank takes a step."""

    def end_backward(self) -> None:
        """Note that gradients are those of a step, of which each member has its own."""

    def before_update(self, optimizer: Optimizer) -> None:
        """Make ready for what ``optimizer`` does with the gradients that it now has, in a step that has begun."""

    def after_update(self, optimizer: Optimizer | None = None, stepped: bool = False) -> None:
        """Have ``optimizer`` (None: each) be as between two steps: it has ``stepped``, or raised, or asks a closure."""

    # - what others look at

    @property
    def shared(self) -> Mapping[Tensor, Tensor]:
        """x̄ of each parameter, of its shape, the same on all ranks; where it is shown, the parameter itself."""

    @property
    def averages(self) -> Mapping[str, Tensor]:
        """x̄ by name, of the parameter's shape."""

    def compared(self) -> Mapping[Tensor, Tensor]:
        """Settle the last step, find out what has changed, and return :attr:`shared`; to be called on every rank."""

    def compare_averages(self) -> None:
        """Raise a RuntimeError on every rank if averages were set that differ; to be called on every rank."""

    # - to other averagers and back

    def merge(self) -> None:
        """Have every rank hold x̄, moved by all that is unsent, of which nothing is left then."""

    def add_to_next(self, groups: Sequence[Group]) -> None:
        """Have each rank add what it has not sent of gradients, in these ``groups``, to its own next gradients."""

    def adopt(self, groups: Iterable[Collection[str]]) -> None:
        """Average what no optimizer trains of each of ``groups``, starting from what it is on every rank."""

    # - checkpoints

    @property
    def not_averaged(self) -> Mapping[str, Tensor]:
        """What no optimizer trains and ranks have not seen change, by name: it may differ between ranks."""

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """This rank's buffers by name, whatever the module shows."""

    @property
    def sampled(self) -> Tensor | None:
        """What this rank has measured and others have not, or not alike; of a shape that the model decides."""

    def state(self, inside: Comm | None = None) -> dict[str, Any]:
        """What a checkpoint keeps beside the groups and is the same on every rank: tensors, and tensors by name.

        ``inside`` are the ranks of a member, where there are several.
        """

    def resume(self, state: Mapping[str, Any], sampled: Tensor | None) -> None:
        """Go on with what :meth:`state` returned, and this rank's ``sampled``."""

    def hold(self, own: Mapping[str, Tensor], late: Collection[str]) -> None:
        """Go on with this rank's ``own`` buffers; into those that are ``late`` others will be loaded before."""

    def unpack(self, steps: int | None, names: Collection[str], averages: Mapping[str, Tensor], late: bool) -> None:
        """Go on after ``steps`` (None: from nothing) with own weights, as ``Weights.restore`` takes them."""

    def abandon(self, is_loaded: bool) -> None:
        """Wait for messages under way, and drop what they bring: another state takes the place of this one.

        If the model ``is_loaded``, what it holds is the average, of which nothing is unsent.
        """


class Averager(ABC):
    """Averages groups of parameters over the ranks, on lanes, and keeps what was not sent.

    Args:
        groups: each group and what averages it, in the order in which they are sent.
        lanes: that send them.

    Attributes:
        local: what else there is to ask where ranks have weights of their own; None where gradients are averaged.
        error: the first failure of a lane, which the next step raises.
        steps: that were averaged.
        last: what the last of them cost.
        was_shown: somebody has asked for the average since the last :meth:`end_pass`, which takes its time.
    """

    local: LocalState | None = None

    def __init__(self, groups: Sequence[tuple[Group, Compressor]], lanes: Lanes) -> None:
        self.lanes, self.size, self.rank = lanes, lanes.size, lanes.rank
        self.device = device_of(groups)
        self.error: BaseException | None = None
        self.steps = 0
        self.last: Report | None = None
        self.sample: Sample | None = None  # of what is unsent, while somebody wants to know how long it waits
        self.was_shown = False
        self.timeline = Timeline(self.device)
        self.lay_out(groups)

    # - groups

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

    @property
    def cut(self) -> Cut:
        """Which slice of each parameter this rank sends."""
        return next((group.cut for group in self.groups), WHOLE)

    @property
    def group_step(self) -> int:
        """The step that the groups' compressors are at, the furthest; 0 where there are no groups."""
        return max((group.step for group in self.groups), default=0)

    def unsent_of(self, group: Group) -> Tensor:
        """What is unsent of ``group`` on this rank [n]."""
        return group.unsent

    def unsent_norm(self) -> float:
        norms = [self.unsent_of(group).norm() for group in self.groups]
        return float(torch.stack(norms).norm()) if norms else 0.0

    # - a step

    @abstractmethod
    def between_steps(self) -> None:
        """Do what is due before a forward that trains.  To be called on every rank."""

    def begin_backward(self) -> None:
        """Note that a backward begins, of which there may be several after a forward, or within one."""

    @abstractmethod
    def hook(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        """DDP's communication hook: takes a bucket of gradients, gives back a future of the same bucket."""

    def handed_back(self) -> None:
        """Note that a backward has ended, whose means are in ``.grad``."""

    def note(self, optimizer: Optimizer) -> None:
        """Know of an ``optimizer`` before it steps; to be called on every rank, between two steps."""

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Make ready for a step of ``optimizer``, which is one of these parameters."""

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Note that ``optimizer`` has stepped."""

    def end_step(self) -> None:
        """Note that an optimizer has stepped, or skipped a step; to be called on every rank."""

    def settle(self) -> None:
        """Do what is due after the last step, if anything is.  To be called between two steps, on every rank."""

    def show_average(self, settle: bool = True, buffers: bool = True) -> None:
        """Have parameters whose values differ between ranks hold their average; see ``LocalAverager``."""
        self.was_shown = True

    def check_join(self, options: Mapping[str, Any]) -> None:
        """Raise a ValueError if ranks cannot have uneven inputs, with these ``options`` of DDP's ``join``."""
        if not options.get("divide_by_initial_world_size", True):
            raise ValueError(
                "join(divide_by_initial_world_size=False) is not supported: a joined rank still sends what it has not "
                "sent, so a mean is always over all ranks. Leave it out."
            )

    # - what others measure

    def watch_unsent(self) -> None:
        """Look at a sample of what is unsent in every step from now on."""
        self.sample = Sample(self.groups)

    def metrics(self) -> dict[str, float]:
        """Further log keys of the last step."""
        return {}

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

    def end_pass(self) -> None:
        """Note that whoever times steps has timed one: ``was_shown`` is of the next."""
        self.was_shown = False

    # - from another averager, and checkpoints

    def go_on_from(self, before: "Averager") -> None:
        """Stand in the place of another averager, of which nothing is unsent."""
        self.count_from(before.steps)
        self.lanes.set_latencies(*before.lanes.latencies)
        self.resume_habits(before.habits)
        if before.sample is not None:
            self.watch_unsent()

    def count_from(self, steps: int) -> None:
        """Go on after so many ``steps`` of another averager."""
        self.steps = steps
        for group in self.groups:
            group.step = steps

    @abstractmethod
    def take_over(self, before: "Averager", memories: bool) -> None:
        """Go on with what each rank has not sent in ``before``, of parameters of the same name and shape.

        Both are of gradients or both of local steps; ``memories`` as for :func:`carry_over`.
        """

    def note_resumed(self) -> None:
        """Note that what is unsent was set from outside; to be called on every rank."""

    def kept(self, with_means: bool = True) -> Iterator[Group]:
        """Yield each group as a checkpoint keeps it for this rank, beside the means that are due or without them."""
        yield from self.groups

    @property
    def due_means(self) -> Mapping[str, Tensor]:
        """Means of gradients by name that were handed back, and no optimizer has taken yet."""
        return {}

    def hand_back(self, means: Mapping[str, Tensor]) -> None:
        """Have the next backward hand back these ``means``, which a checkpoint has kept."""

    @property
    def habits(self) -> dict[str, bool]:
        """What is known of how a training treats gradients; empty where it steps with each."""
        return {}

    def resume_habits(self, habits: Mapping[str, bool]) -> None:
        """Go on with what :attr:`habits` was."""

    # - the end

    def close(self) -> bool:
        """End the issuing threads; returns whether no message is under way.  What is unsent stays readable."""
        return self.lanes.close(self.error is not None or self._within_a_step)

    @property
    @abstractmethod
    def _within_a_step(self) -> bool:
        """Whether messages may be under way."""


def device_of(groups: Sequence[tuple[Group, Compressor]]) -> torch.device:
    """Where the parameters of ``groups`` lie; the CPU where there are none."""
    return next((group.unsent.device for group, _ in groups), torch.device("cpu"))


def lanes_of(groups: Sequence[tuple[Group, Compressor]], comms: Sequence[Comm], threaded: bool) -> Lanes:
    """Lanes over ``comms`` for what lies where ``groups`` do."""
    return Lanes(comms, threaded, device_of(groups))
