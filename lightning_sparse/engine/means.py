"""A step that is saved after its backward and before its optimizer: the means are in no weights yet, nor unsent."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_sparse.engine.step import gradients_of


class Means:
    """The means of the last backward, while no optimizer has stepped: a resume makes that step again, and gets them."""

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self.are_due = False  # a backward has ended, and no optimizer has stepped since
        self._scaler = scaler
        self.saved: dict[Tensor, Tensor] = {}  # of a step that was saved, to be handed back

    @property
    def _scale(self) -> float:
        return self._scaler.get_scale() if self._scaler is not None else 1.0

    def due(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The mean of each of ``parameters`` by name, in float32 and without a loss scale, if they are due."""
        if not self.are_due:
            return {}
        states = self._scaler._per_optimizer_states.values() if self._scaler is not None else ()
        scale = 1.0 if any(state["stage"].name == "UNSCALED" for state in states) else self._scale
        return {name: p.grad.detach().float().cpu() / scale for name, p in parameters.items() if p.grad is not None}

    def resume(self, means: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        """Have the next backward hand back these ``means``, whatever gradients it has."""
        self.saved = {p: means[name] for name, p in parameters.items() if name in means}

    def hand_back(self, buffer: Tensor, parameters: Sequence[Tensor], is_last: bool) -> None:
        """Set the bucket ``buffer`` to the means of the step that was saved."""
        for parameter, gradient in gradients_of(buffer, parameters):
            mean = self.saved.get(parameter)
            gradient.zero_() if mean is None else gradient.copy_(mean * self._scale)
        if is_last:
            self.saved, self.are_due = {}, True
