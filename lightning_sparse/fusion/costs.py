"""What averaging groups costs, from ranks that are simulated on this machine."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.base import take_steps
from lightning_sparse.compressors.group import Group
from lightning_sparse.compressors.wrappers import type_in_place
from lightning_sparse.engine.groups import Piece, pieces_of
from lightning_sparse.fusion.model import Cost, SizeCost
from lightning_sparse.fusion.planner import Kinds
from lightning_sparse.network.comm import Rounds
from lightning_sparse.network.costs import Costs, Inside, Link, traffic
from lightning_sparse.network.simulated import SimNetwork
from lightning_sparse.selection.sparse import Sparse
from lightning_sparse.settings import as_text

RANKS = 4  # Of so many, at most, the work is simulated: of P ranks' it grows with P squared.
FEW, MOST = 2**8, 2**20  # Elements of the groups that are simulated; the second on all ranks together.
RUNS = 3  # Runs of each; the first is not timed, and the shortest was disturbed least.
POOL = 1_000_003  # Elements after which made-up gradients repeat.

Now = Callable[[], float]  # a clock, in seconds


class GroupCosts:
    """The costs of groups of a model's parameters among ranks that are simulated; what was sampled is kept.

    Compressing takes as long as on this machine at the moment, and messages what they would on the link.

    Args:
        parameters: by name, in the order of definition.
        link: between the ranks, or between members of several ranks, each of which averages a slice of each group.
        size: P, or the number of members.
        may_sum_in_place: DDP's buckets are summed where they lie, if that is the soonest.
        now: a clock, in seconds.
        inside: what the ranks of a member take among themselves.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        link: Link,
        size: int,
        may_sum_in_place: bool = True,
        now: Now = time.perf_counter,
        inside: Inside = Inside(),  # noqa: B008 -- nothing changes it
    ) -> None:
        self.parameters, self.link, self.size, self.now, self.inside = parameters, link, size, now, inside
        self.device = next(iter(parameters.values())).device
        self.sums = Costs(size)
        self.sums.latencies = link.latencies(size, self.device.type == "cpu")
        self._may_sum_in_place = may_sum_in_place
        self._kept: dict[tuple[str, int], Cost] = {}

    def of_model(self, compressor: Compressor) -> tuple[list[Piece], Kinds, float]:
        """The pieces of the gradient, what they cost, and the bytes that a rank sends of them in a step."""
        pieces = pieces_of(self.parameters, compressor)
        every = [(dense, self.of_groups(averages, n), n) for dense, averages, n in _kinds(pieces, compressor)]
        return pieces, [(dense, cost) for dense, cost, _ in every], sum(cost.bytes_each * n for _, cost, n in every)

    def sums_s(self, compressor: Compressor) -> float:
        """Seconds of averaging the whole gradient at once."""
        kinds = _kinds(pieces_of(self.parameters, compressor), compressor)
        return sum(float(self.of_groups(averages, n).at(np.array(n))[2]) for _, averages, n in kinds)

    def of_groups(self, compressor: Compressor, largest: int) -> Cost:
        """The cost of groups of up to ``largest`` elements, of which fewer are simulated."""
        largest = max(1, min(largest, self.inside.local_size * (MOST // min(self.size, RANKS))))
        of_slice = partial(self.simulated, compressor)
        return self.in_place(compressor) or self.sampled(
            as_text(compressor), largest, lambda n: self._of_member(n, of_slice)
        )

    def sampled(self, what: str, largest: int, sample: Callable[[int], SizeCost]) -> Cost:
        """The cost of ``what``, of which a ``sample`` is taken of few elements and of the ``largest`` number, once."""
        if (what, largest) not in self._kept:
            self._kept[what, largest] = Cost(sample(min(FEW, largest)), sample(largest))
        return self._kept[what, largest]

    def agree(self, medians: Callable[[Sequence[float]], NDArray[np.float64]]) -> None:
        """Go by the medians over the ranks of all samples, which are short: one rank's are off by half or more.

        To be called on every rank, where all have sampled the same.
        """
        if not self._kept:  # all candidates are sums in place
            return
        times = [s for cost in self._kept.values() for each in cost for s in each[1:4]]
        rows = np.nan_to_num(medians(times)).reshape(-1, 2, 3)  # NaN: no rank has any
        for (key, cost), row in zip(list(self._kept.items()), rows.tolist(), strict=True):
            self._kept[key] = Cost(
                *(
                    SizeCost(each.elements, busy_s, spacing_s, latency_s, each.sent_bytes)
                    for each, (busy_s, spacing_s, latency_s) in zip(cost, row, strict=True)
                )
            )

    def _of_member(self, n: int, of_slice: Callable[[int], SizeCost]) -> SizeCost:
        """The cost of a group of ``n`` elements, where that of a slice is ``of_slice``.

        A processor that copies for the ranks of its member does nothing else meanwhile.
        """
        cost = of_slice(-(-n // self.inside.local_size))
        inside_s = self.inside.seconds(n)
        busy_s = cost.busy_s + (self.device.type == "cpu") * inside_s
        return SizeCost(n, busy_s, cost.spacing_s + inside_s, cost.latency_s + inside_s, cost.sent_bytes)

    def in_place(self, compressor: Compressor) -> Cost | None:
        """The cost of DDP's buckets, if ``compressor`` sums them where they lie."""
        dtype, elements = type_in_place(compressor), sum(parameter.numel() for parameter in self.parameters.values())
        if dtype is None or not (self._may_sum_in_place and self.sums.in_place(dtype.itemsize * elements)):
            return None

        def of(n: int) -> SizeCost:
            sent_bytes = traffic("all_reduce", dtype.itemsize * n, self.size)
            wire_s = sent_bytes * self.link.s_per_byte
            return SizeCost(n, 0.0, wire_s, self.link.all_reduce_of(self.size) + wire_s, sent_bytes)

        return Cost(self._of_member(1, of), self._of_member(elements, of))

    def simulated(self, compressor: Compressor, n: int) -> SizeCost:
        """Estimate the cost of a group of ``n`` elements; only the compressor's own work is measured.

        Some of the ranks are simulated, and what one sends is taken to grow as in a sum.  Messages that follow one
        another take the link's latency for every hop, and a time for every byte; what a group does while another's
        messages are under way is not lost.
        """
        size, link, device, now = self.size, self.link, self.device, self.now
        simulated = min(size, RANKS)
        network = SimNetwork(simulated, hop_bytes=link.carries(link.latency_s), checks=False)
        gradients = [made_up(n, rank, device) for rank in range(simulated)]
        groups = [Group(0, ("simulated",), (gradient,)) for gradient in gradients]
        bucket, comm = torch.empty_like(gradients[0]), network.comms[0]
        busy_s: list[float] = []
        for _ in range(RUNS):
            busy_s.append(0.0)
            sent_before, hops_before = comm.sent_bytes, comm.hops
            with timed_into(busy_s, device, now):
                for group, gradient in zip(groups, gradients, strict=True):
                    group.unsent.copy_(gradient)
            total = take_steps(compressor, groups, network, lambda own: _timed(own, busy_s, device, now))
            with timed_into(busy_s, device, now):
                for group in groups:
                    group.hand_back(total, [bucket], simulated)
        sent = round((comm.sent_bytes - sent_before) * (1 - 1 / size) * simulated / max(simulated - 1, 1))
        busy, wire_s = min(busy_s[1:]) / simulated, sent * link.s_per_byte
        wait_s = wire_s + (comm.hops - hops_before) * link.latency_s
        return SizeCost(n, busy, max(busy, wire_s, (busy + wait_s) / 2), busy + wait_s, sent)


def _kinds(pieces: Sequence[Piece], compressor: Compressor) -> Iterator[tuple[bool, Compressor, int]]:
    """Yield for compressed pieces and for dense ones, if there are any, what averages them, and their elements."""
    for dense, averages in ((False, compressor), (True, compressor.dense_variant())):
        if elements := sum(piece.elements for piece in pieces if piece.dense == dense):
            yield dense, averages, elements


def made_up(n: int, seed: int, device: torch.device) -> Tensor:
    """Return [n] normally distributed values."""
    generator = torch.Generator("cpu").manual_seed(seed + 1)
    pool = torch.randn(min(n, POOL), generator=generator, dtype=torch.float32, device="cpu")
    return pool.repeat(-(-n // POOL))[:n].to(device)


@contextmanager
def timed_into(seconds: list[float], device: torch.device, now: Now) -> Iterator[None]:
    """Add the time of what is done to the last of ``seconds``, by the clock ``now``; nothing where it cannot tell."""
    start_s = now()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    passed_s = now() - start_s
    seconds[-1] += passed_s if 0 < passed_s < math.inf else 0.0


def _timed(rounds: Rounds, busy_s: list[float], device: torch.device, now: Now) -> Rounds:
    """Go through ``rounds``, and add the time they take themselves to the last of ``busy_s``."""
    arrived = None
    while True:
        with timed_into(busy_s, device, now):
            try:
                pending = rounds.send(arrived)  # type: ignore[arg-type]  # None starts it
            except StopIteration as stop:
                total: Tensor | Sparse = stop.value
                return total
        arrived = yield pending
