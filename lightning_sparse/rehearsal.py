"""What averaging a group costs here: measured between two steps, with the compressor and over the network in use."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from torch import Tensor

from lightning_sparse.comm import Comm, Sums, traffic
from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.base import take_step
from lightning_sparse.exchange import Exchange
from lightning_sparse.group import Group
from lightning_sparse.lane import Lane
from lightning_sparse.plan import Array, Cost

SIZES = (2**8, 2**16, 2**20, 2**22)  # elements of the groups that are tried
RUNS = 3  # of each, after one that is not timed: then thresholds are known
LONG_S = 0.1  # what would take longer is not tried: there, the line is drawn from the link and the processor
POOL = 1_000_003  # made-up gradients repeat after so many elements


@dataclass(frozen=True)
class Link:
    """What a message costs: a fixed time, and time for each byte on the wire."""

    latency_s: float
    s_per_byte: float


def measure_link(exchange: Exchange) -> Link | None:
    """Time all-reduces of a few bytes and of 4 MiB; None if no rank could tell the time."""

    def reduce(comm: Comm, x: Tensor) -> Sums:
        return (yield comm.all_reduce(x))

    def seconds(elements: int) -> float:
        x = torch.zeros(elements, device=exchange.device)
        return median([_time(exchange, lambda lane: lane.run(reduce(lane.comm, x)), lanes=1) for _ in range(RUNS)])

    few, many = SIZES[0], SIZES[2]
    latency_s, long_s = median_over_ranks(exchange, [seconds(few), seconds(many)]).tolist()
    if not (math.isfinite(latency_s) and math.isfinite(long_s)):
        return None
    bytes_more = traffic("all_reduce", 4 * (many - few), exchange.size)
    return Link(latency_s, max(long_s - latency_s, 0.0) / bytes_more)


def rehearse(exchange: Exchange, compressor: Compressor, largest: int, link: Link) -> Cost | None:
    """Measure groups of several sizes, up to ``largest`` elements; None if no rank could tell the time.

    Made-up gradients, normally distributed, are averaged as real ones are; nothing of it touches the training.  To be
    called between two steps, on every rank; returns the same on each, the median of what the ranks measured.
    """
    sizes: list[int] = []
    busy_s: list[float] = []
    spacing_s: list[float] = []
    latency_s: list[float] = []
    sent_bytes: list[int] = []
    for n in sorted({min(size, largest) for size in SIZES}):
        if sizes and latency_s[-1] * n / sizes[-1] > LONG_S and n > SIZES[2]:
            break
        *seconds, sent = _try(exchange, compressor, n)
        busy, spacing, latency = median_over_ranks(exchange, seconds).tolist()
        if not math.isfinite(busy + spacing + latency):
            continue
        sizes.append(n)
        busy_s.append(busy)
        spacing_s.append(spacing)
        latency_s.append(max(busy, latency))
        sent_bytes.append(sent)
    if not sizes:
        return None
    busy_rise = max(busy_s[-1] - busy_s[0], 0.0) / max(sizes[-1] - sizes[0], 1)
    wire_rise = sent_bytes[-1] / sizes[-1] * link.s_per_byte
    return Cost(tuple(sizes), tuple(busy_s), tuple(spacing_s), tuple(latency_s), busy_rise, wire_rise)


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


def _try(exchange: Exchange, compressor: Compressor, n: int) -> tuple[float, float, float, int]:
    """Busy, spacing and latency of groups of ``n`` elements on this rank, in seconds, and bytes sent for each."""
    gradient = _made_up(n, exchange.rank, exchange.device)
    weights = _made_up(n, -1, exchange.device)
    groups = {lane: Group(0, ("rehearsal",), (weights,)) for lane in exchange.on_lanes(lambda lane: lane)}
    sent = 0

    def average(lane: Lane) -> float:
        """Seconds the processor was busy."""
        nonlocal sent
        start_ns, waited_ns, sent_before = time.perf_counter_ns(), lane.network_ns, lane.comm.sent_bytes
        group = groups[lane]
        group.unsent.copy_(gradient)
        total = lane.run(take_step(compressor, group, lane.comm))
        group.hand_back(total, [gradient.clone()], exchange.size)
        sent = lane.comm.sent_bytes - sent_before
        return (time.perf_counter_ns() - start_ns - (lane.network_ns - waited_ns)) / 1e9

    busy_s: list[float] = []
    total_s = [_time(exchange, lambda lane: busy_s.append(average(lane)), lanes=1) for _ in range(1 + RUNS)]
    exchange.on_lanes(average)  # each lane's group has thresholds of its own
    queued_s = _time(exchange, lambda lane: [average(lane) for _ in range(RUNS)])
    return median(busy_s[1:]), queued_s / (RUNS * len(groups)), median(total_s[1:]), sent


def _time(exchange: Exchange, work: Callable[[Lane], object], lanes: int | None = None) -> float:
    """Seconds that ``work`` takes on the first ``lanes`` lanes at once."""
    start_s = time.perf_counter()
    exchange.on_lanes(work, lanes)
    if exchange.device.type == "cuda":
        torch.cuda.synchronize(exchange.device)
    return time.perf_counter() - start_s


def _made_up(n: int, seed: int, device: torch.device) -> Tensor:
    """[n] normally distributed."""
    pool = torch.randn(min(n, POOL), generator=torch.Generator().manual_seed(seed + 1))
    return pool.repeat(-(-n // POOL))[:n].to(device)
