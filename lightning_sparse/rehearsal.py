"""What averaging a group costs here: measured between two steps, with the compressor and over the network in use."""

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_sparse.comm import Comm, Sums
from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.base import take_step
from lightning_sparse.exchange import Exchange
from lightning_sparse.group import Group
from lightning_sparse.lane import Lane
from lightning_sparse.plan import Array, Cost

SIZES = (2**8, 2**13, 2**17, 2**20, 2**22)  # elements of the groups that are tried
RUNS = 3  # of each, after one that is not timed: then thresholds are known
LONG_S = 0.3  # what takes longer is the last to be tried; for larger ones the line goes on


def rehearse(exchange: Exchange, compressor: Compressor, largest: int) -> Cost | None:
    """Measure groups of several sizes, up to ``largest`` elements; None if no rank could tell the time.

    Made-up gradients, normally distributed, are averaged as real ones are; nothing of it touches the training.  To be
    called between two steps, on every rank; returns the same on each, the median of what the ranks measured.
    """
    sizes = sorted({min(size, largest) for size in SIZES})
    measured: list[list[float]] = []  # busy, spacing, latency
    known = []
    for n in sizes:
        typical = median_over_ranks(exchange, _try(exchange, compressor, n))
        if not np.isfinite(typical).all():
            continue
        busy, spacing, latency = typical
        measured.append([busy, spacing, max(busy, latency)])
        known.append(n)
        if latency > LONG_S:
            break
    if not known:
        return None
    busy_s, spacing_s, latency_s = (tuple(column) for column in zip(*measured, strict=True))
    return Cost(tuple(known), busy_s, spacing_s, latency_s)


def median_over_ranks(exchange: Exchange, seconds: Sequence[float]) -> Array:
    """The median over the ranks of each of ``seconds`` [m], the same on every rank.

    What cannot be a duration (zero, negative, infinite, NaN) does not count; NaN where no rank has any other.
    """
    own = torch.tensor(seconds, dtype=torch.float64, device=exchange.device)

    def gather(comm: Comm) -> Sums:
        rows = yield comm.all_gather(own)
        return rows

    rows = exchange.on_lanes(lambda lane: lane.run(gather(lane.comm)), lanes=1)[0]
    assert isinstance(rows, Tensor)
    every = rows.cpu().numpy()  # [P, m]
    columns = [column[np.isfinite(column) & (column > 0)] for column in every.T]
    return np.array([np.median(column) if len(column) else np.nan for column in columns])


def _try(exchange: Exchange, compressor: Compressor, n: int) -> tuple[float, float, float]:
    """Busy, spacing and latency of groups of ``n`` elements on this rank, in seconds."""
    device = exchange.device
    gradient = torch.randn(n, generator=torch.Generator().manual_seed(exchange.rank)).to(device)
    weights = torch.randn(n, generator=torch.Generator().manual_seed(0)).to(device)
    groups = {lane: Group(0, ("rehearsal",), (weights,)) for lane in exchange.on_lanes(lambda lane: lane)}

    def average(lane: Lane, runs: int) -> tuple[list[float], list[float]]:
        """Seconds of each run, and of those the processor's."""
        total_s, busy_s = [], []
        for _ in range(runs):
            start, waited_ns = time.perf_counter(), lane.network_ns
            group = groups[lane]
            group.unsent.copy_(gradient)
            total = lane.run(take_step(compressor, group, lane.comm))
            group.hand_back(total, [gradient.clone()], exchange.size)
            if device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            total_s.append(time.perf_counter() - start)
            busy_s.append(total_s[-1] - (lane.network_ns - waited_ns) / 1e9)
        return total_s, busy_s

    exchange.on_lanes(lambda lane: average(lane, 1))
    alone_s, busy_s = exchange.on_lanes(lambda lane: average(lane, RUNS), lanes=1)[0]
    start = time.perf_counter()
    together = exchange.on_lanes(lambda lane: average(lane, RUNS))
    spacing_s = (time.perf_counter() - start) / (RUNS * len(together))
    return float(np.median(busy_s)), spacing_s, float(np.median(alone_s))
