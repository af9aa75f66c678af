"""The optimizers of a module: which they are, what is done around their steps, and how long these are."""

import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_sparse.checks import class_names, is_number
from lightning_sparse.engine.averager import Averager, LocalState
from lightning_sparse.engine.groups import NOT_TRAINED

#: Optimizers of which a rank cannot take a step of its own, by the name of a class, and why.
NOT_ALONE = {
    "LBFGS": "evaluates the model as often as a rank's own loss asks for, so that ranks would wait for each other",
    "ZeroRedundancyOptimizer": "has each rank step a part of the parameters, with that rank's own gradient",
}
HAS_MODES = "has weights of its own on each rank, which its eval() puts in the place of the average"

Step = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of an optimizer's step
PLAIN = {"fused": False, "capturable": False, "foreach": False}  # which runs on any CPU
OF_SCHEDULES = {"params", "lr", "initial_lr"}  # what of a group says nothing about the length of its steps
RATES = (2.0**-6, 2.0**6)  # short, and longer than any that an optimizer goes by which has a longest step
STEPS = (1, 3)  # the first step, and one that may go by what earlier ones have left
SHAPES = ((1,), (2, 2))  # of the parameter: any, and of a matrix for those that train nothing else


class Optimizers:
    """Notices each step of every optimizer of these parameters, in this process, and tells ``averager()`` of it."""

    def __init__(self, parameters: Collection[Tensor], averager: Callable[[], Averager | None]) -> None:
        self._parameters, self._averager = set(parameters), averager
        self._seen: list[weakref.ref[Optimizer]] = []
        #: Hooks around the updates that are under way.
        self._updating: weakref.WeakKeyDictionary[Optimizer, list[RemovableHandle]] = weakref.WeakKeyDictionary()
        own = weakref.ref(self)

        def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step | None:
            return known._before(optimizer, args, kwargs) if (known := own()) else None

        def after(optimizer: Optimizer, *_: Any) -> None:
            if known := own():
                known._after(optimizer)

        self._handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    @property
    def seen(self) -> list[Optimizer]:
        """Those that have begun a step, in the order of the first."""
        return [optimizer for each in self._seen if (optimizer := each()) is not None]

    def note(self, optimizer: Optimizer) -> None:
        """Know ``optimizer`` from now on, as if it had begun a step."""
        if not any(optimizer is known for known in self.seen):
            self._seen.append(weakref.ref(optimizer))

    def numbers(self, parameters: Mapping[str, Tensor]) -> dict[str, int]:
        """The number of the first known optimizer of each parameter by name, NOT_TRAINED where there is none.

        They are numbered in the order of their parameters, so that these alone decide.  Empty if none is known.
        """
        number_of: dict[Tensor, int] = {}
        for number, optimizer in enumerate(self.seen):
            for group in optimizer.param_groups:
                number_of = dict.fromkeys(group["params"], number) | number_of
        first = {name: number_of.get(p, NOT_TRAINED) for name, p in parameters.items()}
        order = {number: i for i, number in enumerate(dict.fromkeys(x for x in first.values() if x != NOT_TRAINED))}
        return {name: order.get(number, NOT_TRAINED) for name, number in first.items()} if order else {}

    @property
    def _local(self) -> LocalState | None:
        averager = self._averager()
        return None if averager is None else averager.local

    def close(self) -> None:
        """Notice nothing any more."""
        for optimizer in list(self._updating):
            self._forget_update(optimizer)
        for handle in self._handles:
            handle.remove()

    def _forget_update(self, optimizer: Optimizer) -> None:
        for handle in self._updating.pop(optimizer, ()):
            handle.remove()

    def are_of(self, optimizer: Optimizer) -> bool:
        """Whether some of these parameters are those of ``optimizer``."""
        return any(p in self._parameters for group in optimizer.param_groups for p in group["params"])

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step | None:
        averager = self._averager()
        if averager is None or not self.are_of(optimizer):
            return None
        self.note(optimizer)
        averager.before_optimizer_step(optimizer)
        if (local := averager.local) is None:
            return None
        if optimizer in self._updating:  # it has raised, or is a subclass that calls its class's step
            self._forget_update(optimizer)
            local.after_update(optimizer)
        self._updating[optimizer] = [handle := optimizer.register_step_post_hook(self._has_stepped)]
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(handle.id, last=False)  # before others, which may set rates
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._updating[optimizer].append(optimizer.register_step_pre_hook(self._before_update))  # after others
            return None

        def closure_then_update(*given: Any, **named: Any) -> Any:
            """Have the closure see the optimizer as it is between two steps; wait for the gradients that it sets."""
            if (now := self._local) is not None:
                now.after_update(optimizer)
            loss = closure(*given, **named)
            self._before_update(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], closure_then_update, *args[2:]), kwargs
        return args, kwargs | {"closure": closure_then_update}

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        if (local := self._local) is not None:
            local.before_update(optimizer)

    def _has_stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if (local := self._local) is not None:
            local.after_update(optimizer, stepped=True)

    def _after(self, optimizer: Optimizer) -> None:
        self._forget_update(optimizer)
        averager = self._averager()
        if averager is not None and self.are_of(optimizer):
            averager.after_optimizer_step(optimizer)


def why_not_alone(optimizer: Optimizer) -> str:
    """Return why a rank cannot take a step of ``optimizer`` of its own; empty if it can."""
    kinds = type(optimizer).__mro__
    known = next((NOT_ALONE[kind.__name__] for kind in kinds if kind.__name__ in NOT_ALONE), "")
    has_modes = all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval"))  # schedule-free ones
    return known or (HAS_MODES if has_modes else "")


def need_full_sums(optimizers: Iterable[Optimizer]) -> bool:
    """Whether one of them goes astray with means that are not those of this step's gradients."""
    return "LBFGS" in class_names(optimizers)


class Rates:
    """Multiplies the learning rates of optimizers by ``factor`` for their updates.

    Without ``is_given``, nobody has asked for this factor, so that there may be none.
    """

    def __init__(self, factor: float, is_given: bool = True) -> None:
        self.factor, self.is_given = factor, is_given
        #: So many groups of each optimizer were looked at, and whether its steps grow with their rates.
        self._known: weakref.WeakKeyDictionary[Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()
        self._scaled: dict[int, tuple[dict[str, Any], Any, Any, Optimizer]] = {}  # group, rate, scaled rate, by whom

    @property
    def may_end(self) -> bool:
        """Whether the factor is to be 1 if rates are multiplied in vain."""
        return self.factor != 1 and not self.is_given

    def are_in_vain(self, optimizer: Optimizer) -> bool:
        """Whether the steps of ``optimizer`` do not grow with its learning rates.

        Raises:
            ValueError: they do not, and the factor was given.
        """
        if self.factor == 1:
            return False
        groups, grows = self._known.get(optimizer, (0, True))
        if groups != len(optimizer.param_groups):
            groups, grows = self._known[optimizer] = len(optimizer.param_groups), step_grows(optimizer)
        if not grows and self.is_given:
            raise ValueError(
                "local_steps looks ahead by multiplying learning rates, which does not work with "
                f"{type(optimizer).__name__}: its steps do not grow with its rate. Give "
                "local_steps=LocalSteps(H, lead=1)."
            )
        return not grows

    def scale(self, optimizer: Optimizer) -> None:
        """Multiply rates, but for those that an optimizer around this one has multiplied and nobody has set since."""
        for group in optimizer.param_groups if self.factor != 1 else ():
            _, rate, scaled, _ = self._scaled.get(id(group), (group, None, None, optimizer))
            if scaled is None or group["lr"] is not scaled:
                rate = group["lr"]
                group["lr"] = scaled = rate * self.factor
            self._scaled[id(group)] = group, rate, scaled, optimizer

    def give_back(self, optimizer: Optimizer | None = None, stepped: bool = False) -> None:
        """Set them to what they were; those of one optimizer, or of all, as after a step that has raised.

        Raises:
            ValueError: ``optimizer`` has ``stepped`` and set another rate, which it may have made of the longer one.
        """
        for key, (group, rate, scaled, by) in list(self._scaled.items()):
            if optimizer is None or by is optimizer:
                if group["lr"] is scaled:
                    group["lr"] = rate
                elif stepped:
                    raise ValueError(
                        f"local_steps looks ahead by multiplying learning rates, and {type(optimizer).__name__} has "
                        f"changed its own within its step, from {scaled} to {group['lr']}. Give "
                        "local_steps=LocalSteps(H, lead=1), or set rates between two steps."
                    )
                del self._scaled[key]


def step_grows(optimizer: Optimizer) -> bool:
    """Return whether each step of ``optimizer`` is twice as long where all learning rates are twice as long.

    Others of its class and the settings of its groups take a few steps with one parameter, on the CPU.  Of one that
    cannot be made so, as where it is made around another, whose steps are not all that it does, nobody knows.
    """
    try:
        return all(_grows(optimizer, group) for group in _different(optimizer.param_groups))
    except Exception:  # whatever else it needs
        return False


def _different(groups: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One of those of ``groups`` that differ in their parameters and learning rates alone."""
    seen = set()
    for group in groups:
        settings = repr(sorted((key, repr(x)) for key, x in group.items() if key not in OF_SCHEDULES))
        if settings not in seen:
            seen.add(settings)
            yield group


def _grows(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    if not (isinstance(rate := group.get("lr"), Tensor) or is_number(rate)):
        return False
    for shape in SHAPES:
        try:
            return all(_is_in_proportion(optimizer, group, shape, rate, steps) for rate in RATES for steps in STEPS)
        except Exception:
            if shape == SHAPES[-1]:
                raise
    return False


def _is_in_proportion(
    optimizer: Optimizer, group: dict[str, Any], shape: Sequence[int], rate: float, steps: int
) -> bool:
    """Whether the last of so many ``steps``, all but the last at ``rate``, is twice as long at twice the rate."""
    once, twice = (_last_step(optimizer, group, shape, [*(steps - 1) * [rate], last]) for last in (rate, 2 * rate))
    return bool(once.any()) and torch.allclose(2 * once, twice, rtol=0.01)


def _last_step(optimizer: Optimizer, group: dict[str, Any], shape: Sequence[int], rates: Sequence[float]) -> Tensor:
    """How far another optimizer moves a parameter in the last of steps at these ``rates``."""
    eager: Any = torch.compiler.set_stance("force_eager")  # nothing is compiled for a step or two
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.inference_mode(False), eager:
        weight = nn.Parameter(torch.ones(shape, dtype=torch.float32, device="cpu"))
        before = weight.detach().clone()
        settings: dict[str, Any] = {
            key: PLAIN.get(key, x.detach().cpu() if isinstance(x, Tensor) else x)
            for key, x in group.items()
            if key not in {"params", "initial_lr"}
        }
        known = inspect.signature(type(optimizer)).parameters
        other: Any = type(optimizer)(
            [{**settings, "params": [weight]}], **{key: x for key, x in settings.items() if key in known}
        )
        own = other.param_groups[0]
        for step, rate in enumerate(rates):
            before.copy_(weight.detach())
            given = torch.full_like(own["lr"], rate, device="cpu") if isinstance(own["lr"], Tensor) else rate
            own["lr"] = given
            weight.grad = torch.full_like(weight, 1.0 + step / 4)
            other.step()
            if own["lr"] is not given:  # it sets its rate itself
                return torch.zeros_like(before)
        return weight.detach() - before
