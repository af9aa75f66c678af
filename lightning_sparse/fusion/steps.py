"""Times steps of a training: generators that are resumed once before each forward, between two steps."""

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from statistics import mean, median
from typing import NamedTuple, TypeVar

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_sparse.engine.exchange import Exchange
from lightning_sparse.engine.link import median_over_ranks
from lightning_sparse.fusion.planner import Measured

CHANGED = 1.5  # The factor between two typical times from which times have changed.
PAUSE = 5  # A step that takes so many times as long as the median has a pause in it, and does not count.

T = TypeVar("T")
Passes = Generator[None, None, T]  # Each yield ends a pass: what is done before a forward.


class PassCounts(NamedTuple):
    """How many passes are for what."""

    settling: int  # until any is measured: buckets are rebuilt, thresholds settle
    beside: int  # measured as they are
    apart: int  # that send nothing before backward has ended, so that neither slows the other


PLANNING = PassCounts(4, 5, 3)
STEPS_MEASURED = sum(PLANNING)


def measure_steps(exchange: Exchange, parameters: Mapping[str, Tensor], counts: PassCounts) -> Passes[Measured]:
    """Look at so many steps as they are, then at backward alone; return the medians over steps and ranks.

    ``parameters`` are by name, in the order of definition.  Spans are of steps as they are, if there are any.
    """
    timeline, backward = exchange.timeline, list(parameters.values())[::-1]
    for _ in range(counts.settling):
        yield
    steps_measured = counts.beside + counts.apart
    rank_zero_info(f"LayerFusion: measuring {steps_measured} step{'s'[: steps_measured > 1]}.")
    spans, rests, arrivals = [], [], []
    now_s = time.perf_counter()
    for i in range(steps_measured):
        exchange.defer(i >= counts.beside)
        before_s, steps = now_s, exchange.steps
        yield
        now_s = time.perf_counter()
        if i < (counts.beside or counts.apart):
            spans.append(timeline.span_s())
            rest_s = (now_s - before_s) / (exchange.steps - steps) - spans[-1]
            rests.append(math.nan if exchange.was_shown else rest_s)  # else somebody evaluated meanwhile
        if i >= counts.beside:
            arrivals.append([timeline.arrival_s(parameter) for parameter in backward])
    exchange.defer(False)
    own = [median(_known(each)) for each in (spans, rests, *zip(*arrivals, strict=True))]
    span_s, rest_s, *arrivals_s = median_over_ranks(exchange, own).tolist()
    groups = [group.names for group in exchange.groups]
    rest_s = rest_s if math.isfinite(rest_s) else max(_known(arrivals_s)) / 2  # a forward, about
    return Measured(arrivals_s, span_s, rest_s, groups)


def typical_s(exchange: Exchange, look: Callable[[], float], looks: int, every: int = 1) -> Passes[float]:
    """Return the mean of so many ``looks``, over those without a pause; of the ranks the median.

    ``look`` returns seconds, once after ``every`` so many passes; NaN does not count.
    """
    seconds = []
    for _ in range(looks):
        for _ in range(every):
            yield
        seconds.append(look())
    known = _known(seconds)
    longest_s = PAUSE * median(known)
    return float(median_over_ranks(exchange, [mean(s for s in known if not s > longest_s)])[0])


def until_changed(
    exchange: Exchange, look: Callable[[], float], looks: int, every: int = 1, usual_s: float = math.nan
) -> Passes[tuple[float, float]]:
    """Return what was typical (``usual_s``, where that is known) and what is now, once they differ by ``CHANGED``."""
    while True:
        now_s = yield from typical_s(exchange, look, looks, every)
        if not math.isfinite(usual_s):
            usual_s = now_s
        elif math.isfinite(now_s) and abs(math.log(now_s / usual_s)) > math.log(CHANGED):
            return usual_s, now_s


def _known(seconds: Sequence[float]) -> list[float]:
    """The finite ones; NaN alone if there is none."""
    return [s for s in seconds if math.isfinite(s)] or [math.nan]
