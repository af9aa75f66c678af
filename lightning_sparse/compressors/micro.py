"""MiCRO: every rank selects from a part of its own, so that no element is selected twice and selection costs a P-th."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse import selection
from lightning_sparse.checks import check_density, check_slack, check_switch
from lightning_sparse.compressors.base import Compressor, carry_thresholds, last_report, report
from lightning_sparse.compressors.group import Group
from lightning_sparse.network.comm import Comm, Rounds
from lightning_sparse.network.sums import sum_selected
from lightning_sparse.selection import partition
from lightning_sparse.selection.estimate import count, room, sampled_threshold
from lightning_sparse.selection.threshold import Held
from lightning_sparse.wire import check_index_format


@dataclass(frozen=True)
class MiCRO(Compressor):
    """Each rank selects the large elements of a P-th of the gradient, and all sum those (Yoon and Oh, HiPC 2023).

    The vector is cut into P partitions.  In step t rank r owns partition (t + r) mod P and selects there what reaches
    a threshold all ranks share.  The indices are gathered, and the values at them summed over all ranks, whether or not
    a rank finds its own large.  So selections never overlap, nothing is sorted, and a rank looks at n / P elements.

    Two messages: an all-gather of indices, coded relative to the partition, and a sum of k values.  A message has room
    for ``slack`` times the elements meant; where there are more, the largest go, the others wait (``group.overflow``).
    Without ``balance`` each rank's indices have room for all k, since they may all lie in its partition.

    Where ours differs from the authors' code (kljp/micro): the threshold starts from a sampled quantile, not from
    1 / (2 sqrt(k)), and is estimated anew when it misses widely; between,
    :class:`~lightning_sparse.selection.threshold.Held` corrects it in proportion to the miss, where the code takes
    fixed steps of 0.5 % and 0.125 %; partitions may move, as in ExDyna (Yoon and Oh, CCGrid 2024); an owner who finds
    nothing sends nothing, where the code sends an element.

    Args:
        density: fraction of elements updated in a step, in (0, 1].  The paper's experiments: 0.001.
        balance: move the partitions' edges until as many are selected in each; False, as the paper: all n / P elements.
        slack: room in a message, as a multiple of the k / P elements meant, or of k without ``balance``, at least 1.
            The code has no limit.
        indices: how indices travel: "auto" (the cheapest), "int32", "block16", "bitmap" or "elias_fano"; on a GPU
            always "block16".  The code: 64 bits each.
    """

    density: float = 0.01
    balance: bool = True
    slack: float = 1.1
    indices: str = "auto"

    def __post_init__(self) -> None:
        check_density(self, self.density)
        check_switch(self, "balance")
        check_slack(self, self.slack)
        check_index_format(self, self.indices)

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        """Gather what the owners select, then sum the values there over all ranks."""
        n, size, unsent, on = group.n, comm.size, group.unsent, selection.on(group.unsent)
        k = group.target = count(self.density, n)
        if "edges" not in group.memory:
            group.memory["edges"] = partition.even(n, size)
        edges = self._adapt(group)
        threshold = yield from self._threshold(group, comm)

        widths, capacity = partition.widths(edges), self._capacity(n, edges)
        layout = on.layout(max(widths), capacity, self.indices)
        own = (group.step + comm.rank) % size
        found = on.select(unsent[edges[own] : edges[own + 1]], threshold, capacity)
        group.overflow = found.seen - found.count
        message = on.pack(layout, found, comm.buffer("message", layout.nbytes, torch.uint8, unsent.device))
        gathered = yield comm.all_gather(message)  # [P, bytes]

        selections = on.unpack(layout, gathered.roll(group.step, 0), widths)  # in each partition
        report(self, group, selections)
        chosen, values = on.join(selections, edges), size * capacity
        if not self.balance:  # there is room for all that are meant, wherever they lie
            values = min(values, room(k, self.slack))
            chosen = on.compact(chosen, values)
        group.picked = chosen.count
        return (yield from sum_selected(chosen, unsent, values, comm))

    def carry(self, parts: Sequence[tuple[Group, int]]) -> dict[str, Tensor]:
        """The threshold."""
        for group, _ in parts:
            self._adapt(group)
        return carry_thresholds(parts, "held")

    def _capacity(self, n: int, edges: list[int]) -> int:
        """Elements there is room for in a message: without balance all of them may lie in one partition."""
        meant = count(self.density, n) / (len(edges) - 1 if self.balance else 1)
        return min(max(partition.widths(edges)), room(meant, self.slack))

    def _threshold(self, group: Group, comm: Comm) -> Rounds[float]:
        """The threshold all ranks share; where there is none, the mean of the ranks' estimates."""
        if "held" not in group.memory:
            estimate = sampled_threshold(group.unsent, group.target)
            total = yield comm.all_reduce(estimate.view(1))
            group.memory["held"] = Held(float(total) / comm.size).state()
        return Held.of(group.memory["held"]).threshold

    def _adapt(self, group: Group) -> list[int]:
        """Threshold and edges of this step, from what all ranks know of the last; returns the edges, [P + 1]."""
        reported = last_report(self, group)
        edges: list[int] = group.memory["edges"].tolist() if "edges" in group.memory else []
        if reported is None:
            return edges
        picked, seen, near, _ = (list(column) for column in zip(*reported, strict=True))  # of each partition
        k, size = count(self.density, group.n), len(seen)
        held = Held.of(group.memory["held"])
        if held.lost(size * min(seen), sum(near), k):
            del group.memory["held"]
        else:
            capacity = self._capacity(group.n, edges)
            roomy = [p for p in range(size) if seen[p] <= capacity] or range(size)
            held = held.after(sum(picked), k, sum(seen[p] for p in roomy), sum(near[p] for p in roomy))
            group.memory["held"] = held.state()
        if self.balance:
            edges = partition.balanced(edges, seen)
            group.memory["edges"] = torch.tensor(edges)
        return edges
