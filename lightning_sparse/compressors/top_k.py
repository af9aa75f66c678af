"""Top-K: each rank's largest elements with their indices, gathered by everyone."""

from dataclasses import dataclass

from lightning_sparse import selection
from lightning_sparse.checks import check_selecting
from lightning_sparse.compressors.base import Compressor, report
from lightning_sparse.compressors.group import Group
from lightning_sparse.network.comm import Comm, Rounds
from lightning_sparse.network.sums import gather
from lightning_sparse.selection.threshold import count


@dataclass(frozen=True)
class TopK(Compressor):
    """Each rank sends its own k = density * n largest elements (Aji and Heafield, EMNLP 2017): the usual baseline.

    One all-gather of k (index, value) pairs, so what a rank sends grows with the number of ranks, and up to P * k
    elements are updated.  The value at an index is the sum over the ranks that selected it.

    Args:
        density: fraction of elements each rank sends, in (0, 1].
        indices: how they are written: "auto" (the cheapest), "int32", "block16", "bitmap" or "elias_fano"; on a GPU
            always "block16".
    """

    default_wire_dtype = "int4"

    density: float = 0.05
    indices: str = "auto"

    def __post_init__(self) -> None:
        check_selecting(self)

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        """Gather everyone's largest elements and add them up, rank by rank, in the same order everywhere."""
        n, unsent, on = group.n, group.unsent, selection.on(group.unsent)
        k = group.target = count(self.density, n)
        layout = on.layout(n, k, self.indices, comm.wire_dtype)
        own = on.select_k(unsent, k)
        selections = yield from gather(own, layout, comm, n)
        on.put(own, unsent)  # the rounding errors
        report(self, group, selections)
        total, group.picked = on.add_up(selections, n)
        return total
