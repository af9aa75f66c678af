"""How sparse_auto chooses: predicted steps, candidates tried on gradients, and which is taken."""

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.auto import chooser as chooser_module
from lightning_sparse.auto.chooser import Chooser, soonest
from lightning_sparse.auto.forecast import Forecast, forecast_of, likely, loss_above, more_steps, sample
from lightning_sparse.auto.policy import CANDIDATES
from lightning_sparse.auto.trial import try_on
from lightning_sparse.auto.trials import LASTS_S, Trials
from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.observers import RUN, STEPS, GradientRecord
from lightning_sparse.fusion import costs as costs_module
from lightning_sparse.fusion.costs import GroupCosts
from lightning_sparse.fusion.planner import Measured
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
MEASURED_LATE = Measured(
    [0.01], span_s=0.01, rest_s=0.0, groups=[["layer"]]
)  # of one layer, beside which nothing is sent
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


@pytest.mark.parametrize("candidate", [ls.Candidate(ls.Dense(), "int4"), ls.Candidate(ls.Dense(), "int4", 2)], ids=str)
def test_what_one_rank_sampled_counts_no_more_than_the_others(candidate: ls.Candidate) -> None:
    layers = {"layer": torch.empty(2**20)}
    alone, agreed = (costs_on(Link(1e-6, 1e-12), layers) for _ in range(2))
    for costs in (alone, agreed):
        sample(candidate, costs)
    agreed.agree(lambda own: np.median([own, np.multiply(own, 3), np.multiply(own, 5)], axis=0))
    few, many = (forecast_of(candidate, MEASURED_LATE, costs).step_s for costs in (alone, agreed))
    assert many - MEASURED_LATE.computing_s == pytest.approx(3 * (few - MEASURED_LATE.computing_s), rel=0.01)


def test_where_nothing_is_sampled_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chooser_module, "median_over_ranks", lambda *_: pytest.fail("a message of nothing"))
    averager: Any = Alone()
    costs = GroupCosts(LAYERS, Link(0.001, 1e-9, 0.002), 4)
    Chooser(ls.Auto([DENSE, BFLOAT16]), local=True).look(averager, MEASURED, costs, averager.record)


@pytest.mark.parametrize("candidate", [*CANDIDATES[:4], *SELECTING[:2]], ids=str)
def test_few_ranks_stand_for_many(candidate: ls.Candidate, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = GroupCosts(LAYERS, Link(1e-6, 1e-9), 16, now=ticking())
    few = costs.simulated(candidate.averaging, 2**15)
    monkeypatch.setattr(costs_module, "RANKS", 16)
    many = costs.simulated(candidate.averaging, 2**15)
    assert few.sent_bytes == pytest.approx(
        many.sent_bytes, rel=0.02 if isinstance(candidate.compressor, ls.Dense) else 0.5
    )


BFLOAT16 = ls.Candidate(ls.Dense(), "bfloat16")
INT4, TOPK = ls.Candidate(ls.Dense(), "int4"), ls.Candidate(ls.TopK(density=0.01))
LOCAL2, LOCAL4 = (ls.Candidate(ls.Dense(), "int4", steps) for steps in (2, 4))


def expected(candidate: ls.Candidate, step_s: float, delivered: float = 0.98) -> Forecast:
    late = float(candidate.local_steps)
    return Forecast(candidate, step_s, step_s, 1.0, "network", 4, 1.0 if candidate == DENSE else delivered, late)


def test_the_soonest_at_a_loss_comes_first_of_those_that_lose_no_more_than_is_allowed() -> None:
    exact, int4, some = expected(DENSE, 1.0), expected(INT4, 0.5, 0.97), expected(TOPK, 0.49, 0.2)
    assert int4.seconds < exact.seconds < some.seconds  # though its steps are the shortest
    assert soonest([some, exact, int4]) == [int4, exact, some]
    assert soonest([some, exact, int4], at_most=0.05) == [int4, exact]
    assert soonest([some, exact, int4], at_most=0.001) == [exact]
    assert soonest([some, int4], at_most=0.001) == [int4]  # which loses least


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


def look(monkeypatch: pytest.MonkeyPatch, steps_ms: dict[ls.Candidate, float], at_most: float | None = 0.05) -> Chooser:
    """Return a chooser that expects these steps, and delays as late as local steps are."""

    def forecast(candidate: ls.Candidate, **_: object) -> Forecast:
        return expected(candidate, steps_ms[candidate] / 1e3)

    monkeypatch.setattr(chooser_module, "forecast_of", forecast)
    averager: Any = Alone()
    chooser = Chooser(ls.Auto(tuple(steps_ms), at_most=at_most), local=True)
    chooser.look(averager, MEASURED, COSTS, averager.record)
    return chooser


def choose(chooser: Chooser, steps_ms: dict[ls.Candidate, float]) -> list[ls.Candidate]:
    """Return what is tried, in order, where steps take this; at last what is chosen."""
    tried = []
    while (candidate := chooser.next()) is not None:
        tried.append(candidate)
        chooser.note(candidate, steps_ms[candidate] / 1e3)
    assert chooser.chosen is not None
    assert chooser.measured == set(tried)
    return [*tried, chooser.chosen.candidate]


def test_what_is_soonest_by_far_is_tried_and_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    steps_ms = {DENSE: 100.0, INT4: 60.0, LOCAL2: 30.0}
    assert choose(look(monkeypatch, steps_ms), steps_ms) == [LOCAL2, LOCAL2]


def test_what_turns_out_to_be_late_makes_way_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    steps_ms = {DENSE: 100.0, INT4: 60.0, LOCAL2: 56.0}
    assert choose(look(monkeypatch, steps_ms), steps_ms | {LOCAL2: 80.0}) == [LOCAL2, INT4, INT4]


def test_what_may_be_as_soon_is_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    steps_ms = {DENSE: 20.0, BFLOAT16: 20.2, INT4: 40.0}
    tried = choose(look(monkeypatch, steps_ms), steps_ms | {DENSE: 20.2, BFLOAT16: 19.0})
    assert set(tried[:-1]) == {DENSE, BFLOAT16}
    assert tried[-1] == BFLOAT16


def test_a_limit_of_the_loss_is_kept_and_what_it_costs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(chooser_module, "rank_zero_info", said.append)
    monkeypatch.setattr(chooser_module, "tried", lambda forecast, *_: forecast)
    steps_ms = {DENSE: 100.0, LOCAL2: 41.0}
    for at_most, best in ((None, LOCAL2), (0.05, LOCAL2), (0.0, DENSE)):
        said.clear()
        assert choose(look(monkeypatch, steps_ms, at_most), steps_ms)[-1] == best
        assert len(said) == 2
        assert f"sparse_auto goes on with {best}. A step takes {steps_ms[best]:.0f} ms, and would take" in said[0]
        if at_most == 0:
            assert said[1].startswith(
                "lightning_sparse: These are the sums of ddp. Left out, since its loss after as many"
            )
            assert said[1].endswith("0.6% above ddp's: 2 local steps, dense, int4 would take 58% less.")
        else:
            assert "It is expected to need 1,020 steps for the loss that ddp has after 1,000" in said[1]
            assert said[1].endswith("; dense, float32 would take 139% longer.")
    said.clear()
    choose(look(monkeypatch, {LOCAL2: 41.0, LOCAL4: 30.0}, at_most=0.0), {LOCAL2: 41.0, LOCAL4: 30.0})
    nearest = "lightning_sparse: No candidate is expected to stay within at_most=0.0; this one comes nearest."
    assert said[1:] == [nearest]


def test_what_is_known_of_one_tells_of_the_others() -> None:
    trials = Trials([expected(DENSE, 0.1), expected(INT4, 0.06)], back_s=0.0)
    trials.note(INT4, 0.12)
    assert trials.steps_s[INT4] == pytest.approx(0.12)
    assert 0.15 < trials.steps_s[DENSE] < 0.2  # most of what was late is common


@pytest.mark.parametrize("back_s", [0.0, LASTS_S / 10])
def test_the_way_back_from_local_steps_must_be_gained(back_s: float) -> None:
    """It takes a tenth of the time within which a trial must gain."""
    trials = Trials([expected(DENSE, 0.1), expected(LOCAL2, 0.1)], back_s)
    trials.note(DENSE, 0.1)
    trials.note(LOCAL2, 0.105)
    assert trials.best == (LOCAL2 if back_s else DENSE)


@pytest.mark.parametrize("step_s", [0.0, math.nan, math.inf])
def test_where_no_rank_can_tell_the_time_trials_end_with_what_was_expected(step_s: float) -> None:
    trials = Trials([expected(DENSE, 0.1), expected(INT4, 0.06), expected(LOCAL2, 0.061)], 0.0)
    while (candidate := trials.next()) is not None:
        trials.note(candidate, step_s)
    assert trials.best == INT4


@given(st.lists(st.tuples(st.floats(0.001, 10), st.floats(0.5, 2)), min_size=1, max_size=9), st.floats(0, 100))
def test_trials_end_each_candidate_is_tried_once_and_what_is_taken_was_tried(
    steps: list[tuple[float, float]], back_s: float
) -> None:
    forecasts = [expected(c, s) for c, (s, _) in zip(CANDIDATES, steps, strict=False)]
    trials, again = Trials(forecasts, back_s), Trials(forecasts, back_s)
    actual = {f.candidate: f.step_s * off for f, (_, off) in zip(forecasts, steps, strict=True)}
    order = []
    while (candidate := trials.next()) is not None:
        assert candidate == again.next()  # as on another rank
        order.append(candidate)
        for each in (trials, again):
            each.note(candidate, actual[candidate])
    assert len(set(order)) == len(order)
    assert trials.best in order
    assert {c: trials.steps_s[c] for c in order} == pytest.approx({c: actual[c] for c in order})


def test_local_steps_are_candidates_only_where_their_average_is_shown() -> None:
    local = str(CANDIDATES[-1])
    assert Chooser(ls.Auto(), local=True).candidate(local) == CANDIDATES[-1]
    assert Chooser(ls.Auto(), local=False).candidate(local) is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ls.Candidate("micro"), "'micro' is not a compressor to choose; give an instance, such as MiCRO()"),  # type: ignore[arg-type]
        (lambda: ls.Candidate(ls.MiCRO(), "int3"), "int3"),
        (lambda: ls.Candidate(ls.MiCRO(), local_steps=-1), "local_steps must be"),
        (lambda: ls.SparseDDPStrategy("sparse_auto", wire_dtype="int8"), "cannot be combined with sparse_auto"),
        (lambda: ls.SparseDDPStrategy("sparse_auto", wire_dtype="float32"), "wire_dtype='float32' cannot be combined"),
        (lambda: ls.Auto(()), "a list of one candidate or more"),
        (lambda: ls.Auto(at_most=-0.1), "at_most must be a number from 0 to 1, or None; got -0.1"),
        (lambda: ls.Auto(at_most=5), "got 5. Give the part"),  # 5 %, it was meant to be
    ],
)
def test_what_cannot_be_chosen_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
