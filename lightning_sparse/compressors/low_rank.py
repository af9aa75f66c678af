"""Low-rank approximation of every matrix by one step of power iteration: PowerSGD."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from lightning_sparse.checks import check_seed, check_setting, is_whole
from lightning_sparse.compressors.base import Compressor
from lightning_sparse.compressors.group import Group
from lightning_sparse.kernels.blocks import TINY
from lightning_sparse.network.comm import Comm, Rounds
from lightning_sparse.network.sums import sum_values
from lightning_sparse.wire import BLOCK
from lightning_sparse.wire.values import Blocks


@dataclass(frozen=True)
class LowRank(Compressor):
    """Sums a rank-r approximation of each matrix: two thin factors travel in its place.

    Vogels, Karimireddy and Jaggi, "PowerSGD" (NeurIPS 2019), algorithm 1.  The gradient of a parameter of shape
    [a, b, ...] is a matrix M [a, b * ...].  Each step sums M Q over the ranks, makes its columns orthonormal, P, and
    sums M^T P, the new Q, with which the next step starts.  The total is P Q^T.  Vectors, and matrices that are no
    larger than their factors, are summed densely.

    The columns of Q are divided by their norms before they are used, which changes no P: M Q would else grow as the
    square of the gradient.  Where values share a scale in blocks, none holds both factors and vectors, since the
    smaller would be lost in it.  A rank takes P times what it sent of its own M^T P out of M, not the mean: the sum is
    the same, but what the others do not have would pile up, and the rounding errors of its factors with it.

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
        summed = yield from _sum_all([(m @ q).T for m, q in zip(matrices, right, strict=True)], vectors, comm)
        for slot, values in zip(sums, summed[len(matrices) :], strict=True):
            slot.copy_(values)
        if matrices:
            left = [torch.linalg.qr(_scaled(factor.T)).Q for factor in summed[: len(matrices)]]
            right = yield from _project(matrices, left, approximations, comm)
            group.memory = dict(zip(self._names(group), right, strict=True))
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
        """Q of each of ``matrices``, [columns, r] of norm one: of the step before, or random where that has none."""
        generator = group.generator(self.seed)
        drawn = [
            torch.randn(m.shape[1], self.rank, generator=generator, dtype=torch.float32, device=m.device)
            for m in matrices
        ]
        return [_unit(group.memory.get(name, q), q) for name, q in zip(self._names(group), drawn, strict=True)]


def _project(
    matrices: Sequence[Tensor], left: Sequence[Tensor], products: Sequence[Tensor], comm: Comm
) -> Rounds[list[Tensor]]:
    """Move what ``matrices`` hold in the columns of ``left``, P, into ``products``, summed; returns Q of each."""
    own = [(m.T @ p).T for m, p in zip(matrices, left, strict=True)]
    kept = [factor.clone() for factor in own]
    right = yield from _sum_all(kept, [], comm)
    for matrix, product, p, q, mine, rest in zip(matrices, products, left, right, own, kept, strict=True):
        thrice = p.repeat(1, 3)
        torch.mm(thrice, _pieces(q), out=product)
        matrix.addmm_(thrice, _pieces(mine - rest), alpha=-1)
        matrix.nan_to_num_(0.0, 0.0, 0.0)  # what is not finite is in the product, in all of it
    return [q.T.nan_to_num(0.0, 0.0, 0.0).contiguous() for q in right]


def _pieces(factor: Tensor) -> Tensor:
    """Three of 8 bits, [3 r, n], whose sum is ``factor`` [r, n]: exact also where products are rounded to TF32.

    What the ranks take out is then what they add to the total, to the rounding of float32.
    """
    high = factor.bfloat16().float()
    middle = (factor - high).bfloat16().float()
    return torch.cat([high, middle, factor - high - middle])


def _scaled(columns: Tensor) -> Tensor:
    """``columns`` [n, r] over their largest magnitudes: their squares are then finite.  Zeros stay."""
    return columns / columns.abs().amax(0).clamp(min=TINY)


def _unit(columns: Tensor, instead: Tensor) -> Tensor:
    """``columns`` [n, r] over their norms; of those that are zero, the ones of ``instead``."""
    scaled = _scaled(columns)
    return normalize(torch.where(scaled.any(0), scaled, instead), dim=0)


def _sum_all(factors: Sequence[Tensor], vectors: Sequence[Tensor], comm: Comm) -> Rounds[list[Tensor]]:
    """The sums over all ranks of ``factors`` and ``vectors``, in one message; rounding errors stay in them."""
    parts = [*factors, *vectors]
    flat = torch.cat([part.reshape(-1) for part in parts])
    total = yield from _sum_apart(flat, sum(factor.numel() for factor in factors), comm)
    sizes = [part.numel() for part in parts]
    for part, kept in zip(parts, flat.split(sizes), strict=True):
        part.copy_(kept.view(part.shape))
    return [summed.view(part.shape) for summed, part in zip(total.split(sizes), parts, strict=True)]


def _sum_apart(flat: Tensor, count: int, comm: Comm) -> Rounds[Tensor]:
    """The sum over all ranks of ``flat`` [n]; no block holds any of the first ``count`` values and any other.

    Between them lie copies, which change no block's mean magnitude, and of which there are always as many.
    """
    first, others = flat[:count], flat[count:]
    if not isinstance(comm.wire_dtype, Blocks) or not first.numel() or not others.numel():
        return (yield from sum_values(flat, comm))
    room = flat.numel() + BLOCK - 1
    start = _next_block(count, room, comm)
    apart = torch.cat([_extended(first, start), _extended(others, room - start)])
    end = start + others.numel()
    total = yield from sum_values(apart, comm)
    first.copy_(apart[:count])
    others.copy_(apart[start:end])
    return torch.cat([total[:count], total[start:end]])


def _next_block(position: int, n: int, comm: Comm) -> int:
    """Where a block begins, at ``position`` or less than ``BLOCK`` after it, when n values are summed."""
    way = comm.costs.way_of(comm.wire_dtype.nbytes(n), lossless=False)
    width = -(-n // comm.size) if way == "two_hops" else n  # of a slice, with which blocks begin anew
    within = position % width
    return position + min(-within % BLOCK, width - within)


def _extended(values: Tensor, length: int) -> Tensor:
    """``values`` [n], and after them the first of them over and over, [length]."""
    more = torch.arange(length - values.numel(), device=values.device)
    return torch.cat([values, values[more % values.numel()]])
