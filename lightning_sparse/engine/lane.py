"""A lane: one process group, and the one issuer of messages on it."""

import queue
import threading
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from lightning_sparse.network.comm import Comm, Rounds, expect_pending
from lightning_sparse.selection.sparse import Sparse

PATIENCE_S = 2  # for a thread with nothing to do to end


class Lane:
    """One process group and its issuer: whoever submits work, or a thread that runs it in order.

    Args:
        comm: the ranks; nobody else may launch messages on it.
        threaded: give the lane a thread of its own.
    """

    def __init__(self, comm: Comm, threaded: bool) -> None:
        self.comm = comm
        self.groups: Sequence[int] = ()  # indices, in the order in which they are sent
        self.next = 0  # position in `groups` of the one to send next; only the hook's thread looks
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.start_step()
        self._threaded = threaded
        self._thread: threading.Thread | None = None  # started with its first work
        self._closed = False

    def submit(self, work: Callable[[], None]) -> None:
        """Have ``work`` done by the issuer: at once, or by its thread, and then it must not raise.

        Raises:
            RuntimeError: the lane was closed.
        """
        if self._closed:
            raise RuntimeError(
                "the hook on this DistributedDataParallel was closed, so it averages no gradients any more; to train "
                "on, make a new DistributedDataParallel and a new hook."
            )
        if not self._threaded:
            work()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._inbox,), name="lightning_sparse", daemon=True)
            self._thread.start()
        self._inbox.put(work)

    def close(self, within_a_step: bool = False) -> bool:
        """End the thread and release the ranks; returns whether that was possible.

        It is not while a message may be under way, as ``within_a_step``; then nobody waits for the thread.
        """
        self._closed = True
        self._inbox.put(None)
        if within_a_step or not self._has_ended():
            return False
        self.comm.release()
        return True

    def _has_ended(self) -> bool:
        if self._thread is None or self._thread is threading.current_thread():  # garbage is collected on any thread
            return True
        self._thread.join(timeout=PATIENCE_S)
        return not self._thread.is_alive()

    def take_complete(self, arriving: Sequence[int]) -> list[int]:
        """Groups that may be sent now: complete, and with none before them on this lane that is not."""
        first = self.next
        while self.next < len(self.groups) and not arriving[self.groups[self.next]]:
            self.next += 1
        return list(self.groups[first : self.next])

    def start_step(self) -> None:
        """Count from zero."""
        self.compress_ns = 0
        self.network_ns = 0
        self._sent_before = self.comm.sent_bytes

    def sent_bytes(self) -> int:
        """Payload put on the wire in this step."""
        return self.comm.sent_bytes - self._sent_before

    def run(self, rounds: Rounds, meanwhile: Callable[[], None] = lambda: None) -> Tensor | Sparse:
        """Run a compressor to its end, and ``meanwhile`` while its first message is under way.

        Counts the time it worked and the time it waited.
        """
        self.comm.reuse_buffers()
        start_ns = time.perf_counter_ns()
        waited_ns = 0
        try:
            pending = expect_pending(next(rounds))
            meanwhile()
            while True:
                waiting_ns = time.perf_counter_ns()
                result = pending.wait()
                waited_ns += time.perf_counter_ns() - waiting_ns
                pending = expect_pending(rounds.send(result))
        except StopIteration as stop:
            self.network_ns += waited_ns
            self.compress_ns += time.perf_counter_ns() - start_ns - waited_ns
            total: Tensor | Sparse = stop.value
            return total


def _work(inbox: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    """What a lane's thread does.  Between two works it refers to nothing else, so that whoever is dropped goes."""
    while (work := inbox.get()) is not None:
        work()
        del work


def spread(elements: Sequence[int], lanes: int) -> list[int]:
    """A lane for each group of so many ``elements``, in their order: the one that has the fewest so far."""
    given = [0] * lanes
    chosen = []
    for n in elements:
        chosen.append(given.index(min(given)))
        given[chosen[-1]] += max(n, 1)
    return chosen
