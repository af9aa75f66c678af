"""What the ranks hand to the first of them, between two steps: for a checkpoint, which only that rank writes."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Collector:
    """Collects tensors of all ranks on the first one; every rank calls the same methods in the same order.

    Args:
        size: the number of ranks, or of nodes, each of which its leader speaks for.
        ranks: of this process group; None is the default one.
    """

    size: int
    ranks: dist.ProcessGroup | None

    def rows(self, x: Tensor) -> Tensor:
        """Every rank's ``x`` [n] on the first rank, [P, n] on the CPU; [0, n] elsewhere."""
        x = x.contiguous()
        if self.size == 1:
            return x.clone().cpu().unsqueeze(0)
        rows = [torch.empty_like(x) for _ in range(self.size)] if dist.get_rank(self.ranks) == 0 else None
        if dist.get_rank(self.ranks) >= 0:  # else another rank of its node speaks for it
            dist.gather(x, rows, dst=0, group=self.ranks)
        return torch.stack([row.cpu() for row in rows]) if rows else x.new_empty((0, x.numel()), device="cpu")

    def mean(self, x: Tensor) -> Tensor:
        """The mean of ``x`` [n] over the ranks, [n] on the CPU; it means something on the first rank only."""
        total = x.clone()
        if self.size > 1 and dist.get_rank(self.ranks) >= 0:
            dist.reduce(total, dst=0, group=self.ranks)
        return total.div_(self.size).cpu()
