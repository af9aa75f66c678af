"""What ranks send each other in a step, counted by running their compressors in one process."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.compressors import COMPRESSORS, Dense
from lightning_sparse.compressors.base import take_step
from lightning_sparse.compressors.group import Group
from lightning_sparse.network.simulated import SimNetwork
from lightning_sparse.selection.streams import draw

STEPS = 3  # of which the last is counted: then thresholds and partitions are known
SPREAD = 3.0  # deviation of the logarithm of the elements' scales: of the large, most are large in every step


@dataclass(frozen=True)
class StepTraffic:
    """Messages of each rank in one step of one strategy, for one group of gradients."""

    strategy: str  # its name
    ranks: int  # P
    elements: int  # n, of the gradient
    sent_bytes: int  # payload of a rank; all send as much, since sizes of messages do not depend on data
    hops: int  # from rank to rank that follow one another


def count_traffic(strategy: str, ranks: int, elements: int) -> StepTraffic:
    """Run a compressor on all ranks for ``STEPS`` steps, and count what the last one sends.

    Nothing is estimated anew in that step (Ok-Topk does in every 32nd).  The gradients are made up: normally
    distributed, each element with a scale of its own that all ranks share.

    Args:
        strategy: name of the compressor.
        ranks: P, 2 or more.
        elements: n, of the gradient.
    """
    compressor = COMPRESSORS[strategy]()
    if compressor.is_dense("gradient", elements):
        compressor = Dense()
    weights, scale = torch.zeros(elements), scales(elements)
    groups = [Group(0, ("gradient",), (weights,)) for _ in range(ranks)]
    for step in range(STEPS):
        for rank, group in enumerate(groups):
            add_gradient(group.unsent, scale, step, rank)
        network = SimNetwork(ranks)
        network.run([take_step(compressor, group, comm) for group, comm in zip(groups, network.comms, strict=True)])
    first = network.comms[0]
    return StepTraffic(strategy, ranks, elements, first.sent_bytes, first.hops)


def scales(n: int) -> Tensor:
    """The scale of each element of a made-up gradient, [n]."""
    return _normal(n, 0).mul_(SPREAD).exp_()


def add_gradient(unsent: Tensor, scale: Tensor, step: int, rank: int) -> None:
    """Add the made-up gradient of a rank in a step to ``unsent`` [n]; ``scale`` [n] is of its elements."""
    unsent.addcmul_(scale, _normal(unsent.numel(), draw(step, rank)))


def _normal(n: int, seed: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))
