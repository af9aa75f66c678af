"""Measures between two steps how long averaging a group takes with a compressor."""

import math
import time
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.base import take_step
from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.exchange import Exchange
from lightning_sparse.engine.lane import Lane
from lightning_sparse.engine.link import RUNS, SLOW_S, NoClock, median_over_ranks, time_s
from lightning_sparse.fusion.model import Cost
from lightning_sparse.network.costs import Link as Link
from lightning_sparse.network.costs import traffic

SIZES = (2**8, 2**16, 2**20, 2**22)  # Elements of the groups that are tried.
LONG_S = 0.1  # Seconds: the largest groups, if they would take longer, follow from the link and the processor.
POOL = 1_000_003  # Elements after which made-up gradients repeat.


class SizeCost(NamedTuple):
    """The cost of groups of one size, as in :class:`Cost`, and the bytes a rank sends for one."""

    elements: int
    busy_s: float
    spacing_s: float
    latency_s: float
    sent_bytes: int


def measure_cost(exchange: Exchange, compressor: Compressor, largest: int, link: Link) -> Cost:
    """Measure groups of several sizes, up to ``largest`` elements; the medians over the ranks.

    Made-up gradients, normally distributed, are averaged as real ones are, a first time without being timed: then
    thresholds are known.  Nothing of it touches the training.  To be called between two steps, on every rank.

    Raises:
        NoClock: if no rank could tell the time.
    """
    samples: list[SizeCost] = []
    for n in sorted({min(size, largest) for size in SIZES}):
        if samples and samples[-1].latency_s * n / samples[-1].elements > LONG_S and n > SIZES[2]:
            break
        slow = link.latency_s + traffic("all_reduce", 4 * n, exchange.size) * link.s_per_byte > SLOW_S
        *seconds, sent = _time_group(exchange, compressor, n, 1 if slow else RUNS)
        busy, spacing, latency = median_over_ranks(exchange, seconds).tolist()
        if math.isfinite(busy + spacing + latency):
            samples.append(SizeCost(n, busy, spacing, max(busy, latency), sent))
    if not samples:
        raise NoClock
    return cost_of(samples, link)


def cost_of(samples: Sequence[SizeCost], link: Link) -> Cost:
    """Return the cost of groups of any size, from samples of rising sizes."""
    elements, busy_s, spacing_s, latency_s, sent_bytes = zip(*samples, strict=True)
    busy_rise = max(busy_s[-1] - busy_s[0], 0.0) / max(elements[-1] - elements[0], 1)
    return Cost(elements, busy_s, spacing_s, latency_s, busy_rise, sent_bytes[-1] / elements[-1] * link.s_per_byte)


def made_up(n: int, seed: int, device: torch.device) -> Tensor:
    """Return [n] normally distributed values."""
    pool = torch.randn(min(n, POOL), generator=torch.Generator().manual_seed(seed + 1))
    return pool.repeat(-(-n // POOL))[:n].to(device)


def _time_group(exchange: Exchange, compressor: Compressor, n: int, runs: int) -> tuple[float, float, float, int]:
    """Busy, spacing and latency of groups of ``n`` elements on this rank, in seconds, and bytes sent for each."""
    values = made_up(n + 1, exchange.rank, exchange.device)
    gradient, weights = values[1:], values[:-1]  # in the same memory: they only must not be alike
    bucket = torch.empty_like(gradient)  # of all lanes: nobody reads the means
    groups = {lane: Group(0, ("measured",), (weights,)) for lane in exchange.on_lanes(lambda lane: lane)}
    busy_s, sent_bytes = [], []

    def average(lane: Lane) -> None:
        start_ns, waited_ns, sent_before = time.perf_counter_ns(), lane.network_ns, lane.comm.sent_bytes
        groups[lane].unsent.copy_(gradient)
        total = lane.run(take_step(compressor, groups[lane], lane.comm))
        groups[lane].hand_back(total, [bucket], exchange.size)
        sent_bytes.append(lane.comm.sent_bytes - sent_before)
        busy_s.append((time.perf_counter_ns() - start_ns - (lane.network_ns - waited_ns)) / 1e9)

    alone_s = [time_s(exchange, average, lanes=1) for _ in range(1 + runs)][1:]
    busy, sent = median(busy_s[1:]), sent_bytes[-1]
    exchange.on_lanes(average)  # each lane's group has thresholds of its own

    def queue(lane: Lane) -> None:
        for _ in range(runs):
            average(lane)

    return busy, time_s(exchange, queue) / (runs * len(groups)), median(alone_s), sent
