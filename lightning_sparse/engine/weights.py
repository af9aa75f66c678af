"""Whose weights the parameters hold: this rank's own, or the average that all ranks share."""

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor

from lightning_sparse.engine.replica import Replica

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


class Phase(Enum):
    """Where a training with local steps is, and whose weights the parameters hold.

    ========  =======================================  ==========  ==============================================
    phase     from                                     weights     until
    ========  =======================================  ==========  ==============================================
    BETWEEN   the end of the optimizer's step          own         the next forward that trains, or SHOWN
    STEP      a forward that trains                    own         the optimizer has stepped, or SHOWN
    SHOWN     the start; whenever somebody asks        average     the next forward that trains, or optimizer step
    ENDED     the engine is closed                     average     for good
    ========  =======================================  ==========  ==============================================
    """

    BETWEEN = "between two steps"
    STEP = "within a step"
    SHOWN = "showing the average"
    ENDED = "ended"


class Weights:
    """The only place where a rank's own weights x_r and the average x̄ change places in the parameters.

    Weights that somebody else sets while the average is shown, such as a loaded checkpoint, are the new average, of
    which nothing is unsent.

    Args:
        replicas: of all groups.

    Attributes:
        replicas: likewise, and those that were added.
        set_by_others: whether somebody has set the average; whoever looks resets it.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = list(replicas)
        # While the average is shown, of each parameter this rank's own weights; None where they are the average.
        self._held: list[list[Tensor | None]] | None = [[None] * len(each.group.names) for each in self.replicas]
        self.set_by_others = False
        self._resumed = False  # what is held is from a checkpoint, whose average may not be in the parameters yet

    @property
    def shown(self) -> bool:
        """Whether the parameters hold the average."""
        return self._held is not None

    def add(self, replica: Replica) -> None:
        """Take care of one replica more, whose tensors hold this rank's own values."""
        self.replicas.append(replica)
        if self._held is not None:
            self._held.append(_show(replica))

    def show(self) -> None:
        """Have the parameters hold the average."""
        if self._held is None:
            self._held = [_show(replica) for replica in self.replicas]

    @torch.no_grad()
    def hide(self) -> None:
        """Have the parameters hold this rank's own weights."""
        self.take_over()
        for replica, held in zip(self.replicas, self._held or [], strict=False):
            for p, own in zip(replica.tensors(), held, strict=True):
                if own is not None:
                    p.copy_(own)
        self._held, self._resumed = None, False

    @torch.no_grad()
    def take_over(self) -> None:
        """Take what others have set while the average was shown for the average."""
        for replica, held in zip(self.replicas, self._held or [], strict=False):
            for place, (p, average) in enumerate(zip(replica.tensors(), replica.averages(), strict=True)):
                if not torch.equal(p.detach(), average.to(p.dtype)):  # whoever changed it, and how
                    replica.start_from(place, p, rounding=self._resumed)
                    held[place] = held[place] if self._resumed else None
                    self.set_by_others = not self._resumed or self.set_by_others

    def hold(self, own: Sequence[Sequence[Tensor | None]]) -> None:
        """Keep ``own`` of each replica, from a checkpoint; the parameters hold the average, or will."""
        self._held, self._resumed = [list(weights) for weights in own], True

    def own(self, replica: Replica) -> list[Tensor]:
        """This rank's own weights of each parameter."""
        if self._held is None:
            return replica.tensors()
        self.take_over()
        held = self._held[self.replicas.index(replica)]
        return [p if own is None else own for p, own in zip(replica.tensors(), held, strict=True)]

    def shared(self, replica: Replica) -> list[Tensor]:
        """The average of each parameter, of its shape; where it is shown the parameter itself."""
        return replica.tensors() if self.shown else replica.averages()

    def checksum(self) -> int:
        """One number that tells whether ranks have the same average."""
        return sum((place + 1) * int(checksum(replica.average)) for place, replica in enumerate(self.replicas))


def _show(replica: Replica) -> list[Tensor | None]:
    """Set the parameters of ``replica`` to the average; return what they were."""
    own = [p.detach().clone() for p in replica.tensors()]
    with torch.no_grad():
        for p, average in zip(replica.tensors(), replica.averages(), strict=True):
            p.copy_(average)
    return list(own)


def checksum(x: Tensor) -> Tensor:
    """Add up the bits of ``x`` as integers modulo 2**64: int64 [], in one pass.

    Elements that only change places are not noticed.
    """
    x = x.detach()
    if x.is_complex():
        x = torch.view_as_real(x)
    return x.view(_BITS[x.element_size()]).sum(dtype=torch.int64)
