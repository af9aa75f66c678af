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


@dataclass(frozen=True)
class Exact(Dense):
    """Everything is sent as float32, whatever the wire format: statistics, which rounding could make negative.

    What is not finite on a rank arrives as such on every rank, which then leaves that element as it is.
    """

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        """Sum everything."""
        total = group.unsent.clone()
        group.unsent.zero_()
        return (yield comm.all_reduce(total))
