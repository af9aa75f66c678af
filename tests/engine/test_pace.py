"""When a host meets the others at its own pace: by recorded times."""

from typing import Any

import pytest
import torch

from lightning_sparse.elastic import pace
from lightning_sparse.elastic.pace import Pace


class Training:
    """A training of ``last`` steps."""

    def __init__(self, last: int = -1) -> None:
        self.taken, self.last = 0, last

    def last_step(self) -> int:
        return self.last

    def steps_taken(self) -> int:
        return self.taken

    def begin_step(self, counts: bool) -> None:
        pass

    def skip_steps(self, steps: int) -> None:
        self.taken += steps


class Clock:
    """Stands in for ``time``."""

    now_s = 1.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(pace, "time", found)
    return found


def started(training: Any, others: list[list[float]]) -> Pace:
    found = Pace(own_pace=True, ahead=1)
    found.training = training
    found.enter()
    found.vote()
    found.received = torch.tensor(others, dtype=torch.float64)
    found.keep_up()
    found.meet()
    return found


def steps_until_met(of: Pace, clock: Clock, step_s: float, every: int) -> int:
    """Own steps until an exchange that is due after ``every`` of the schedule."""
    of.meet()
    for steps in range(1, 100):
        of.begin_step()
        clock.now_s += step_s
        of.training.taken += 1  # type: ignore[attr-defined]
        if of.end_step(lambda ahead: ahead == every):
            return steps
    raise AssertionError


@pytest.mark.parametrize(
    ("step_s", "every", "steps"), [(1.0, 1, 3), (3.0, 1, 1), (1.0, 8, 8), (3.0, 8, 3), (1.1, 1, 3)]
)
def test_a_host_takes_the_steps_that_come_nearest(clock: Clock, step_s: float, every: int, steps: int) -> None:
    of = started(Training(), [[0, 1.0], [0, 3.0]])
    assert steps_until_met(of, clock, step_s, every) == steps
    assert steps_until_met(of, clock, step_s, every) == steps


def test_all_count_the_steps_of_the_furthest_and_none_exchanges_after_the_last(clock: Clock) -> None:
    training = Training(last=20)
    of = started(training, [[8, 1.0], [0, 3.0]])
    assert training.taken == 8
    assert not of.has_ended
    training.taken = 18
    assert steps_until_met(of, clock, 1.0, 8) == 1  # after 19: what is exchanged beside the last step counts
    of.vote()
    of.received = torch.tensor([[19, 1.0], [19, 3.0]])
    of.keep_up()
    assert of.has_ended


def test_the_step_to_the_last_meeting_is_not_skipped(clock: Clock) -> None:
    training = Training(last=20)
    of = started(training, [[0, 1.0]])
    assert steps_until_met(of, clock, 3.0, 1) == 1
    of.vote()
    training.taken += 1  # beside the exchange
    of.begin_step()
    of.end_step(lambda _: True)
    of.received = torch.tensor([[1, 3.0], [19, 1.0]])
    of.keep_up()
    assert training.taken == 18
    assert steps_until_met(of, clock, 0.1, 8) == 1  # else it would end, and the others would wait for it


def test_a_step_does_not_count_in_which_a_host_meets_others_that_have_ended() -> None:
    training = Training(last=20)
    of = started(training, [[0, 1.0]])
    training.taken = 20
    of.begin_step()  # as with two optimizers, whose steps count as two
    assert of.counts
    of.enter()
    of.begin_step()
    of.begin_step()  # another forward of the same step
    assert not of.counts
    assert training.taken == 19
