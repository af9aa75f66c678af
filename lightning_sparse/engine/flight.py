"""Groups on their way: taken up after a step, averaged by the lanes, and not applied yet."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future as LaneFuture
from concurrent.futures import wait
from functools import partial

from lightning_sparse.engine.lane import Lane, have_caller_wait, spent, wait_for_caller
from lightning_sparse.engine.replica import Replica


class Flight:
    """The exchange of replicas after one step, on ``lanes``."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.error: BaseException | None = None  # the first failure of a lane
        self.replicas: list[Replica] = []
        self.spent_before = spent(lanes)
        self._lanes = lanes
        self._works: list[LaneFuture[None]] = []

    @property
    def is_under_way(self) -> bool:
        """Whether a message may be: a lane is at work, or has failed."""
        return self.error is not None or not all(work.done() for work in self._works)

    def send(self, replicas: Sequence[Replica], queues: Sequence[Sequence[int]], size: int) -> None:
        """Have each lane average those of ``replicas`` in its queue, over ``size`` ranks, in this order."""
        self.replicas = list(replicas)
        wait_for_caller(self._lanes)
        for lane, queue in zip(self._lanes, queues, strict=True):
            for i in queue:
                self.launch(lane, partial(_average, self.replicas[i], size))

    def launch(self, lane: Lane, work: Callable[[Lane], None]) -> None:
        """Have ``lane`` do ``work`` after all else, unless a lane has failed."""
        self._works.append(lane.submit(partial(self._unless_failed, work, lane)))

    def wait(self) -> int:
        """Wait until all has arrived; returns for how many nanoseconds."""
        start_ns = time.perf_counter_ns()
        wait(self._works)
        have_caller_wait(self._lanes)
        return time.perf_counter_ns() - start_ns

    def _unless_failed(self, work: Callable[[Lane], None], lane: Lane) -> None:
        if self.error is None:
            try:
                work(lane)
            except BaseException as error:  # whatever it is, training must hear of it
                self.error = error


def _average(replica: Replica, size: int, lane: Lane) -> None:
    replica.move(lane.run(replica.exchange(lane.comm)), size)
