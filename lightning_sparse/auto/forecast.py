"""Predicts the step of each candidate, from measured steps and a link."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from torch import Tensor

from lightning_sparse.auto.more_steps import more_steps
from lightning_sparse.auto.policy import Candidate
from lightning_sparse.auto.simulated_cost import Now, applying_s, in_place_cost, simulated_cost
from lightning_sparse.auto.trial import RANKS
from lightning_sparse.compressors import Compressor, Dense
from lightning_sparse.compressors.rounded import type_in_place
from lightning_sparse.engine.groups import Piece, cut_into_fragments, pieces_of
from lightning_sparse.fusion.costs import SizeCost, cost_of
from lightning_sparse.fusion.model import Cost, Plan
from lightning_sparse.fusion.planner import DDP_PLAN, Calibration, Kinds, Measured, best_plan, calibrate, kinds_of
from lightning_sparse.network.costs import Link
from lightning_sparse.settings import as_text

SHORT = 0.1  # Part of a step by which repeated measurements of the same step differ.
FEW, MOST = 2**8, 2**20  # Elements of the groups that are simulated; the second on all of them together.

Samples: TypeAlias = dict[tuple[str, int], list[SizeCost]]


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


class Forecaster:
    """Predicts steps in which computing takes what was measured, and messages what they would on a link.

    Args:
        parameters: by name, in the order of definition.
        measured: with ``at_work``.
        link: between the ranks.
        size: P.
        at_work: what averaged meanwhile; None: nothing was sent.
        now: the clock by which compressing is timed.
        samples: costs of groups on this link that were simulated before, to which others are added; by what and size.

    Attributes:
        calibration: how measured steps differ from the model.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        measured: Measured,
        link: Link,
        size: int,
        at_work: Compressor | None,
        now: Now = time.perf_counter,
        samples: Samples | None = None,
    ) -> None:
        self._now, self._samples = now, {} if samples is None else samples
        self._parameters, self._measured, self._link, self._size = parameters, measured, link, size
        self._device = next(iter(parameters.values())).device
        self.calibration = Calibration()
        self._sent_bytes = math.inf  # of a rank in a measured step
        if at_work is not None:
            pieces, kinds, self._sent_bytes = self._costs(at_work)
            self.calibration = calibrate(pieces, kinds, measured)

    @property
    def computing_s(self) -> float:
        """Seconds of a step that sends nothing: no candidate's is shorter."""
        return self._measured.computing_s

    @property
    def sums_in_place(self) -> bool:
        """Whether float32 sums of the gradient where it lies are the soonest sums of it."""
        return bool(self._in_place(Dense()))

    def sums_s(self, compressor: Compressor) -> float:
        """Seconds from the start of backward to the last mean, in DDP's buckets."""
        return self._planned(compressor)[0].spans[DDP_PLAN]

    def forecast(self, candidate: Candidate) -> Forecast:
        """Predict a step."""
        return self._of_local_steps(candidate) if candidate.local_steps else self._of_gradients(candidate)

    def _of_gradients(self, candidate: Candidate) -> Forecast:
        compressor = candidate.averaging
        plan, sent_bytes = self._planned(compressor)
        buckets_s = plan.rest_s + plan.spans[DDP_PLAN]
        step_s = buckets_s if self._in_place(compressor) else plan.step_s
        known = (1.0, 0.0) if type_in_place(compressor) else (None, None)  # all arrives at once, rounded at most
        return Forecast(candidate, step_s, buckets_s, sent_bytes, _limit(plan), self._size, *known)

    def _planned(self, compressor: Compressor) -> tuple[Plan, float]:
        """The best groups, and the bytes that a rank sends in a step."""
        pieces, kinds, sent_bytes = self._costs(compressor)
        return best_plan(pieces, kinds, self._measured, self.calibration), sent_bytes

    def _costs(self, compressor: Compressor) -> tuple[list[Piece], Kinds, float]:
        """The pieces of the gradient, what they cost, and the bytes that a rank sends of them in a step."""
        pieces, sent = pieces_of(self._parameters, compressor), []

        def cost(averages: Compressor, elements: int) -> Cost:
            sent.append(self._bytes_each(averages, elements) * elements)
            return self._cost(averages, elements)

        return pieces, kinds_of(pieces, compressor, cost), sum(sent)

    def _of_local_steps(self, candidate: Candidate) -> Forecast:
        """A fragment is exchanged beside the next step, which is as long as the longer of the two.

        A processor that computes the step has the work of the exchange too; a device does not.  By what measured steps
        were longer than the model, these are by their share of the bytes.
        """
        compressor, steps = candidate.averaging, candidate.local_steps
        pieces = pieces_of(self._parameters, compressor)
        sizes = np.array(cut_into_fragments([[piece] for piece in pieces], steps)[1])
        largest = int(sizes.max())
        busy_s, _, latency_s = self._cost(compressor, largest).at(sizes)
        n = min(largest, MOST)
        own_s = self.computing_s + applying_s(n, self._size, self._device, self._now) / n * sizes
        own_s = own_s + (busy_s if self._device.type == "cpu" else 0.0)
        each_bytes = self._bytes_each(compressor, largest) * sizes
        own_s = own_s + self.calibration.offset_s * each_bytes / self._sent_bytes
        step_s = float(np.maximum(own_s, latency_s).mean())
        limit = "network" if (latency_s > own_s).mean() > 0.5 else "backward"
        return Forecast(candidate, step_s, step_s, float(each_bytes.mean()), limit, self._size)

    def _cost(self, compressor: Compressor, elements: int) -> Cost:
        return cost_of(self._simulated(compressor, elements), self._link)

    def _bytes_each(self, compressor: Compressor, elements: int) -> float:
        largest = self._simulated(compressor, elements)[-1]
        return largest.sent_bytes / largest.elements

    def _in_place(self, compressor: Compressor) -> list[SizeCost]:
        """The cost of DDP's buckets, if ``compressor`` sums them where they lie; else empty."""
        elements, dtype = sum(parameter.numel() for parameter in self._parameters.values()), type_in_place(compressor)
        return in_place_cost(elements, self._size, self._link, dtype) if dtype else []

    def _simulated(self, compressor: Compressor, elements: int) -> list[SizeCost]:
        n = max(1, min(elements, MOST // min(self._size, RANKS)))
        key = (as_text(compressor), n)
        if key not in self._samples and (in_place := self._in_place(compressor)):
            self._samples[key] = in_place
        elif key not in self._samples:
            sizes = sorted({min(FEW, n), n})
            self._samples[key] = [
                simulated_cost(compressor, each, self._size, self._link, self._device, self._now) for each in sizes
            ]
        return self._samples[key]


def _limit(plan: Plan) -> str:
    """What is under way between the last gradient and the last mean: "backward", "compression" or "network"."""
    times, ready_s = plan.times, plan.model.ready_s[-1]
    after_backward_s = times[-1].end_s - ready_s
    if after_backward_s < SHORT * plan.step_s:
        return "backward"
    busy_s = sum(time.busy_s for time in times if time.end_s > ready_s)
    return "compression" if busy_s > after_backward_s / 2 else "network"
