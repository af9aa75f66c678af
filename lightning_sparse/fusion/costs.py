"""What averaging groups costs: measured between two steps, or from ranks simulated on this machine."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.base import take_step
from lightning_sparse.compressors.group import Group
from lightning_sparse.compressors.rounded import type_in_place
from lightning_sparse.engine.exchange import Exchange
from lightning_sparse.engine.groups import Piece, pieces_of
from lightning_sparse.engine.lane import Lane
from lightning_sparse.engine.link import SLOW_S, NoClock, median_over_ranks, time_s
from lightning_sparse.fusion.model import Cost
from lightning_sparse.fusion.planner import Kinds
from lightning_sparse.network.comm import Rounds
from lightning_sparse.network.costs import Costs, Link, hops, traffic
from lightning_sparse.network.simulated import SimNetwork
from lightning_sparse.selection.sparse import Sparse
from lightning_sparse.settings import as_text

SIZES = (2**8, 2**16, 2**20, 2**22)  # Elements of the groups that are measured.
LONG_S = 0.1  # Seconds: the largest groups, if they would take longer, follow from the link and the processor.
RANKS = 4  # Of so many, at most, the work is simulated: of P ranks' it grows with P squared.
FEW, MOST = 2**8, 2**20  # Elements of the groups that are simulated; the second on all ranks together.
RUNS = 3  # Runs of each; of those of simulated ranks the first is not timed, and the shortest was disturbed least.
POOL = 1_000_003  # Elements after which made-up gradients repeat.

Now = Callable[[], float]  # a clock, in seconds


class SizeCost(NamedTuple):
    """The cost of groups of one size, as in :class:`Cost`, and the bytes a rank sends for one."""

    elements: int
    busy_s: float
    spacing_s: float
    latency_s: float
    sent_bytes: int


class GroupCosts(ABC):
    """The costs of groups of a model's parameters on a link; what was sampled is kept.

    Args:
        parameters: by name, in the order of definition.
        link: between the ranks.
        size: P.
    """

    def __init__(self, parameters: Mapping[str, Tensor], link: Link, size: int) -> None:
        self.parameters, self.link, self.size = parameters, link, size
        self.device = next(iter(parameters.values())).device
        self._kept: dict[tuple[str, int], list[SizeCost]] = {}

    @abstractmethod
    def _sample(self, compressor: Compressor, largest: int) -> list[SizeCost]:
        """Groups of rising sizes, up to ``largest`` elements or where those follow from the link and the processor."""

    def of_model(self, compressor: Compressor) -> tuple[list[Piece], Kinds, float]:
        """The pieces of the gradient, what they cost, and the bytes that a rank sends of them in a step."""
        pieces = pieces_of(self.parameters, compressor)
        every = list(_kinds(pieces, compressor))
        kinds = [(dense, self.of_groups(averages, n)) for dense, averages, n in every]
        return pieces, kinds, sum(self.bytes_each(averages, n) * n for _, averages, n in every)

    def sums_s(self, compressor: Compressor) -> float:
        """Seconds of averaging the whole gradient at once."""
        kinds = _kinds(pieces_of(self.parameters, compressor), compressor)
        return sum(float(self.of_groups(averages, n).at(np.array(n))[2]) for _, averages, n in kinds)

    def of_groups(self, compressor: Compressor, largest: int) -> Cost:
        """The cost of groups of up to ``largest`` elements."""
        elements, busy_s, spacing_s, latency_s, sent_bytes = zip(*self._samples(compressor, largest), strict=True)
        busy_rise = max(busy_s[-1] - busy_s[0], 0.0) / max(elements[-1] - elements[0], 1)
        wire_rise = sent_bytes[-1] / elements[-1] * self.link.s_per_byte
        return Cost(elements, busy_s, spacing_s, latency_s, busy_rise, wire_rise)

    def bytes_each(self, compressor: Compressor, largest: int) -> float:
        """The bytes that a rank sends of each element, in groups of up to ``largest``."""
        sample = self._samples(compressor, largest)[-1]
        return sample.sent_bytes / sample.elements

    def _samples(self, compressor: Compressor, largest: int) -> list[SizeCost]:
        key = (as_text(compressor), largest)
        if key not in self._kept:
            self._kept[key] = self._sample(compressor, largest)
        return self._kept[key]


def _kinds(pieces: Sequence[Piece], compressor: Compressor) -> Iterator[tuple[bool, Compressor, int]]:
    """Yield for compressed pieces and for dense ones, if there are any, what averages them, and their elements."""
    for dense, averages in ((False, compressor), (True, compressor.dense_variant())):
        if elements := sum(piece.elements for piece in pieces if piece.dense == dense):
            yield dense, averages, elements


class MeasuredCosts(GroupCosts):
    """Costs as the ranks of ``exchange`` measure them; to be asked between two steps, on every rank.

    Made-up gradients, normally distributed, are averaged as real ones are, a first time without being timed: then
    thresholds are known.  Nothing of it touches the training.

    Raises:
        NoClock: when asked, if no rank could tell the time.
    """

    def __init__(self, parameters: Mapping[str, Tensor], link: Link, exchange: Exchange) -> None:
        super().__init__(parameters, link, exchange.size)
        self._exchange = exchange

    def _sample(self, compressor: Compressor, largest: int) -> list[SizeCost]:
        samples: list[SizeCost] = []
        for n in sorted({min(size, largest) for size in SIZES}):
            if samples and samples[-1].latency_s * n / samples[-1].elements > LONG_S and n > SIZES[2]:
                break
            slow = self.link.latency_s + traffic("all_reduce", 4 * n, self.size) * self.link.s_per_byte > SLOW_S
            *seconds, sent = _time_group(self._exchange, compressor, n, 1 if slow else RUNS)
            busy, spacing, latency = median_over_ranks(self._exchange, seconds).tolist()
            if math.isfinite(busy + spacing + latency):
                samples.append(SizeCost(n, busy, spacing, max(busy, latency), sent))
        if not samples:
            raise NoClock
        return samples


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

    untimed = 2 if exchange.device.type == "cuda" else 1  # The first two compile different kernels.
    alone_s = [time_s(exchange, average, lanes=1) for _ in range(untimed + runs)][untimed:]
    busy, sent = median(busy_s[untimed:]), sent_bytes[-1]
    exchange.on_lanes(average)  # each lane's group has thresholds of its own

    def queue(lane: Lane) -> None:
        for _ in range(runs):
            average(lane)

    return busy, time_s(exchange, queue) / (runs * len(groups)), median(alone_s), sent


class SimulatedCosts(GroupCosts):
    """Costs of ranks that are simulated, where compressing takes as long as here by the clock ``now``."""

    def __init__(self, parameters: Mapping[str, Tensor], link: Link, size: int, now: Now = time.perf_counter) -> None:
        super().__init__(parameters, link, size)
        self.now = now

    @property
    def _all_reduce_s(self) -> float:
        all_reduce_s, link = self.link.all_reduce_s, self.link
        return all_reduce_s if math.isfinite(all_reduce_s) else hops("all_reduce", self.size) * link.latency_s

    @property
    def sums(self) -> Costs:
        """What sums go by on the link."""
        costs = Costs(self.size, self.link.carries(self.link.latency_s))
        costs.all_reduce_bytes = self.link.carries(self._all_reduce_s)
        return costs

    def in_place(self, compressor: Compressor) -> list[SizeCost]:
        """The cost of DDP's buckets, if ``compressor`` sums them where they lie; else empty."""
        dtype, elements = type_in_place(compressor), sum(parameter.numel() for parameter in self.parameters.values())
        if dtype is None or not self.sums.in_place(dtype.itemsize * elements):
            return []
        sizes, all_reduce_s = sorted({1, elements}), self._all_reduce_s
        sent_bytes = [traffic("all_reduce", dtype.itemsize * n, self.size) for n in sizes]
        wires_s = [sent * self.link.s_per_byte for sent in sent_bytes]
        return [SizeCost(n, 0.0, s, all_reduce_s + s, b) for n, s, b in zip(sizes, wires_s, sent_bytes, strict=True)]

    def _samples(self, compressor: Compressor, largest: int) -> list[SizeCost]:
        return super()._samples(compressor, max(1, min(largest, MOST // min(self.size, RANKS))))

    def _sample(self, compressor: Compressor, largest: int) -> list[SizeCost]:
        return self.in_place(compressor) or [
            simulated_cost(compressor, each, self.size, self.link, self.device, self.now)
            for each in sorted({min(FEW, largest), largest})
        ]


def simulated_cost(
    compressor: Compressor, n: int, size: int, link: Link, device: torch.device, now: Now = time.perf_counter
) -> SizeCost:
    """Estimate the cost of a group of ``n`` elements among ``size`` ranks; only the compressor's own work is measured.

    Some of the ranks are simulated, and what one sends is taken to grow as in a sum.  Messages that follow one another
    take the link's latency for every hop, and a time for every byte; what a group does while another's messages are
    under way is not lost.
    """
    simulated = min(size, RANKS)
    network = SimNetwork(simulated, hop_bytes=link.carries(link.latency_s), checks=False)
    gradients = [made_up(n, rank, device) for rank in range(simulated)]
    groups = [Group(0, ("simulated",), (gradient,)) for gradient in gradients]
    bucket, comm = torch.empty_like(gradients[0]), network.comms[0]
    busy_s: list[float] = []
    for _ in range(RUNS):
        busy_s.append(0.0)
        sent_before, hops_before = comm.sent_bytes, comm.hops
        for group, gradient in zip(groups, gradients, strict=True):
            with adding_to(busy_s if group is groups[0] else [0.0], device, now):
                group.unsent.copy_(gradient)
        own, *others = (take_step(compressor, g, c) for g, c in zip(groups, network.comms, strict=True))
        total = network.run([_timed(own, busy_s, device, now), *others])[0]
        with adding_to(busy_s, device, now):
            groups[0].hand_back(total, [bucket], simulated)
    sent = round((comm.sent_bytes - sent_before) * (1 - 1 / size) * simulated / max(simulated - 1, 1))
    hops, busy = comm.hops - hops_before, min(busy_s[1:])
    wire_s = sent * link.s_per_byte
    wait_s = wire_s + hops * link.latency_s
    return SizeCost(n, busy, max(busy, wire_s, (busy + wait_s) / 2), busy + wait_s, sent)


def made_up(n: int, seed: int, device: torch.device) -> Tensor:
    """Return [n] normally distributed values."""
    pool = torch.randn(min(n, POOL), generator=torch.Generator().manual_seed(seed + 1))
    return pool.repeat(-(-n // POOL))[:n].to(device)


@contextmanager
def adding_to(seconds: list[float], device: torch.device, now: Now) -> Iterator[None]:
    """Add what is done to the last of ``seconds``, by the clock ``now``."""
    start_s = now()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds[-1] += now() - start_s


def _timed(rounds: Rounds, busy_s: list[float], device: torch.device, now: Now) -> Rounds:
    """Go through ``rounds``, and add the time they take themselves to the last of ``busy_s``."""
    arrived = None
    while True:
        with adding_to(busy_s, device, now):
            try:
                pending = rounds.send(arrived)  # type: ignore[arg-type]  # None starts it
            except StopIteration as stop:
                total: Tensor | Sparse = stop.value
                return total
        arrived = yield pending
