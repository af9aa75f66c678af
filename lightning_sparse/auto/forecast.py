"""Predicts the step of each candidate, from measured steps and a link, and how many more steps it needs to a loss.

The second is fitted on stored trainings of three tasks, which differ: docs/benchmarks/2026-11-24-more-steps.md.
"""

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

from lightning_sparse.auto.policy import Candidate
from lightning_sparse.compressors import Dense
from lightning_sparse.compressors.group import Group
from lightning_sparse.compressors.wrappers import type_in_place
from lightning_sparse.engine.groups import cut_into_fragments, message_lengths, pieces_of
from lightning_sparse.fusion.costs import MOST, RUNS, GroupCosts, made_up, timed_into
from lightning_sparse.fusion.model import Cost, Integers, Plan, SizeCost
from lightning_sparse.fusion.planner import DDP_PLAN, IN_PLACE, Measured, best_plan
from lightning_sparse.local_steps.replica import Replica
from lightning_sparse.local_steps.settings import LocalSteps

# Averaged gradients need exp(OF_UNSENT * u) times as many steps, where u is the part of what is unsent that stays.
OF_UNSENT = 1.0
# Local steps need LOCAL times as many, as long as all ranks together take at most AS_DENSE steps from one average to
# the next.  Where they take n, the factor is LOCAL * (n / AS_DENSE) ** OF_LOCAL.
AS_DENSE, LOCAL, OF_LOCAL = 8, 1.02, 0.12
APART = 2.5  # A task may need the factor to the power of APART, or of 1 / APART.
OF_STEPS = 0.3  # The loss after equal steps is the factor to this power times that of dense training.
SHORT = 0.1  # Part of a step by which repeated measurements of the same step differ.


@dataclass(frozen=True)
class Forecast:
    """What to expect of a candidate.

    Attributes:
        candidate: of which.
        step_s: seconds of a step.
        buckets_s: seconds of a step in DDP's buckets.
        sent_bytes: of a rank in a step.
        limit: what the step waits for at its end: "backward", "compression" or "network".
        ranks: P.
        delivered: the part of what is unsent that a step delivers; None until it was tried.
        staleness: steps after which a gradient arrives; None until it was tried.
    """

    candidate: Candidate
    step_s: float
    buckets_s: float
    sent_bytes: float
    limit: str
    ranks: int
    delivered: float | None = None
    staleness: float | None = None

    @property
    def more_steps(self) -> float:
        """How many times as many steps as dense training are expected to a loss; at least, until it was tried."""
        delivered = 1.0 if self.delivered is None else self.delivered
        return more_steps(delivered, self.staleness or 0.0, self.ranks, self.candidate.local_steps)

    @property
    def seconds(self) -> float:
        """Expected to a loss, for each step that dense training needs: what candidates are chosen by."""
        return self.step_s * self.more_steps


def sample(candidate: Candidate, costs: GroupCosts) -> None:
    """Sample all costs that a forecast of ``candidate`` goes by."""
    if candidate.local_steps:
        _of_fragments(candidate, costs)
    else:
        costs.of_model(candidate.averaging)


def forecast_of(candidate: Candidate, measured: Measured, costs: GroupCosts) -> Forecast:
    """Predict a step in which computing takes what was ``measured``, and messages what they would on a link."""
    return (_of_local_steps if candidate.local_steps else _of_gradients)(candidate, measured, costs)


def _of_gradients(candidate: Candidate, measured: Measured, costs: GroupCosts) -> Forecast:
    compressor = candidate.averaging
    dtype, in_place, message_bytes = type_in_place(compressor), costs.in_place(compressor), None
    pieces, kinds, sent_bytes = costs.of_model(compressor)
    if dtype and in_place:
        elements = sum(piece.elements for piece in pieces)
        message_bytes = message_lengths(4 * elements, costs.sums.message_bytes * 4 // dtype.itemsize)
    plan = best_plan(pieces, kinds, measured, message_bytes=message_bytes)
    step_s = plan.rest_s + plan.spans.get(IN_PLACE, plan.span_s)
    buckets_s = plan.rest_s + plan.spans[DDP_PLAN]
    known = (1.0, 0.0) if dtype else (None, None)  # all arrives at once, rounded at most
    return Forecast(candidate, step_s, buckets_s, sent_bytes, _limit(plan), costs.size, *known)


def _of_local_steps(candidate: Candidate, measured: Measured, costs: GroupCosts) -> Forecast:
    """A fragment is exchanged beside the next step, which is as long as the longer of the two.

    A processor that computes the step has the work of the exchange too; a device does not.  In every step the ranks of
    a member average all gradients among themselves.
    """
    sizes, exchange, applying = _of_fragments(candidate, costs)
    busy_s, _, latency_s = exchange.at(sizes)
    own_s = measured.computing_s + costs.inside.seconds(int(sizes.sum())) + applying.at(sizes)[0]
    own_s += (costs.device.type == "cpu") * busy_s
    step_s = float(np.maximum(own_s, latency_s).mean())
    limit = "network" if (latency_s > own_s).mean() > 0.5 else "backward"
    sent_bytes = float(exchange.bytes_each * sizes.mean())
    return Forecast(candidate, step_s, step_s, sent_bytes, limit, costs.size)


def _of_fragments(candidate: Candidate, costs: GroupCosts) -> tuple[Integers, Cost, Cost]:
    """The elements of each fragment [H], what its exchange costs, and what it takes to apply this."""
    pieces = pieces_of(costs.parameters, candidate.averaging)
    sizes = np.array(cut_into_fragments([[piece] for piece in pieces], candidate.local_steps)[1])
    largest = int(sizes.max())
    applying = costs.sampled("applying an exchange", min(largest, MOST), partial(applied, costs))
    return sizes, costs.of_groups(candidate.averaging, largest), applying


def applied(costs: GroupCosts, n: int) -> SizeCost:
    """What a rank takes to take up its slice of ``n`` weights after local steps, and to apply their exchange."""
    weights = made_up(-(-n // costs.inside.local_size), 0, costs.device)
    replica = Replica(Group(0, ("simulated",), (weights,)), Dense(), 0, LocalSteps(2))
    seconds = []
    for _ in range(RUNS):
        seconds.append(0.0)
        with timed_into(seconds, costs.device, costs.now):
            replica.snapshot(costs.size)
        replica.set_move(replica.group.unsent, costs.size)
        with timed_into(seconds, costs.device, costs.now):
            replica.apply_move()
    shortest_s = min(seconds[1:])
    return SizeCost(n, shortest_s, shortest_s, shortest_s, sent_bytes=0)


def _limit(plan: Plan) -> str:
    """What is under way between the last gradient and the last mean: "backward", "compression" or "network"."""
    times, ready_s = plan.times, plan.model.ready_s[-1]
    after_backward_s = times[-1].end_s - ready_s
    if after_backward_s < SHORT * plan.step_s:
        return "backward"
    busy_s = sum(time.busy_s for time in times if time.end_s > ready_s)
    return "compression" if busy_s > after_backward_s / 2 else "network"


# - how many more steps than dense training a strategy needs to the same loss, by what it delivers and how late


def more_steps(delivered: float, staleness: float, ranks: int, local_steps: int) -> float:
    """Return how many times as many steps as dense training are expected to the same loss.

    Args:
        delivered: the part of what is unsent that a step delivers.
        staleness: steps after which a gradient arrives.
        ranks: P.
        local_steps: H; 0: gradients are averaged.
    """
    if local_steps:
        return LOCAL * math.pow(max(1.0, ranks * max(local_steps, staleness) / AS_DENSE), OF_LOCAL)
    return math.exp(OF_UNSENT * (1 - delivered))


def steps_alone(gradients: Tensor, size: int) -> float:
    """Return how many times as many steps one member alone needs to the same loss as ``size`` of them, 1 to their root.

    A gradient of batch B has 1 + N / B times the squared length of what all batches have in common, where N is the
    gradient noise scale of McCandlish et al., "An Empirical Model of Large-Batch Training" (2018), by the simple
    estimate of appendix A.1.  Adam divides by that length, so that what a step gains is taken to be its inverse, as in
    the square-root rule of Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms" (2022).

    Args:
        gradients: [R, T, m], of R members in T steps.
        size: P.
    """
    members = len(gradients)
    if members == 1:
        return 1.0
    of_one, of_mean = (float(x.double().square().sum(-1).mean()) for x in (gradients, gradients.mean(0)))
    noise = max(of_one - of_mean, 0.0) / (1 - 1 / members)  # of the gradient of one batch, as its squared length
    signal = max(of_mean - noise / members, 0.0)
    return math.sqrt((signal + noise) / (signal + noise / size)) if noise else 1.0


def likely(more: float) -> tuple[float, float]:
    """Return the least and the most times as many steps that a task may need where ``more`` are expected."""
    return more ** (1 / APART), more**APART


def loss_above(more: float) -> float:
    """Return by what part the loss after as many steps is expected above dense training's, which needs fewer."""
    return math.exp(OF_STEPS * math.log(more)) - 1
