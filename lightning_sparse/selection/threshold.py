"""Thresholds that a wanted number of elements reaches: estimated from a sample, and held step after step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SAMPLE = 2**16  # elements at least in a sample, where there are so many ...
SAMPLED_ABOVE = 1024  # ... and so many of them above the threshold that is wanted: about 3 % of uncertainty
QUANTILES = 128  # that summarise a distribution

NEAR = 0.95  # elements above this multiple of the threshold are counted too: they tell how steep the distribution is
GAIN = 0.5  # of the miss is corrected at once ...
TREND_GAIN = 0.1  # ... and so much of it is added to what the threshold moves by in every step
WIDEST_MISS = 0.2  # natural logarithms of what is corrected, and of the trend: beyond, the control would overshoot
FASTEST_TREND = 0.03
STARVED = 0.25  # of the target: fewer are next to nothing
CROWDED, LEVEL = 1.1, 1.2  # more than so many times the target, and below the threshold less than so many times these
_LEAST = 1e-300  # a threshold of zero has no logarithm
LARGEST = torch.finfo(torch.float32).max  # magnitudes are float32


def count(density: float, n: int) -> int:
    """k: ``density * n`` rounded, at least 1 and at most n."""
    return min(n, max(1, round(density * n)))


def room(wanted: float, slack: float) -> int:
    """Elements there is room for in a message that is meant to carry ``wanted``: at least 1."""
    return max(1, math.ceil(wanted * slack))


def sampled_threshold(x: Tensor, k: int) -> Tensor:
    """About the ``k``-th largest magnitude in ``x`` [n], [] float32, from a regular sample.

    Zero where fewer than k elements are not; NaN where the sample has too many of it.
    """
    n = x.numel()
    if n == 0 or k >= n:
        return x.new_zeros(())
    wanted = max(SAMPLE, SAMPLED_ABOVE * n // k)
    stride = max(1, n // wanted) | 1  # odd, so as not to fall in step with the rows of a matrix
    sample = x[::stride].abs()
    return least_of_largest(sample, count(k / n, sample.numel()))


def least_of_largest(magnitudes: Tensor, k: int) -> Tensor:
    """The ``k``-th largest of ``magnitudes`` [m], exactly: [].  NaN counts as the largest."""
    return magnitudes.topk(k, sorted=False).values.min()


def not_nan(threshold: Tensor) -> Tensor:
    """``threshold`` [], or infinity where it is NaN, which every element reached: so what is not finite goes first."""
    return torch.where(threshold.isnan(), torch.inf, threshold)


def summary(x: Tensor, most: int) -> Tensor:
    """How the ``most`` largest magnitudes in ``x`` [m] are distributed, for :func:`pooled_threshold`.

    Returns:
        [1 + QUANTILES] float32: how many they are, and their quantiles.
    """
    m = min(most, x.numel())
    if m == 0:
        return x.new_zeros(1 + QUANTILES)
    ordered = x.abs().topk(m).values
    at = torch.arange(QUANTILES, device=x.device) * (m - 1) // (QUANTILES - 1)
    return torch.cat([x.new_full((1,), m), ordered.index_select(0, at)])


def pooled_threshold(summaries: Tensor, k: int) -> Tensor:
    """About the ``k``-th largest magnitude of all that ``summaries`` [P, 1 + QUANTILES] describe: [] float64.

    Zero if there are fewer.  Each quantile stands for as many elements, so k is met to within m / (2 QUANTILES)
    elements of a summary of m.
    """
    counts, quantiles = summaries.double().split([1, QUANTILES], dim=1)
    magnitudes, order = quantiles.flatten().sort(descending=True)
    reached = counts.long().expand_as(quantiles).flatten().index_select(0, order).cumsum(0)  # times QUANTILES
    place = (reached < k * QUANTILES).sum()
    return torch.cat([magnitudes, magnitudes.new_zeros(1)]).index_select(0, place.view(1)).squeeze(0)


@dataclass(frozen=True)
class ThresholdController:
    """A threshold under control: of magnitudes, and the logarithm it moves by in every step.

    What is unsent grows for the first hundreds of steps, shrinks when gradients do, and ends abruptly just above the
    threshold, so how many more elements reach a lower threshold varies by a factor of fifty.  Hence the control
    measures that (by the count at ``NEAR`` times the threshold), corrects the logarithm of the threshold by a part of
    the miss, and follows a trend.  It is symmetric: twice too many moves it up as far as half as many moves it down.
    """

    threshold: float
    trend: float = 0.0
    was_reestimated: bool = False  # evaluated anew, see :meth:`needs_reestimate`

    def after(self, picked: int, target: int, seen: int, near: int) -> "ThresholdController":
        """The threshold of the next step after one that sent ``picked`` elements where ``target`` were meant.

        Where messages had room for all, ``seen`` reached the threshold, and ``near`` reached ``NEAR`` times as much.
        """
        steepness = math.log(max(near, 1) / max(seen, 1)) / -math.log(NEAR)  # -d log(count) / d log(threshold)
        miss = _bounded(math.log(max(picked, 0.5) / target) / max(steepness, 1.0), WIDEST_MISS)
        trend = _bounded(self.trend + TREND_GAIN * miss, FASTEST_TREND)
        return ThresholdController(min(self.threshold * math.exp(GAIN * miss + trend), LARGEST), trend)

    def following(self, messages: Sequence[Sequence[int]], target: int) -> "ThresholdController | None":
        """The threshold of the next step, from the headers of all messages; None where it is better evaluated anew.

        They say of each message how many elements were sent, seen and near; ``target`` should have been sent in all.
        Where there was no room for all that was seen, what was seen does not say how many a lower one would send.
        """
        sent, seen, near = ([message[i] for message in messages] for i in range(3))
        if self.lost(len(seen) * min(seen), sum(near), target):
            return None
        roomy = [i for i in range(len(seen)) if seen[i] == sent[i]] or range(len(seen))
        return self.after(sum(sent), target, sum(seen[i] for i in roomy), sum(near[i] for i in roomy))

    def lost(self, seen: int, near: int, target: int) -> bool:
        """Whether the threshold missed so widely that it is better evaluated anew than corrected."""
        return seen > 2 * target or (near < target / 2 and self.threshold > 0)

    def needs_reestimate(self, picked: int, target: int, seen: int, near: int) -> bool:
        """Whether it is better evaluated anew, since these counts (see :meth:`after`) do not say how far to move it.

        Next to nothing reaches it, or too much was sent and hardly anything is just below: then what was counted ends
        near it.  Gradients that have shrunk leave everything unsent piled up just below the threshold, and it would
        jump to and fro across that edge.
        """
        too_many = picked > CROWDED * target and near < LEVEL * seen
        return self.threshold > 0 and (seen < STARVED * target or too_many)

    def renewed(self, threshold: float) -> "ThresholdController":
        """``threshold``, which was used in this one's place.

        Where this one needed that, it has the trend that would have led there; after a jump of the scale it has none.
        """
        if not self.was_reestimated:
            return ThresholdController(threshold, self.trend)
        moved = math.log(max(threshold, _LEAST)) - math.log(max(self.threshold, _LEAST))  # not of a ratio: inf / inf
        trend = _bounded(self.trend + moved, FASTEST_TREND) if abs(moved) < WIDEST_MISS else 0.0
        return ThresholdController(threshold, trend)

    def state(self) -> Tensor:
        """[3] float64, to keep in a group's memory."""
        return torch.tensor([self.threshold, self.trend, self.was_reestimated], dtype=torch.float64, device="cpu")

    @staticmethod
    def joined(states: Sequence[tuple[Tensor, int]]) -> Tensor:
        """The state of a group made of parts of others: of each its state, and how many elements come from it."""
        total = sum(elements for _, elements in states)
        logs = [math.log(max(float(state[0]), _LEAST)) * elements for state, elements in states]
        trends = [float(state[1]) * elements for state, elements in states]
        return ThresholdController(math.exp(sum(logs) / total), sum(trends) / total).state()

    @staticmethod
    def of(state: Tensor) -> "ThresholdController":
        """What :meth:`state` kept."""
        threshold, trend, was_reestimated = state.tolist()
        return ThresholdController(threshold, trend, bool(was_reestimated))


def _bounded(x: float, limit: float) -> float:
    return min(max(x, -limit), limit)
