"""How many hops of a step wait for each other: on a slow link each costs its latency."""

from itertools import pairwise

import pytest

import lightning_sparse as ls
from lightning_sparse.network.simulated import SimNetwork
from lightning_sparse.wire import wire_format
from tests.support.simulated import SimulatedRanks, layered


@pytest.mark.parametrize(
    ("compressor", "far", "near"),
    [
        (ls.Dense(), 1, 2),
        (ls.SkipReduce(), 2, 2),
        (ls.RandomK(), 1, 2),
        (ls.TopK(), 1, 1),
        (ls.MiCRO(), 2, 3),
        (ls.ImportancePruning(), 3, 4),  # a broadcast among four takes two
        (ls.ImportancePruning(givers=2), 3, 4),
        (ls.SketchFusion(), 2, 4),
        (ls.SketchFusion(exact=False), 1, 2),
        (ls.OkTopk(), 2, 2),
        (ls.LowRank(), 2, 4),
    ],
    ids=repr,
)
def test_hops_in_a_row(compressor: ls.Compressor, far: int, near: int) -> None:
    """In most steps: thresholds are evaluated in one more.  With high latency sums take one hop, without it two."""
    size = 4
    for hop_bytes, expected in ((10**9, far), (1, near)):
        network, hops = SimNetwork(size, wire_format("int4"), hop_bytes), [0]
        ranks = SimulatedRanks(compressor, size, (50, 100), network=network)
        for gradients in layered(5000, size, 16):
            ranks.step(gradients)
            assert len({comm.hops for comm in network.comms}) == 1
            hops.append(network.comms[0].hops)
        each = sorted(after - before for before, after in pairwise(hops))
        assert each[0] == each[len(each) // 2] == expected
        assert each[-1] <= expected + 2 * (size - 1)
