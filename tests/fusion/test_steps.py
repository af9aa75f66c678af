"""What a step typically takes, and when that has changed."""

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.auto.passes import StepClock
from lightning_sparse.fusion import steps
from lightning_sparse.fusion.steps import PassCounts, Passes, measure_steps, typical_s, until_changed

T = TypeVar("T")
ALONE: Any = None  # an exchange of one rank, of which nobody asks anything here


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "median_over_ranks", lambda exchange, own: np.array(own))


def ran(passes: Passes[T], most: int) -> tuple[int, T | None]:
    """The passes until the end, at most so many, and what was returned."""
    for number in range(most):
        try:
            next(passes)
        except StopIteration as stop:
            return number, stop.value
    return most, None


def looks(seconds: Sequence[float]) -> Any:
    return itertools.cycle(seconds).__next__


def test_it_is_the_mean_since_fragments_differ() -> None:
    assert ran(typical_s(ALONE, looks([1.0, 3.0]), 10), 20) == (10, 2.0)


def test_it_looks_as_seldom_as_it_is_told() -> None:
    assert ran(typical_s(ALONE, looks([1.0]), 4, every=10), 99) == (40, 1.0)


@pytest.mark.parametrize("every", [10, 25])
def test_a_long_pause_is_no_change(every: int) -> None:
    seconds = [20.0 if step % every == every - 1 else 1.0 for step in range(500)]
    assert ran(until_changed(ALONE, looks(seconds), 10), 500) == (500, None)


@pytest.mark.parametrize("unknown", [float("nan"), float("inf")])
def test_what_is_not_known_does_not_count(unknown: float) -> None:
    assert ran(until_changed(ALONE, looks([1.0, unknown]), 10), 500) == (500, None)
    assert ran(until_changed(ALONE, looks([unknown]), 10), 500) == (500, None)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_steps_that_stay_longer_or_shorter_are_a_change(factor: float) -> None:
    seconds = [1.0] * 30 + [factor] * 70
    assert ran(until_changed(ALONE, looks(seconds), 10), 500) == (40, (1.0, factor))
    assert ran(until_changed(ALONE, looks([factor]), 10, usual_s=1.0), 500) == (10, (1.0, factor))


def test_where_somebody_evaluated_after_each_step_a_forward_is_taken_for_half_of_backward() -> None:
    timeline = SimpleNamespace(span_s=lambda: 0.3, arrival_s=float)
    exchange: Any = SimpleNamespace(timeline=timeline, steps=0, groups=[], was_shown=True, defer=lambda on: None)
    parameters = {"last": torch.tensor(0.2), "first": torch.tensor(0.1)}
    passes = measure_steps(exchange, parameters, PassCounts(settling=0, beside=0, apart=1))
    next(passes)
    exchange.steps = 1
    with pytest.raises(StopIteration) as end:
        next(passes)
    assert end.value.value.computing_s == pytest.approx(0.3)  # 0.2 of backward


def test_a_step_before_which_somebody_evaluated_is_not_timed() -> None:
    class Shown:
        was_shown = False

    exchange: Any = Shown()
    clock = StepClock(exchange)
    assert clock() >= 0
    exchange.was_shown = True
    assert clock() != clock()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("local_steps", [0, 2])
def test_an_evaluation_is_noticed_where_the_forward_is_within_the_optimizers_step(local_steps: int) -> None:
    """As in Lightning, whose optimizers are given a closure."""
    ddp = DistributedDataParallel(nn.Linear(2, 1))
    hook = ls.SparseHook(ddp, "sparse_dense", fusion="bucket", local_steps=local_steps)
    optimizer, seen = torch.optim.SGD(ddp.parameters(), lr=0.1), []

    def closure() -> Tensor:
        seen.append(hook.exchange.was_shown)
        loss: Tensor = ddp(torch.ones(1, 2)).sum()
        seen.append(hook.exchange.was_shown)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)  # type: ignore[arg-type]  # which returns a tensor
    hook.show_average()
    optimizer.step(closure)  # type: ignore[arg-type]
    hook.close()
    assert seen == [False, False] * 2 + [True, False]
