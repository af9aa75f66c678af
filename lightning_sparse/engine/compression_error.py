"""The compression error: what a step leaves unsent, and after how many steps a gradient arrives."""

import torch
from torch import Tensor


def delivered(unsent: float, left: float) -> float:
    """Return the part that a step delivers, of the squared norms of what is ``unsent`` before it and ``left`` after."""
    return 1 - left / unsent if unsent else 1.0


def part_left(unsent: Tensor, left: Tensor) -> Tensor:
    """Return of each element, [m], the part of what was ``unsent`` before a step that is ``left`` after it."""
    return (left / unsent).abs_().nan_to_num_(0.0, 1.0).clamp_(max=1.0)


class CompressionError:
    """What a strategy delivers and after how many steps, judged by the same m elements in every step.

    Before a step's messages what a rank has not sent and the gradient of the step are ``unsent``; after them ``left``
    is.  With local steps these are x_r - x̄ after the optimizer's step, and after what was exchanged has been applied.
    Only sums over the ranks count: what cancels between ranks is nothing that the mean lacks.

    Squares weigh: large elements count most.  The staleness is by Little's law: what has arrived waits with its square
    as weight, in the proportion left / unsent of its element, and weight that waits after a step, divided by weight
    that arrives in a step, is the mean number of steps waited.

    Args:
        skip: first steps that are not counted, since nothing waits yet.
    """

    def __init__(self, skip: int = 0) -> None:
        self._skip, self._steps = skip, 0
        self._delivered = self._waited = self._arrived = 0.0  # sums over steps
        self._left = self._waiting = torch.zeros(
            (), dtype=torch.float32, device="cpu"
        )  # [m], after the last step: what was left, and weights

    @torch.no_grad()
    def step(self, unsent: Tensor, left: Tensor) -> None:
        """Take in a step: of P ranks and m elements, [P, m] each, or their sums, [1, m]."""
        unsent, left = unsent.sum(0), left.sum(0)
        arrived = (unsent - self._left).square()
        self._left, self._waiting = left, (self._waiting + arrived) * part_left(unsent, left)
        self._steps += 1
        if self._steps > self._skip:
            self._delivered += delivered(float(unsent.square().sum()), float(left.square().sum()))
            self._waited += float(self._waiting.sum())
            self._arrived += float(arrived.sum())

    @property
    def delivered(self) -> float:
        """The part of what is unsent on all ranks together, as a squared norm, that a step delivers; the mean."""
        counted = self._steps - self._skip
        return self._delivered / counted if counted > 0 else 1.0

    @property
    def staleness(self) -> float:
        """The steps that a gradient waits before it is delivered; 0 where everything is delivered at once."""
        return self._waited / self._arrived if self._arrived else 0.0
