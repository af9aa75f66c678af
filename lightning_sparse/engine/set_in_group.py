"""What somebody has set of a group's weights beside the optimizers' steps, on its way into the average."""

import torch
from torch import Tensor

from lightning_sparse.compressors.group import Group


class SetInGroup:
    """The sum of what was set of each element since the group was taken up.

    Attributes:
        change: [n]; None before anything was set.
    """

    def __init__(self, group: Group) -> None:
        self.change: Tensor | None = None
        self._group = group
        self._taken_up: Tensor | None = None

    def add(self, place: int, value: Tensor, before: Tensor, like: Tensor) -> None:
        """Note that the parameter at ``place`` was set to ``value``; ``like`` is [n], of the type to count in."""
        if self.change is None:
            self.change = torch.zeros_like(like)
        slot = self._group.slots(self.change)[place].view(value.shape)
        slot.add_(value.detach().to(like.dtype) - before.to(like.dtype))

    def forget(self, place: int) -> None:
        """Take nothing of the parameter at ``place`` for set."""
        if self.change is not None:
            self._group.slots(self.change)[place].zero_()

    def take_up(self, unsent: Tensor, more: float) -> None:
        """Add what was set ``more`` times to what is ``unsent`` [n], and count from zero."""
        if self.change is not None:
            unsent.add_(self.change, alpha=more)
            self._taken_up, self.change = self.change, torch.zeros_like(self.change)

    def put_back(self) -> None:
        """Count what was taken up once more, since it was not sent."""
        self.change = self.whole

    @property
    def whole(self) -> Tensor | None:
        """What was set, also of what is under way [n]."""
        return self.change if self.change is None or self._taken_up is None else self.change + self._taken_up

    def end(self) -> None:
        """Forget what is under way."""
        self._taken_up = None
