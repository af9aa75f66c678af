"""Measures between two steps what a message costs, and how long averaging a group takes with a compressor."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.base import take_step
from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.exchange import Exchange
from lightning_sparse.engine.lane import Lane
from lightning_sparse.fusion.model import Array, Cost
from lightning_sparse.network.costs import hops, traffic

SIZES = (2**8, 2**16, 2**20, 2**22)  # Elements of the groups that are tried.
RUNS = 3  # Runs of each, after one that is not timed: then thresholds are known.
LONG_S = 0.1  # Seconds: larger groups that would take longer follow from the link and the processor.
SLOW_S = 0.02  # Seconds of a message that is timed once: there, runs differ little beside it.
IMMEASURABLE = 1e-11  # Seconds for a byte, or less, of a link whose rate cannot be told: 800 Gbit/s.
MOST_LATENCY_BYTES = 2**26  # The most bytes that a link is taken to carry in its latency.
POOL = 1_000_003  # Elements after which made-up gradients repeat.


@dataclass(frozen=True)
class Link:
    """The time of a message: a latency, and time for each byte on the wire.

    Attributes:
        latency_s: of a message to all other ranks at once.
        s_per_byte: that a rank sends.
        all_reduce_s: the latency of an all-reduce of the backend.
    """

    latency_s: float
    s_per_byte: float
    all_reduce_s: float = math.nan

    def carries(self, seconds: float) -> int:
        """Bytes on the wire in ``seconds``, in steps of a fifth, so that two measurements are often alike."""
        on_the_wire = min(max(seconds / max(self.s_per_byte, 1e-12), 1), MOST_LATENCY_BYTES)
        return round(2 ** (round(4 * math.log2(on_the_wire)) / 4))


class NoClock(Exception):
    """No rank could tell the time; raised on every rank."""


def measure_link(exchange: Exchange) -> Link:
    """Time sums of a few bytes, in one hop and as the backend does it, and longer ones for the rate.

    These are of 256 KiB, or up to 4 MiB where that is quick, and of a quarter; the backend's, but where latency is long
    in one hop, and the backend's latency is taken to be that of its hops.  Sums go by the latencies from then on.

    Raises:
        NoClock: if no rank could tell the time.
    """

    def seconds(elements: int, direct: bool, runs: int = RUNS) -> float:
        """The median over ``runs`` and ranks."""
        x = torch.zeros(elements, device=exchange.device)
        own = median(_time(exchange, lambda lane: lane.comm.all_reduce(x, direct).wait(), lanes=1) for _ in range(runs))
        return float(median_over_ranks(exchange, [own])[0])

    few = SIZES[0]
    latency_s = seconds(few, True)
    far = not latency_s < SLOW_S
    all_reduce_s = hops("all_reduce", exchange.size) * latency_s if far else seconds(few, False)
    many = SIZES[1]
    while (many_s := seconds(many, far, 1)) < SLOW_S and many < SIZES[2]:
        many *= 4
    some, runs = many // 4, RUNS if many_s < SLOW_S else 1
    some_s, many_s = seconds(some, far, runs), seconds(many, far, runs) if runs > 1 else many_s
    if not math.isfinite(latency_s + all_reduce_s + some_s + many_s):
        raise NoClock
    sent_bytes = traffic("all_gather" if far else "all_reduce", 4 * many, exchange.size)
    s_per_byte = max((many_s - some_s) / (many - some), 0.0) * many / sent_bytes
    link = Link(latency_s, s_per_byte, all_reduce_s)
    exchange.set_latencies(link.carries(link.latency_s), link.carries(link.all_reduce_s))
    rate = f"carries {8e-6 / s_per_byte:,.0f} Mbit/s" if s_per_byte > IMMEASURABLE else "is too fast to be measured"
    rank_zero_info(
        f"LayerFusion: a message takes {1e3 * link.latency_s:.2f} ms, an all-reduce of the backend "
        f"{1e3 * link.all_reduce_s:.2f} ms; the link {rate}."
    )
    return link


class SizeCost(NamedTuple):
    """The cost of groups of one size, as in :class:`Cost`, and the bytes a rank sends for one."""

    elements: int
    busy_s: float
    spacing_s: float
    latency_s: float
    sent_bytes: int


def measure_cost(exchange: Exchange, compressor: Compressor, largest: int, link: Link) -> Cost:
    """Measure groups of several sizes, up to ``largest`` elements; the medians over the ranks.

    Made-up gradients, normally distributed, are averaged as real ones are; nothing of it touches the training.  To be
    called between two steps, on every rank.

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
    return Cost(
        elements,
        busy_s,
        spacing_s,
        latency_s,
        busy_rise=max(busy_s[-1] - busy_s[0], 0.0) / max(elements[-1] - elements[0], 1),
        wire_rise=sent_bytes[-1] / elements[-1] * link.s_per_byte,
    )


def median_over_ranks(exchange: Exchange, seconds: Sequence[float]) -> Array:
    """The median over the ranks of each of ``seconds`` [m], the same on every rank.

    What cannot be a duration (zero, negative, infinite, NaN) does not count; NaN where no rank has any other.
    """
    own = torch.tensor(seconds, dtype=torch.float64, device=exchange.device)
    every = exchange.ask(lambda comm: comm.all_gather(own)).cpu().numpy()  # [P, m]
    columns = [column[np.isfinite(column) & (column > 0)] for column in every.T]
    return np.array([np.median(column) if len(column) else np.nan for column in columns])


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

    alone_s = [_time(exchange, average, lanes=1) for _ in range(1 + runs)][1:]
    busy, sent = median(busy_s[1:]), sent_bytes[-1]
    exchange.on_lanes(average)  # each lane's group has thresholds of its own

    def queue(lane: Lane) -> None:
        for _ in range(runs):
            average(lane)

    queued_s = _time(exchange, queue)
    return busy, queued_s / (runs * len(groups)), median(alone_s), sent


def _time(exchange: Exchange, work: Callable[[Lane], object], lanes: int | None = None) -> float:
    """Seconds that ``work`` takes on the first ``lanes`` lanes at once."""
    start_s = time.perf_counter()
    exchange.on_lanes(work, lanes)
    if exchange.device.type == "cuda":
        torch.cuda.synchronize(exchange.device)
    return time.perf_counter() - start_s
