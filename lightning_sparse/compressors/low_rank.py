"""Low-rank approximation of every matrix by one step of power iteration: PowerSGD."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.checks import check_seed, check_setting, is_whole
from lightning_sparse.compressors.base import Compressor
from lightning_sparse.compressors.group import Group
from lightning_sparse.network.comm import Comm, Rounds
from lightning_sparse.network.sums import sum_values


@dataclass(frozen=True)
class LowRank(Compressor):
    """Sums a rank-r approximation of each matrix: two thin factors travel in its place.

    Vogels, Karimireddy and Jaggi, "PowerSGD" (NeurIPS 2019), algorithm 1.  The gradient of a parameter of shape
    [a, b, ...] is a matrix M [a, b * ...].  Each step sums M Q over the ranks, makes its columns orthonormal, P, and
    sums M^T P, the new Q, with which the next step starts.  The total is P Q^T; each rank keeps its gradient less the
    mean.  Vectors, and matrices that are no larger than their factors, are summed densely.

    Factors are rounded on the wire like any values.  All ranks must compute the same bits from the same factors: use
    processors of one kind.

    Args:
        rank: r, columns of the factors, at least 1.
        seed: of the first Q; the same on every rank.
    """

    rank: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        check_setting(self, "rank", is_whole(self.rank, least=1), "an integer, at least 1")
        check_seed(self, self.seed)

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        """Sum the left factors and all that is dense, then the right factors."""
        matrices, vectors = self._parts(group, group.unsent)
        total = torch.empty_like(group.unsent)
        approximations, sums = self._parts(group, total)
        right = self._right_factors(group, matrices)
        summed = yield from _sum_all([m @ q for m, q in zip(matrices, right, strict=True)], vectors, comm)
        for slot, values in zip(sums, summed[len(matrices) :], strict=True):
            slot.copy_(values)
        if not matrices:
            return total
        left = [torch.linalg.qr(factor).Q for factor in summed[: len(matrices)]]
        right = yield from _sum_all([m.T @ p for m, p in zip(matrices, left, strict=True)], [], comm)
        for matrix, product, p, q in zip(matrices, approximations, left, right, strict=True):
            torch.mm(p, q.T, out=product)
            matrix.sub_(product, alpha=1 / comm.size)
        group.memory = dict(zip(self._names(group), (q / comm.size for q in right), strict=True))
        return total

    def carry(self, parts: Sequence[tuple[Group, int]]) -> dict[str, Tensor]:
        """The right factors of every matrix."""
        return {key: factor for group, _ in parts for key, factor in group.memory.items()}

    def _is_matrix(self, shape: torch.Size) -> bool:
        """Whether factors of r columns are smaller than a parameter of this shape."""
        rows, columns = shape[0] if shape else 0, shape[1:].numel()
        return len(shape) > 1 and self.rank * (rows + columns) < rows * columns

    def _names(self, group: Group) -> list[str]:
        return [name for name, shape in zip(group.names, group.shapes, strict=True) if self._is_matrix(shape)]

    def _parts(self, group: Group, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Views of ``flat`` [n]: the matrices, [rows, columns] each, and all others, [m] each."""
        slots = list(zip(group.slots(flat), group.shapes, strict=True))
        matrices = [slot.view(shape[0], -1) for slot, shape in slots if self._is_matrix(shape)]
        return matrices, [slot for slot, shape in slots if not self._is_matrix(shape)]

    def _right_factors(self, group: Group, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Q of each of ``matrices``, [columns, r]: of the step before, or random."""
        generator = group.generator(self.seed)
        return [
            group.memory[name]
            if name in group.memory
            else torch.randn(matrix.shape[1], self.rank, generator=generator, device=matrix.device)
            for name, matrix in zip(self._names(group), matrices, strict=True)
        ]


def _sum_all(factors: Sequence[Tensor], vectors: Sequence[Tensor], comm: Comm) -> Rounds[list[Tensor]]:
    """The sums over all ranks of ``factors`` and ``vectors``, in one message; vectors keep their rounding errors."""
    parts = [*factors, *vectors]
    flat = torch.cat([part.reshape(-1) for part in parts])
    total = yield from sum_values(flat, comm)
    sizes = [part.numel() for part in parts]
    for vector, kept in zip(vectors, flat.split(sizes)[len(factors) :], strict=True):
        vector.copy_(kept)
    return [part.view(like.shape) for part, like in zip(total.split(sizes), parts, strict=True)]
