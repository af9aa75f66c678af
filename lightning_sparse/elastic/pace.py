"""How many own steps a host takes until it meets the others, where hosts are not equally fast."""

import time
from collections import deque
from collections.abc import Callable
from itertools import count
from statistics import median
from typing import Any, Protocol

import torch

LATEST = 5  # own steps whose median is what one takes


class Training(Protocol):
    """The training of one host among several, which its averager is part of."""

    def described(self) -> dict[str, str]:
        """What must be the same on all hosts, as text by name; to be asked before the first step."""

    def training_state(self) -> dict[str, Any]:
        """What a host needs that joins, beside what the averager knows."""

    def load_training_state(self, state: dict[str, Any]) -> None:
        """Go on as the host that returned ``state``.

        Raises:
            RuntimeError: before anything has changed, if its optimizers or schedules do not fit.
        """

    def begin_step(self, counts: bool) -> None:
        """Make ready for a step, or for another forward of one; schedules stay as they are unless it ``counts``."""

    def last_step(self) -> int:
        """The number of steps with which the training ends; -1 if other things end it."""

    def steps_taken(self) -> int:
        """Steps so far."""

    def skip_steps(self, steps: int) -> None:
        """Count so many more, and have schedules go on by as many; below 0 so many fewer, and schedules stay."""

    def has_failed(self) -> bool:
        """Whether it has ended, on this rank, with an error."""


class Pace:
    """Counts and times own steps of this host, and says when to meet the others.

    At its own pace a host takes as many steps from one meeting to the next as fit best into a time: the fastest host's
    for the steps of the schedule, or the slowest host's for one step if that is longer.  The training's steps are those
    of the host that has taken most: after each exchange all others count as many, so that their schedules and ends are
    alike.

    Args:
        own_pace: False: a step of the schedule is an own step of every host.
        ahead: own steps that are taken beside an exchange, before it counts.
        agreed: returns what the first rank of this host has given: all go by its clock.

    Attributes:
        training: whose steps these are; to be set before the first.
        sent: to other hosts [2] float64: steps that this one has taken, and seconds that one takes, 0 before the first.
        received: from all hosts [P, 2].
        counts: whether the own step under way does; not if this host has met others that have taken the last one.
    """

    training: Training
    counts = True

    def __init__(self, own_pace: bool, ahead: int, agreed: Callable[[int], int] = lambda steps: steps) -> None:
        self._own_pace, self.ahead, self._agreed = own_pace, ahead, agreed
        self._latest: deque[float] = deque(maxlen=LATEST)
        self._comes_late = False  # when the others have taken the last step, but in the midst of one here
        self._met_s = time.perf_counter()
        self._begun_s: float | None = None  # of an own step that is under way
        self._fastest_s = self._slowest_s = 0.0
        self._taken = self._per_step = 0  # steps of the training so far, and those that an own step counts
        self._furthest = 0  # what the furthest host had taken when an exchange last counted
        self.sent = self.received = torch.zeros(0, dtype=torch.float64, device="cpu")

    def enter(self) -> None:
        """Note how far the training is, before the first step here, or when this host has caught up."""
        self._taken, self.counts, self._comes_late = self.training.steps_taken(), True, self.is_over

    def meet(self) -> None:
        """Note that the hosts have met."""
        self._met_s = time.perf_counter()

    def begin_step(self) -> None:
        """Note that an own step begins, or goes on with another forward."""
        self._begun_s = self._begun_s or time.perf_counter()
        if self._comes_late:
            self.counts = self._comes_late = False
            self.training.skip_steps(-(self._per_step or 1))
        self.training.begin_step(self.counts)

    def end_step(self, is_due: Callable[[int], bool]) -> int:
        """Note that it has ended; returns by how many steps the schedule goes on, in which an exchange ``is_due``."""
        if self._begun_s is not None:
            self._latest.append(time.perf_counter() - self._begun_s)
        self._begun_s = None
        taken = self.training.steps_taken()
        self._per_step, self._taken = taken - self._taken, taken
        if not self._own_pace:
            return 1
        until = next(steps for steps in count(1) if is_due(steps))
        return self._agreed(until if self._is_over(until) or self._is_last(taken) else 0)

    def vote(self) -> None:
        """Note what to tell in the exchange that begins."""
        self.sent = torch.tensor([self._taken, self._step_s], dtype=torch.float64, device="cpu")

    def keep_up(self) -> None:
        """Go by what was received: count as many steps as the furthest host, but not those from the last meeting on."""
        taken, seconds = self.received.T.tolist()
        known = [each for each in seconds if each > 0]
        self._fastest_s, self._slowest_s = min(known, default=0.0), max(known, default=0.0)
        self._furthest = int(max(taken))
        behind, last = self._furthest - int(self.sent[0]), self.training.last_step()
        behind = min(behind, last - (1 + self.ahead) * self._per_step - self._taken) if last > 0 else behind
        if behind > 0:
            self.training.skip_steps(behind)
            self._taken += behind

    @property
    def has_ended(self) -> bool:
        """Whether the exchange that counted last is the last before the training ends."""
        return self._is_last(self._furthest)

    @property
    def is_over(self) -> bool:
        """Whether this host has taken the last step of the training."""
        return 0 < self.training.last_step() <= self.training.steps_taken()

    @property
    def _step_s(self) -> float:
        return median(self._latest) if self._latest else 0.0

    def _is_over(self, steps: int) -> bool:
        deadline_s = max(self._slowest_s, steps * self._fastest_s)
        return time.perf_counter() - self._met_s + self._step_s / 2 >= deadline_s

    def _is_last(self, taken: int) -> bool:
        """Whether no exchange after one after so many steps would count before the training ends."""
        return 0 < self.training.last_step() <= taken + self.ahead * self._per_step
