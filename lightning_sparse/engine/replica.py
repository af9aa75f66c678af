"""A group's replica: this rank's own weights, the average all ranks share, and the way from one to the other."""

import torch
from torch import Tensor

from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.base import take_step
from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.local_steps import LocalSteps
from lightning_sparse.network.comm import Comm, Rounds
from lightning_sparse.selection.sparse import Sparse, dense

VELOCITY = "outer velocity"  # in a group's memory


class Replica:
    """The weights of a group on this rank, x_r, which are its parameters, and the average x̄.  n = elements.

    Over all P ranks, what a step of the exchange does obeys the law of gradients, with updates in their place:
    ``P * (what x̄ moved) + sum(unsent after) == sum(unsent before + update)``, to the rounding of the weights.

    Attributes:
        group: whose ``unsent`` is x_r - x̄ from :meth:`take_up` to :meth:`apply`.
        compressor: what averages it.
        fragment: with which it takes turns.
        average: x̄ [n] float32, the same bits on every rank.
    """

    def __init__(self, group: Group, compressor: Compressor, fragment: int, settings: LocalSteps) -> None:
        self.group, self.compressor, self.fragment = group, compressor, fragment
        self.average = torch.empty_like(group.unsent)
        self._settings = settings
        self._own: list[Tensor] = []  # the weights when they were taken up
        # What parameters in half precision cannot hold of x̄ + unsent: part of what is owed.
        self._rounding = None if all(p.dtype == torch.float32 for p in group.parameters) else group.unsent.clone()
        for parameter, slot in zip(group.parameters, group.slots(self.average), strict=True):
            slot.view(parameter.shape).copy_(parameter.detach())

    def is_due(self, step: int, warmup_steps: int = 0) -> bool:
        """Whether the group travels after ``step``; if so, it then knows which of its turns that is."""
        turn = self._settings.turn(self.fragment, step, warmup_steps)
        if turn is not None:
            self.group.step = turn
        return turn is not None

    @torch.no_grad()
    def take_up(self, size: int) -> None:
        """Set ``unsent`` to what this rank owes, x_r - x̄."""
        group = self.group
        self._own = [parameter.detach().clone() for parameter in group.parameters]
        owed = torch.empty_like(group.unsent)
        for own, slot in zip(self._own, group.slots(owed), strict=True):
            slot.view(own.shape).copy_(own)
        owed -= self.average
        if self._rounding is not None:
            owed += self._rounding
        group.unsent.zero_()
        self.compressor.accumulate(
            group, [slot.view(p.shape) for slot, p in zip(group.slots(owed), group.parameters, strict=True)], size
        )

    def exchange(self, comm: Comm) -> Rounds:
        """Send some of what is owed; to be run to its end, which returns the total."""
        return take_step(self.compressor, self.group, comm)

    @torch.no_grad()
    def move(self, total: Tensor | Sparse, size: int) -> None:
        """Move x̄ by the mean over ``size`` ranks, or by the outer step that it calls for."""
        rate, momentum = self._settings.outer_rate, self._settings.outer_momentum
        if isinstance(total, Sparse) and not momentum:
            self.average.index_add_(0, total.index, total.values / size * rate)
            return
        mean = dense(total, self.group.n) / size
        if momentum:
            velocity = self.group.memory.setdefault(VELOCITY, torch.zeros_like(mean))
            velocity.mul_(momentum).add_(mean)
            mean += velocity * momentum
        self.average += mean * rate if rate != 1 else mean

    @torch.no_grad()
    def apply(self) -> None:
        """Set this rank's weights to x̄ + unsent, and what its optimizer has done to them since they were taken up."""
        group = self.group
        slots = zip(group.parameters, self._own, group.slots(self.average), group.slots(group.unsent), strict=True)
        rounded = group.slots(self._rounding) if self._rounding is not None else None
        for i, (parameter, own, average, unsent) in enumerate(slots):
            if rounded is None:
                parameter.sub_(own).add_(average.view(own.shape)).add_(unsent.view(own.shape))
                continue
            exact = (parameter.float() - own.float()).view(-1) + average + unsent
            parameter.copy_(exact.view(own.shape))
            rounded[i].copy_(exact - parameter.detach().float().view(-1))
        self._own = []
