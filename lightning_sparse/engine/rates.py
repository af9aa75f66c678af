"""Learning rates that are longer while an optimizer updates weights, and otherwise as whoever set them knows them."""

import weakref
from typing import Any

from torch.optim import Optimizer

from lightning_sparse.engine.step_length import step_grows


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
