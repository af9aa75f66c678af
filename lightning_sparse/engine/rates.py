"""Learning rates that are longer while an optimizer updates weights, and otherwise as whoever set them knows them."""

from typing import Any

from torch.optim import Optimizer


class Rates:
    """Multiplies the learning rates of optimizers for their updates.

    Args:
        factor: by which.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._scaled: dict[int, tuple[dict[str, Any], Any, Any, Optimizer]] = {}  # group, rate, scaled rate, by whom

    def scale(self, optimizer: Optimizer) -> None:
        """Multiply rates that no optimizer around this one, or in it, has multiplied already."""
        for group in optimizer.param_groups if self._factor != 1 else ():
            if id(group) not in self._scaled:
                rate = group["lr"]
                group["lr"] = scaled = rate * self._factor
                self._scaled[id(group)] = group, rate, scaled, optimizer

    def give_back(self, optimizer: Optimizer | None = None) -> None:
        """Set them to what they were; those of one optimizer, or of all, as after a step that has raised."""
        for key, (group, rate, scaled, by) in list(self._scaled.items()):
            if optimizer is None or by is optimizer:
                if group["lr"] is scaled:  # else somebody has set another meanwhile
                    group["lr"] = rate
                del self._scaled[key]
