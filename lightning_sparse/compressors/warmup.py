"""Dense steps first."""

from dataclasses import dataclass

from lightning_sparse.comm import Comm, Rounds
from lightning_sparse.compressors.base import Compressor
from lightning_sparse.compressors.dense import Dense
from lightning_sparse.group import Group


@dataclass(frozen=True)
class Warmup(Compressor):
    """Dense sums for the first ``steps`` steps, then ``compressor``."""

    steps: int
    compressor: Compressor

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"Warmup(steps={self.steps}): the number of dense steps cannot be negative; 0 is none.")

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        """Whichever's turn it is; what one leaves unsent the other sends."""
        return (Dense() if group.step < self.steps else self.compressor).reduce(group, comm)

    def sends_whole(self, name: str, elements: int) -> bool:
        """As the wrapped compressor says."""
        return self.compressor.sends_whole(name, elements)
