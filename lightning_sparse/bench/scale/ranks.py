"""Count what a compressor sends among many ranks: all of them run in this process, over a simulated network."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lightning_sparse.compressors import Compressor, Dense, by_name
from lightning_sparse.compressors.base import take_step
from lightning_sparse.compressors.group import Group
from lightning_sparse.network.simulated import SimNetwork
from lightning_sparse.selection.streams import draw

STEPS = 4  # of which the last is counted: then thresholds and partitions are known
FEW_RANKS = 32  # up to so many, every rank takes all steps; more go on where half as many ended, and take one
MOST_FLOATS = 375_000_000  # of all ranks' gradients together, 1.5 GB: beyond, gradients get shorter
SPREAD = 3.0  # deviation of the logarithm of the elements' scales: of the large, most are large in every step


@dataclass(frozen=True)
class StepTraffic:
    """What each rank puts on the wire in one step of one strategy, for one group of gradients."""

    strategy: str  # its name
    ranks: int  # P
    elements: int  # n, of the gradient
    sent_bytes: int  # payload of a rank; all send as much, since sizes of messages do not depend on data
    messages: int  # of a rank
    hops: int  # from rank to rank, one after the other, that these messages need


def count_traffic(compressor: str | Compressor, sizes: Sequence[int], elements: int) -> Iterator[StepTraffic]:
    """Run ``compressor`` on all ranks, for each number of ranks, and count what a step sends.

    It is a step in which nothing is estimated anew (Ok-Topk does in every 32nd).  The gradients are made up: normally
    distributed, each element with a scale of its own that all ranks share.  Up to ``FEW_RANKS`` ranks take ``STEPS``
    steps, of which the last counts.  More than those take one step; what they have not sent and know at its start
    (thresholds, edges of partitions) is what half as many ranks did.

    Args:
        compressor: an instance, or a name in ``COMPRESSORS``.
        sizes: numbers of ranks, each twice the one before.
        elements: n, of the gradient; fewer where P n exceeds ``MOST_FLOATS``.

    Raises:
        ValueError: for an unknown name, or numbers out of range.
        AssertionError: if the ranks launch different messages.
    """
    made = by_name(compressor)
    if elements < 1:
        raise ValueError(f"elements must be at least 1; got {elements!r}")
    if not sizes or sizes[0] < 2 or any(b != 2 * a for a, b in pairwise(sizes)):
        raise ValueError(f"sizes must be numbers of ranks from 2 on, each twice the one before; got {list(sizes)!r}")
    at_work = Dense() if made.sends_whole("gradient", elements) else made
    scale, weights = scales(elements), torch.zeros(elements)
    half: list[Group] = []
    for size in sizes:
        n = min(elements, MOST_FLOATS // size)
        groups = [Group(0, ("gradient",), (weights[:n],)) for _ in range(size)]
        if half and size > FEW_RANKS:
            _go_on(groups, half)
        for step in range(groups[0].step, max(groups[0].step + 1, STEPS)):
            for rank, group in enumerate(groups):
                add_gradient(group.unsent, scale, step, rank)
            network = SimNetwork(size)
            network.run([take_step(at_work, g, c) for g, c in zip(groups, network.comms, strict=True)])
        first = network.comms[0]
        name = compressor if isinstance(compressor, str) else repr(compressor)
        yield StepTraffic(name, size, n, first.sent_bytes, first.messages, first.hops)
        half = groups


def _go_on(groups: Sequence[Group], half: Sequence[Group]) -> None:
    """Let ``groups`` begin with what each of ``half`` as many has not sent, on two ranks, and with what it remembers.

    The second of two ranks gets it with a random sign: then sums over ranks grow as slowly as those of independent
    gradients.  Of memory with an entry for each edge between ranks' parts, every part is halved; with an entry for
    each rank, it is left out.
    """
    n, before = groups[0].n, half[0].n
    memory = {}
    for key, kept in half[0].memory.items():
        if kept.shape == (len(half) + 1,) and int(kept[-1]) == before:
            middles = (kept[:-1] + kept[1:]) // 2
            kept = torch.cat([torch.stack([kept[:-1], middles], dim=1).flatten(), kept[-1:]]) * n // before
        if kept.shape[:1] != (len(half),):
            memory[key] = kept
    for rank, group in enumerate(groups):
        second, original = divmod(rank, len(half))
        group.unsent.copy_(half[original].unsent[:n])
        if second and draw(rank) % 2:
            group.unsent.neg_()
        group.memory = {key: kept.clone() for key, kept in memory.items()}
        group.step = half[0].step


def add_gradient(unsent: Tensor, scale: Tensor, step: int, rank: int) -> None:
    """Add the made-up gradient of a rank in a step to ``unsent`` [n]; ``scale`` [n or more] is of its elements."""
    unsent.addcmul_(scale[: unsent.numel()], _normal(unsent.numel(), draw(step, rank)))


def scales(elements: int) -> Tensor:
    """The scale of each element of a made-up gradient, [elements]."""
    return _normal(elements, 0).mul_(SPREAD).exp_()


def _normal(n: int, seed: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))
