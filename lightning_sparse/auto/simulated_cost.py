"""Estimates what groups would cost on a link, from ranks simulated on this machine."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_sparse.auto.trial import RANKS
from lightning_sparse.compressors import Compressor, Dense
from lightning_sparse.compressors.base import take_step
from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.local_steps import LocalSteps
from lightning_sparse.engine.replica import Replica
from lightning_sparse.fusion.costs import SizeCost, made_up
from lightning_sparse.network.comm import Rounds
from lightning_sparse.network.costs import Costs, Link, hops, traffic
from lightning_sparse.network.simulated import SimNetwork
from lightning_sparse.selection.sparse import Sparse

RUNS = 2  # Runs of each, after one that is not timed: then thresholds are known; the shortest was disturbed least.

Now = Callable[[], float]  # a clock, in seconds


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
    for _ in range(1 + RUNS):
        busy_s.append(0.0)
        sent_before, hops_before = comm.sent_bytes, comm.hops
        for group, gradient in zip(groups, gradients, strict=True):
            with _adding_to(busy_s if group is groups[0] else [0.0], device, now):
                group.unsent.copy_(gradient)
        own, *others = (take_step(compressor, g, c) for g, c in zip(groups, network.comms, strict=True))
        total = network.run([_timed(own, busy_s, device, now), *others])[0]
        with _adding_to(busy_s, device, now):
            groups[0].hand_back(total, [bucket], simulated)
    sent = round((comm.sent_bytes - sent_before) * (1 - 1 / size) * simulated / max(simulated - 1, 1))
    hops, busy = comm.hops - hops_before, min(busy_s[1:])
    wire_s = sent * link.s_per_byte
    wait_s = wire_s + hops * link.latency_s
    return SizeCost(n, busy, max(busy, wire_s, (busy + wait_s) / 2), busy + wait_s, sent)


def in_place_cost(n: int, size: int, link: Link, dtype: torch.dtype) -> list[SizeCost]:
    """Estimate the cost of 1 to ``n`` elements that are summed where they lie; empty where other sums are sooner."""
    all_reduce_s = link.all_reduce_s if math.isfinite(link.all_reduce_s) else hops("all_reduce", size) * link.latency_s
    costs = Costs(size, link.carries(link.latency_s))
    costs.all_reduce_bytes = link.carries(all_reduce_s)
    if not costs.in_place(dtype.itemsize * n):
        return []
    samples = []
    for elements in sorted({1, n}):
        sent_bytes = traffic("all_reduce", dtype.itemsize * elements, size)
        wire_s = sent_bytes * link.s_per_byte
        samples.append(SizeCost(elements, 0.0, wire_s, all_reduce_s + wire_s, sent_bytes))
    return samples


def applying_s(n: int, size: int, device: torch.device, now: Now = time.perf_counter) -> float:
    """Seconds in which a rank takes up ``n`` weights after local steps and applies their exchange."""
    replica = Replica(Group(0, ("simulated",), (made_up(n, 0, device),)), Dense(), 0, LocalSteps(2))
    seconds = []
    for _ in range(1 + RUNS):
        seconds.append(0.0)
        with _adding_to(seconds, device, now):
            replica.take_up(size)
        replica.move(replica.group.unsent, size)
        with _adding_to(seconds, device, now):
            replica.apply()
    return min(seconds[1:])


@contextmanager
def _adding_to(seconds: list[float], device: torch.device, now: Now) -> Iterator[None]:
    start_s = now()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds[-1] += now() - start_s


def _timed(rounds: Rounds, busy_s: list[float], device: torch.device, now: Now) -> Rounds:
    """Go through ``rounds``, and add the time they take themselves to the last of ``busy_s``."""
    arrived = None
    while True:
        with _adding_to(busy_s, device, now):
            try:
                pending = rounds.send(arrived)  # type: ignore[arg-type]  # None starts it
            except StopIteration as stop:
                total: Tensor | Sparse = stop.value
                return total
        arrived = yield pending
