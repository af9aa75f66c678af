"""Ok-Topk: a sparse all-reduce whose traffic does not grow with the number of ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_sparse import kernels, selection
from lightning_sparse.checks import check_density, check_setting, check_slack, is_whole
from lightning_sparse.compressors.base import Compressor, carry_thresholds
from lightning_sparse.compressors.group import Group
from lightning_sparse.compressors.ok_topk_control import Evaluated, Reported, adapt
from lightning_sparse.network.comm import Comm, Rounds
from lightning_sparse.network.sparse_collectives import even_out, reduce_scatter
from lightning_sparse.selection import partition
from lightning_sparse.selection.estimate import count, room
from lightning_sparse.selection.sparse import Sparse
from lightning_sparse.wire import MessageLayout, Selection, check_index_format


@dataclass(frozen=True)
class OkTopk(Compressor):
    """The largest sums of what ranks find large, at nearly the least traffic possible (Li and Hoefler, PPoPP 2022).

    1. Each rank selects the elements that reach its own threshold, about k = density * n of them.
    2. Split and reduce: the vector is cut into P regions, and each rank sends what it selected in a region to its
       owner, who adds them up.  Destinations rotate: in round j rank r sends to r + j and receives from r - j.
    3. Balance and gather: owners select the sums that reach a threshold all ranks share, even out how many each holds
       if one holds more than a message has room for, and everyone gathers them.

    Only what arrives in the end is taken out of ``unsent``: what did not reach the shared threshold stays with
    its rank.  A rank sends k (P-1)/P (index, value) pairs in step 2 and as many in step 3, times ``slack``; with 32-bit
    indices and values that is 4 ``slack`` k (P-1)/P words.  The paper's bound is 6, and 2 are needed (Theorem 3.1).

    Thresholds are evaluated every ``evaluate_every`` steps, or where they missed by a factor of two, and the shared one
    where it finds less than a quarter of k; between, :class:`~lightning_sparse.selection.threshold.Held` corrects them.
    Regions are cut anew every ``repartition_every`` steps, so that ranks select equally many in each.  Where ours
    differs from the authors' code: the shared threshold comes from 128 quantiles of each owner's sums, not from
    gathering all of them; messages have a fixed size.

    On a GPU step 3 does not even out, and thresholds and regions follow a step later, so that nobody waits for it: see
    :class:`~lightning_sparse.compressors.ok_topk_control.Reported`.

    Args:
        density: k / n, the fraction of elements updated in a step, in (0, 1].  The paper's experiments: 0.01 and 0.02.
        evaluate_every: steps between evaluations of the thresholds, tau' in the paper; its code has 32 and 128.
        repartition_every: steps between repartitions, tau in the paper; its code has 64, which left the fullest region
            19 % above the mean on skewed layers, where 32 left it 9 % above.
        slack: room in a message, as a multiple of the k / P elements meant, at least 1.
        indices: how indices travel: "auto" (the cheapest), "int32", "block16", "bitmap" or "elias_fano"; on a GPU
            always "block16".  The code: 32 bits each.
    """

    density: float = 0.01
    evaluate_every: int = 32
    repartition_every: int = 32
    slack: float = 1.25
    indices: str = "auto"

    def __post_init__(self) -> None:
        check_density(self, self.density)
        check_slack(self, self.slack)
        check_index_format(self, self.indices)
        for name in ("evaluate_every", "repartition_every"):
            check_setting(
                self, name, is_whole(getattr(self, name), least=1), "an integer, at least 1: a number of steps"
            )

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        """Select, split and reduce, select among the sums and gather; take out what arrived."""
        n, unsent, rank, on = group.n, group.unsent, comm.rank, selection.on(group.unsent)
        group.target = count(self.density, n)
        control = (Reported if kernels.used_for(unsent) else Evaluated)(self, group, comm)
        found, edges = yield from control.find()
        widths = partition.widths(edges)
        layout = self.layout(group, comm, max(widths))
        mine = on.with_values(on.join(found, edges), unsent)
        values = mine.values.split([part.index.numel() for part in found])
        parts = [replace(part, values=own) for part, own in zip(found, values, strict=True)]
        region, arrived = yield from reduce_scatter(parts, layout, widths[rank], comm)

        own, counts = yield from control.choose(region)
        kept = [on.moved(own, edges[rank], edges[rank + 1], n)]  # its values keep the rounding errors
        if counts and max(counts) > layout.capacity:
            even = yield from even_out(Sparse(kept[0].index, own.values), counts, self.layout(group, comm, n), comm)
            own, layout = Selection(even.index, even.values), self.layout(group, comm, n)
            edges, widths = [0] * comm.size, []  # indices count from the start of the group
            kept.append(own)
        message = on.pack(layout, own, comm.buffer("message", layout.nbytes, torch.uint8, unsent.device))
        gathered = on.unpack(layout, (yield comm.all_gather(message)), widths)

        delivered = on.join(gathered, edges)
        on.put(on.among(mine, delivered.index, n), unsent)
        for each in kept:
            on.add(each, unsent)
        group.picked = delivered.count
        yield from control.finish(mine, [*gathered, *arrived])
        return on.total(delivered, n)

    def layout(self, group: Group, comm: Comm, n: int) -> MessageLayout:
        """Messages that carry a P-th of k elements among n."""
        capacity = min(n, room(group.target / comm.size, self.slack))
        return selection.on(group.unsent).layout(n, capacity, self.indices, comm.wire_dtype)

    def carry(self, parts: Sequence[tuple[Group, int]]) -> dict[str, Tensor]:
        """Both thresholds."""
        for group, _ in parts:
            adapt(self, group)
        return carry_thresholds(parts, "local", "shared")
