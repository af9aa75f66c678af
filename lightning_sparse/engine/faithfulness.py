"""Faithfulness: how much of what ranks owe a step delivers, and how many steps late a gradient arrives."""

import torch
from torch import Tensor


class Faithfulness:
    """What a strategy delivers of what is owed, and its age, by the same elements in every step.

    A rank owes what it has not sent and the gradient of the step: ``owed``; after the step ``left`` is unsent.  What is
    neither in ``owed`` nor was left by the step before is what has arrived.  With local steps both are x_r - x̄, before
    and after what was exchanged is applied.

    The age is by Little's law: an arrival waits with its square as weight, in the proportion left / owed of its
    element; weight that waits after a step, divided by weight that arrives in a step, is the mean time waited.

    Args:
        skip: first steps, in which nothing waits yet, that are not counted.
    """

    def __init__(self, skip: int = 0) -> None:
        self._skip, self._steps = skip, 0
        self._delivered = 0.0  # sum over steps
        self._unsent = torch.zeros(())  # [P, m], what was left by the last step
        self._waiting = torch.zeros(())  # [P, m], weights
        # [P, m], sums over steps of: squares owed and left, weights that arrive and that wait
        self._owed = self._left = self._arrived = self._waited = torch.zeros(())

    @torch.no_grad()
    def step(self, owed: Tensor, left: Tensor) -> None:
        """Take in a step: what P ranks owed of m elements, [P, m], and what of it is left."""
        arrived = (owed - self._unsent).square()
        kept = (left / owed).abs_().nan_to_num_(0.0, 1.0).clamp_(max=1.0)
        self._waiting = (self._waiting + arrived) * kept
        self._unsent = left.clone()
        self._steps += 1
        if self._steps <= self._skip:
            return
        whole = float(owed.sum(0).square().sum())
        self._delivered += 1 - float(left.sum(0).square().sum()) / whole if whole else 1.0
        self._owed, self._left = self._owed + owed.square(), self._left + left.square()
        self._arrived, self._waited = self._arrived + arrived, self._waited + self._waiting

    @property
    def delivered(self) -> float:
        """The part of what the ranks owed together, as a squared norm, that a step delivers: the mean over steps."""
        return self._delivered / max(1, self._steps - self._skip)

    @property
    def age(self) -> float:
        """Steps that a gradient waits before it is delivered: 0 for dense averaging, weighted by its square."""
        return float(self._waited.sum() / self._arrived.sum().clamp(min=torch.finfo(torch.float32).tiny))

    @property
    def delivered_each(self) -> float:
        """The part of what a rank owes of an element that a step delivers: the mean over elements, all alike."""
        return 1 - _mean_ratio(self._left, self._owed)

    @property
    def age_each(self) -> float:
        """Steps that a gradient waits before it is delivered: the mean over elements, all alike."""
        return _mean_ratio(self._waited, self._arrived)


def _mean_ratio(part: Tensor, whole: Tensor) -> float:
    """The mean of ``part`` / ``whole`` over elements, where there is any."""
    known = whole > 0
    return float((part[known] / whole[known]).mean()) if bool(known.any()) else 0.0
