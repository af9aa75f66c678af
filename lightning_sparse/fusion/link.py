"""Measures the link between the ranks, by which their sums go: between two steps, on every rank."""

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_debug
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparse.engine.averager import Averager
from lightning_sparse.engine.inside import mean_of_slices, share
from lightning_sparse.engine.lanes import Lane
from lightning_sparse.network.comm import completed
from lightning_sparse.network.costs import Inside, Link, hops, traffic

FEW, MANY, MOST = 2**8, 2**16, 2**20  # Elements of a sum that takes its latency alone, and of those that tell the rate.
RUNS = 4  # Runs of many elements; the shortest was disturbed least.
RUNS_OF_SLOW = (
    2  # Runs that take ``SLOW_S`` or longer: a lost packet, which is sent again 0.2 s later, would spoil one.
)
RUNS_OF_FEW = 10  # Runs of few elements, which are short, and whose times decide the way of all sums.
RUNS_OF_FAR = 2  # Runs over a far link, where the first opens the windows of connections, one latency after another.
SLOW_S = 0.02  # Seconds of a message that is timed less often; of a latency, from which on a link is far.
IMMEASURABLE = 1e-11  # Seconds for a byte, or less, of a link whose rate cannot be measured: 800 Gbit/s.


class NoClock(Exception):
    """No rank could tell the time; raised on every rank."""


def measure_latency(averager: Averager) -> float:
    """Return the seconds of a sum of a few bytes in one hop, with which :func:`measure_link` begins."""
    return _medians_s(averager, 2, (FEW, True))[0]  # the first may have to connect


def is_far(latency_s: float) -> bool:
    """Whether measuring the link waits for messages more than for anything else; also where no rank has a clock."""
    return not latency_s < SLOW_S


def measure_link(averager: Averager, latency_s: float | None = None) -> Link:
    """Time sums of a few bytes, in one hop and as the backend does it, and a longer one of it for the rate.

    That is of 256 KiB, or up to 4 MiB where that is quick.  Where latency is long it is sent twice, in one hop, and the
    backend's latency is taken to be that of its hops.  Sums go by the latencies from then on.

    Args:
        averager: between whose ranks.
        latency_s: what :func:`measure_latency` returned, if it was called.

    Raises:
        NoClock: if no rank could tell the time.
    """
    latency_s, many = measure_latency(averager) if latency_s is None else latency_s, MANY
    far = is_far(latency_s)
    if far:
        all_reduce_s = hops("all_reduce", averager.size) * latency_s
        few_s, (many_s,) = latency_s, _medians_s(averager, RUNS_OF_FAR, (many, True))
    else:
        latency_s, all_reduce_s = _medians_s(averager, RUNS_OF_FEW, (FEW, True), (FEW, False))
        while (many_s := _medians_s(averager, 1, (many, False))[0]) < SLOW_S and many < MOST:
            many *= 4
        runs = RUNS if many_s < SLOW_S else RUNS_OF_SLOW
        few_s, many_s = all_reduce_s, float(np.fmin(many_s, _medians_s(averager, runs - 1, (many, False))[0]))
    if not math.isfinite(latency_s + all_reduce_s + many_s):
        raise NoClock
    sent_bytes = traffic("all_gather" if far else "all_reduce", 4 * many, averager.size)
    link = Link(latency_s, max(many_s - few_s, 0.0) / sent_bytes, all_reduce_s)
    averager.lanes.set_latencies(*link.latencies(averager.size, averager.device.type == "cpu"))
    mbit_s = 8e-6 / max(link.s_per_byte, IMMEASURABLE)
    rate = f"carries {mbit_s:,.0f} Mbit/s" if link.s_per_byte > IMMEASURABLE else "is too fast to be measured"
    rank_zero_debug(
        f"lightning_sparse: a message takes {1e3 * link.latency_s:.2f} ms, an all-reduce of the backend "
        f"{1e3 * link.all_reduce_s:.2f} ms; the link {rate}."
    )
    return link


def measure_inside(averager: Averager) -> Inside:
    """Time what the ranks of a member do for a group of few elements and for one of many; to be called on every rank.

    Raises:
        NoClock: if no rank could tell the time.
    """
    cut, times_s = averager.cut, []
    if cut.count == 1:
        return Inside()
    for n in (FEW, MOST):
        x = torch.zeros(n, dtype=torch.float32, device=averager.device)

        def average(lane: Lane, x: Tensor = x) -> None:
            assert lane.comm.inside is not None
            completed(mean_of_slices([x], [x], cut, lane.comm.inside))
            completed(share([x], cut, lane.comm.inside))

        times_s.append(min(time_s(averager, average) for _ in range(RUNS)))
    few_s, many_s = median_over_ranks(averager, times_s).tolist()
    if not math.isfinite(few_s + many_s):
        raise NoClock
    return Inside(cut.count, few_s, max(many_s - few_s, 0.0) / (MOST - FEW))


def _medians_s(averager: Averager, runs: int, *sums: tuple[int, bool]) -> list[float]:
    """The medians over ranks of the shortest of ``runs`` of each sum, given as (elements, in one hop)."""

    def shortest_s(elements: int, direct: bool) -> float:
        x = torch.zeros(elements, dtype=torch.float32, device=averager.device)
        return min(time_s(averager, lambda lane: lane.comm.all_reduce(x, direct).wait()) for _ in range(runs))

    own = [shortest_s(*each) for each in sums]
    return [float(median) for median in median_over_ranks(averager, own)]


def median_over_ranks(averager: Averager, seconds: Sequence[float]) -> NDArray[np.float64]:
    """The median over the ranks of each of ``seconds`` [m], the same on every rank.

    What cannot be a duration (zero, negative, infinite, NaN) does not count; NaN where no rank has any other.
    """
    columns = [column[np.isfinite(column) & (column > 0)] for column in _of_ranks(averager, seconds).T]
    return np.array([np.median(column) if len(column) else np.nan for column in columns])


def least_over_ranks(averager: Averager, seconds: Sequence[float]) -> NDArray[np.float64]:
    """The least over the ranks of each of ``seconds`` [m], the same on every rank; NaN where no rank knows any.

    Of messages that is what the link takes: other ranks have waited for the last one to begin, too.
    """
    of_ranks = _of_ranks(averager, seconds)
    least: NDArray[np.float64] = np.fmin.reduce(np.where(np.isfinite(of_ranks), of_ranks, np.nan))
    return least


def _of_ranks(averager: Averager, seconds: Sequence[float]) -> NDArray[np.float64]:  # [P, m]
    own = torch.tensor(seconds, dtype=torch.float64, device=averager.device)
    every: NDArray[np.float64] = averager.lanes.run_message(lambda comm: comm.all_gather(own)).cpu().numpy()
    return every


def time_s(averager: Averager, work: Callable[[Lane], object]) -> float:
    """Seconds that ``work`` takes on the first lane."""
    start_s = time.perf_counter()
    averager.lanes.on_first(work)
    if averager.device.type == "cuda":
        torch.cuda.synchronize(averager.device)
    return time.perf_counter() - start_s
