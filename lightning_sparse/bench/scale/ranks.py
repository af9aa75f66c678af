"""What communication among many ranks costs: bytes counted, seconds modelled, and a link fitted to measured ones."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_sparse.bench.compare.report import Summary
from lightning_sparse.compressors import COMPRESSORS, Dense
from lightning_sparse.compressors.base import take_step
from lightning_sparse.compressors.group import Group
from lightning_sparse.fusion.costs import Link
from lightning_sparse.network.costs import hops
from lightning_sparse.network.simulated import SimNetwork
from lightning_sparse.selection.streams import draw

STEPS = 3  # of which the last is counted: then thresholds and partitions are known
MOST_FLOATS = 375_000_000  # of all ranks' gradients together, 1.5 GB: beyond, gradients get shorter
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

    Of the n ``elements`` there are fewer where P n exceeds ``MOST_FLOATS``; P is 2 or more.
    """
    n = min(elements, MOST_FLOATS // ranks)
    compressor = COMPRESSORS[strategy]()
    if compressor.is_dense("gradient", elements):
        compressor = Dense()
    weights, scale = torch.zeros(n), scales(n)
    groups = [Group(0, ("gradient",), (weights,)) for _ in range(ranks)]
    for step in range(STEPS):
        for rank, group in enumerate(groups):
            add_gradient(group.unsent, scale, step, rank)
        network = SimNetwork(ranks)
        network.run([take_step(compressor, group, comm) for group, comm in zip(groups, network.comms, strict=True)])
    first = network.comms[0]
    return StepTraffic(strategy, ranks, n, first.sent_bytes, first.hops)


def scales(n: int) -> Tensor:
    """The scale of each element of a made-up gradient, [n]."""
    return _normal(n, 0).mul_(SPREAD).exp_()


def add_gradient(unsent: Tensor, scale: Tensor, step: int, rank: int) -> None:
    """Add the made-up gradient of a rank in a step to ``unsent`` [n]; ``scale`` [n] is of its elements."""
    unsent.addcmul_(scale, _normal(unsent.numel(), draw(step, rank)))


def _normal(n: int, seed: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Measurement:
    """Traffic and time of one strategy among some ranks, measured by the bench or modelled."""

    strategy: str  # name of its compressor, or "ddp"
    ranks: int  # P
    sent_bytes: float  # payload of a rank in a step
    seconds: float  # of communication in a step that nothing else explains


@dataclass(frozen=True)
class Fit:
    """A link that explains measured points."""

    link: Link  # latency of a hop, and seconds for each byte
    rms_s: float  # root of the mean square of (modelled - measured)
    points: int  # how many there were


def model_s(hops: int, sent_bytes: float, link: Link) -> float:
    """Return the seconds that messages take: a latency for every hop, and time for every byte."""
    return hops * link.latency_s + sent_bytes * link.s_per_byte


def fit(measured: Sequence[Measurement], counts: Iterable[StepTraffic]) -> Fit | None:
    """Find the link with the least sum of squared differences between modelled and measured seconds.

    Bytes are those measured; hops are those counted for the same compressor among as many ranks, and for "ddp" those of
    an all-reduce round a ring.  None if there are too few points to separate latency and rate.
    """
    from scipy.optimize import nnls  # an extra

    counted = {(each.strategy, each.ranks): each.hops for each in counts}
    counted |= {("ddp", m.ranks): hops("all_reduce", m.ranks) for m in measured}
    x = np.array([(counted[m.strategy, m.ranks], m.sent_bytes) for m in measured], dtype=np.float64).reshape(-1, 2)
    y = np.array([point.seconds for point in measured])  # [m]; x is [m, 2]
    unit = np.abs(x).max(axis=0, initial=0)  # hops and bytes are of very different size
    if not unit.all() or np.linalg.matrix_rank(x / unit, tol=1e-6) < 2:
        return None
    found = nnls(x / unit, y)[0] / unit
    missed = x @ found - y
    return Fit(Link(*map(float, found)), float(np.sqrt((missed**2).mean())), len(y))


def measured_points(rows: Iterable[Summary]) -> list[Measurement]:
    """Read traffic and time off the bench's rows; those with no step without communication beside them are left out.

    Differences that noise made negative are zero.
    """
    return [
        Measurement(
            row.strategy.partition(":")[0],
            row.ranks,
            row.counted_bytes,
            max(row.s.value - row.s_without_communication - (row.ms_compress or 0.0) / 1e3, 0.0),
        )
        for row in rows
        if row.s_without_communication is not None and row.counted_bytes > 0
    ]
