"""Top-K: each rank's largest elements with their indices, gathered by everyone."""

from dataclasses import dataclass

import torch

from lightning_sparse.comm import Comm, Rounds
from lightning_sparse.compressors.base import Compressor
from lightning_sparse.group import Group
from lightning_sparse.select import check_density, count, largest
from lightning_sparse.sparse import Sparse, add_up
from lightning_sparse.wire import PickLayout, Picks, check_index_format, index_format


@dataclass(frozen=True)
class TopK(Compressor):
    """Each rank sends its own k = density * n largest elements (Aji and Heafield, EMNLP 2017): the usual baseline.

    One all-gather of k (index, value) pairs, so what a rank sends grows with the number of ranks, and up to P * k
    elements are updated.  The value at an index is the sum over the ranks that picked it.

    Args:
        density: fraction of elements each rank sends, in (0, 1].
        indices: how indices travel: "auto" (the cheapest), "int32", "block16", "bitmap" or "elias_fano".
    """

    density: float = 0.01
    indices: str = "auto"

    def __post_init__(self) -> None:
        check_density(self, self.density)
        check_index_format(self, self.indices)

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        """Gather everyone's largest elements and add them up, rank by rank, in the same order everywhere."""
        n, unsent = group.n, group.unsent
        k = group.target = count(self.density, n)
        layout = PickLayout(n, k, index_format(self.indices, n, k), comm.wire_dtype)
        index = largest(unsent, k)
        values = unsent.index_select(0, index)
        message = layout.pack(Picks(index, values), out=comm.buffer(layout.nbytes, torch.uint8, unsent.device))
        unsent.index_copy_(0, index, values)  # what rounding left
        gathered = yield comm.all_gather(message)  # [P, bytes]
        picks = [layout.unpack(payload) for payload in gathered]
        return add_up([Sparse(pick.index, pick.values) for pick in picks], n)
