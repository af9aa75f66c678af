"""A lane: one process group, and the one issuer of messages on it."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_sparse.network.comm import Comm, Pending, Rounds, expect_pending, without_autocast
from lightning_sparse.selection.sparse import Sparse

T = TypeVar("T")

PATIENCE_S = 2  # for a thread with nothing to do to end


class Lane:
    """One process group and its issuer: whoever submits work, or if ``threaded`` a thread that runs it in order.

    Nobody else may launch messages on ``comm``.  Work is done on ``stream``, which is None on the CPU.
    """

    def __init__(self, comm: Comm, threaded: bool, device: torch.device | None = None) -> None:
        self.comm = comm
        self.compress_ns = self.network_ns = 0
        on_device = device is not None and device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if on_device else None
        self._inbox: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._threaded = threaded
        self._thread: threading.Thread | None = None  # started with its first work; a daemon, which no exit waits for
        self._closed = False

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Have ``work`` done by the issuer: at once, or by its thread; the future has its result or its error.

        Raises:
            RuntimeError: the lane was closed.
        """
        self.check_open()
        result: Future[T] = Future()
        if not self._threaded:
            _do(work, self.stream, result)
            return result
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._inbox,), name="lightning_sparse", daemon=True)
            self._thread.start()
        self._inbox.put((work, self.stream, result))
        return result

    def check_open(self) -> None:
        """Raise a RuntimeError if the lane was closed."""
        if self._closed:
            raise RuntimeError(
                "the hook on this DistributedDataParallel was closed, so it averages no gradients any more; to train "
                "on, make a new DistributedDataParallel and a new hook."
            )

    def wait_for_caller(self) -> None:
        """Have this lane do nothing more before what the caller's stream is given so far is done."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def have_caller_wait(self) -> None:
        """Have the caller's stream do nothing more before what this lane is given so far is done."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

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

    @without_autocast()
    def run(self, rounds: Rounds, meanwhile: Callable[[], None] = lambda: None) -> Tensor | Sparse:
        """Run a compressor to its end, and ``meanwhile`` while its first message is under way.

        Counts the time it worked and the time it waited.
        """
        self.comm.buffers.reuse()
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


class Answer:
    """What a lane was asked for, under way."""

    def __init__(self, lane: Lane, launch: Callable[[Comm], Pending]) -> None:
        self._lane = lane
        lane.wait_for_caller()
        self._arriving = lane.submit(lambda: launch(lane.comm).wait())

    def result(self) -> Tensor:
        """Wait for it; on a device the caller's stream does, since the lane's own is all that has waited so far."""
        result = self._arriving.result()
        self._lane.have_caller_wait()
        return result


def _serve(inbox: "queue.SimpleQueue[tuple[Any, ...] | None]") -> None:
    """Run a lane's thread.  Between two works it refers to nothing else, so that whoever is dropped goes."""
    while (task := inbox.get()) is not None:
        _do(*task)
        del task


def _do(work: Callable[[], T], stream: torch.cuda.Stream | None, result: Future[T]) -> None:
    try:
        with torch.cuda.stream(stream):
            result.set_result(work())
    except BaseException as error:  # whatever it is, backward must hear of it, not wait
        result.set_exception(error)


def wait_for_caller(lanes: Sequence[Lane]) -> None:
    """Have all ``lanes`` wait for the caller's stream, as :meth:`Lane.wait_for_caller`."""
    for lane in lanes:
        lane.wait_for_caller()


def have_caller_wait(lanes: Sequence[Lane]) -> None:
    """Have the caller's stream wait for all ``lanes``, as :meth:`Lane.have_caller_wait`."""
    for lane in lanes:
        lane.have_caller_wait()


def spent(lanes: Sequence[Lane]) -> list[int]:
    """Bytes that all ``lanes`` have sent, nanoseconds in compressors' own code, nanoseconds of waiting for messages."""
    every = [(lane.comm.sent_bytes, lane.compress_ns, lane.network_ns) for lane in lanes]
    return [sum(each) for each in zip(*every, strict=True)]


def spread(elements: Sequence[int], lanes: int) -> list[int]:
    """A lane for each group of so many ``elements``, in their order: the one that has the fewest so far."""
    given = [0] * lanes
    chosen = []
    for n in elements:
        chosen.append(given.index(min(given)))
        given[chosen[-1]] += max(n, 1)
    return chosen
