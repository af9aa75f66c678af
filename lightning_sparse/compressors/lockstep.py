"""One step of P ranks in one process, in lockstep: for trying a compressor, and for testing one without processes."""

from collections.abc import Callable, Sequence

from torch import Tensor

from lightning_sparse.compressors.base import Compressor, take_step
from lightning_sparse.compressors.group import Group
from lightning_sparse.network.comm import Rounds
from lightning_sparse.network.simulated import SimNetwork, same_bits
from lightning_sparse.selection.sparse import Sparse, dense


def take_steps(
    compressor: Compressor,
    groups: Sequence[Group],
    network: SimNetwork,
    around_first: Callable[[Rounds], Rounds] = lambda rounds: rounds,
) -> Tensor | Sparse:
    """Sum what the ranks send in one step of one group, [P], message by message; returns the total [n] of all ranks.

    Before it ``unsent`` of each rank's group holds what the rank has not sent; after it what it keeps.
    ``around_first`` wraps what rank 0 does, to time it.  Totals are compared where the network ``checks``.

    Raises:
        AssertionError: if the ranks launch different messages, or end with different totals.
    """
    own, *others = (take_step(compressor, group, comm) for group, comm in zip(groups, network.comms, strict=True))
    totals = network.run([around_first(own), *others])
    if network.checks:
        first, *rest = (dense(total, groups[0].n) for total in totals)
        for rank, other in enumerate(rest, start=1):
            assert same_bits(other, first), f"the totals differ: rank {rank}'s is not rank 0's, bit for bit"
    return totals[0]
