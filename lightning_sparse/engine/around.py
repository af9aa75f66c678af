"""What an engine does around the steps of a training."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer


class Training(Protocol):
    """The training of one host among several, which its engine is part of."""

    def described(self) -> dict[str, str]:
        """What must be the same on all hosts, as text by name; to be asked before the first step."""

    def training_state(self) -> dict[str, Any]:
        """What a host needs that joins, beside what the engine knows."""

    def load_training_state(self, state: dict[str, Any]) -> None:
        """Go on as the host that returned ``state``.

        Raises:
            RuntimeError: before anything has changed, if its optimizers or schedules do not fit.
        """

    def begin_step(self, counts: bool) -> None:
        """Make ready for a step, or for another forward of one; schedules stay as they are unless it ``counts``."""

    def last_step(self) -> int:
        """The number of steps with which the training ends; -1 if others things end it."""

    def steps_taken(self) -> int:
        """Steps so far."""

    def skip_steps(self, steps: int) -> None:
        """Count so many more, and have schedules go on by as many; below 0 so many fewer, and schedules stay."""


class Around:
    """What an engine does around a step of a training; nothing, where gradients are averaged within backward."""

    takes_local_steps = False  # ranks have weights of their own
    was_shown = False  # the average was asked for since the last pass, by an evaluation say, which takes its time

    @property
    def is_starting(self) -> bool:
        """Whether steps have work that later ones do not have, so that their times say nothing of these."""
        return False

    def enter(self) -> None:
        """Take part from now on; see :class:`ElasticExchange`."""

    def serve(self, training: Training) -> None:
        """Be part of this ``training``, of which a host that joins gets what it needs; see :class:`ElasticExchange`."""

    def settle(self) -> None:
        """Do what is due after the last step, if anything is.  To be called between two steps, on every rank."""

    def end_forward(self) -> None:
        """Note the end of a forward that trains."""

    def note(self, optimizer: Optimizer) -> None:
        """Know of an ``optimizer`` before it steps; to be called on every rank, between two steps."""

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Make ready for a step of ``optimizer``, which is one of these parameters."""

    def before_update(self, optimizer: Optimizer) -> None:
        """Make ready for what ``optimizer`` does with the gradients that it now has, in a step that has begun."""

    def after_update(self, optimizer: Optimizer | None = None, stepped: bool = False) -> None:
        """Have ``optimizer`` (None: each) be as between two steps: it has ``stepped``, or raised, or asks a closure."""

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Note that ``optimizer`` has stepped."""

    @property
    def habits(self) -> dict[str, bool]:
        """What is known of how a training treats gradients; empty where it steps with each."""
        return {}

    def resume_habits(self, habits: Mapping[str, bool]) -> None:
        """Go on with what :attr:`habits` was."""

    def begin_backward(self) -> None:
        """Note that a backward begins, of which there may be several after a forward, or within one."""

    def look(self, parameter: Tensor, before: Tensor | None) -> None:
        """Note what ``.grad`` of a parameter held ``before`` what backward adds to it now."""

    def handed_back(self) -> None:
        """Note that a backward has ended, whose means are in ``.grad``."""

    def end_step(self) -> None:
        """Note that an optimizer has stepped, or skipped a step; to be called on every rank."""

    @property
    def within_step(self) -> bool:
        """Whether weights that differ between ranks are in use, so that their average cannot be shown now."""
        return False

    @property
    def is_half_made(self) -> bool:
        """Whether an optimizer needs another forward for the step that is open."""
        return False

    @property
    def averages(self) -> Mapping[str, Tensor]:
        """Where ranks have weights of their own, their average x̄ by name, of the parameter's shape."""
        return {}

    @property
    def shared(self) -> Mapping[Tensor, Tensor]:
        """Likewise by parameter, the same on all ranks."""
        return {}

    @property
    def due_means(self) -> Mapping[str, Tensor]:
        """Means of gradients by name that were handed back, and no optimizer has taken yet."""
        return {}

    def hand_back(self, means: Mapping[str, Tensor]) -> None:
        """Have the next backward hand back these ``means``, which a checkpoint has kept."""

    def merge(self) -> None:
        """Have every rank hold the mean of all ranks' own weights, of which nothing is unsent."""

    def adopt(self, groups: Iterable[Collection[str]]) -> None:
        """Average what no optimizer trains of each of ``groups``, starting from what it is on every rank."""

    def abandon(self, is_loaded: bool) -> None:
        """Wait for messages under way, and drop what they bring: another state takes the place of this one.

        If the model ``is_loaded``, what it holds is the average, of which nothing is unsent.
        """

    @property
    def not_averaged(self) -> Mapping[str, Tensor]:
        """What no optimizer trains and ranks have not seen change, by name: it may differ between ranks."""
        return {}

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """Where ranks have buffers of their own, this rank's by name, whatever the module shows."""
        return {}

    def hold(self, own: Mapping[str, Tensor], late: Collection[str]) -> None:
        """Go on with this rank's ``own`` buffers; into those that are ``late`` others will be loaded before."""

    @property
    def sampled(self) -> Tensor | None:
        """What this rank has measured and others have not, or not alike; of a shape that the model decides."""
        return None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the groups and is the same on every rank: tensors, and tensors by name."""
        return {}

    def resume(self, state: Mapping[str, Any], sampled: Tensor | None) -> None:
        """Go on with what :meth:`state` returned, and this rank's ``sampled``."""

    def unpack(self, steps: int | None, names: Collection[str], averages: Mapping[str, Tensor], late: bool) -> None:
        """Go on after ``steps`` (None: from nothing) with own weights; see :class:`LocalExchange`."""

    def metrics(self) -> dict[str, float]:
        """Further log keys of the last step."""
        return {}

    def check_join(self, options: Mapping[str, Any]) -> None:
        """Raise a ValueError if ranks cannot have uneven inputs, with these ``options`` of DDP's ``join``."""
        if not options.get("divide_by_initial_world_size", True):
            raise ValueError(
                "join(divide_by_initial_world_size=False) is not supported: a joined rank still sends what it has not "
                "sent, so a mean is always over all ranks. Leave it out."
            )

    def show_average(self, settle: bool = True, buffers: bool = True) -> None:
        """Have parameters whose values differ between ranks hold their average; see :class:`LocalExchange`."""
        self.was_shown = True

    def end_pass(self) -> None:
        """Note that whoever times steps has timed one: ``was_shown`` is of the next."""
        self.was_shown = False

    def compare_averages(self) -> None:
        """Raise a RuntimeError on every rank if averages were set that differ; to be called on every rank."""

    def compare(self) -> None:
        """Find out what no optimizer trains and has changed, and differs between ranks; to be called on every rank."""
