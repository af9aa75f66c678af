"""Momentum correction: momentum before selection, so that what waits gathers the momentum it would have had."""

import math
import sys
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_sparse.comm import Comm, Rounds
from lightning_sparse.compressors.base import Compressor
from lightning_sparse.compressors.wrapper import Wrapper
from lightning_sparse.group import Group
from lightning_sparse.select import is_number
from lightning_sparse.sparse import Sparse


@dataclass(frozen=True)
class MomentumCorrection(Wrapper):
    """Adds velocities, v = momentum * v + gradient, to what is unsent, where others add gradients.

    Lin et al., "Deep Gradient Compression" (ICLR 2018), sections 3.2 and 3.3.  Give the optimizer no momentum of its
    own: SGD with the sum of velocities is SGD with momentum.  Where an element is delivered its velocity is set to
    zero on all ranks (momentum factor masking), so that what was sent does not go on moving it.  The law is then of
    velocities:

        ``P * mean + sum(unsent after) == sum(unsent before + velocity)``

    Costs a second float32 copy of the gradient.

    Args:
        momentum: in [0, 1).
        compressor: what selects and sends.
        clip_norm: before it is added, a rank's gradient of a group is scaled down to this Euclidean norm over sqrt(P)
            (local gradient clipping; the paper clips the whole gradient, which is not there yet when its first group
            is sent).  None: no clipping.
    """

    momentum: float
    compressor: Compressor | str
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (is_number(self.momentum) and 0 <= self.momentum < 1):
            raise ValueError(f"MomentumCorrection(momentum={self.momentum!r}): momentum is at least 0 and below 1.")
        if self.clip_norm is not None and not (is_number(self.clip_norm) and 0 < self.clip_norm <= sys.float_info.max):
            raise ValueError(
                f"MomentumCorrection(clip_norm={self.clip_norm!r}) is a norm, above 0 and finite; None is no clipping."
            )

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        """As the wrapped compressor; then the velocities of what was delivered start anew."""
        memory = group.memory
        memory["momentum"] = torch.tensor(self.momentum, dtype=torch.float64)
        if self.clip_norm is not None:
            memory["clip_norm"] = torch.tensor(self.clip_norm / math.sqrt(comm.size), dtype=torch.float64)
        if "velocity" not in memory:  # before the first step velocities are zero, and after it they are its gradients
            memory["velocity"] = group.unsent.clone()
        total = yield from self.wrapped.reduce(group, comm)
        if isinstance(total, Sparse):
            memory["velocity"].index_fill_(0, total.index, 0)
        elif isinstance(group.picked, Tensor):  # on a device, where nobody waits to know which they were
            memory["velocity"].masked_fill_(total != 0, 0)
        return total

    def at(self, step: int) -> Compressor:
        """The same around whatever is at work in ``step``."""
        return replace(self, compressor=self.wrapped.at(step))

    def densely(self) -> Compressor:
        """Dense sums of velocities."""
        return replace(self, compressor=self.wrapped.densely())
