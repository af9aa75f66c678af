"""Faithfulness: how much of what ranks owe a step delivers, and how many steps late a gradient arrives."""

import torch
from torch import Tensor

#: What local steps leave counts so much: a rank's own weights have its own steps at once, only the others' are late.
LOCAL = 0.2


class Faithfulness:
    """What a strategy delivers of what is owed, and how late, judged by the same m elements in every step.

    A rank owes what it has not sent and the gradient of the step, ``owed``; after the step ``left`` is unsent.  With
    local steps these are x_r - x̄ after the optimizer's step, and after what was exchanged has been applied.  Only sums
    over the ranks count: what ranks owe each other, and what cancels, is nothing that the mean lacks.

    Squares weigh: large elements count most.  The age is by Little's law: what has arrived waits with its square as
    weight, in the proportion left / owed of its element, and weight that waits after a step, divided by weight that
    arrives in a step, is the mean number of steps waited.

    Args:
        skip: first steps that are not counted, since nothing waits yet.
    """

    def __init__(self, skip: int = 0) -> None:
        self._skip, self._steps = skip, 0
        self._delivered = self._waited = self._arrived = 0.0  # sums over steps
        self._left = self._waiting = torch.zeros(())  # [m], after the last step: what was left, and weights

    @torch.no_grad()
    def step(self, owed: Tensor, left: Tensor) -> None:
        """Take in a step: what P ranks owed of m elements and what of it is left, [P, m] each, or [1, m], their sum."""
        owed, left = owed.sum(0), left.sum(0)
        arrived = (owed - self._left).square()
        kept = (left / owed).abs_().nan_to_num_(0.0, 1.0).clamp_(max=1.0)
        self._left, self._waiting = left, (self._waiting + arrived) * kept
        self._steps += 1
        if self._steps > self._skip:
            whole = float(owed.square().sum())
            self._delivered += 1 - float(left.square().sum()) / whole if whole else 1.0
            self._waited += float(self._waiting.sum())
            self._arrived += float(arrived.sum())

    @property
    def delivered(self) -> float:
        """The part of what the ranks owed together, as a squared norm, that a step delivers; the mean over steps."""
        counted = self._steps - self._skip
        return self._delivered / counted if counted > 0 else 1.0

    @property
    def age(self) -> float:
        """The steps that a gradient waits before it is delivered; 0 where everything is delivered at once."""
        return self._waited / self._arrived if self._arrived else 0.0


def undelivered(delivered: float, local: bool = False) -> float:
    """Return by what strategies are ordered, the least first: the loss they cost grows with it.

    Args:
        delivered: of :class:`Faithfulness`.
        local: whether the strategy takes local steps.
    """
    return (1 - delivered) * (LOCAL if local else 1)
