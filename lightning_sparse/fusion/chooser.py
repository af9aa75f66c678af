"""Chooses among candidates: the most faithful of those whose steps are about as short as the shortest."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_sparse.compressors import Auto, Candidate, Compressor, Dense
from lightning_sparse.engine.exchange import Exchange
from lightning_sparse.engine.gradient_record import GradientRecord
from lightning_sparse.fusion.forecast import Forecast, Forecaster
from lightning_sparse.fusion.planner import Measured
from lightning_sparse.fusion.rehearsal import Link
from lightning_sparse.fusion.trial import try_on

EXACT = Candidate(Dense())  # more faithful than all others, so these are not looked at where it hides
TRIED = 2**15  # elements of all ranks together on which candidates are tried


def about_as_short(forecasts: Sequence[Forecast], tolerance: float) -> list[Forecast]:
    """Those whose steps are at most ``tolerance`` longer than the shortest."""
    shortest_s = min(forecast.step_s for forecast in forecasts)
    return [forecast for forecast in forecasts if forecast.step_s <= (1 + tolerance) * shortest_s]


def tried(forecast: Forecast, gradients: Tensor, weights: Tensor) -> Forecast:
    """Return ``forecast`` with what its candidate delivers of ``gradients`` [P, T, m], and how late."""
    found = try_on(forecast.candidate, gradients, weights)
    return replace(forecast, delivered=found.delivered, age=found.age)


def most_faithful(forecasts: Sequence[Forecast]) -> Forecast:
    """The one of which least is undelivered, of equals the first."""
    return min(forecasts, key=lambda forecast: forecast.undelivered)


def _shared(
    exchange: Exchange, candidates: Sequence[Candidate], forecast: Callable[[Candidate], Forecast]
) -> list[Forecast]:
    """Return the forecast of each candidate, made by one of the ranks; to be called on every rank, with the same."""
    if not candidates:
        return []
    own = torch.zeros(len(candidates), Forecast.NUMBERS, dtype=torch.float64, device=exchange.device)
    for i in range(exchange.rank, len(candidates), exchange.size):
        own[i] = torch.tensor(forecast(candidates[i]).numbers())
    every = exchange.ask(lambda comm: comm.all_gather(own)).tolist()  # [P][candidates][NUMBERS]
    return [Forecast.read(candidate, every[i % exchange.size][i]) for i, candidate in enumerate(candidates)]


class Chooser:
    """Chooses for an exchange.

    Args:
        auto: what to choose from, and how.
        parameters: by name, in the order of definition.
        local: whether local steps may be chosen.

    Attributes:
        forecasts: of the last choice, the same on every rank.
        chosen: one of them.
        measured: what they were made of.
    """

    def __init__(self, auto: Auto, parameters: Mapping[str, Tensor], local: bool) -> None:
        self.forecasts: list[Forecast] = []
        self.chosen: Forecast | None = None
        self.measured: tuple[Measured, Link] | None = None
        self._auto, self._parameters = auto, parameters
        self._local_factor = 1.0  # by which local steps were longer than expected
        self._candidates = [c for c in auto.candidates if isinstance(c, Candidate) and (local or not c.local_steps)]

    def record(self, exchange: Exchange) -> None:
        """Record gradients from the next step on, for :meth:`choose`."""
        exchange.record = GradientRecord(exchange.groups, TRIED // exchange.size)

    def exclude(self, candidate: Candidate) -> None:
        """Do not choose ``candidate`` any more: its steps were longer than those before."""
        self._candidates = [each for each in self._candidates if each != candidate] or self._candidates

    def candidate(self, text: str) -> Candidate | None:
        """The candidate that is written like this, if there is one."""
        return next((each for each in self._candidates if str(each) == text), None)

    def worthwhile_s(self) -> float:
        """Seconds that a step of the chosen candidate may take, or a more faithful one would be about as short."""
        assert self.chosen is not None
        better = [f.step_s for f in self.forecasts if f.undelivered < self.chosen.undelivered]
        return min(better, default=math.inf) / (1 + self._auto.tolerance)

    def choose_again(self, step_s: float) -> Candidate:
        """Return what is to be chosen where the chosen local steps take ``step_s`` seconds, not what was expected."""
        assert self.chosen is not None
        factor = step_s / self.chosen.step_s
        self._local_factor *= factor
        self.forecasts = [f.corrected(factor) for f in self.forecasts]
        return self._take_best()

    def _take_best(self) -> Candidate:
        short = about_as_short(self.forecasts, self._auto.tolerance)
        best = self.chosen = most_faithful(short)
        rank_zero_info(
            f"sparse_auto: training goes on with {best.candidate}, whose step is expected to take "
            f"{1e3 * best.step_s:.0f} ms. Steps of {len(short)} of {len(self.forecasts)} candidates are about as short "
            f"as the shortest, and of these it is the most faithful: each step delivers {best.delivered or 0:.0%} of "
            f"what is owed, {best.age or 0:.1f} steps late."
        )
        return best.candidate

    def choose(self, exchange: Exchange, measured: Measured, link: Link, at_work: Compressor) -> Candidate:
        """Return the same candidate on every rank; to be called on every rank between two steps."""
        record, exchange.record = exchange.record, None
        assert record is not None
        forecaster = Forecaster(self._parameters, measured, link, exchange.size, at_work)
        candidates = self._candidates
        forecasts = _shared(exchange, candidates[:1], forecaster.forecast)
        if candidates[0] != EXACT or forecasts[0].step_s > (1 + self._auto.tolerance) * forecaster.computing_s:
            forecasts += _shared(exchange, candidates[1:], forecaster.forecast)
        gradients, weights = exchange.ask(lambda comm: comm.all_gather(record.gradients())), record.weights()
        expected = {f.candidate: f.corrected(self._local_factor) for f in forecasts}
        short = about_as_short(list(expected.values()), self._auto.tolerance)
        worth_trying = [c for c, f in expected.items() if f in short or isinstance(c.compressor, Dense)]
        found = _shared(exchange, worth_trying, lambda c: tried(expected[c], gradients, weights))
        self.forecasts = list((expected | {f.candidate: f for f in found}).values())
        self.measured = measured, link
        return self._take_best()
