"""Measures the first steps of a training, as they are and without messages beside backward."""

import math
import time
from collections.abc import Generator, Mapping, Sequence
from typing import TypeVar

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_sparse.engine.exchange import Exchange
from lightning_sparse.fusion.chooser import Chooser
from lightning_sparse.fusion.planner import Measured
from lightning_sparse.fusion.rehearsal import median_known, median_over_ranks

SETTLING = 4  # passes (one before each forward) until any is measured: buckets are rebuilt, thresholds settle
BESIDE = 5  # passes measured as they are
APART = 3  # passes measured that send nothing before backward has ended, so that neither slows the other
STEPS_MEASURED = SETTLING + BESIDE + APART

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
    for _ in range(SETTLING):
        yield
    if chooser:
        chooser.record(exchange)
    rank_zero_info(f"LayerFusion: measuring {BESIDE + APART} steps, then what messages cost.")
    spans, rests, arrivals = [], [], []
    now_s = time.perf_counter()
    for _ in range(BESIDE):
        before_s, steps = now_s, exchange.steps
        yield
        now_s = time.perf_counter()
        spans.append(timeline.span_s())
        rests.append((now_s - before_s) / (exchange.steps - steps) - spans[-1])
    exchange.deferred = True
    for _ in range(APART):
        yield
        arrivals.append([timeline.arrival_s(parameters[name]) for name in names])
    exchange.deferred = False
    own = [median_known(each) for each in (spans, rests, *zip(*arrivals, strict=True))]
    span_s, rest_s, *arrivals_s = median_over_ranks(exchange, own).tolist()
    groups = [group.names for group in exchange.groups]
    return Measured(arrivals_s, span_s, rest_s if math.isfinite(rest_s) else 0.0, groups)
