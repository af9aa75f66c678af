"""A loss that is no longer finite is said once, by the step in which it was noticed."""

import time
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

LOOK_S = 5.0  # s between two looks on a GPU, of which each waits for the device


class WatchesLoss:
    """The part of a strategy that looks at the loss before backward.

    What one rank's loss spoils is in every rank's weights after the step, so that rank 0 sees it in the next one.  With
    a gradient scaler losses may overflow now and then, and such steps are skipped.
    """

    _looked_s = 0.0
    _has_diverged = False

    def on_train_start(self: Any) -> None:
        self._has_diverged = False
        super().on_train_start()  # type: ignore[misc]  # of the class beside, here and below

    def backward(self: Any, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._look_at(closure_loss)
        loss: Tensor = super().backward(closure_loss, *args, **kwargs)  # type: ignore[misc]
        return loss

    def _look_at(self: Any, loss: Tensor) -> None:
        now_s = time.monotonic()
        if self._has_diverged or (loss.device.type != "cpu" and now_s - self._looked_s < LOOK_S):
            return
        self._looked_s = now_s
        if getattr(self.precision_plugin, "scaler", None) is None and not loss.isfinite().all():
            self._has_diverged = True
            rank_zero_warn(
                f"The loss must be finite; got {loss.detach().float().mean():g}, noticed in step "
                f"{self.lightning_module.trainer.global_step}. If its gradient is not finite either, training has "
                "diverged, as it would with plain DDP: no weight, and nothing that ranks have not sent, is finite any "
                "more. Then go on from a checkpoint before this step, with a lower learning rate or gradient_clip_val; "
                "Trainer(detect_anomaly=True) names the operation if the model is the cause."
            )
