"""Learning rates that are longer while an optimizer updates weights, and otherwise as whoever set them knows them."""

from typing import Any

from torch.optim import Optimizer


class Rates:
    """Multiplies the learning rates of optimizers by ``factor`` for their updates."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._scaled: dict[int, tuple[dict[str, Any], Any, Any, Optimizer]] = {}  # group, rate, scaled rate, by whom

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
