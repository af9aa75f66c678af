"""Sketch-Fusion: add up count-sketches, read off where the sum is large, and fetch the exact values there."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_sparse import selection
from lightning_sparse.checks import check_density, check_seed, check_setting, check_switch, is_number, is_whole
from lightning_sparse.compressors.base import Compressor
from lightning_sparse.compressors.group import Group
from lightning_sparse.network.comm import Comm, Rounds
from lightning_sparse.network.sums import sum_selected, sum_values
from lightning_sparse.selection.sketch import CountSketch, coder
from lightning_sparse.selection.sparse import Sparse
from lightning_sparse.selection.threshold import count
from lightning_sparse.wire import INDEX_LIMIT

FEWEST_COLUMNS = 16
MOST_ROWS = 99  # beyond, a table is no sketch


@dataclass(frozen=True)
class SketchFusion(Compressor):
    """Ranks sum sketches of their gradients, find the large elements of the sum in it, and sum those exactly.

    Sketch-Fusion SGD (Dai et al., JPDC 2024), after gs-SGD and Sketched-SGD (Ivkin et al., NeurIPS 2019).  No indices
    are sent: all ranks read the same elements off the same table.  Two sums: the table, ``rows`` x ``columns`` values,
    and the exact values of k = density * n candidates.

    Of the Sketch-Fusion paper only the abstract could be had.  That sketches are fused over layers and summed, and
    error fed back, is the paper's; table size, hashes (:mod:`lightning_sparse.selection.sketch`) and the rule that all
    candidates are delivered, not the best quarter of them as in Sketched-SGD's code, are ours.

    Args:
        density: fraction of elements updated in a step, in (0, 1].
        rows: of the table, odd.  More rows make wild estimates rarer.
        width: columns of the table, as a multiple of k.  With 5 rows and width 4 the table is twenty times the values.
            Narrower sends less but finds less of what is large, until what is unsent grows without end: on digits,
            1 % and width 1 diverged.
        momentum: choose candidates from a running sum of tables, T = momentum * T + table, in [0, 1).
        exact: fetch exact values in a second round.  False delivers the estimates, which saves a twenty-first of the
            bytes and loses the difference between estimate and sum: with c columns about ||sum|| / sqrt(c) an element,
            up to twice that where an error made it a candidate.
        seed: of the hashes; the same on every rank.
    """

    default_wire_dtype = "int4"

    density: float = 0.05
    rows: int = 5
    width: float = 4.0
    momentum: float = 0.0
    exact: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_density(self, self.density)
        odd = is_whole(self.rows, least=1) and self.rows % 2 == 1 and self.rows <= MOST_ROWS
        wide = is_number(self.width) and 0 < self.width <= INDEX_LIMIT
        fading = is_number(self.momentum) and 0 <= self.momentum < 1
        check_setting(self, "rows", odd, f"an odd number, as the median needs, at most {MOST_ROWS}; 5 is usual")
        check_setting(self, "width", wide, "a number above 0, at most 2**31: columns of the table over k; 4 is usual")
        check_setting(self, "momentum", fading, "a number of at least 0 and below 1; 0 is none")
        check_switch(self, "exact")
        check_seed(self, self.seed)

    def sketch(self, group: Group) -> CountSketch:
        """The hashes of this step: others in each, so that no two elements meet for ever; one for all with momentum."""
        columns = min(group.n, max(FEWEST_COLUMNS, round(self.width * count(self.density, group.n))))
        return CountSketch(self.rows, columns, self.seed if self.momentum else group.draw(self.seed))

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        """Sum sketches, find candidates, sum those."""
        n, unsent, on = group.n, group.unsent, selection.on(group.unsent)
        k = group.target = count(self.density, n)
        sketch = self.sketch(group)
        hashed = coder(sketch, unsent)
        own = comm.buffer("table", sketch.rows * sketch.columns, torch.float32, unsent.device)
        hashed.encode(unsent, out=own.view(sketch.rows, sketch.columns))
        # Rounding errors are not carried over to the next step: only candidates come of the table.
        table = yield from sum_values(own, comm)
        table = self._remembered(group, table.view(sketch.rows, sketch.columns))
        estimates = hashed.estimate(table, out=comm.buffer("estimates", n, torch.float32, unsent.device))

        found = on.select_k(estimates, k)
        group.picked, broken = found.count, (0 * found.values).sum()  # NaN if an estimate is not finite
        if self.exact:
            total = yield from sum_selected(found, unsent, k, comm)
        else:
            on.put(replace(found, values=torch.zeros_like(found.values)), unsent)
            total = on.total(found, n)
        if isinstance(total, Sparse) and not broken.isnan():
            return total
        for x in (unsent, *group.memory.values()):
            x.nan_to_num_(0.0, 0.0, 0.0)  # none is left of what is not finite: it arrives as NaN, in all of the group
        return torch.full_like(unsent, torch.nan) if isinstance(total, Sparse) else total + broken

    def _remembered(self, group: Group, table: Tensor) -> Tensor:
        if not self.momentum:
            return table
        before = group.memory.get("table")
        group.memory["table"] = table.clone() if before is None else before.mul_(self.momentum).add_(table)
        return group.memory["table"]
