"""Times steps of a training: generators that are resumed once before each forward, between two steps."""

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from statistics import mean, median
from typing import NamedTuple, TypeVar

import numpy as np
from lightning_utilities.core.rank_zero import rank_zero_debug
from torch import Tensor

from lightning_sparse.engine.averager import Averager
from lightning_sparse.engine.bucket import Report
from lightning_sparse.fusion.link import NoClock, least_over_ranks, measure_link, median_over_ranks
from lightning_sparse.fusion.planner import Measured
from lightning_sparse.gradients.averager import GradientAverager
from lightning_sparse.network.costs import Link
from lightning_sparse.settings import counted

CHANGED = 1.5  # The factor between two typical times from which times have changed.
LEAST_ROUNDS = 3  # In which every weight travels once, of which a median tells what messages take.
PAUSE = 2  # A step that takes so many times as long as the median has a pause in it, and does not count.

T = TypeVar("T")
BetweenSteps = Generator[None, None, T]  # Each yield ends a pass: what is done before a forward.


class Times(NamedTuple):
    """What a step takes, in seconds.

    Attributes:
        step_s: the whole.
        messages_s: in which messages were under way; NaN if nobody knows.
        sees_hidden: also beside computing, and not only while the step waited for them.
        dense: how many times as many bytes dense sums in float32 send.
    """

    step_s: float
    messages_s: float
    sees_hidden: bool = True
    dense: float = 1.0

    @property
    def are_known(self) -> bool:
        """Whether both times are."""
        return math.isfinite(self.step_s) and math.isfinite(self.messages_s)

    def have_changed(self, now: "Times") -> bool:
        """Whether messages take another time ``now``, so much that the step would, if they were waited for.

        Computing does not count: a step that computes for longer waits for less of its messages, and is no shorter.
        """
        with_now_s = max(self.step_s + now.messages_s - self.messages_s, 0.0)
        if not (self.sees_hidden and now.sees_hidden) and with_now_s < self.step_s:
            with_now_s = max(with_now_s, min(now.step_s, self.step_s))
        return _differ(now.messages_s, self.messages_s) and _differ(with_now_s, self.step_s)

    def may_be_for_others(self, now: "Times") -> bool:
        """Whether messages are so much shorter ``now`` that candidates may be sooner which send more."""
        less_s = self.dense * (self.messages_s - now.messages_s)
        return now.messages_s < self.messages_s / CHANGED and less_s > (1 - 1 / CHANGED) * self.step_s


def _differ(s: float, other_s: float) -> bool:
    return max(s, other_s) > CHANGED * min(s, other_s)


class PassCounts(NamedTuple):
    """How many passes are for what."""

    settling: int  # until any is measured: buckets are rebuilt, thresholds settle
    beside: int  # measured as they are
    apart: int  # that send nothing before backward has ended, so that neither slows the other


PLANNING = PassCounts(4, 5, 3)
STEPS_MEASURED = sum(PLANNING)


def measure_steps(
    averager: GradientAverager, parameters: Mapping[str, Tensor], counts: PassCounts
) -> BetweenSteps[Measured]:
    """Look at so many steps as they are, then at backward alone; return the medians over steps and ranks.

    ``parameters`` are by name, in the order of definition.  Spans are of steps as they are, if there are any.
    """
    timeline, backward = averager.timeline, list(parameters.values())[::-1]
    for _ in range(counts.settling):
        yield
    steps_measured = counts.beside + counts.apart
    rank_zero_debug(f"lightning_sparse: measuring {counted(steps_measured, 'step')}.")
    spans, rests, messages, arrivals = [], [], [], []
    now_s = time.perf_counter()
    for i in range(steps_measured):
        averager.defer(i >= counts.beside)
        before_s, steps = now_s, averager.steps
        yield
        now_s = time.perf_counter()
        if i < (counts.beside or counts.apart):
            spans.append(timeline.span_s())
            messages.append(averager.messages())
            rest_s = (now_s - before_s) / (averager.steps - steps) - spans[-1]
            rests.append(math.nan if averager.was_shown else rest_s)  # else somebody evaluated meanwhile
        if i >= counts.beside:
            arrivals.append([timeline.arrival_s(parameter) for parameter in backward])
    averager.defer(False)
    own = [median(_known(each)) for each in (spans, rests, *zip(*arrivals, strict=True))]
    span_s, rest_s, *arrivals_s = median_over_ranks(averager, own).tolist()
    groups = [group.names for group in averager.groups]
    rest_s = rest_s if math.isfinite(rest_s) else max(_known(arrivals_s)) / 2  # a forward, about
    messages_s = median(_known(list(least_over_ranks(averager, [tell() for tell in messages]))))
    return Measured(arrivals_s, span_s, rest_s, groups, messages_s)


class StepClock:
    """Returns the seconds since it was asked last; NaN where somebody evaluated or saved meanwhile."""

    def __init__(self, averager: Averager) -> None:
        self._averager, self._last_s = averager, time.perf_counter()

    def __call__(self) -> float:
        """Return the seconds of the last step."""
        before_s, self._last_s = self._last_s, time.perf_counter()
        return math.nan if self._averager.was_shown else self._last_s - before_s


def typical_times(averager: Averager, steps: int) -> BetweenSteps[Times]:
    """Return what so many steps take, the next ones: the mean over those without a pause, of the ranks the median.

    Of messages it is the median over rounds, in which every weight travels once, of what they took on the rank that
    they took least, since other ranks wait in them for the slowest.
    """
    clock, seconds, messages = StepClock(averager), list[float](), list[Callable[[], float]]()
    reports: list[Report | None] = []
    for _ in range(steps):
        yield
        seconds.append(clock())
        messages.append(averager.messages())
        reports.append(averager.last)
    known = _known(seconds)
    longest_s = PAUSE * median(known)
    sent_bytes, dense_bytes = (
        sum(getattr(each, name, 0) for each in reports) for name in ("sent_bytes", "dense_bytes")
    )
    own = [mean(s for s in known if not s > longest_s), dense_bytes / max(sent_bytes, 1)]
    step_s, dense = median_over_ranks(averager, own).tolist()  # ranks with other slices send other numbers of bytes
    return Times(step_s, _of_rounds(averager, messages), averager.sees_hidden_messages, dense)


def _of_rounds(averager: Averager, messages: Sequence[Callable[[], float]]) -> float:
    """Seconds of messages in a step, where ``messages`` tell those of steps that followed each other."""
    least, steps = least_over_ranks(averager, [tell() for tell in messages]), averager.round
    rounds = [float(np.mean(least[i : i + steps])) for i in range(0, len(least) - steps + 1, steps)]
    return median(_known(rounds))


def in_rounds(averager: Averager, steps: int) -> int:
    """So many steps, or more until there are rounds enough."""
    return max(steps, LEAST_ROUNDS * averager.round)


def until_changed(
    averager: Averager, steps: int, usual: Times | None = None, link: Link | None = None
) -> BetweenSteps[tuple[Times, Times]]:
    """Return what is ``usual``, if that is known, or else what was first, and what is now, once it has changed.

    Where messages have become short that were hardly waited for, it has if the ``link`` has, which is measured then.
    """
    while True:
        now = yield from typical_times(averager, in_rounds(averager, steps))
        if usual is None or not usual.are_known:
            usual = now
        elif usual.have_changed(now):
            return usual, now
        elif link is not None and usual.may_be_for_others(now):
            with suppress(NoClock):
                if _differ(measure_link(averager).s_per_byte, link.s_per_byte):
                    return usual, now
            usual = usual._replace(messages_s=now.messages_s)


def _known(seconds: Sequence[float]) -> list[float]:
    """The finite ones; NaN alone if there is none."""
    return [s for s in seconds if math.isfinite(s)] or [math.nan]
