"""What is known of each candidate, which to try next, and when to stop: the knowledge gradient, without a tensor.

Of each candidate the logarithm of the seconds to a loss is believed to be normally distributed, around its forecast at
first.  All forecasts are off by something common, so that the steps of one candidate tell of the others.  The candidate
to try next is the one whose trial is expected to gain most, over the time that is left, beyond what it costs; where
none gains, the best is taken.  Frazier, Powell and Dayanik, The knowledge-gradient policy for correlated normal
beliefs, 2009.  A trial is taken to tell a step exactly, so that no candidate is tried twice.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean

from lightning_sparse.auto.forecast import Forecast
from lightning_sparse.auto.policy import Candidate
from lightning_sparse.local_steps.second_moments import EARLY

TIMED = 10  # Steps of a trial, or more until every weight has travelled, whose mean is what a step takes.
TAKING_OVER = 2  # Steps after a change of sums: one sends what was not sent before, or finds thresholds.
SETTLING = 5  # Local steps until any is timed, once ranks compare second moments no longer in each of them.
# What these three are good for is in docs/benchmarks/2026-11-29-regret.md.
LASTS_S = 300.0  # Seconds of training within which a trial must gain what it costs.
COMMON, OWN = 0.1, 0.05  # Standard deviations of log(step / forecast): of all candidates, and of each beside it.
POINTS = [NormalDist().inv_cdf((i + 0.5) / 15) for i in range(15)]  # of a standard normal, equally likely


class Trials:
    """Trials of candidates in a training, the same on every rank that notes the same.

    Args:
        forecasts: of the candidates that may be taken, one or more.
        back_s: seconds that the way back from local steps takes; gradients are averaged at first.

    Attributes:
        tried: the candidates whose steps were measured.
    """

    def __init__(self, forecasts: Sequence[Forecast], back_s: float) -> None:
        n = range(len(forecasts))
        self._more = {f.candidate: f.more_steps for f in forecasts}
        self._candidates = list(self._more)
        self._mean = [math.log(f.seconds) for f in forecasts]
        self._covariance = [[COMMON**2 + OWN**2 * (i == j) for j in n] for i in n]
        self._back_s, self._is_local = back_s, False
        self.tried: set[Candidate] = set()

    @property
    def steps_s(self) -> dict[Candidate, float]:
        """The seconds of a step of each candidate, by all that is known."""
        return {c: math.exp(x) / self._more[c] for c, x in zip(self._candidates, self._mean, strict=True)}

    @property
    def best(self) -> Candidate:
        """What to go on with: the soonest, the way to it included."""
        after = self._after(self._is_local)
        return self._candidates[after.index(min(after))]

    def next(self) -> Candidate | None:
        """The candidate to try; None: no trial is expected to gain, so that the best is taken, which was tried."""
        gains = {c: self._gain(i) for i, c in enumerate(self._candidates) if c not in self.tried}
        if gains and max(gains.values()) > 0:
            return max(gains, key=lambda c: gains[c])
        return None if self.best in self.tried else self.best

    def note(self, candidate: Candidate, step_s: float) -> None:
        """Learn that a step of ``candidate``, which trains now, takes ``step_s`` seconds; nothing if nobody knows."""
        self._is_local = candidate.local_steps > 0
        self.tried.add(candidate)
        i = self._candidates.index(candidate)
        row = self._covariance[i]
        if 0 < step_s < math.inf:
            off = (math.log(step_s * self._more[candidate]) - self._mean[i]) / row[i]
            self._mean = [mean + x * off for mean, x in zip(self._mean, row, strict=True)]
        self._covariance = [
            [x - a * b / row[i] for x, b in zip(line, row, strict=True)]
            for line, a in zip(self._covariance, row, strict=True)
        ]

    def _after(self, is_local: bool) -> list[float]:
        """Logarithms of seconds to a loss of each, if one goes on from local steps or from averaged gradients."""
        way = self._back_s / LASTS_S if is_local else 0.0
        return [mean + way * (not c.local_steps) for mean, c in zip(self._mean, self._candidates, strict=True)]

    def _gain(self, i: int) -> float:
        """The part of the time that is left that a trial of candidate ``i`` is expected to gain."""
        candidate, row = self._candidates[i], self._covariance[i]
        now, after = self._after(self._is_local), self._after(candidate.local_steps > 0)
        least = fmean(min(x + z * y / math.sqrt(row[i]) for x, y in zip(after, row, strict=True)) for z in POINTS)
        steps = TIMED + (EARLY + SETTLING if candidate.local_steps else TAKING_OVER)
        later = steps * max(1 - math.exp(min(now) - self._mean[i]), 0.0) + 1  # steps, one of them for the change
        costs_s = later * math.exp(self._mean[i]) / self._more[candidate]
        return min(now) - least - costs_s / LASTS_S - (now[i] - self._mean[i])
