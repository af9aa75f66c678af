"""What a step typically takes, and when that has changed."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.fusion import steps
from lightning_sparse.fusion.steps import (
    BetweenSteps,
    PassCounts,
    StepClock,
    Times,
    measure_steps,
    typical_times,
    until_changed,
)
from lightning_sparse.network.costs import Link
from tests.conftest import compress_alone

T = TypeVar("T")


class Simulated:
    """An exchange of one rank, whose steps take as long as they are told, and their messages."""

    round, was_shown, last = 1, False, SimpleNamespace(sent_bytes=1, dense_bytes=1)

    def __init__(self, step_s: Sequence[float], messages_s: Sequence[float] = (1.0,), sees_hidden: bool = True) -> None:
        self.step_s, self.messages_s = itertools.cycle(step_s).__next__, itertools.cycle(messages_s).__next__
        self.sees_hidden_messages = sees_hidden

    def messages(self) -> Callable[[], float]:
        return partial(float, self.messages_s())


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "median_over_ranks", lambda averager, own: np.array(own))
    monkeypatch.setattr(steps, "least_over_ranks", lambda averager, own: np.array(own))


@pytest.fixture(name="simulated")
def _simulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes an exchange whose clock is simulated."""
    monkeypatch.setattr(StepClock, "__call__", lambda self: self._averager.step_s())
    return Simulated


def ran(passes: BetweenSteps[T], most: int) -> tuple[int, T | None]:
    """The passes until the end, at most so many, and what was returned."""
    for number in range(most):
        try:
            next(passes)
        except StopIteration as stop:
            return number, stop.value
    return most, None


def test_it_is_the_mean_since_fragments_differ(simulated: Any) -> None:
    assert ran(typical_times(simulated([1.0, 3.0]), 10), 20) == (10, Times(2.0, 1.0))


def test_messages_are_those_of_rounds_of_which_pauses_do_not_count(simulated: Any) -> None:
    averager = simulated([10.0], [8.0, 0.0, 0.0, 0.0] * 4 + [500.0] + [0.0] * 7)
    averager.round = 4
    assert ran(typical_times(averager, 24), 25) == (24, Times(10.0, 2.0))


@pytest.mark.parametrize("every", [10, 25])
def test_a_long_pause_is_no_change(simulated: Any, every: int) -> None:
    seconds = [20.0 if step % every == every - 1 else 1.0 for step in range(500)]
    assert ran(until_changed(simulated(seconds, seconds), 10, Times(1.0, 1.0)), 500) == (500, None)


@pytest.mark.parametrize("unknown", [float("nan"), float("inf")])
def test_what_is_not_known_does_not_count(simulated: Any, unknown: float) -> None:
    for usual in (None, Times(1.0, 1.0), Times(1.0, unknown)):
        assert ran(until_changed(simulated([1.0], [1.0, unknown]), 10, usual), 500) == (500, None)
        assert ran(until_changed(simulated([unknown], [1.0, unknown]), 10, usual), 500) == (500, None)
        assert ran(until_changed(simulated([unknown], [unknown]), 10, usual), 500) == (500, None)


@pytest.mark.parametrize("sees_hidden", [True, False])
@pytest.mark.parametrize(("before", "now"), [(Times(1.2, 0.2), Times(3.0, 2.0)), (Times(3.0, 2.0), Times(1.2, 0.2))])
@pytest.mark.parametrize("after", [0, 1, 5, 30, 200])
def test_a_link_that_changes_at_any_time_is_noticed(
    simulated: Any, before: Times, now: Times, after: int, sees_hidden: bool
) -> None:
    """Within two windows of the step after which it changes, be it the first that is watched."""
    each = [before] * after + [now] * 500
    averager = simulated([step.step_s for step in each], [step.messages_s for step in each], sees_hidden)
    passes, _ = ran(until_changed(averager, 50, before), 500)
    assert after + 25 <= passes <= after + 100


def test_messages_are_noticed_that_become_short_or_long_beside_computing(simulated: Any) -> None:
    assert ran(until_changed(simulated([1.0], [0.05]), 10, Times(1.0, 0.9)), 500)[0] == 10
    assert ran(until_changed(simulated([1.0], [0.9]), 10, Times(1.0, 0.05)), 500)[0] == 10
    assert ran(until_changed(simulated([1.0], [0.05]), 10, Times(1.0, 0.3)), 500)[0] == 500  # it hardly matters
    assert ran(until_changed(simulated([1.0], [0.9]), 10, Times(1.0, 0.65)), 500)[0] == 500


@pytest.mark.parametrize("is_faster", [True, False])
def test_short_messages_that_become_shorter_are_a_change_if_the_link_is_faster(
    simulated: Any, monkeypatch: pytest.MonkeyPatch, is_faster: bool
) -> None:
    """Candidates that send more may be sooner then; the link is measured once."""
    measured: list[Link] = []

    def measure(averager: object) -> Link:
        measured.append(Link(1e-4, 1e-9 if is_faster else 0.9e-7))
        return measured[-1]

    monkeypatch.setattr(steps, "measure_link", measure)
    usual, link = Times(1.0, 0.1, dense=16.0), Link(1e-4, 1e-7)
    assert ran(until_changed(simulated([1.0], [0.01]), 10, usual, link), 200)[0] == (10 if is_faster else 200)
    assert len(measured) == 1
    assert ran(until_changed(simulated([1.0], [0.01]), 10, usual._replace(dense=2.0), link), 200)[0] == 200
    assert len(measured) == 1  # dense sums were as good before


@pytest.mark.parametrize("sees_hidden", [True, False])
@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_computing_that_takes_another_time_is_no_change(simulated: Any, factor: float, sees_hidden: bool) -> None:
    usual = Times(1.2, 0.2, sees_hidden)
    averager = simulated([1.2] * 20 + [factor + 0.2] * 80, [0.2], sees_hidden)
    assert ran(until_changed(averager, 10, usual), 500) == (500, None)
    hides_more = simulated([1.0 + factor], [0.1], sees_hidden=False)
    assert ran(until_changed(hides_more, 10, Times(2.0, 1.0, False)), 500)[0] == (500 if factor > 1 else 10)


def test_where_somebody_evaluated_after_each_step_a_forward_is_taken_for_half_of_backward() -> None:
    timeline = SimpleNamespace(span_s=lambda: 0.3, arrival_s=float)
    averager: Any = SimpleNamespace(timeline=timeline, steps=0, groups=[], was_shown=True, defer=lambda on: None)
    averager.messages = lambda: lambda: 0.1
    parameters = {"last": torch.tensor(0.2), "first": torch.tensor(0.1)}
    passes = measure_steps(averager, parameters, PassCounts(settling=0, beside=0, apart=1))
    next(passes)
    averager.steps = 1
    with pytest.raises(StopIteration) as end:
        next(passes)
    assert end.value.value.computing_s == pytest.approx(0.3)  # 0.2 of backward
    assert end.value.value.messages_s == 0.1


def test_a_step_before_which_somebody_evaluated_is_not_timed() -> None:
    class Shown:
        was_shown = False

    averager: Any = Shown()
    clock = StepClock(averager)
    assert clock() >= 0
    averager.was_shown = True
    assert clock() != clock()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("local_steps", [0, 2])
def test_an_evaluation_is_noticed_where_the_forward_is_within_the_optimizers_step(
    local_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Lightning, whose optimizers are given a closure."""
    compress_alone(monkeypatch)
    ddp = DistributedDataParallel(nn.Linear(2, 1))
    hook = ls.SparseHook(ddp, "sparse_dense", fusion="bucket", local_steps=local_steps)
    optimizer, seen = torch.optim.SGD(ddp.parameters(), lr=0.1), []

    def closure() -> Tensor:
        seen.append(hook.averager.was_shown)
        loss: Tensor = ddp(torch.ones(1, 2)).sum()
        seen.append(hook.averager.was_shown)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)  # type: ignore[arg-type]  # which returns a tensor
    hook.show_average()
    optimizer.step(closure)  # type: ignore[arg-type]
    hook.close()
    assert seen == [False, False] * 2 + [True, False]
