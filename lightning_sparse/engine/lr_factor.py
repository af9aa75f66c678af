"""How much shorter steps of one rank's optimizer are, which divides by the noise of one rank's gradient."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.lane import Lane
from lightning_sparse.engine.sample import spread_over
from lightning_sparse.network.comm import Comm, Rounds

EVERY = 10  # steps from one look to the next
DECAY = 0.9  # of means over about 10 looks


class LrFactor:
    """The factor by which an optimizer that normalises moves less with one rank's gradient than with the mean's.

    Adam's step is the mean gradient over the root of its mean square.  The mean over P ranks has a smaller mean square
    than one rank's gradient, by a factor between 1 (no noise) and 1/P (nothing else); steps are shorter by its root.
    Every ``EVERY`` steps a sample of the gradient and its squares are summed over the ranks.

    Attributes:
        value: from 1 to the root of P, the same on every rank; 1 until it was measured.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self.value = 1.0
        self._places = {
            p: spread_over(name, p.numel()).to(p.device)
            for group in groups
            for name, p in zip(group.names, group.parameters, strict=True)
        }
        #: [2, m], of the mean gradient, and the mean of each rank's; zeros until known
        self.squares = torch.zeros(2, sum(map(len, self._places.values())))
        self._gradients: dict[Tensor, Tensor] = {}
        self._sampled: Tensor | None = None  # [m], this rank's gradient, until the ranks' have been compared
        self._sums: Tensor | None = None  # [2, m], over the ranks, of gradients and their squares

    def take_in(self, gradients: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Sample parameters' gradients on this rank."""
        for parameter, gradient in gradients:
            if parameter in self._places:
                self._gradients[parameter] = gradient.reshape(-1).index_select(0, self._places[parameter]).float()

    @property
    def sampled(self) -> Tensor | None:
        """This rank's gradient [m] that is to be compared, or is being compared; None if there is none."""
        if self._gradients:
            own = [self._gradients.get(p, torch.zeros(len(i), device=i.device)) for p, i in self._places.items()]
            return torch.cat(own).nan_to_num_(0.0, 0.0, 0.0)
        return self._sampled

    def take_up(self) -> bool:
        """Have ready what :meth:`sum_up` sends; returns whether there is anything to compare, as on all ranks."""
        self._sampled = self.sampled
        self._gradients.clear()
        if self._sampled is None and self._places:
            self._sampled = torch.zeros(self.squares.shape[1], device=next(iter(self._places)).device)
        return bool(self.squares.numel())

    def sum_up(self, comm: Comm) -> Rounds:
        """Compare the ranks' gradients; to be run to its end, on every rank; returns their sum and that of squares."""
        assert self._sampled is not None
        self._sums = yield comm.all_reduce(torch.stack([self._sampled, self._sampled.square()]))
        return self._sums

    def compare(self, lane: Lane) -> None:
        """Run :meth:`sum_up` on ``lane``."""
        lane.run(self.sum_up(lane.comm))

    def read(self, size: int) -> None:
        """Set ``value`` from what was summed up over ``size`` ranks, if anything was since the last time."""
        if self._sums is not None:
            mean, square = self._sums.cpu() / size
            now, self._sums, self._sampled = torch.stack([mean.square(), square]), None, None
            self._set(self.squares * DECAY + now * (1 - DECAY) if bool(self.squares.any()) else now, size)

    def resume(self, squares: Tensor, sampled: Tensor | None, size: int) -> None:
        """Go on with ``squares`` and ``sampled`` from a checkpoint, if they are of these parameters."""
        self._gradients.clear()
        if squares.shape == self.squares.shape:
            self._set(squares.clone(), size)
            self._sampled = None if sampled is None or not self._places else sampled.to(next(iter(self._places)).device)

    def _set(self, squares: Tensor, size: int) -> None:
        self.squares = squares
        of_mean, of_ranks = squares
        if bool((known := of_ranks > 0).any()):
            share = float((of_mean[known] / of_ranks[known]).mean())
            self.value = min(max(share, 1 / size), 1.0) ** -0.5
