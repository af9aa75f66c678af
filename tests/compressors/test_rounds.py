"""How many messages of a step wait for each other: on a slow link each costs its latency."""

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.compressors.base import take_step
from lightning_sparse.compressors.group import Group
from lightning_sparse.network.comm import Pending
from lightning_sparse.network.simulated import SimNetwork, _Part
from lightning_sparse.wire import wire_format
from tests.runs import layered


class Counting(SimNetwork):
    """Counts, for each rank, the longest row of messages each launched after the one before had arrived."""

    def start(self) -> None:
        self.longest = [0] * self.size
        self.depth: dict[tuple[int, int], int] = {}  # by rank and number of the message

    def add(self, part: _Part) -> Pending:
        self.depth[part.rank, part.number] = self.longest[part.rank] + 1
        return super().add(part)

    def deliver(self, part: _Part) -> Tensor:
        self.longest[part.rank] = max(self.longest[part.rank], self.depth[part.rank, part.number])
        return super().deliver(part)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("compressor", "float32", "rounded"),
    [
        (ls.Dense(), 1, 2),
        (ls.RandomK(), 1, 2),
        (ls.TopK(), 1, 1),
        (ls.MiCRO(), 2, 3),
        (ls.ImportancePruning(), 2, 3),
        (ls.ImportancePruning(givers=2), 2, 3),
        (ls.SketchFusion(), 2, 4),
        (ls.SketchFusion(exact=False), 1, 2),
        (ls.OkTopk(), 2, 2),
    ],
    ids=repr,
)
def test_messages_in_a_row(compressor: ls.Compressor, float32: int, rounded: int, size: int) -> None:
    """In most steps: thresholds are evaluated in a message more."""
    for wire_dtype, expected in (("float32", float32), ("int4", rounded)):
        network, rows = Counting(size, wire_format(wire_dtype)), []
        groups = [Group(0, ("g",), (torch.ones(5000),)) for _ in range(size)]
        for gradients in layered(5000, size, 24):
            network.start()
            for group, gradient in zip(groups, gradients, strict=True):
                compressor.accumulate(group, [gradient], size)
            network.run([take_step(compressor, g, c) for g, c in zip(groups, network.comms, strict=True)])
            assert len(set(network.longest)) == 1
            rows.append(network.longest[0])
        assert min(rows) == sorted(rows)[len(rows) // 2] == expected
        assert max(rows) <= expected + 1
