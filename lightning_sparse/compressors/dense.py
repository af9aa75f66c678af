"""Dense sums in float32, whatever the wire format."""

from dataclasses import dataclass

from lightning_sparse.compressors.base import Dense
from lightning_sparse.compressors.group import Group
from lightning_sparse.network.comm import Comm, Rounds

__all__ = ["Dense", "Exact"]


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
