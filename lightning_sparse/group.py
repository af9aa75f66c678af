"""A group: parameters whose gradients travel together, and what this rank still owes of them."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_sparse.streams import draw


@dataclass
class Group:
    """Parameters that travel together.  n = elements in the group.

    Args:
        index: position in the order in which groups are sent.
        names: of the parameters, in the order in which they lie in ``unsent``.
        parameters: the parameters themselves.

    Attributes:
        unsent: [n] float32, this rank's gradient that has not been sent yet.
        memory: the compressor's own tensors, under the same names and of the same shapes on every rank; saved with a
            checkpoint.
        step: optimizer steps this group has taken part in.
        picked: distinct elements updated in the last step, a number or a 0-d tensor (not read before it is logged).
        target: elements the compressor meant to update in the last step.
        overflow: elements this rank meant to send in the last step but kept, for want of room in a message.
    """

    index: int
    names: tuple[str, ...]
    parameters: tuple[Tensor, ...]
    unsent: Tensor = field(init=False)
    memory: dict[str, Tensor] = field(default_factory=dict)
    step: int = 0
    picked: int | Tensor = 0
    target: int = 0
    overflow: int = 0

    def __post_init__(self) -> None:
        self.sizes = [p.numel() for p in self.parameters]
        device = self.parameters[0].device if self.parameters else None
        self.unsent = torch.zeros(sum(self.sizes), dtype=torch.float32, device=device)

    @property
    def n(self) -> int:
        """Elements in the group."""
        return self.unsent.numel()

    def slots(self, flat: Tensor) -> tuple[Tensor, ...]:
        """``flat`` [n] cut into one view a parameter, in the order of ``names``."""
        return torch.split(flat, self.sizes)

    def weight(self) -> Tensor:
        """The parameters' values now, [n] float32."""
        return torch.cat([p.detach().reshape(-1).float() for p in self.parameters])

    def draw(self, seed: int) -> int:
        """A random integer of this step in [0, 2**63), the same on every rank."""
        return draw(seed, self.step, self.index)

    def generator(self, seed: int) -> torch.Generator:
        """A random stream of this step, the same on every rank whose device is of the same kind."""
        return torch.Generator(self.unsent.device).manual_seed(self.draw(seed))
