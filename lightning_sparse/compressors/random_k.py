"""Random-K: a random part of the gradient, the same on every rank, so that no indices are sent."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.checks import check_density, check_seed
from lightning_sparse.compressors.base import Compressor
from lightning_sparse.compressors.group import Group
from lightning_sparse.network.comm import Comm, Rounds
from lightning_sparse.network.sums import sum_values
from lightning_sparse.selection.sparse import Sparse
from lightning_sparse.selection.threshold import count


@dataclass(frozen=True)
class RandomK(Compressor):
    """Every rank sends the same k = density * n randomly chosen elements.

    The choice comes from a random stream all ranks share, so only values are sent: one all-reduce of k values.  It is
    the random gradient pruning of Kainolda's thesis on Skip-Reduce (KAIST, 2023), and Random-k of Stich et al.,
    "Sparsified SGD with memory" (NeurIPS 2018).

    Args:
        density: fraction of elements sent each step, in (0, 1].
        seed: of the random choice; the same on every rank.
    """

    default_wire_dtype = "int4"

    density: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        check_density(self, self.density)
        check_seed(self, self.seed)

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        """Sum the chosen elements over all ranks; the others wait."""
        index = scattered(group.n, count(self.density, group.n), group.generator(self.seed))  # [k]
        group.target = index.numel()
        chosen = group.unsent.index_select(0, index)  # [k]
        total = yield from sum_values(chosen, comm)
        group.unsent.index_copy_(0, index, chosen)  # the rounding errors
        return Sparse(index, total)


def scattered(n: int, k: int, generator: torch.Generator) -> Tensor:
    """Draw k distinct indices below n in rising order, each element as likely as any other: [k].

    Stratified: [0, n) is cut into k runs of n // k or n // k + 1 elements and one is drawn from each, then the whole
    is turned by a random amount so that no element is favoured by the place of the cuts.
    """
    device = generator.device
    edges = torch.arange(k + 1, device=device) * n // k  # [k + 1]
    widths = edges.diff()
    offset = (torch.rand(k, generator=generator, device=device, dtype=torch.float64) * widths).long()
    turn = torch.randint(n, (1,), generator=generator, device=device)
    return ((edges[:-1] + offset + turn) % n).sort().values
