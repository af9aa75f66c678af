"""MiCRO: every rank selects from a part of its own, so that no element is selected twice and selection costs a P-th."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_sparse import selection
from lightning_sparse.checks import check_selecting, check_switch
from lightning_sparse.compressors.base import Compressor, carry_thresholds, last_report, report
from lightning_sparse.compressors.group import Group
from lightning_sparse.network.comm import Comm, Rounds
from lightning_sparse.network.sums import gather, sum_selected
from lightning_sparse.selection import partition
from lightning_sparse.selection.threshold import ThresholdController, count, room, sampled_threshold


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
    a :class:`~lightning_sparse.selection.threshold.ThresholdController` corrects it in proportion to the miss, where
    the code takes fixed steps of 0.5 % and 0.125 %; partitions may move, as in ExDyna (Yoon and Oh, CCGrid 2024); an
    owner who finds nothing sends nothing, where the code sends an element.

    Args:
        density: fraction of elements updated in a step, in (0, 1].  The paper's experiments: 0.001.
        balance: move the partitions' edges until as many are selected in each; False, as the paper: all n / P elements.
        slack: room in a message, as a multiple of the k / P elements meant, or of k without ``balance``, at least 1.
            The code has no limit.
        indices: how they are written: "auto" (the cheapest), "int32", "block16", "bitmap" or "elias_fano"; on a GPU
            always "block16".  The code: 64 bits each.
    """

    default_wire_dtype = "int4"

    density: float = 0.05
    balance: bool = True
    slack: float = 1.1
    indices: str = "auto"

    def __post_init__(self) -> None:
        check_selecting(self)
        check_switch(self, "balance")

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        """Gather what the owners select, then sum the values there over all ranks."""
        n, size, unsent, on = group.n, comm.size, group.unsent, selection.on(group.unsent)
        k = group.target = count(self.density, n)
        self._adapt(group)
        if "held" not in group.memory:
            estimates = yield comm.all_reduce(sampled_threshold(unsent, k).view(1))
            group.memory["held"] = ThresholdController(float(estimates) / size).state()
        threshold = ThresholdController.of(group.memory["held"]).threshold
        edges = group.memory.setdefault("edges", partition.even(n, size))

        widths = partition.widths(edges.tolist())
        meant = room(k / size if self.balance else k, self.slack)  # without balance all may lie in one partition
        layout = on.layout(max(widths), min(max(widths), meant), self.indices)
        found = on.select(unsent.split(widths)[(group.step + comm.rank) % size], threshold, layout.capacity)
        first = -group.step % size  # the owner of the first partition
        gathered = yield from gather(found, layout, comm, n, on.placed(edges, unsent), first)
        report(self, group, gathered)

        values = size * layout.capacity if self.balance else min(size * layout.capacity, meant)
        chosen = on.compact(on.as_one(gathered), values)
        group.picked, group.overflow = chosen.count, found.seen - found.count
        return (yield from sum_selected(chosen, unsent, values, comm))

    def carry(self, parts: Sequence[tuple[Group, int]]) -> dict[str, Tensor]:
        """The threshold."""
        for group, _ in parts:
            self._adapt(group)
        return carry_thresholds(parts, "held")

    def _adapt(self, group: Group) -> None:
        """Set threshold and edges of this step, from what all ranks know of the last; a threshold may be given up."""
        reported, memory = last_report(self, group), group.memory
        if reported is not None:
            controller = ThresholdController.of(memory.pop("held")).following(reported, count(self.density, group.n))
            if controller is not None:
                memory["held"] = controller.state()
            if self.balance:
                memory["edges"] = partition.balanced(memory["edges"], [seen for _, seen, *_ in reported])
