"""Chooses among candidates the one that is expected to be soonest at a loss: seconds a step, times steps."""

import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from statistics import mean

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_sparse.auto.forecast import Forecast, forecast_of, likely, loss_above
from lightning_sparse.auto.policy import Auto, Candidate
from lightning_sparse.auto.trial import try_on
from lightning_sparse.compressors import Compressor, Dense
from lightning_sparse.engine.averager import Averager
from lightning_sparse.engine.observers import GradientRecord
from lightning_sparse.fusion.costs import RANKS, GroupCosts
from lightning_sparse.fusion.link import median_over_ranks
from lightning_sparse.fusion.planner import Measured
from lightning_sparse.settings import same

EXACT = Candidate(Dense())  # It has no error, so that others need not be looked at where its messages cost nothing.
NOISE = 0.05  # Part by which the seconds of two candidates must differ to tell which is sooner.
EVEN = 0.04  # As ``NOISE``, once they were measured in turn: float32 is taken, which rounds nothing.
DOUBT = 0.1  # As ``NOISE``, where the soonest is only expected to be so.
BFLOAT16 = Candidate(Dense(), "bfloat16")
PLAIN = (EXACT, BFLOAT16)  # What DDP and PyTorch's hook do: nobody wants to be slower.
DOUBT_OF_PLAIN = 0.25  # As ``DOUBT``, for these to be tried.
FAR = 0.25  # As ``DOUBT``, of the first local steps, which take longer than later ones.
WAY_BACK = 1.25  # Times as long local steps must take as sums not measured so far: to go back sends weights and states.
MOST_TRIED = 5  # Candidates whose steps are measured; then one of these is taken.
FINALISTS = 3  # Of which at most are measured in turn.


def tried(forecast: Forecast, gradients: Tensor, weights: Tensor) -> Forecast:
    """Return ``forecast`` with what its candidate delivers of ``gradients`` [R, T, m], and after how many steps."""
    found = try_on(forecast.candidate, gradients, weights)
    return replace(forecast, delivered=found.delivered, staleness=found.staleness)


def soonest(
    forecasts: Sequence[Forecast], at_most: float | None = None, measured: Collection[Candidate] = ()
) -> Forecast:
    """Return which is expected to be soonest at a loss.

    Noise does not tell some apart: then it is the one that loses least, to a percent.  Plain sums are tried first where
    they may be soonest, and left only for what is sooner by far.  The first local steps to be tried are those that
    send the fewest weights, since nobody knows well what sending takes of a processor.  To go on from them to others
    takes no message.

    Args:
        forecasts: at least one.
        at_most: as of :class:`Auto`; where none loses so little, that which loses least.
        measured: candidates whose steps were, which take precedence within noise.
    """
    allowed = [f for f in forecasts if _is_allowed(f, at_most)] or [min(forecasts, key=lambda f: f.more_steps)]
    first = min(allowed, key=lambda f: f.seconds)
    doubt = NOISE if first.candidate in measured else DOUBT
    close = [f for f in allowed if f.seconds <= (1 + (DOUBT if f.candidate in PLAIN else doubt)) * first.seconds]
    near = [f for f in allowed if f.candidate in PLAIN and f.seconds <= (1 + DOUBT_OF_PLAIN) * first.seconds]
    near += [f for f in close if f.candidate.local_steps and any(other.local_steps for other in measured)]
    if untried := [f for f in near if f.candidate not in measured]:
        return min(untried, key=lambda f: f.seconds)
    known = [f for f in close if f.candidate in measured]
    best = min(known or close, key=lambda f: (round(f.more_steps, 2), f.seconds))
    if known or not best.candidate.local_steps:
        return best
    return min(close, key=lambda f: (-f.candidate.local_steps, f.seconds))


def _is_allowed(forecast: Forecast, at_most: float | None) -> bool:
    return at_most is None or loss_above(forecast.more_steps) <= at_most


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
    """Chooses for an averager, tries what it chose, and chooses again where its steps are longer than expected.

    Args:
        auto: what to choose from, and how.
        local: whether local steps may be chosen.

    Attributes:
        forecasts: of the candidates that were looked at, corrected by measured steps, the same on every rank.
        chosen: one of them.
    """

    def __init__(self, auto: Auto, local: bool) -> None:
        self.forecasts: list[Forecast] = []
        self.chosen: Forecast | None = None
        self._auto = auto
        self._looks: dict[Candidate, list[float]] = {}  # seconds of steps, for each time that they were measured
        self._candidates = auto.choices
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
    def measured(self) -> dict[Candidate, float]:
        """The seconds of a step of what was measured."""
        return {candidate: mean(looks) for candidate, looks in self._looks.items()}

    @property
    def is_settled(self) -> bool:
        """Whether the steps of what was chosen have been measured, so that training goes on with it."""
        return self.chosen is not None and self.chosen.candidate in self.measured

    def longest_s(self, doubt: float) -> float:
        """Seconds of a step of what was chosen, above which another that was measured is sooner by over ``doubt``."""
        known_s = min((f.seconds for f in self._eligible), default=math.inf)
        return (1 + doubt) * known_s / (self.chosen.more_steps if self.chosen else 1.0)

    def finalists(self, doubt: float) -> list[Candidate]:
        """Measured sums of gradients: the soonest, and those later by a part of ``doubt``; ``DOUBT`` if not plain."""
        sums = sorted((f for f in self._eligible if not f.candidate.local_steps), key=lambda f: f.seconds)
        later = [(f.candidate, f.seconds / sums[0].seconds - 1) for f in sums]
        return [c for c, part in later if part <= (doubt if c in PLAIN else min(doubt, DOUBT))][:FINALISTS]

    def see(self, candidate: Candidate, step_s: float) -> None:
        """Note that so many more steps of ``candidate`` took ``step_s`` seconds each, where that is known."""
        if 0.0 < step_s < math.inf:
            self._looks.setdefault(candidate, []).append(step_s)
            self._correct(candidate)

    def take_soonest(self) -> Candidate:
        """Choose the soonest of the measured sums, or float32 where that is hardly later."""
        best = EXACT if EXACT in (even := self.finalists(EVEN)) else even[0]
        return self._announced(next(f for f in self.forecasts if f.candidate == best))

    @property
    def _known(self) -> list[Forecast]:
        """Those of candidates whose steps were measured."""
        return [f for f in self.forecasts if f.candidate in self._looks]

    @property
    def _within_reach(self) -> list[Forecast]:
        """All but sums that would hardly make up for the way back from measured local steps."""
        known, is_local = self._known, self.chosen is not None and self.chosen.candidate.local_steps > 0
        now_s = min((f.seconds for f in known if is_local and f.candidate.local_steps), default=math.inf)
        of_known = {f.candidate: 0.0 if f.candidate in PLAIN else 1 + NOISE for f in known}  # plain sums are not left
        longer = {f: of_known.get(f.candidate, WAY_BACK) for f in self.forecasts}
        return [f for f in self.forecasts if f.candidate.local_steps or longer[f] * f.seconds <= now_s]

    @property
    def _eligible(self) -> list[Forecast]:
        """Those of them that lose no more than is allowed, and what was chosen."""
        chosen, at_most = [self.chosen.candidate] if self.chosen else [], self._auto.at_most
        return [f for f in self._known if f.candidate in chosen or _is_allowed(f, at_most)]

    def start(self, averager: Averager, costs: GroupCosts, given: Compressor) -> tuple[Compressor, float]:
        """Return what to begin with: ``given``, or plain sums where the link takes them sooner; and their seconds.

        To be called on every rank between two steps, before any is measured.
        """
        options = [given, *(each.averaging for each in PLAIN if each in self._candidates)]
        seconds = median_over_ranks(averager, list(map(costs.sums_s, options))).tolist()
        return options[seconds.index(min(seconds))], min(seconds)

    def choose(
        self,
        averager: Averager,
        measured: Measured,
        costs: GroupCosts,
        at_work: Compressor | None,
        record: GradientRecord,
    ) -> Candidate:
        """Return the same candidate on every rank, for :meth:`note`; to be called on every rank between two steps.

        Args:
            averager: that averages.
            measured: steps with ``at_work``.
            costs: of groups on the link.
            at_work: what averaged; None where these steps are too few to be those of a candidate.
            record: of this rank's gradients.
        """
        self._record, self._has_looked = record, False  # at all candidates
        self.forecasts, self._computing_s = [], measured.computing_s
        self._forecast_of = partial(forecast_of, measured=measured, costs=costs)
        # Little lies between plain sums, of which these few steps tell too little.
        known = [c for c in self._candidates if c not in PLAIN and not c.local_steps and same(c.averaging, at_work)]
        self._looks = {candidate: [measured.span_s + measured.rest_s] for candidate in known}
        if EXACT in self._candidates and costs.in_place(EXACT.averaging):
            self.forecasts = [self._forecast_of(EXACT)]
        return self._take_best(averager)

    def note(self, averager: Averager, step_s: float) -> Candidate:
        """Return what to go on with, now that a step of what was chosen has taken ``step_s`` seconds.

        To be called on every rank between two steps, with the same.
        """
        assert self.chosen is not None
        chosen = self.chosen.candidate
        if chosen in self._looks:
            return chosen
        self.see(chosen, step_s)
        return self._take_best(averager) if chosen in self._looks else chosen

    def _look(self, averager: Averager) -> None:
        """Predict the step of each candidate, and gather gradients of all ranks."""
        self._has_looked, own = True, self._record.gradients()
        rows = averager.lanes.on_first(lambda lane: lane.comm.all_gather(own.flatten().bfloat16()).wait())
        of_each = rows[:RANKS].float()  # of the members, which have recorded the same slices
        self._gradients, self._weights = of_each.unflatten(1, own.shape), self._record.weights()
        self.forecasts = _shared(averager, self._candidates, self._forecast_of)
        for candidate in self._looks:
            self._correct(candidate)

    def _try(self, averager: Averager, untried: Sequence[Forecast]) -> None:
        """Try on gradients, on each rank one, those that may be soonest."""
        candidates = [f.candidate for f in sorted(untried, key=lambda f: f.seconds)[: averager.lanes.everyone.size]]
        expected = {f.candidate: f for f in self.forecasts}
        found = _shared(averager, candidates, lambda c: tried(expected[c], self._gradients, self._weights))
        self.forecasts = list((expected | {f.candidate: f for f in found}).values())

    def _is_hidden(self, forecast: Forecast) -> bool:
        """Whether no candidate can be sooner by so much that it is taken: a step that sends nothing takes as long."""
        return forecast.seconds <= (1 + (DOUBT if forecast.candidate in PLAIN else NOISE)) * self._computing_s

    def _correct(self, measured: Candidate) -> None:
        """Expect of ``measured`` the step that it took, and of others of its kind accordingly.

        Sums of gradients are corrected by one factor; plain sums, which code nothing, by a factor of their own, and so
        every kind of which none was measured.  Local steps that took longer than expected pass the delay on to other
        local steps: where the network is the limit, in proportion to the bytes they send, at most all of it; else one
        half of it whole, and the other in proportion to the weights they exchange.
        """
        kinds = {_kind(each) for each in self._looks}
        step_s, expected = self.measured[measured], next(f for f in self.forecasts if f.candidate == measured)

        def corrected(f: Forecast) -> Forecast:
            if f.candidate == measured:
                return replace(f, step_s=step_s)
            is_alike = _kind(f.candidate) == _kind(measured)
            is_of_all = measured in PLAIN or (measured.local_steps and expected.limit == "backward")
            if f.candidate in self._looks or not (is_alike or (is_of_all and _kind(f.candidate) not in kinds)):
                return f
            if not measured.local_steps:
                return replace(f, step_s=f.step_s * step_s / expected.step_s)
            weights = measured.local_steps / (f.candidate.local_steps or math.inf)  # exchanged in a step, of as many
            most = 1.0 if step_s > expected.step_s else math.inf  # latency may have taken longer, whatever the bytes
            share = min(f.sent_bytes / expected.sent_bytes, most) if expected.limit == "network" else (1 + weights) / 2
            return replace(f, step_s=max(f.step_s + share * (step_s - expected.step_s), self._computing_s))

        self.forecasts = [corrected(f) for f in self.forecasts]

    def _take_best(self, averager: Averager) -> Candidate:
        """Choose by what is known, after a look at all if another might be sooner; of many measured, one of these."""
        while True:
            among = [f for f in self._within_reach if len(self._known) < MOST_TRIED or f in self._known]
            best = soonest(among, self._auto.at_most, self.measured) if among else None
            if best and best.delivered is None:
                self._try(averager, [f for f in among if f.delivered is None])
            elif best and (self._has_looked or self._is_hidden(best)):
                return self._announced(best)
            else:
                self._look(averager)

    def _announced(self, best: Forecast) -> Candidate:
        """Choose ``best``."""
        self.chosen = best
        takes = "takes" if best.candidate in self.measured else "is expected to take"
        computing_s = min(self._computing_s, best.step_s)
        least, most = (1e3 * best.step_s * more for more in likely(best.more_steps))
        rank_zero_info(
            f"sparse_auto: training goes on with {best.candidate}, whose step {takes} {1e3 * best.step_s:.0f} ms; one "
            f"that sends next to nothing would take {1e3 * computing_s:.0f} ms. The loss of 1,000 "
            f"steps of dense training is expected after {1e3 * best.more_steps:,.0f} steps, {1e3 * best.seconds:.0f} s "
            f"({least:.0f} to {most:.0f}).{self._cost_of_limit(best)}"
        )
        return best.candidate

    def _cost_of_limit(self, best: Forecast) -> str:
        """Say what ``at_most`` costs in time, if it does."""
        free = soonest(self._within_reach, measured=self.measured)
        if free.candidate == best.candidate or _is_allowed(free, self._auto.at_most):
            return ""
        return f" Without at_most={self._auto.at_most:g} {free.candidate} might take {1e3 * free.seconds:.0f} s."


def _kind(candidate: Candidate) -> tuple[bool, bool, type]:
    """What is wrong with the forecast of one is wrong with that of others of this kind."""
    return bool(candidate.local_steps), candidate in PLAIN, type(candidate.compressor)
