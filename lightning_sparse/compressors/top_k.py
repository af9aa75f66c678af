"""Top-K: each rank's largest elements with their indices, gathered by everyone."""

from dataclasses import dataclass

import torch

from lightning_sparse import wire
from lightning_sparse.comm import Comm, Rounds
from lightning_sparse.compressors.base import Compressor
from lightning_sparse.group import Group
from lightning_sparse.select import check_density, count


@dataclass(frozen=True)
class TopK(Compressor):
    """Each rank sends its own k = density * n largest elements (Aji and Heafield, EMNLP 2017): the usual baseline.

    One all-gather of k (index, value) pairs, so what a rank sends grows with the number of ranks, and up to P * k
    elements are updated.  The value at an index is the sum over the ranks that picked it.

    Args:
        density: fraction of elements each rank sends, in (0, 1].
    """

    density: float = 0.01

    def __post_init__(self) -> None:
        check_density(self, self.density)

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        """Gather everyone's largest elements and add them up, rank by rank, in the same order everywhere."""
        if group.n > wire.INDEX_LIMIT:
            raise ValueError(f"TopK: a group of {group.n} elements is too large for 32-bit indices.")
        group.target = count(self.density, group.n)
        index = group.unsent.abs().topk(group.target, sorted=False).indices  # [k]
        picked = group.unsent[index]  # [k]
        travelling = torch.empty_like(picked, dtype=comm.wire_dtype)
        wire.take(picked, out=travelling)
        group.unsent[index] = picked  # what rounding left
        payloads = yield comm.all_gather(wire.pack(index, travelling))  # [P, bytes]

        total = torch.zeros_like(group.unsent)
        updated = torch.zeros_like(group.unsent, dtype=torch.bool)
        for payload in payloads:  # one rank after the other: indices of one rank are distinct, so the order is fixed
            indices, values = wire.unpack(payload, comm.wire_dtype)
            total.index_add_(0, indices, values.float())
            updated[indices] = True
        group.picked = updated.sum()
        return total
