"""One step of P ranks in one process, in lockstep: for trying a compressor, and for testing one without processes."""

from collections.abc import Sequence

from torch import Tensor

from lightning_sparse.compressors.base import Compressor, take_step
from lightning_sparse.compressors.group import Group
from lightning_sparse.network.simulated import SimNetwork, same_bits
from lightning_sparse.selection.sparse import Sparse, dense


def take_steps(compressor: Compressor, groups: Sequence[Group], network: SimNetwork) -> Tensor | Sparse:
    """Sum what the ranks send in one step of one group, [P], message by message; returns the total [n] of all ranks.

    Before it ``unsent`` of each rank's group holds what the rank has not sent; after it what it keeps.

    Raises:
        AssertionError: if the ranks launch different messages, or end with different totals.
    """
    totals = network.run([take_step(compressor, g, c) for g, c in zip(groups, network.comms, strict=True)])
    first, *others = (dense(total, groups[0].n) for total in totals)
    for rank, other in enumerate(others, start=1):
        assert same_bits(other, first), f"the totals differ: rank {rank}'s is not rank 0's, bit for bit"
    return totals[0]
