"""Chooses the candidate that is expected to be soonest at a loss: seconds of a step, times the steps needed."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from lightning_utilities.core.rank_zero import rank_zero_debug, rank_zero_info
from torch import Tensor

from lightning_sparse.auto.forecast import Forecast, forecast_of, loss_above, sample, steps_alone
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


def is_within(forecast: Forecast, at_most: float | None) -> bool:
    """Whether the loss after as many steps is not expected more than this part above dense training's."""
    return at_most is None or loss_above(forecast.more_steps) <= at_most


def soonest(forecasts: Sequence[Forecast], at_most: float | None = None) -> list[Forecast]:
    """Return those that are not expected to lose more than ``at_most``, the soonest first; if all are, the best."""
    allowed = [f for f in forecasts if is_within(f, at_most)]
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
        alone: seconds of a step of one member alone, and how many times as many it needs to the same loss.
    """

    def __init__(self, auto: Auto, local: bool) -> None:
        self.chosen: Forecast | None = None
        self.alone = 0.0, 1.0
        self._auto, self._candidates = auto, auto.choices
        self._expected: dict[Candidate, Forecast] = {}
        self._trials: Trials | None = None
        if not local:
            self.forbid_local_steps()

    def forbid_local_steps(self, reason: str = "") -> None:
        """Choose among candidates that average gradients from now on; say so once if there is a ``reason``."""
        if reason and any(each.local_steps for each in self._candidates):
            rank_zero_info(f"lightning_sparse: local steps are no candidates of sparse_auto with {reason}.")
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
        self.chosen = None
        for candidate in self._candidates:  # on every rank at once, as in a step, in which all compress
            sample(candidate, costs)
        costs.agree(partial(median_over_ranks, averager))
        expected = _shared(averager, self._candidates, partial(forecast_of, measured=measured, costs=costs))
        self._expected = {f.candidate: f for f in expected}
        own, weights = record.gradients(), record.weights()
        rows = averager.lanes.on_first(lambda lane: lane.comm.all_gather(own.flatten().bfloat16()).wait())
        gradients = rows[:RANKS].float().unflatten(1, own.shape)  # of the members, which recorded the same slices
        elements = sum(parameter.numel() for parameter in costs.parameters.values())
        self.alone = measured.computing_s + costs.inside.seconds(elements), steps_alone(gradients, costs.size)
        allowed = [f.candidate for f in soonest(expected, self._auto.at_most)]
        untried = [c for c in allowed if self._expected[c].delivered is None]
        found = _shared(averager, untried, lambda c: tried(self._expected[c], gradients, weights))
        self._expected |= {f.candidate: f for f in found}
        back_s = STATES * traffic("all_reduce", 4 * elements, costs.size) * costs.link.s_per_byte
        for each in self._expected.values():
            rank_zero_debug(f"lightning_sparse: expected of {each.candidate}: {1e3 * each.step_s:.1f} ms a step.")
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

    def note(self, candidate: Candidate, step_s: float) -> None:
        """Note what a step of ``candidate``, which trains now, takes; to be called on every rank, with the same."""
        assert self._trials is not None
        rank_zero_debug(f"lightning_sparse: tried {candidate}: {1e3 * step_s:.1f} ms a step.")
        self._trials.note(candidate, step_s)

    def _announce(self, best: Forecast) -> None:
        """Say what was chosen, and why."""
        alone_s = min(self.alone[0], best.step_s)
        rank_zero_info(
            f"lightning_sparse: sparse_auto goes on with {best.candidate}. A step takes {1e3 * best.step_s:.0f} ms, "
            f"and would take {1e3 * alone_s:.0f} ms if it sent nothing."
        )
        within = is_within(best, self._auto.at_most)
        nearest = f"No candidate is expected to stay within at_most={self._auto.at_most}; this one comes nearest."
        rank_zero_info(f"lightning_sparse: {self._why(best) + self._left_out(best) if within else nearest}")

    def _why(self, best: Forecast) -> str:
        """Compare with float32 sums, or where these are the best with what would come next."""
        of = {f.candidate: f for f in self.forecasts}
        others = [f for f in soonest(self.forecasts, self._auto.at_most) if f != best]
        exact = of.get(EXACT)
        if exact is None or exact == best:
            parts = ["These are the sums of ddp"] * bool(exact) + [_beside(each, best) for each in others[:1]]
            return f"{'; '.join(parts) or 'There is nothing else to choose'}."
        return (
            f"It is expected to need {1e3 * best.more_steps:,.0f} steps for the loss that ddp has after 1,000; "
            f"{_beside(exact, best)}."
        )

    def _left_out(self, best: Forecast) -> str:
        """Name what would be sooner, if ``at_most`` leaves it out."""
        free = soonest(self.forecasts)[0]
        if not free.seconds < best.seconds or is_within(free, self._auto.at_most):
            return ""
        return (
            f" Left out, since its loss after as many steps is expected {loss_above(free.more_steps):.1%} above ddp's: "
            f"{_beside(free, best)}."
        )


def _beside(other: Forecast, best: Forecast) -> str:
    part = other.seconds / best.seconds - 1
    return f"{other.candidate} would take {abs(part):.0%} {'longer' if part > 0 else 'less'}"
