"""A scaled loss: residuals in true units, and a step that nobody takes if one rank overflowed."""

import torch
from torch import Tensor

from lightning_sparse.compressors.group import Group


class LossScale:
    """Takes the loss scale out of a step's gradients on their way in, and puts it back on their way out, or undoes all.

    Gradients arrive multiplied by a scale that changes, so they are divided by it before they are added to what is
    unsent.  A step in which a gradient of any rank is not finite is undone on all: what is unsent and what compressors
    keep is as before it, and every rank's scaler finds infinities and skips the step.  That takes one more copy of all
    that is unsent.
    """

    def __init__(self, scaler: torch.amp.GradScaler, device: torch.device) -> None:
        self.overflowed = torch.zeros(
            1, dtype=torch.float32, device=device
        )  # above 0 once a gradient of this step was not finite
        self._scale: Tensor = scaler.scale(torch.ones((), dtype=torch.float32, device=device))
        self._before: list[tuple[Group, Group]] = []

    def take_in(self, buffer: Tensor) -> None:
        """Unscale a bucket of gradients, in place; zeros where they are not finite: the step will be undone."""
        if buffer.numel():
            self.overflowed += (~torch.linalg.vector_norm(buffer, torch.inf).isfinite()).float()
        buffer.nan_to_num_(0.0, 0.0, 0.0).div_(self._scale)

    def unscale(self, mean: Tensor) -> Tensor:
        """Return what :meth:`take_in` would have made of ``mean``."""
        return mean / self._scale

    def keep(self, group: Group) -> None:
        """Keep a group's state, to be called before its gradients are added."""
        self._before.append((group, group.snapshot()))

    def give_back(self, buffer: Tensor, overflowed: Tensor) -> None:
        """Scale a bucket of means, in place, or fill it with infinities, which every rank's scaler finds.

        ``overflowed`` [1] is how many ranks found a gradient that is not finite; nobody looks at it.
        """
        buffer.mul_(self._scale).masked_fill_(overflowed > 0, torch.inf)

    def end_step(self, undone: bool) -> None:
        """Forget what was kept; if the step is ``undone``, set all groups to it.

        The scale itself stays until another stream has read it.
        """
        for group, before in self._before if undone else ():
            group.restore(before)
        self._before.clear()
