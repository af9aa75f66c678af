"""MiCRO: every rank picks from a part of its own, so that nobody picks twice and selection costs a P-th."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse import partition
from lightning_sparse.comm import Comm, Pending, Rounds
from lightning_sparse.compressors.base import Compressor, carry_thresholds
from lightning_sparse.control import Held
from lightning_sparse.group import Group
from lightning_sparse.ring import sum_at
from lightning_sparse.select import check_density, check_slack, count, estimate_threshold, pick, room
from lightning_sparse.sparse import Sparse
from lightning_sparse.wire import PickLayout, Picks, check_index_format, index_format


@dataclass(frozen=True)
class MiCRO(Compressor):
    """Each rank picks the large elements of one P-th of the gradient, and all ranks sum those (Yoon and Oh, HiPC 2023).

    The vector is cut into P partitions.  In step t rank r owns partition (t + r) mod P and picks there what reaches a
    threshold all ranks share.  The picked indices are gathered, and the values at them summed over all ranks, whether
    or not a rank finds its own large.  So picks never overlap, nothing is sorted, and a rank looks at n / P elements.

    Two messages: an all-gather of indices, coded relative to the partition, and a sum of k values.  A message has room
    for ``slack`` times the picks meant; where there are more, the largest go and the others wait (``group.overflow``).

    Where ours differs from the authors' code (kljp/micro): the threshold starts from a sampled quantile, not from
    1 / (2 sqrt(k)), and is estimated anew when it misses widely; between, :class:`~lightning_sparse.control.Held`
    corrects it in proportion to the miss, where the code takes fixed steps of 0.5 % and 0.125 %; partitions may move,
    as in ExDyna (Yoon and Oh, CCGrid 2024); an owner who finds nothing sends nothing, where the code sends an element.

    Args:
        density: fraction of elements updated in a step, in (0, 1].  The paper's experiments: 0.001.
        balance: move the partitions' edges until each holds as many picks; False, as the paper: all n / P elements.
        slack: room in a message, as a multiple of the k / P picks meant, at least 1.  The code has no limit.
        indices: how indices travel: "auto" (the cheapest), "int32", "block16", "bitmap" or "elias_fano".  The code: 64
            bits each.
    """

    density: float = 0.01
    balance: bool = True
    slack: float = 1.25
    indices: str = "auto"

    def __post_init__(self) -> None:
        check_density(self, self.density)
        check_slack(self, self.slack)
        check_index_format(self, self.indices)

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        """Gather the owners' picks, then sum the values there over all ranks."""
        size, unsent = comm.size, group.unsent
        k = group.target = count(self.density, group.n)
        held = yield from self._threshold(group, comm)
        edges = group.memory.setdefault("edges", partition.even(group.n, size)).tolist()  # [P + 1]
        width = max(partition.widths(edges))
        capacity = min(width, room(k / size, self.slack))
        layout = PickLayout(width, capacity, index_format(self.indices, width, capacity))

        own = (group.step + comm.rank) % size
        mine = pick(unsent[edges[own] : edges[own + 1]], held.threshold, capacity)
        group.overflow = mine.seen - mine.index.numel()
        message = layout.pack(mine, out=comm.buffer(layout.nbytes, torch.uint8, unsent.device))
        gathered = yield comm.all_gather(message)  # [P, bytes]

        owners = [(p - group.step) % size for p in range(size)]  # of each partition
        picks = [layout.unpack(gathered[owner]) for owner in owners]
        index = torch.cat([part.index + start for part, start in zip(picks, edges, strict=False)])  # [m], rising
        total = yield from sum_at(index, unsent, size * capacity, comm)
        self._adapt(group, held, picks, capacity, edges)
        return Sparse(index, total)

    def carry(self, parts: Sequence[tuple[Group, int]]) -> dict[str, Tensor]:
        """The threshold."""
        return carry_thresholds(parts, "held")

    def _threshold(self, group: Group, comm: Comm) -> Generator[Pending, Tensor, Held]:
        """The threshold all ranks share; where there is none, the mean of the ranks' estimates."""
        if "held" in group.memory:
            return Held.of(group.memory["held"])
        estimate = group.unsent.new_tensor([estimate_threshold(group.unsent, group.target)])
        total = yield comm.all_reduce(estimate)
        return Held(float(total) / comm.size)

    def _adapt(self, group: Group, held: Held, picks: Sequence[Picks], capacity: int, edges: list[int]) -> None:
        """Threshold and edges of the next step, from what all ranks know."""
        k, size = group.target, len(picks)
        seen = [part.seen for part in picks]
        picked = sum(part.index.numel() for part in picks)
        if held.lost(size * min(seen), sum(part.near for part in picks), k):
            group.memory.pop("held", None)
        else:
            roomy = [part for part in picks if part.seen <= capacity] or picks
            group.memory["held"] = held.after(picked, k, sum(p.seen for p in roomy), sum(p.near for p in roomy)).state()
        if self.balance:
            group.memory["edges"] = torch.tensor(partition.balanced(edges, seen))
