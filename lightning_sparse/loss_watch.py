"""A loss that is no longer finite is said once, by the step in which it was noticed."""

import time
import warnings
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

LOOK_S = 5.0  # s between two looks on a GPU, of which each waits for the device


class WatchesLoss:
    """The part of a strategy that looks at the loss before backward.

    What one rank's loss spoils is in every rank's weights after the step, so that rank 0 sees it in the next one; if it
    has spoiled nothing, that rank says so itself.  With a gradient scaler losses may overflow now and then, and such
    steps are skipped.
    """

    _looked_s = 0.0
    _has_diverged = False
    _own_loss = ""  # that was not finite on this rank, other than 0, and where

    def on_train_start(self: Any) -> None:
        self._has_diverged, self._own_loss = False, ""
        super().on_train_start()  # type: ignore[misc]  # of the class beside, here and below

    def backward(self: Any, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._look_at(closure_loss)
        loss: Tensor = super().backward(closure_loss, *args, **kwargs)  # type: ignore[misc]
        return loss

    def _look_at(self: Any, loss: Tensor) -> None:
        if self._own_loss and all(p.isfinite().all() for p in self.lightning_module.parameters()):
            warnings.warn(
                f"The loss must be finite; got {self._own_loss}, after which the weights still are. See to what makes "
                "it so, such as the logarithm of 0 or a bad batch: what is logged and averaged of it is not finite.",
                stacklevel=2,
            )
        self._own_loss = ""
        now_s = time.monotonic()
        if self._has_diverged or (loss.device.type != "cpu" and now_s - self._looked_s < LOOK_S):
            return
        self._looked_s = now_s
        if getattr(self.precision_plugin, "scaler", None) is None and not loss.isfinite().all():
            self._has_diverged = True
            value, step = loss.detach().float().mean(), self.lightning_module.trainer.global_step
            if self.global_rank:
                self._own_loss = f"{value:g} on rank {self.global_rank} in step {step}"
            rank_zero_warn(
                f"The loss must be finite; got {value:g}, noticed in step {step}. If its gradient is not finite "
                "either, nor is the mean, as with plain DDP; and unless your code leaves that mean out, training has "
                "diverged. Then go on from a checkpoint before this step, with a lower learning rate or "
                "gradient_clip_val; Trainer(detect_anomaly=True) names the operation if the model is the cause."
            )
