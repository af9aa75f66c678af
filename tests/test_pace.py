"""How long local steps take, and when that has changed."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from lightning_sparse import engines
from lightning_sparse.engine.phases import Phase
from lightning_sparse.engines import SETTLING, WINDOW, Pace


class Clock:
    """An exchange that only counts steps, and the time that they take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps, self.now_s, self.phase = 0, 0.0, Phase.BETWEEN
        monkeypatch.setattr(engines.time, "perf_counter", lambda: self.now_s)
        monkeypatch.setattr(engines, "median_over_ranks", lambda exchange, own: np.array(own))

    def changes(self, pace: Pace, seconds: Sequence[float], evaluated_after: int = 0) -> list[int]:
        """The steps after which ``pace`` had changed; the average is shown after every so many."""
        changed = []
        for step_s in seconds:
            self.steps, self.now_s = self.steps + 1, self.now_s + step_s
            shown = evaluated_after > 0 and self.steps % evaluated_after == 0
            self.phase = Phase.SHOWN if shown else Phase.BETWEEN
            if pace.has_changed(self):  # type: ignore[arg-type]  # it asks for no more
                changed.append(self.steps)
        return changed


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_it_is_the_mean_since_fragments_differ(clock: Clock) -> None:
    pace = Pace()
    clock.changes(pace, [5.0] * SETTLING + [1.0, 3.0] * (WINDOW // 2))
    assert pace.usual_s == pytest.approx(2)


@pytest.mark.parametrize("every", [10, 25])
def test_a_long_pause_is_no_change(clock: Clock, every: int) -> None:
    pace = Pace()
    assert clock.changes(pace, [20.0 if step % every == every - 1 else 1.0 for step in range(500)]) == []
    assert pace.usual_s == pytest.approx(1)


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_a_step_with_a_short_evaluation_does_not_count(clock: Clock, every: int) -> None:
    pace = Pace()
    assert clock.changes(pace, [1.0] * (SETTLING + WINDOW)) == []
    assert (
        clock.changes(pace, [1.0 if (step + 1) % every else 5.0 for step in range(SETTLING + WINDOW, 500)], every) == []
    )
    assert pace.usual_s == 1


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_steps_that_stay_longer_or_shorter_are_a_change(clock: Clock, factor: float) -> None:
    pace: Any = Pace()
    assert clock.changes(pace, [1.0] * (SETTLING + WINDOW)) == []
    assert clock.changes(pace, [factor] * (SETTLING + 2 * WINDOW))[:1] == [2 * (SETTLING + WINDOW)]
