"""Chooses the candidate that is expected to be soonest at a loss: seconds of a step, times the steps needed."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_sparse.auto.forecast import Forecast, forecast_of, likely, loss_above
from lightning_sparse.auto.policy import Auto, Candidate
from lightning_sparse.auto.trial import try_on
from lightning_sparse.auto.trials import Trials
from lightning_sparse.compressors import Compressor, Dense
from lightning_sparse.engine.averager import Averager
from lightning_sparse.engine.observers import GradientRecord
from lightning_sparse.fusion.costs import RANKS, GroupCosts
from lightning_sparse.fusion.link import median_over_ranks
from lightning_sparse.fusion.planner import Measured
from lightning_sparse.network.costs import traffic

EXACT, BFLOAT16 = Candidate(Dense()), Candidate(Dense(), "bfloat16")  # what DDP and PyTorch's hook do
STATES = 3  # The weights and Adam's two states, which the way back from local steps sends in float32.


def tried(forecast: Forecast, gradients: Tensor, weights: Tensor) -> Forecast:
    """Return ``forecast`` with what its candidate delivers of ``gradients`` [R, T, m], and after how many steps."""
    found = try_on(forecast.candidate, gradients, weights)
    return replace(forecast, delivered=found.delivered, staleness=found.staleness)


def soonest(forecasts: Sequence[Forecast], at_most: float | None = None) -> list[Forecast]:
    """Return those that are not expected to lose more than ``at_most``, the soonest first; if all are, the best."""
    allowed = [f for f in forecasts if at_most is None or loss_above(f.more_steps) <= at_most]
    return sorted(allowed, key=lambda f: f.seconds) or [min(forecasts, key=lambda f: f.more_steps)]


def _shared(
    averager: Averager, candidates: Sequence[Candidate], forecast: Callable[[Candidate], Forecast]
) -> list[Forecast]:
    """Return the forecast of each candidate, made by one of the ranks; to be called on every rank, with the same."""
    ranks = averager.lanes.everyone
    own = [vars(forecast(candidate)) for candidate in candidates[ranks.rank :: ranks.size]]
    numbers = [{name: x for name, x in each.items() if name != "candidate"} for each in own]
    every = [json.loads(each) for each in averager.lanes.gather_text(json.dumps(numbers))]
    return [Forecast(c, **every[i % ranks.size][i // ranks.size]) for i, c in enumerate(candidates)]


class Chooser:
    """Chooses for an averager: predicts what candidates take, and has those tried that may be soonest.

    Args:
        auto: what to choose from, and how.
        local: whether local steps may be chosen.

    Attributes:
        chosen: of what training goes on with; None until it is chosen.
    """

    def __init__(self, auto: Auto, local: bool) -> None:
        self.chosen: Forecast | None = None
        self._auto, self._candidates = auto, auto.choices
        self._expected: dict[Candidate, Forecast] = {}
        self._trials: Trials | None = None
        if not local:
            self.forbid_local_steps()

    def forbid_local_steps(self, reason: str = "") -> None:
        """Choose among candidates that average gradients from now on; say so once if there is a ``reason``."""
        if reason and any(each.local_steps for each in self._candidates):
            rank_zero_info(f"sparse_auto: local steps are no candidates with {reason}.")
        self._candidates = [each for each in self._candidates if not each.local_steps] or [EXACT]

    def candidate(self, text: str) -> Candidate | None:
        """The candidate that is written like this, if there is one."""
        return next((each for each in self._candidates if str(each) == text), None)

    @property
    def measured(self) -> set[Candidate]:
        """The candidates whose steps were."""
        return self._trials.tried if self._trials else set()

    @property
    def forecasts(self) -> list[Forecast]:
        """What is expected of each candidate by all that is known, the same on every rank."""
        known_s = self._trials.steps_s if self._trials else {}
        return [replace(f, step_s=known_s.get(c, f.step_s)) for c, f in self._expected.items()]

    def start(self, averager: Averager, costs: GroupCosts, given: Compressor) -> tuple[Compressor, float]:
        """Return what to begin with: ``given``, or plain sums where the link takes them sooner; and their seconds.

        To be called on every rank between two steps, before any is measured.
        """
        options = [given, *(each.averaging for each in (EXACT, BFLOAT16) if each in self._candidates)]
        seconds = median_over_ranks(averager, list(map(costs.sums_s, options))).tolist()
        return options[seconds.index(min(seconds))], min(seconds)

    def look(self, averager: Averager, measured: Measured, costs: GroupCosts, record: GradientRecord) -> None:
        """Predict the step of each candidate, and what those that may be soonest do to gradients of all ranks.

        To be called on every rank between two steps, before :meth:`next`.

        Args:
            averager: that averages.
            measured: steps of the training.
            costs: of groups on the link.
            record: of this rank's gradients.
        """
        self.chosen, self._computing_s = None, measured.computing_s
        expected = _shared(averager, self._candidates, partial(forecast_of, measured=measured, costs=costs))
        self._expected = {f.candidate: f for f in expected}
        own, weights = record.gradients(), record.weights()
        rows = averager.lanes.on_first(lambda lane: lane.comm.all_gather(own.flatten().bfloat16()).wait())
        gradients = rows[:RANKS].float().unflatten(1, own.shape)  # of the members, which recorded the same slices
        allowed = [f.candidate for f in soonest(expected, self._auto.at_most)]
        untried = [c for c in allowed if self._expected[c].delivered is None]
        found = _shared(averager, untried, lambda c: tried(self._expected[c], gradients, weights))
        self._expected |= {f.candidate: f for f in found}
        elements = sum(parameter.numel() for parameter in costs.parameters.values())
        back_s = STATES * traffic("all_reduce", 4 * elements, costs.size) * costs.link.s_per_byte
        self._trials = Trials(soonest([self._expected[c] for c in allowed], self._auto.at_most), back_s)

    def next(self) -> Candidate | None:
        """The candidate to train with for a while, the same on every rank; None: training goes on with ``chosen``."""
        assert self._trials is not None
        candidate = self._trials.next()
        if candidate is None:
            best = self._trials.best
            self.chosen = next(f for f in self.forecasts if f.candidate == best)
            self._announce(self.chosen)
        return candidate

    def told(self, candidate: Candidate, step_s: float) -> None:
        """Note what a step of ``candidate``, which trains now, takes; to be called on every rank, with the same."""
        assert self._trials is not None
        self._trials.told(candidate, step_s)

    def _announce(self, best: Forecast) -> None:
        """Say what was chosen, and why."""
        takes_s, least, most = (1e3 * best.step_s * more for more in (best.more_steps, *likely(best.more_steps)))
        rank_zero_info(
            f"sparse_auto: training goes on with {best.candidate}, whose step takes {1e3 * best.step_s:.0f} ms; one "
            f"that sends next to nothing would take {1e3 * min(self._computing_s, best.step_s):.0f} ms."
        )
        rank_zero_info(
            f"sparse_auto: the loss of 1,000 steps of dense training is expected after {1e3 * best.more_steps:,.0f} "
            f"steps, {takes_s:.0f} s ({least:.0f} to {most:.0f}){self._instead(best)}."
        )

    def _instead(self, best: Forecast) -> str:
        """Say what would come next, and what ``at_most`` costs in time, if it does."""
        others = [f for f in soonest(self.forecasts, self._auto.at_most) if f != best and f.delivered is not None]
        free = soonest([f for f in self.forecasts if f.delivered is not None])[0]
        said = f"; with {others[0].candidate} after {1e3 * others[0].seconds:.0f} s" if others else ""
        if free.seconds < best.seconds and free not in others:
            said += f"; without at_most={self._auto.at_most:g} with {free.candidate} after {1e3 * free.seconds:.0f} s"
        return said
