"""Momentum correction: momentum before selection, so that what waits gathers the momentum it would have had."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_sparse.checks import is_number
from lightning_sparse.compressors.base import Compressor
from lightning_sparse.compressors.group import Group
from lightning_sparse.compressors.wrapper import Wrapper
from lightning_sparse.network.comm import Comm, Rounds
from lightning_sparse.selection.sparse import Sparse


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
            raise ValueError(f"MomentumCorrection: momentum must be at least 0 and below 1; got {self.momentum!r}.")
        if self.clip_norm is not None and not (is_number(self.clip_norm) and 0 < self.clip_norm <= sys.float_info.max):
            raise ValueError(
                f"MomentumCorrection: clip_norm must be above 0 and finite, or None for no clipping; got "
                f"{self.clip_norm!r}."
            )

    @property
    def per_element(self) -> tuple[str, ...]:
        return ("velocity", *self.wrapped.per_element)

    def accumulate(self, group: Group, gradients: Sequence[Tensor | None], size: int, scale: float = 1.0) -> None:
        """Add each gradient to its velocity, and the velocity to what is unsent."""
        if self.clip_norm is not None:
            scale *= _shrunk(gradients, scale, self.clip_norm / math.sqrt(size))
        velocities: list[Tensor | None] = []
        for velocity, gradient in zip(group.slots(_velocity(group)), gradients, strict=True):
            if gradient is None:
                velocities.append(None)
            else:
                velocities.append(velocity.view(gradient.shape).mul_(self.momentum).add_(gradient, alpha=scale))
        self.wrapped.accumulate(group, velocities, size)
        _velocity(group).nan_to_num_(0.0, 0.0, 0.0)  # what is not finite is unsent once

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        """Sum as the wrapped compressor does; then set the velocities of what was delivered to zero."""
        total = yield from self.wrapped.reduce(group, comm)
        if isinstance(total, Sparse):
            _velocity(group).index_fill_(0, total.index, 0)
        elif isinstance(group.picked, Tensor):  # on a device, where nobody waits to know which they were
            _velocity(group).masked_fill_(total != 0, 0)
        return total

    def dense_variant(self) -> Compressor:
        return replace(self, compressor=self.wrapped.dense_variant())


def _velocity(group: Group) -> Tensor:
    """The group's velocities [n], which are zero before its first step."""
    if "velocity" not in group.memory:
        group.memory["velocity"] = torch.zeros_like(group.unsent)
    return group.memory["velocity"]


def _shrunk(gradients: Sequence[Tensor | None], scale: float, most: float) -> float:
    """The factor, at most 1, that takes the Euclidean norm of all ``gradients``, times ``scale``, down to ``most``."""
    # In float64: a norm that overflows would scale a finite gradient down to nothing.
    norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients if g is not None]
    norm = scale * float(torch.stack(norms).norm()) if norms else 0.0
    return most / norm if norm > most else 1.0
