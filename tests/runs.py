"""Simulated ranks step by step, and made-up gradients that look like a network's."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.compressors.base import take_step
from lightning_sparse.compressors.group import Group
from lightning_sparse.network.simulated import SimNetwork
from lightning_sparse.selection.sparse import Sparse


def layered(
    n: int,
    size: int,
    steps: int,
    std: float = 1.0,
    jumps: Mapping[int, float] | None = None,
    layers: int = 12,
    seed: int = 0,
) -> Iterator[Tensor]:
    """``steps`` gradients [P, n]: layers and elements of different scales, and a mean.

    At the steps in ``jumps`` the scale of all is multiplied, for good.
    """
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randint(n, (layers - 1,), generator=generator).sort().values.tolist()
    scale = torch.cat(
        [
            torch.exp(1.2 * torch.randn(1, generator=generator)).expand(stop - start)
            for start, stop in zip([0, *cuts], [*cuts, n], strict=True)
        ]
    ) * torch.exp(0.5 * torch.randn(n, generator=generator))
    mean = 0.3 * torch.randn(n, generator=generator) * scale
    for step in range(steps):
        std *= (jumps or {}).get(step, 1.0)
        yield std * (torch.randn(size, n, generator=generator) * scale + mean)


class Run:
    """Ranks that take steps; remembers what each step did."""

    def __init__(self, compressor: ls.Compressor, size: int, n: int) -> None:
        self.compressor = compressor
        self.network = SimNetwork(size)
        self.groups = [Group(0, ("g",), (torch.zeros(n),)) for _ in range(size)]

    def step(self, gradients: torch.Tensor) -> Sparse:
        for group, gradient in zip(self.groups, gradients, strict=True):
            group.unsent += gradient
        pairs = zip(self.groups, self.network.comms, strict=True)
        total = self.network.run([take_step(self.compressor, group, comm) for group, comm in pairs])[0]
        assert isinstance(total, Sparse)
        assert (total.index.diff() > 0).all(), "an element was picked twice"
        return total
