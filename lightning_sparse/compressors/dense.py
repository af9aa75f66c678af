"""Dense: everything is sent."""

from dataclasses import dataclass

from lightning_sparse.compressors.base import Compressor
from lightning_sparse.compressors.group import Group
from lightning_sparse.network.comm import Comm, Rounds
from lightning_sparse.network.sums import sum_values


@dataclass(frozen=True)
class Dense(Compressor):
    """Every rank sends all of its gradient: plain data-parallel training, the baseline of every comparison.

    One all-reduce of n values.  With two ranks and float32 on the wire it equals plain DDP bit for bit.
    """

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        """Sum everything."""
        return sum_values(group.unsent, comm)

    def compresses(self, step: int) -> bool:
        """Never."""
        del step
        return False
