"""Ok-Topk: a sparse all-reduce whose traffic does not grow with the number of ranks."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse import kernels
from lightning_sparse.checks import check_density, check_slack, is_whole
from lightning_sparse.compressors import ok_topk_device
from lightning_sparse.compressors.base import Compressor, carry_thresholds
from lightning_sparse.compressors.group import Group
from lightning_sparse.network.comm import Comm, Rounds
from lightning_sparse.network.sparse_collectives import Talk, even_out, reduce_scatter
from lightning_sparse.selection import partition
from lightning_sparse.selection.host import at_most, count, kth_largest, pick, pooled_threshold, room, summary
from lightning_sparse.selection.sparse import Sparse, contained, nonzero
from lightning_sparse.selection.threshold import Held
from lightning_sparse.wire import CAUSE, CorruptMessage, PickLayout, Picks, check_index_format, index_format, joined


@dataclass(frozen=True)
class OkTopk(Compressor):
    """The largest sums of what ranks find large, at nearly the least traffic possible (Li and Hoefler, PPoPP 2022).

    1. Each rank picks the elements that reach its own threshold, about k = density * n of them.
    2. Split and reduce: the vector is cut into P regions, and each rank sends its picks in a region to the region's
       owner, who adds them up.  Destinations rotate: in round j rank r sends to r + j and receives from r - j.
    3. Balance and gather: owners pick the sums that reach a threshold all ranks share, even out how many each holds if
       one holds more than a message has room for, and everyone gathers them.

    Only what arrives in the end is taken out of ``unsent``: a pick that did not reach the shared threshold stays with
    its rank.  A rank sends k (P-1)/P (index, value) pairs in step 2 and as many in step 3, times ``slack``; with 32-bit
    indices and values that is 4 ``slack`` k (P-1)/P words.  The paper's bound is 6, and 2 are needed (Theorem 3.1).

    Thresholds are evaluated every ``evaluate_every`` steps, or where they missed by a factor of two, and the shared one
    where it finds less than a quarter of k; between, :class:`~lightning_sparse.selection.threshold.Held` corrects them.
    Regions are cut anew every ``repartition_every`` steps, so that ranks have equally many picks in each.  Where ours
    differs from the authors' code: the shared threshold comes from 128 quantiles of each owner's sums, not from
    gathering all of them; messages have a fixed size.

    On a GPU step 3 does not even out, and thresholds and regions follow a step later, so that nobody waits for it: see
    :mod:`~lightning_sparse.compressors.ok_topk_device`.

    Args:
        density: k / n, the fraction of elements updated in a step, in (0, 1].  The paper's experiments: 0.01 and 0.02.
        evaluate_every: steps between evaluations of the thresholds, tau' in the paper; its code has 32 and 128.
        repartition_every: steps between repartitions, tau in the paper; its code has 64, which left the fullest region
            19 % above the mean on skewed layers, where 32 left it 9 % above.
        slack: room in a message, as a multiple of the k / P picks meant, at least 1.
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
            if not is_whole(getattr(self, name), least=1):
                raise ValueError(f"OkTopk({name}={getattr(self, name)!r}) is a number of steps, 1 or more.")

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        """Pick, split and reduce, balance and gather; take out what arrived."""
        group.target = count(self.density, group.n)
        if kernels.used_for(group.unsent):
            return (yield from ok_topk_device.reduce(self, group, comm))
        found = self._pick(group)
        edges = yield from self._regions(group, comm, found)
        mine, region = yield from self._split_and_reduce(group, comm, found, edges)
        chosen, counts = yield from self._select(group, comm, region)
        total, left = yield from self._balance_and_gather(group, comm, region[chosen], counts, edges)
        arrived = mine[nonzero(contained(mine.index, total.index))]
        group.unsent.index_copy_(0, arrived.index, arrived.values)
        for rest in left:
            group.unsent.index_add_(0, rest.index, rest.values)
        return total

    def carry(self, parts: Sequence[tuple[Group, int]]) -> dict[str, Tensor]:
        """Both thresholds."""
        for group, _ in parts:
            ok_topk_device.adapt(self, group)
        return carry_thresholds(parts, "local", "shared")

    def _pick(self, group: Group) -> Tensor:
        """Indices of the elements that reach this rank's own threshold, [m] rising."""
        k, unsent, memory = group.target, group.unsent, group.memory
        held = Held.of(memory["local"]) if "local" in memory else None
        if held is None or group.step % self.evaluate_every == 0:
            held = Held(kth_largest(unsent, k), held.trend if held else 0.0)
        picks = pick(unsent, held.threshold, group.n)
        index = picks.index
        if held.lost(picks.seen, picks.near, k):
            too_low = picks.seen > k  # then what is wanted is among what was picked
            among = unsent.index_select(0, index) if too_low else unsent
            held = Held(kth_largest(among, k))
            picks = pick(among, held.threshold, group.n)
            index = index.index_select(0, picks.index) if too_low else picks.index
        memory["local"] = held.after(picks.seen, k, picks.seen, picks.near).state()
        return index

    def _regions(self, group: Group, comm: Comm, found: Tensor) -> Talk[list[int]]:
        """Edges [P + 1] of the regions: the mean over the ranks of where each would cut its own picks evenly."""
        size = comm.size
        if "regions" not in group.memory or group.step % self.repartition_every == 0:
            edges = partition.even(group.n, size).to(found.device)
            if size > 1:
                inner = edges[1:-1].clone()
                if found.numel() >= size:
                    inner.copy_(found[partition.even(found.numel(), size)[1:-1].to(found.device)])
                edges[1:-1] = (yield comm.all_reduce(inner)) // size
                cut = edges.tolist()
                if sorted(cut) != cut or cut[0] != 0 or cut[-1] != group.n:
                    raise CorruptMessage(f"regions with the edges {cut} arrived, rising ones expected: {CAUSE}")
            group.memory["regions"] = edges
        edges_now: list[int] = group.memory["regions"].tolist()
        return edges_now

    def _split_and_reduce(
        self, group: Group, comm: Comm, found: Tensor, edges: list[int]
    ) -> Talk[tuple[Sparse, Sparse]]:
        """What this rank contributes, values being what rounding leaves; and the sum of all in its own region."""
        unsent = group.unsent
        layout = self.layout(group, comm, max(partition.widths(edges)))
        cuts = torch.searchsorted(found, torch.tensor(edges[1:-1], device=found.device)).tolist()
        inside = [at_most(layout.capacity, part, unsent) for part in torch.tensor_split(found, cuts)]
        index = torch.cat(inside)
        group.overflow = found.numel() - index.numel()
        mine = Sparse(index, unsent.index_select(0, index))
        ends = [0, *itertools.accumulate(part.numel() for part in inside)]
        parts = [
            Sparse(part - start, mine.values[ends[r] : ends[r + 1]])
            for r, (part, start) in enumerate(zip(inside, edges, strict=False))
        ]
        region = yield from reduce_scatter(parts, layout, edges[comm.rank + 1] - edges[comm.rank], comm)
        return mine, Sparse(region.index + edges[comm.rank], region.values)

    def _select(self, group: Group, comm: Comm, region: Sparse) -> Talk[tuple[Tensor, list[int]]]:
        """Positions in ``region`` of the sums that reach the shared threshold, and how many every rank has of them."""
        k, memory = group.target, group.memory
        space = comm.size * self.layout(group, comm, group.n).capacity
        held = Held.of(memory["shared"]) if "shared" in memory else None
        evaluated = held is None or group.step % self.evaluate_every == 0
        blind = False
        while True:
            if evaluated or held is None:
                summaries = yield comm.all_gather(summary(region.values))
                threshold = pooled_threshold(summaries, k)
                held = held.renewed(threshold) if held and blind else Held(threshold, held.trend if held else 0.0)
            picks = pick(region.values, held.threshold, region.values.numel())
            own = torch.tensor([picks.seen, picks.near], dtype=torch.int32, device=region.index.device)
            sizes = yield comm.all_gather(own)  # [P, 2]
            if int(sizes.min()) < 0 or int(sizes.max()) > group.n:
                raise CorruptMessage(f"counts {sizes.tolist()} arrived, 0 to {group.n} expected: {CAUSE}")
            seen, near = sizes.sum(0).tolist()
            blind = held.blind(min(seen, space), k, seen, near)
            if evaluated or not (blind or held.lost(seen, near, k)):
                break
            evaluated = True
        memory["shared"] = held.after(min(seen, space), k, seen, near).state()
        counts = sizes[:, 0].tolist()
        if seen > space:  # each rank keeps its share of what there is room for
            counts = [c * space // seen for c in counts]
            picks = pick(region.values, held.threshold, counts[comm.rank])
            group.overflow += picks.seen - picks.index.numel()
        return picks.index, counts

    def _balance_and_gather(
        self, group: Group, comm: Comm, own: Sparse, counts: list[int], edges: list[int]
    ) -> Talk[tuple[Sparse, list[Sparse]]]:
        """Every rank's ``own``, everywhere; and what rounding left of them here."""
        starts = edges[:-1]  # indices count from the start of a region ...
        layout = self.layout(group, comm, max(partition.widths(edges)))
        left = [own]
        if max(counts) > layout.capacity:
            starts = [0] * comm.size  # ... or of the group
            layout = self.layout(group, comm, group.n)
            own = yield from even_out(own, counts, layout, comm)
            left.append(own)
        if own.index.numel() > layout.capacity:
            raise CorruptMessage(f"{own.index.numel()} sums where counts {counts} leave {layout.capacity}: {CAUSE}")
        message = Picks(own.index - starts[comm.rank], own.values)
        buffer = comm.buffer(layout.nbytes, torch.uint8, own.index.device)
        gathered = yield comm.all_gather(layout.pack(message, buffer))  # [P, bytes]
        parts = [layout.unpack(payload) for payload in gathered]
        index = joined(parts, starts, group.n)
        return Sparse(index, torch.cat([part.values for part in parts])), left

    def layout(self, group: Group, comm: Comm, n: int) -> PickLayout:
        """Messages that carry a P-th of k picks among n elements."""
        capacity = min(n, room(group.target / comm.size, self.slack))
        indices = "block16" if kernels.used_for(group.unsent) else self.indices  # what a device codes by itself
        return PickLayout(n, capacity, index_format(indices, n, capacity), comm.wire_dtype)
