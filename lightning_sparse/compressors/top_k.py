"""Top-K: each rank's largest elements with their indices, gathered by everyone."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse import kernels
from lightning_sparse.checks import check_density
from lightning_sparse.compressors.base import Compressor, last_report
from lightning_sparse.compressors.group import Group
from lightning_sparse.network.comm import Comm, Rounds
from lightning_sparse.selection import messages, padded
from lightning_sparse.selection.host import count, largest, not_nan, room, sampled_threshold
from lightning_sparse.selection.sparse import Sparse, add_up
from lightning_sparse.wire import PickLayout, Picks, check_index_format, index_format

SOUGHT = 1.25  # times k elements are meant to reach the threshold on a device, of which the k largest go


@dataclass(frozen=True)
class TopK(Compressor):
    """Each rank sends its own k = density * n largest elements (Aji and Heafield, EMNLP 2017): the usual baseline.

    One all-gather of k (index, value) pairs, so what a rank sends grows with the number of ranks, and up to P * k
    elements are updated.  The value at an index is the sum over the ranks that picked it.

    Args:
        density: fraction of elements each rank sends, in (0, 1].
        indices: how indices travel: "auto" (the cheapest), "int32", "block16", "bitmap" or "elias_fano"; on a GPU
            always "block16".
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
        if kernels.used_for(unsent):
            return (yield from self._on_device(group, comm, k))
        layout = PickLayout(n, k, index_format(self.indices, n, k), comm.wire_dtype)
        index = largest(unsent, k)
        values = unsent.index_select(0, index)
        message = layout.pack(Picks(index, values), out=comm.buffer(layout.nbytes, torch.uint8, unsent.device))
        unsent.index_copy_(0, index, values)  # what rounding left
        gathered = yield comm.all_gather(message)  # [P, bytes]
        picks = [layout.unpack(payload) for payload in gathered]
        return add_up([Sparse(pick.index, pick.values) for pick in picks], n)

    def _on_device(self, group: Group, comm: Comm, k: int) -> Rounds:
        """As :meth:`reduce`, and nobody waits for the device to know how many were picked: all that travels is padded.

        The k largest are sought among those that reach a sampled threshold, which a few more do.  Indices are block16,
        which the device codes by itself.
        """
        n, unsent = group.n, group.unsent
        last_report(self, group)
        layout = PickLayout(n, k, index_format("block16", n, k), comm.wire_dtype)
        threshold = not_nan(sampled_threshold(unsent, min(n, room(k, SOUGHT))))
        found = kernels.largest_first(unsent, threshold, k)
        values = padded.take(unsent, found.index)
        message = messages.pack(layout, found, comm.buffer(layout.nbytes, torch.uint8, unsent.device), values)
        padded.put(found.index, values, unsent)  # what rounding left
        gathered = yield comm.all_gather(message)  # [P, bytes]

        index, report = messages.unpack(layout, gathered)  # [P, k], n where there is no pick
        group.send_to_host("report", report)
        total = unsent.new_zeros(n + 1)
        for row, picked in zip(index, messages.values(layout, gathered, index), strict=True):
            total.index_add_(0, row, picked)
        touched = torch.zeros(n + 1, dtype=torch.bool, device=unsent.device).index_fill_(0, index.flatten(), True)
        group.picked = touched[:n].sum()
        return total[:n]

    def carry(self, parts: Sequence[tuple[Group, int]]) -> dict[str, Tensor]:
        """Nothing, where no message was damaged."""
        for group, _ in parts:
            last_report(self, group)
        return {}
