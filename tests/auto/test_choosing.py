"""How sparse_auto chooses: predicted steps, candidates tried on gradients, and which is taken."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.auto import between_steps
from lightning_sparse.auto import chooser as chooser_module
from lightning_sparse.auto.chooser import Chooser, soonest
from lightning_sparse.auto.forecast import Forecast, forecast_of, likely, loss_above, more_steps
from lightning_sparse.auto.policy import CANDIDATES
from lightning_sparse.auto.trial import try_on
from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.observers import RUN, STEPS, GradientRecord
from lightning_sparse.fusion import costs as costs_module
from lightning_sparse.fusion.costs import GroupCosts
from lightning_sparse.fusion.planner import Measured
from lightning_sparse.fusion.steps import BetweenSteps, Times
from lightning_sparse.network.comm import Comm, Pending
from lightning_sparse.network.costs import Inside, Link
from lightning_sparse.network.simulated import SimNetwork
from tests.support.ticking import ticking

DENSE = ls.Candidate(ls.Dense())
SELECTING = [
    ls.Candidate(each, "int4") for each in (ls.OkTopk(density=0.3), ls.MiCRO(density=0.3), ls.MiCRO(density=0.05))
]
LAYERS = {"a": torch.empty(1024, 64), "b": torch.empty(1024, 512)}
MEASURED = Measured([0.01, 0.02], span_s=0.05, rest_s=0.01, groups=[["b", "a"]])
COSTS = GroupCosts(LAYERS, Link(0.001, 1e-9, 0.002), 4)


@pytest.fixture
def gradients() -> Tensor:
    """Of 4 ranks in 6 steps, 2,000 elements of scales from 0.01 to 1: noise that is twice what the ranks agree on."""
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(1, 1, 2000, generator=generator)
    noise = 2 * torch.randn(4, 6, 2000, generator=generator)
    return (shared + noise) * torch.logspace(-2, 0, 2000)


def test_dense_sums_deliver_everything_at_once(gradients: Tensor) -> None:
    found = try_on(DENSE, gradients, torch.zeros(2000))
    assert (found.delivered, found.staleness) == (1.0, 0.0)


def test_what_sends_more_delivers_more_and_sooner(gradients: Tensor) -> None:
    orders: list[list[ls.Candidate]] = [
        [ls.Candidate(ls.Dense(), each) for each in ("float32", "bfloat16", "int8", "int4", "sign")],
        [ls.Candidate(ls.MiCRO(density=each), "int4") for each in (0.3, 0.1, 0.05, 0.01)],
        [ls.Candidate(ls.Dense(), "int4", each) for each in (2, 4, 16)],
    ]
    for order in orders:
        found = [try_on(candidate, gradients, torch.zeros(2000)) for candidate in order]
        assert [f.delivered for f in found] == sorted((f.delivered for f in found), reverse=True)
        assert [f.staleness for f in found] == sorted(f.staleness for f in found)


def test_every_candidate_can_be_tried_and_what_it_keeps_is_bounded(gradients: Tensor) -> None:
    for candidate in (*CANDIDATES, *SELECTING):
        found = try_on(candidate, gradients, torch.zeros(2000))
        assert 0 < found.delivered <= 1, candidate
        assert 0 <= found.staleness < 50, candidate


def costs_on(link: Link, layers: dict[str, Tensor] = LAYERS) -> GroupCosts:
    return GroupCosts(layers, link, 4, now=ticking())


def test_local_steps_hide_what_they_send_beside_the_next_step() -> None:
    # 8 Gbit/s and 1 Mbit/s
    fast, slow = (partial(forecast_of, measured=MEASURED, costs=costs_on(Link(0.0001, s))) for s in (1e-9, 8e-6))
    local = ls.Candidate(ls.Dense(), "int4", local_steps=2)
    assert MEASURED.computing_s == pytest.approx(0.03)
    assert fast(local).step_s < 0.04
    bound = slow(local)
    assert bound.step_s == pytest.approx(8e-6 * bound.sent_bytes, rel=0.1)  # no longer hidden
    assert bound.limit == "network"
    assert bound.sent_bytes == pytest.approx(0.5 * slow(ls.Candidate(ls.Dense(), "int4")).sent_bytes, rel=0.02)


@pytest.mark.parametrize("local_steps", [0, 2])
def test_ranks_of_a_member_send_a_slice_each_and_average_among_themselves(local_steps: int) -> None:
    candidate, link = ls.Candidate(ls.Dense(), "int4", local_steps), Link(0.0001, 8e-7)  # 10 Mbit/s

    def found(inside: Inside) -> tuple[Forecast, float]:
        costs = GroupCosts(LAYERS, link, 2, now=ticking(), inside=inside)
        return forecast_of(candidate, MEASURED, costs), costs.of_groups(candidate.averaging, 2**18).many.latency_s

    (alone, _), (free, free_s), (dear, dear_s) = (found(x) for x in (Inside(), Inside(4), Inside(4, 0.001, 1e-6)))
    assert free.sent_bytes == pytest.approx(alone.sent_bytes / 4, rel=0.02)
    assert alone.step_s > 2 * free.step_s  # what is sent takes the time
    assert dear_s - free_s == pytest.approx(0.001 + 1e-6 * 2**18)
    assert dear.step_s > free.step_s + 0.5  # a microsecond for each of 589,824 elements


def test_float32_in_several_buckets_takes_the_time_of_its_bytes() -> None:
    layers = {str(i): torch.empty(1024, 1024) for i in range(20)}  # 80 MiB
    measured = Measured([0.01] * 20, span_s=0.05, rest_s=0.01, groups=[list(layers)])
    found = forecast_of(DENSE, measured, costs_on(Link(0.0001, 8e-8), layers))  # 100 Mbit/s
    assert found.step_s == pytest.approx(8e-8 * 2 * 3 / 4 * 80 * 2**20, rel=0.1)


@pytest.mark.parametrize("now_s", [float("nan"), 5.0, float("inf")])
@pytest.mark.parametrize("candidate", [ls.Candidate(ls.Dense(), "int4"), ls.Candidate(ls.Dense(), "int4", 2)], ids=str)
def test_a_clock_that_stands_still_leaves_a_forecast_of_the_network(candidate: ls.Candidate, now_s: float) -> None:
    costs = GroupCosts(LAYERS, Link(0.001, 1e-8), 4, now=lambda: now_s)
    assert math.isfinite(forecast_of(candidate, MEASURED, costs).step_s)


@pytest.mark.parametrize("candidate", [*CANDIDATES[:4], *SELECTING[:2]], ids=str)
def test_few_ranks_stand_for_many(candidate: ls.Candidate, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = GroupCosts(LAYERS, Link(1e-6, 1e-9), 16, now=ticking())
    few = costs.simulated(candidate.averaging, 2**15)
    monkeypatch.setattr(costs_module, "RANKS", 16)
    many = costs.simulated(candidate.averaging, 2**15)
    assert few.sent_bytes == pytest.approx(
        many.sent_bytes, rel=0.02 if isinstance(candidate.compressor, ls.Dense) else 0.5
    )


def expected(step_s: float, delivered: float | None = None) -> Forecast:
    return Forecast(DENSE, step_s, step_s, 1.0, "network", 4, delivered, None if delivered is None else 1 - delivered)


def test_what_is_soonest_at_a_loss_is_taken_and_within_noise_what_loses_least() -> None:
    exact = expected(1.0, 1.0)
    int4, some, few = (replace(expected(*each), candidate=TOPK) for each in ((0.5, 0.97), (0.52, 0.9), (0.49, 0.2)))
    assert int4.seconds < some.seconds < exact.seconds < few.seconds  # though its steps are the shortest
    assert soonest([exact, int4, some, few]) is int4
    assert soonest([exact, some, few]) is some
    assert soonest([exact, some, few], at_most=0.02) is exact
    assert soonest([some, few], at_most=0.02) is some  # which is the least that can be had
    near = replace(int4, step_s=0.485, delivered=0.96)
    assert near.seconds < int4.seconds
    assert soonest([near, int4]) is int4  # noise does not tell them apart


def test_within_noise_what_was_measured_is_taken() -> None:
    hoped, known = replace(expected(0.50, 0.97), candidate=TOPK), replace(expected(0.51, 0.96), candidate=INT4)
    assert soonest([hoped, known]) is hoped
    assert soonest([hoped, known], measured=[INT4]) is known
    assert soonest([hoped, replace(known, step_s=0.6)], measured=[INT4]) is hoped


def test_plain_ddp_is_tried_where_it_may_be_soonest() -> None:
    exact, known = expected(0.6, 1.0), replace(expected(0.50, 0.98), candidate=INT4)
    assert soonest([exact, known], measured=[INT4]) is exact
    assert soonest([exact, known], measured=[INT4, DENSE]) is known
    assert soonest([replace(exact, step_s=0.65), known], measured=[INT4]) is known
    near = replace(exact, step_s=0.52)
    assert soonest([near, known], measured=[INT4, DENSE]) is near


def test_sums_in_bfloat16_are_tried_where_they_may_be_soonest() -> None:
    known = replace(expected(0.50, 0.98), candidate=INT4)
    rounded = replace(expected(0.54, 1.0), candidate=ls.Candidate(ls.Dense(), "bfloat16"))
    assert soonest([rounded, known], measured=[INT4]) is rounded
    assert soonest([rounded, known], measured=[INT4, rounded.candidate]) is rounded
    slow = replace(rounded, step_s=0.6)
    assert soonest([slow, known], measured=[INT4]) is slow
    assert soonest([slow, known], measured=[INT4, slow.candidate]) is known
    assert soonest([expected(0.6, 1.0), rounded, known], measured=[INT4]) is rounded  # whichever is the sooner
    assert soonest([expected(0.53, 1.0), rounded, known], measured=[INT4]).candidate == DENSE
    assert soonest([expected(0.60, 1.0), rounded], measured=[DENSE, rounded.candidate]) is rounded


@pytest.mark.parametrize("local", [False, True])
def test_what_is_late_needs_more_steps_and_loses_more(local: bool) -> None:
    of_less = [more_steps(1 - late / 10, 3.0 * late, 4, late if local else 0) for late in range(10)]
    assert of_less[0] == 1
    assert of_less == sorted(set(of_less))
    assert [loss_above(more) for more in of_less] == sorted({loss_above(more) for more in of_less})
    for more in of_less[1:]:
        least, most = likely(more)
        assert 1 < least < more < most
    assert more_steps(0.5, 5.0, 8, 2) > more_steps(0.5, 5.0, 4, 2)  # a rank's own steps are fewer of all


def test_local_steps_are_counted_on_all_ranks_until_these_know_of_each_other() -> None:
    """Few of them cost hardly any steps, though never none."""
    assert 1 < more_steps(0.5, 0.0, 4, 1) == more_steps(0.5, 2.0, 4, 2) == more_steps(0.5, 1.0, 8, 1) < 1.03
    assert more_steps(0.5, 0.0, 4, 4) == more_steps(0.5, 4.0, 4, 2) == more_steps(0.5, 0.0, 16, 1)
    assert more_steps(0.5, 0.0, 4, 4) / more_steps(0.5, 0.0, 4, 2) == pytest.approx(1.087, abs=0.001)


def test_a_record_holds_gradients_and_not_what_was_unsent_before() -> None:
    weights = torch.arange(10.0)
    group = Group(0, ("w",), (weights,))
    group.unsent += 5.0
    record = GradientRecord([group], 5)
    for step in range(STEPS + 2):
        group.unsent += step
        record.before(group)
        group.unsent *= 0.5
        record.end_step()
    record.end_step()  # in which the group did not travel
    assert record.weights().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert record.gradients().tolist() == [[float(step)] * 5 for step in (*range(3, STEPS + 2), 0)]


def test_a_record_is_of_neighbours_from_everywhere() -> None:
    groups = [Group(i, ("w",), (torch.arange(float(n)),)) for i, n in enumerate((10_000, 3, 0))]
    weights = GradientRecord(groups, 1000).weights()
    assert weights[-1] < 3
    first = weights[: 3 * RUN].view(3, RUN)
    assert torch.equal(first[:, 1:] - first[:, :-1], torch.ones(3, RUN - 1))
    assert first[:, 0].tolist() == [0.0, 3333.0, 6666.0]


class Alone:
    """An averager of one rank that has recorded gradients, and its lanes."""

    def __init__(self) -> None:
        self.rank, self.size, self.device = 0, 1, torch.device("cpu")
        group = Group(0, ("w",), (torch.ones(8),))
        self.record = GradientRecord([group], 8)
        self._comm = SimNetwork(1).comms[0]
        self.lanes = self

    def run_message(self, launch: Callable[[Comm], Pending]) -> Tensor:
        return launch(self._comm).wait()

    def on_first(self, work: Callable[[Any], Any]) -> Any:
        return work(SimpleNamespace(comm=self._comm))

    @property
    def everyone(self) -> Comm:
        return self._comm

    def gather_text(self, text: str) -> list[str]:
        return [text]


class GivenSteps:
    """A forecaster to which the steps of candidates are given in milliseconds; of what it was asked there is a list."""

    def __init__(
        self,
        steps_ms: dict[ls.Candidate, float],
        computing_ms: float = 40,
        limit: str = "network",
    ) -> None:
        self.measured = replace(MEASURED, arrivals_s=[computing_ms / 1e3 - MEASURED.rest_s])
        self.asked: list[ls.Candidate] = []
        self.steps_ms, self._limit = steps_ms, limit

    def forecast(self, candidate: ls.Candidate, **_: object) -> Forecast:
        self.asked.append(candidate)
        step_s = self.steps_ms[candidate] / 1e3
        known = (1.0, 0.0) if candidate == DENSE else (None, None)
        return Forecast(candidate, step_s, step_s, 1 / max(candidate.local_steps, 1), self._limit, 4, *known)


def as_late_as_expected(forecast: Forecast, *_: Tensor) -> Forecast:
    return replace(forecast, delivered=0.98, staleness=float(forecast.candidate.local_steps))


@pytest.mark.parametrize(("s_per_byte", "wire_dtype"), [(1e-11, "bfloat16"), (8e-8, "int4")])
def test_it_begins_with_the_sums_that_the_link_takes_soonest(s_per_byte: float, wire_dtype: str) -> None:
    averager: Any = Alone()
    averager.size = 4

    def begun(auto: ls.Auto) -> ls.Compressor:
        chooser = Chooser(auto, local=True)
        costs = GroupCosts(LAYERS, Link(1e-5, s_per_byte, 2e-5), averager.size)
        return chooser.start(averager, costs, auto.start)[0]

    assert begun(ls.Auto()) == ls.Candidate(ls.Dense(), wire_dtype).averaging
    assert begun(ls.Auto([ls.MiCRO()])) == ls.Auto().start  # no plain sums are to be chosen


BFLOAT16 = ls.Candidate(ls.Dense(), "bfloat16")
INT4, TOPK = ls.Candidate(ls.Dense(), "int4"), ls.Candidate(ls.TopK(density=0.01))
LOCAL2, LOCAL4 = (ls.Candidate(ls.Dense(), "int4", steps) for steps in (2, 4))
ALL = (DENSE, INT4, TOPK, LOCAL2, LOCAL4)


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[[GivenSteps], tuple[Chooser, Any, ls.Candidate]]:
    def chosen(steps: GivenSteps) -> tuple[Chooser, Any, ls.Candidate]:
        monkeypatch.setattr(chooser_module, "forecast_of", steps.forecast)
        monkeypatch.setattr(chooser_module, "tried", as_late_as_expected)
        averager: Any = Alone()
        chooser = Chooser(ls.Auto(tuple(steps.steps_ms)), local=True)
        at_work = INT4.averaging
        return (
            chooser,
            averager,
            chooser.choose(averager, steps.measured, COSTS, at_work, averager.record),
        )  # which takes 60 ms

    return chosen


def test_float32_is_tried_before_others_where_its_messages_are_hidden(choose: Any) -> None:
    steps = GivenSteps({DENSE: 41, INT4: 50, TOPK: 90, LOCAL2: 41, LOCAL4: 41})
    chooser, averager, first = choose(steps)
    assert first == DENSE
    assert steps.asked == [DENSE]
    assert chooser.note(averager, 0.042) == DENSE  # about as short as a step that sends nothing
    assert steps.asked == [DENSE]


def test_others_are_looked_at_where_float32_turns_out_to_be_slow(choose: Any) -> None:
    chooser, averager, _ = choose(GivenSteps({DENSE: 41, INT4: 50, TOPK: 90, LOCAL2: 41, LOCAL4: 41}))
    assert chooser.note(averager, 0.07) == INT4  # since local steps are expected to take longer, too
    assert next(f.step_s for f in chooser.forecasts if f.candidate == INT4) == pytest.approx(0.06)  # as measured


def test_what_coding_took_longer_is_not_corrected_in_plain_sums(choose: Any) -> None:
    chooser, *_ = choose(GivenSteps({DENSE: 60, INT4: 30, LOCAL2: 50}, computing_ms=30))
    steps_ms = {f.candidate: 1e3 * f.step_s for f in chooser.forecasts}
    assert steps_ms[INT4] == pytest.approx(60)  # as measured, twice what was expected
    assert steps_ms[DENSE] == 60


def test_what_plain_sums_took_longer_is_expected_of_all_of_which_nothing_else_is_known(choose: Any) -> None:
    chooser, averager, _ = choose(GivenSteps({DENSE: 41, INT4: 50, LOCAL2: 44, BFLOAT16: 42}))
    chooser.note(averager, 0.082)
    steps_ms = {f.candidate: 1e3 * f.step_s for f in chooser.forecasts}
    assert steps_ms == pytest.approx({DENSE: 82, INT4: 60, LOCAL2: 88, BFLOAT16: 84})  # int4 as measured


def test_what_is_slower_than_expected_makes_way_and_so_does_its_kind(choose: Any) -> None:
    steps = GivenSteps({DENSE: 100, INT4: 50, TOPK: 90, LOCAL2: 40, LOCAL4: 39}, computing_ms=40)
    chooser, averager, first = choose(steps)
    assert first == LOCAL4
    assert chooser.note(averager, 0.2) == INT4  # of which steps were measured at first


def test_what_is_known_does_not_make_way_for_what_noise_may_be(choose: Any) -> None:
    steps = GivenSteps({DENSE: 100, INT4: 60, TOPK: 48.5, LOCAL2: 41, LOCAL4: 49}, computing_ms=33)
    chooser, averager, first = choose(steps)
    assert first == LOCAL2
    assert chooser.note(averager, 0.05) == LOCAL2  # though 48.5 ms are expected of another


@pytest.mark.parametrize(("topk_ms", "back"), [(47, False), (42, True)])
def test_the_way_back_from_local_steps_is_for_sums_that_are_far_sooner(choose: Any, topk_ms: float, back: bool) -> None:
    steps = GivenSteps({DENSE: 100, INT4: 60, TOPK: topk_ms, LOCAL2: 34}, computing_ms=33)
    chooser, averager, first = choose(steps)
    assert first == LOCAL2
    assert chooser.note(averager, 0.056) == (TOPK if back else LOCAL2)  # 16 and 25 % sooner, and LOCAL2 loses more


@pytest.mark.parametrize(("local_s", "back"), [(0.0605, False), (0.0635, True)])
def test_local_steps_are_not_left_for_sums_that_noise_may_have_sooner(choose: Any, local_s: float, back: bool) -> None:
    chooser, averager, first = choose(GivenSteps({DENSE: 100, INT4: 60, LOCAL2: 34}, computing_ms=33))
    assert first == LOCAL2
    assert chooser.note(averager, local_s) == (INT4 if back else LOCAL2)  # 60 ms were measured, of fewer steps


def test_measured_plain_sums_are_left_only_for_what_is_sooner(choose: Any) -> None:
    chooser, averager, first = choose(GivenSteps({DENSE: 41, INT4: 90, LOCAL2: 33}, computing_ms=32))
    assert (first, chooser.note(averager, 0.06)) == (DENSE, LOCAL2)
    assert chooser.note(averager, 0.0595) == DENSE  # as long, and LOCAL2 needs more steps


def test_the_way_back_is_judged_by_the_soonest_local_steps_that_were_measured(choose: Any) -> None:
    steps = GivenSteps({DENSE: 200, INT4: 60, LOCAL2: 52, LOCAL4: 50}, computing_ms=33, limit="backward")
    chooser, averager, first = choose(steps)
    assert (first, chooser.note(averager, 0.056)) == (LOCAL4, LOCAL2)
    assert chooser.note(averager, 0.075) == LOCAL4  # not INT4, of which 60 ms were measured


def test_what_a_limit_costs_is_said_also_of_what_is_not_measured_any_more(
    choose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chooser, *_ = choose(GivenSteps({DENSE: 100, INT4: 60, LOCAL2: 41, LOCAL4: 50}, computing_ms=33))
    monkeypatch.setattr(chooser_module, "MOST_TRIED", 1)  # measured candidates are as many
    chooser._auto = ls.Auto(ALL, at_most=0.0)
    assert "Without at_most=0 2 local steps" in chooser._cost_of_limit(chooser.forecasts[1])


def test_of_local_steps_that_take_longer_than_expected_those_that_send_less_are_tried(choose: Any) -> None:
    chooser, averager, first = choose(
        GivenSteps({DENSE: 100, INT4: 55, TOPK: 90, LOCAL2: 41, LOCAL4: 45.5}, computing_ms=33)
    )
    assert first == LOCAL2
    assert chooser.note(averager, 0.055) == LOCAL4  # by the bytes of which 52.5 ms are expected
    assert chooser.note(averager, 0.054) == LOCAL2  # which was about as short


def test_of_a_far_link_what_local_steps_take_longer_is_not_all_for_their_bytes(choose: Any) -> None:
    steps = GivenSteps({DENSE: 120, INT4: 60, LOCAL2: 45.7, LOCAL4: 39.7}, computing_ms=11)
    chooser, averager, first = choose(steps)
    assert first == LOCAL4
    assert chooser.note(averager, 0.0455) == LOCAL2  # of which 51.5 ms are expected, and 57.3 would be by its bytes
    assert chooser.note(averager, 0.048) == LOCAL2


def test_of_local_steps_whose_bytes_hide_those_that_exchange_less_are_tried(
    choose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    int2 = ls.Candidate(ls.Dense(), "int2", 1)  # as many bytes here as LOCAL4
    steps = GivenSteps({DENSE: 100, INT4: 90, TOPK: 90, LOCAL4: 37, int2: 33}, computing_ms=31, limit="backward")
    monkeypatch.setattr(steps, "forecast", lambda c, **_: replace(GivenSteps.forecast(steps, c), sent_bytes=1.0))
    chooser, averager, first = choose(steps)
    assert first == int2
    assert chooser.note(averager, 0.06) == LOCAL4  # five eighths of 27 ms more are expected of it


def test_after_local_steps_others_are_tried_that_noise_may_have_sooner(choose: Any) -> None:
    steps = GivenSteps({DENSE: 100, INT4: 90, LOCAL2: 41, LOCAL4: 41}, computing_ms=33, limit="backward")
    chooser, averager, first = choose(steps)
    assert first == LOCAL4  # which exchanges fewer weights
    assert chooser.note(averager, 0.042) == LOCAL2  # of which 42.5 ms are expected, and fewer steps
    assert chooser.note(averager, 0.044) == LOCAL2  # which loses less


@pytest.mark.parametrize("step_s", [0.0, math.nan, math.inf])
def test_a_step_whose_time_is_not_known_changes_nothing(choose: Any, step_s: float) -> None:
    chooser, averager, first = choose(GivenSteps({DENSE: 100, INT4: 90, LOCAL2: 41, LOCAL4: 41}, computing_ms=33))
    before = list(chooser.forecasts)
    chooser.see(first, step_s)
    assert chooser.note(averager, step_s) == first
    assert (chooser.forecasts, chooser.is_settled) == (before, False)


def test_nothing_is_expected_to_be_sooner_than_computing(choose: Any) -> None:
    chooser, averager, first = choose(GivenSteps({DENSE: 100, INT4: 90, LOCAL2: 50, LOCAL4: 41}, computing_ms=31))
    assert first == LOCAL4
    chooser.note(averager, 0.0311)
    steps_ms = {f.candidate: 1e3 * f.step_s for f in chooser.forecasts}
    assert steps_ms == pytest.approx({DENSE: 100, INT4: 60, LOCAL2: 31, LOCAL4: 31.1})  # LOCAL2 sends twice as much


def test_what_local_steps_that_hide_their_bytes_took_longer_is_half_expected_of_sums(choose: Any) -> None:
    steps = GivenSteps({DENSE: 60, BFLOAT16: 43, INT4: 60, TOPK: 90, LOCAL2: 33}, computing_ms=31, limit="backward")
    chooser, averager, first = choose(steps)
    assert first == LOCAL2
    assert chooser.note(averager, 0.055) == LOCAL2  # though 43 ms would be sooner by a quarter
    steps_ms = {f.candidate: 1e3 * f.step_s for f in chooser.forecasts}
    assert steps_ms == pytest.approx({DENSE: 71, BFLOAT16: 54, INT4: 60, TOPK: 101, LOCAL2: 55})  # int4 as measured


def test_what_cannot_be_soonest_is_not_tried(choose: Any) -> None:
    chooser, *_ = choose(GivenSteps({DENSE: 100, INT4: 50, TOPK: 90, LOCAL2: 41, LOCAL4: 50}, computing_ms=30))
    assert [f.candidate for f in chooser.forecasts if f.delivered is None] == [INT4, TOPK, LOCAL4]


@pytest.mark.parametrize("at_most", [None, ls.Auto().at_most, 0.0])
def test_a_limit_of_the_loss_is_kept_and_what_it_costs_is_said(
    monkeypatch: pytest.MonkeyPatch, at_most: float | None
) -> None:
    steps, averager, said = GivenSteps({DENSE: 100, INT4: 60, TOPK: 90, LOCAL2: 41, LOCAL4: 50}), Alone(), []
    monkeypatch.setattr(chooser_module, "forecast_of", steps.forecast)
    monkeypatch.setattr(chooser_module, "rank_zero_info", said.append)
    monkeypatch.setattr(chooser_module, "tried", as_late_as_expected)
    chooser = Chooser(ls.Auto(ALL, at_most=at_most), local=True)
    chosen = chooser.choose(averager, steps.measured, COSTS, INT4.averaging, averager.record)  # type: ignore[arg-type]
    assert chosen == (DENSE if at_most == 0 else LOCAL2)
    assert ("Without at_most=0 2 local steps" in said[-1]) == (at_most == 0)
    assert "The loss of 1,000 steps of dense training is expected after 1,0" in said[-1]


def to_its_end(course: BetweenSteps[Times], after: Callable[[int], None] = lambda steps: None) -> tuple[int, Times]:
    """Return how many passes it takes, and what it returns."""
    steps = 0
    while True:
        try:
            next(course)
        except StopIteration as stop:
            return steps, stop.value
        steps += 1
        after(steps)


@pytest.fixture
def settled() -> Chooser:
    """Measured 100, 105, 108 and 90 ms; the last of local steps."""
    chooser = Chooser(ls.Auto((*ALL, BFLOAT16)), local=True)
    chooser._computing_s = 0.04
    steps_ms = {DENSE: 100, BFLOAT16: 105, INT4: 108, LOCAL2: 90, TOPK: 95}
    chooser.forecasts = [replace(expected(ms / 1e3, 1.0), candidate=each) for each, ms in steps_ms.items()]
    chooser._looks = {each: [ms / 1e3] for each, ms in steps_ms.items() if each != TOPK}
    chooser.chosen = chooser.forecasts[0]
    return chooser


def test_sums_that_differ_little_are_measured_in_turn_if_they_were_measured(settled: Chooser) -> None:
    assert settled.finalists(0.1) == [DENSE, BFLOAT16, INT4]
    assert settled.finalists(0.06) == [DENSE, BFLOAT16]
    settled.forecasts[2] = replace(settled.forecasts[2], delivered=0.5, step_s=0.05)  # it loses more than is allowed
    assert settled.finalists(0.1) == [DENSE, BFLOAT16]
    settled.chosen, settled._looks[INT4] = settled.forecasts[2], [0.05]
    assert INT4 in settled.finalists(0.1)
    settled.see(INT4, 0.05)
    assert INT4 in settled.finalists(0.1)
    settled._looks.clear()  # where nobody has a clock
    assert settled.finalists(0.1) == []


@pytest.mark.parametrize(
    ("bfloat16_s", "int4_s", "best"),
    [(0.088, 0.2, DENSE), (0.086, 0.2, BFLOAT16), (0.086, 0.07, INT4), (float("nan"), float("nan"), DENSE)],
)
def test_in_turn_the_soonest_wins_and_float32_where_it_is_as_soon(
    settled: Chooser, bfloat16_s: float, int4_s: float, best: ls.Candidate
) -> None:
    """Of what was measured twice the mean counts."""
    settled.see(BFLOAT16, bfloat16_s)
    settled.see(INT4, int4_s)
    assert settled.take_soonest() == best
    assert settled.chosen is not None
    assert settled.chosen.candidate == best
    assert settled.measured[BFLOAT16] == (0.105 if bfloat16_s != bfloat16_s else (0.105 + bfloat16_s) / 2)


def test_plain_sums_are_measured_in_turn_where_others_are_too_late(settled: Chooser) -> None:
    settled.see(BFLOAT16, 0.135)  # 120 ms in the mean
    settled.see(INT4, 0.124)  # 116 ms
    assert settled.finalists(0.25) == [DENSE, BFLOAT16]
    assert settled.finalists(0.1) == [DENSE]


def test_measuring_in_turn_ends_with_the_groups_of_the_best(settled: Chooser, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the three that differ little one is soon too late, and another a turn later."""
    steps_s, followed = {DENSE: 0.1, BFLOAT16: 0.09, INT4: 0.108}, []
    active: Any = SimpleNamespace(layer_fusion=SimpleNamespace(follow=followed.append), averager=None, chosen=DENSE)

    def looks(averager: object, count: int) -> BetweenSteps[Times]:
        for _ in range(count):
            yield
        return Times(steps_s[active.chosen], 0.01)

    monkeypatch.setattr(between_steps, "typical_times", looks)
    layouts: Any = {each: str(each) for each in steps_s}
    steps, times = to_its_end(between_steps._measure_in_turn(active, settled, layouts, {}))
    assert times == Times(0.09, 0.01)
    assert settled.measured[BFLOAT16] == pytest.approx((0.105 + 2 * 0.09) / 3)
    assert followed == [str(each) for each in (DENSE, BFLOAT16, INT4, BFLOAT16, DENSE, BFLOAT16)]
    assert active.chosen == BFLOAT16
    assert steps == 5 * (between_steps.TAKING_OVER + between_steps.TIMED)


def test_local_steps_are_candidates_only_where_their_average_is_shown() -> None:
    local = str(CANDIDATES[-1])
    assert Chooser(ls.Auto(), local=True).candidate(local) == CANDIDATES[-1]
    assert Chooser(ls.Auto(), local=False).candidate(local) is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ls.Candidate("micro"), "'micro' is not a compressor to choose"),  # type: ignore[arg-type]
        (lambda: ls.Candidate(ls.MiCRO(), "int3"), "int3"),
        (lambda: ls.Candidate(ls.MiCRO(), local_steps=-1), "local_steps must be"),
        (lambda: ls.SparseDDPStrategy("sparse_auto", wire_dtype="int8"), "cannot be combined with sparse_auto"),
        (lambda: ls.Auto(()), "a list of one candidate or more"),
        (lambda: ls.Auto(at_most=-0.1), "at_most must be a number from 0 to 1, or None; got -0.1"),
        (lambda: ls.Auto(at_most=5), "got 5. Give the part"),  # 5 %, it was meant to be
    ],
)
def test_what_cannot_be_chosen_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.fixture
def two_then_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take 2 s at first, then 1 s."""

    def looks(averager: object, count: int) -> BetweenSteps[Times]:
        for _ in range(count):
            yield
        return Times(2.0 if count == between_steps.GLANCE else 1.0, 0.5)

    monkeypatch.setattr(between_steps, "typical_times", looks)


@pytest.mark.usefixtures("two_then_one")
def test_a_trial_of_sums_ends_early_where_they_take_too_long() -> None:
    layout = between_steps.Layout([["layer"]], DENSE.averaging)
    fusion = SimpleNamespace(layout=layout, compressor=DENSE.averaging, follow=lambda layout: None)
    active: Any = SimpleNamespace(layer_fusion=fusion, averager=None, chosen=None)
    given: Any = (active, INT4, DENSE.averaging, MEASURED, Link(1e-5, 1e-8))
    first = between_steps.TAKING_OVER + between_steps.GLANCE
    assert to_its_end(between_steps._average_gradients(*given, 1.9)) == (first, Times(2.0, 0.5))
    assert to_its_end(between_steps._average_gradients(*given, 2.1)) == (first + between_steps.TIMED, Times(1.0, 0.5))


@pytest.mark.usefixtures("two_then_one")
def test_a_trial_of_local_steps_ends_early_where_they_take_far_too_long() -> None:
    def trial(longest_s: float) -> tuple[int, Times]:
        """How many steps it takes, and what one takes."""
        local = SimpleNamespace(is_starting=True)
        averager = SimpleNamespace(local=local, round=2)
        active: Any = SimpleNamespace(layer_fusion=None, averager=averager, to_local_steps=lambda candidate: None)
        trial_of = between_steps._take_local_steps(active, LOCAL2, longest_s)
        return to_its_end(trial_of, lambda steps: vars(local).update(is_starting=steps < 20))

    first = between_steps.TAKING_OVER + between_steps.GLANCE
    assert trial(longest_s=1.9) == (first, Times(2.0, 0.5))
    assert trial(longest_s=2.1) == (20 + between_steps.SETTLING + between_steps.TIMED, Times(1.0, 0.5))


def test_steps_are_far_too_long_where_a_quarter_more_would_be_as_soon_as_what_was_measured() -> None:
    chooser = Chooser(ls.Auto(), local=True)
    assert chooser.longest_s(0.25) == float("inf")
    chooser.forecasts = [expected(0.2, 1.0), replace(expected(0.1, 0.7), candidate=LOCAL2)]
    chooser.chosen = chooser.forecasts[1]
    assert chooser.longest_s(0.25) == float("inf")
    chooser._looks = {DENSE: [0.2]}
    assert chooser.longest_s(0.25) == pytest.approx(1.25 * 0.2 / chooser.chosen.more_steps)
