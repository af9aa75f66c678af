"""Measures the first steps of a training, as they are and without messages beside backward."""

import math
import time
from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_sparse.engine.exchange import Exchange
from lightning_sparse.fusion.chooser import Chooser
from lightning_sparse.fusion.planner import Measured
from lightning_sparse.fusion.rehearsal import median_known, median_over_ranks


class Schedule(NamedTuple):
    """How many passes, one before each forward, are for what."""

    settling: int  # until any is measured: buckets are rebuilt, thresholds settle
    beside: int  # measured as they are
    apart: int  # that send nothing before backward has ended, so that neither slows the other


PLANNING = Schedule(4, 5, 3)
CHOOSING = Schedule(2, 3, 2)  # what averages then is not what will; and steps of what is chosen correct the forecasts
STEPS_MEASURED = sum(PLANNING)

T = TypeVar("T")
Passes = Generator[None, None, T]  # resumed between two steps, once in each pass


def measure(
    exchange: Exchange, parameters: Mapping[str, Tensor], names: Sequence[str], chooser: Chooser | None
) -> Passes[Measured]:
    """Look at steps as they are, then at backward alone; return the medians over steps and ranks.

    Args:
        exchange: that averages.
        parameters: by name.
        names: the same names in backward order.
        chooser: that needs a record of the gradients, if any does.
    """
    timeline = exchange.timeline
    schedule = CHOOSING if chooser else PLANNING
    for number in range(schedule.settling):
        yield
        if chooser and number == 0:  # what a checkpoint holds is in its place now
            chooser.record(exchange)
    rank_zero_info(f"LayerFusion: measuring {schedule.beside + schedule.apart} steps, then what messages cost.")
    spans, rests, arrivals = [], [], []
    now_s = time.perf_counter()
    for _ in range(schedule.beside):
        before_s, steps = now_s, exchange.steps
        yield
        now_s = time.perf_counter()
        spans.append(timeline.span_s())
        rests.append((now_s - before_s) / (exchange.steps - steps) - spans[-1])
    exchange.deferred = True
    for _ in range(schedule.apart):
        yield
        arrivals.append([timeline.arrival_s(parameters[name]) for name in names])
    exchange.deferred = False
    own = [median_known(each) for each in (spans, rests, *zip(*arrivals, strict=True))]
    span_s, rest_s, *arrivals_s = median_over_ranks(exchange, own).tolist()
    groups = [group.names for group in exchange.groups]
    return Measured(arrivals_s, span_s, rest_s if math.isfinite(rest_s) else 0.0, groups)
