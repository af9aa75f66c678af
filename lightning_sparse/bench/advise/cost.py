"""Estimates what groups would cost on a cluster, from simulated ranks on this machine."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import torch
from torch import Tensor

from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.base import take_step
from lightning_sparse.compressors.group import Group
from lightning_sparse.fusion.model import Cost
from lightning_sparse.fusion.rehearsal import RUNS, SIZES, Link, Sample, cost_of, made_up
from lightning_sparse.network.comm import Rounds
from lightning_sparse.network.simulated import SimNetwork
from lightning_sparse.selection.sparse import Sparse

FEW_RANKS = 8  # the most that are simulated with all sizes; with more, memory allows the smaller ones


def model_cost(compressor: Compressor, largest: int, size: int, link: Link) -> Cost:
    """Estimate the cost of groups among ``size`` ranks over ``link``; only the compressor's own work is measured.

    The ranks are simulated.  Messages that follow one another take the link's latency for every hop, and a time for
    every byte; what a group does while another's messages are under way is not lost.
    """
    samples = []
    for n in sorted({min(each, largest) for each in SIZES[: 3 if size > FEW_RANKS else None]}):
        network = SimNetwork(size, hop_bytes=link.carries(link.latency_s))
        gradients = [made_up(n, rank, torch.device("cpu")) for rank in range(size)]
        groups = [Group(0, ("rehearsal",), (gradient,)) for gradient in gradients]
        bucket, comm = torch.empty_like(gradients[0]), network.comms[0]
        busy_s: list[float] = []
        for _ in range(1 + RUNS):
            busy_s.append(0.0)
            sent_before, hops_before = comm.sent_bytes, comm.hops
            for group, gradient in zip(groups, gradients, strict=True):
                with _adding_to(busy_s if group is groups[0] else [0.0]):
                    group.unsent.copy_(gradient)
            own, *others = (take_step(compressor, g, c) for g, c in zip(groups, network.comms, strict=True))
            total = network.run([_timed(own, busy_s), *others])[0]
            with _adding_to(busy_s):
                groups[0].hand_back(total, [bucket], size)
        sent, hops, busy = comm.sent_bytes - sent_before, comm.hops - hops_before, median(busy_s[1:])
        wire_s = sent * link.s_per_byte
        wait_s = wire_s + hops * link.latency_s
        samples.append(Sample(n, busy, max(busy, wire_s, (busy + wait_s) / 2), busy + wait_s, sent))
    return cost_of(samples, link)


@contextmanager
def _adding_to(seconds: list[float]) -> Iterator[None]:
    start_s = time.perf_counter()
    yield
    seconds[-1] += time.perf_counter() - start_s


def _timed(rounds: Rounds, busy_s: list[float]) -> Rounds:
    """Go through ``rounds``, and add the time they take themselves to the last of ``busy_s``."""
    arrived = None
    while True:
        with _adding_to(busy_s):
            try:
                pending = rounds.send(arrived)  # type: ignore[arg-type]  # None starts it
            except StopIteration as stop:
                total: Tensor | Sparse = stop.value
                return total
        arrived = yield pending
