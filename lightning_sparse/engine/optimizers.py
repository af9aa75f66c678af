"""The optimizers of a module: which they are, and what is to be done around their steps."""

import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_sparse.engine.around import Around
from lightning_sparse.engine.groups import NOT_TRAINED

#: Optimizers of which a rank cannot take a step of its own, by the name of a class, and why.
NOT_ALONE = {
    "LBFGS": "evaluates the model as often as a rank's own loss asks for, so that ranks would wait for each other",
    "ZeroRedundancyOptimizer": "has each rank step a part of the parameters, with that rank's own gradient",
}
HAS_MODES = "has weights of its own on each rank, which its eval() puts in the place of the average"

Step = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of an optimizer's step


class Optimizers:
    """Notices each step of every optimizer of these parameters, in this process; ``around`` is asked anew at each."""

    def __init__(self, parameters: Collection[Tensor], around: Callable[[], Around | None]) -> None:
        self._parameters, self._around = set(parameters), around
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
        around = self._around()
        if around is None or not self.are_of(optimizer):
            return None
        self.note(optimizer)
        around.before_optimizer_step(optimizer)
        if not around.takes_local_steps:
            return None
        if optimizer in self._updating:  # it has raised, or is a subclass that calls its class's step
            self._forget_update(optimizer)
            around.after_update(optimizer)
        self._updating[optimizer] = [handle := optimizer.register_step_post_hook(self._has_stepped)]
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(handle.id, last=False)  # before others, which may set rates
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._updating[optimizer].append(optimizer.register_step_pre_hook(self._before_update))  # after others
            return None

        def closure_then_update(*given: Any, **named: Any) -> Any:
            """Have the closure see the optimizer as it is between two steps; wait for the gradients that it sets."""
            if (now := self._around()) is not None:
                now.after_update(optimizer)
            loss = closure(*given, **named)
            self._before_update(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], closure_then_update, *args[2:]), kwargs
        return args, kwargs | {"closure": closure_then_update}

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        if (around := self._around()) is not None:
            around.before_update(optimizer)

    def _has_stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if (around := self._around()) is not None:
            around.after_update(optimizer, stepped=True)

    def _after(self, optimizer: Optimizer) -> None:
        self._forget_update(optimizer)
        around = self._around()
        if around is not None and self.are_of(optimizer):
            around.after_optimizer_step(optimizer)


def why_not_alone(optimizer: Optimizer) -> str:
    """Return why a rank cannot take a step of ``optimizer`` of its own; empty if it can."""
    kinds = type(optimizer).__mro__
    known = next((NOT_ALONE[kind.__name__] for kind in kinds if kind.__name__ in NOT_ALONE), "")
    has_modes = all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval"))  # schedule-free ones
    return known or (HAS_MODES if has_modes else "")
