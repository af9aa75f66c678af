"""Lanes: process groups and the one issuer of messages on each, and questions that all ranks answer."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_sparse.network.agreement import everywhere
from lightning_sparse.network.comm import Comm, Pending, Rounds, expect_pending, without_autocast

T = TypeVar("T")

PATIENCE_S = 2  # for a thread with nothing to do to end


class Lanes:
    """All lanes of a rank, on which groups are averaged beside training, and questions are asked between two steps.

    Args:
        comms: the ranks, once for each lane, or this rank's column of members; nobody else may launch messages on them.
        threaded: give each lane a thread of its own.
        device: of what is sent.
        asked: who answers :meth:`run_message`, if they are others than in the first lane: the ranks of this host, of
            which other hosts know nothing.

    What all decide together is asked of every rank of every member: columns would decide differently.

    [Note: who issues messages] Each group is sent on the lane with the fewest elements before it.  A lane is one
    process group and one issuer, which runs its groups one after the other in a fixed order, so that on each process
    group every rank launches the same messages in the same order whatever the timing.  Over Gloo the issuer is a
    thread, which goes on where no hook is called: two such lanes took 0.70 of plain DDP's step where one took 0.73, and
    backward's thread, waiting in each hook, 0.81 (docs/benchmarks/2026-11-21-skip-reduce.md).  On NCCL, where waiting
    blocks a stream and not the host, the issuer is the caller of the hook, and both lanes are on one communicator:
    each has a stream of its own, so that one compresses while the other waits for a message, unless messages of several
    communicators must be one after the other.  All groups are then launched in one fixed order, whichever are complete
    first: a replica of a sharded model that skips a layer gets its gradients later than the others.  See [Note: one
    order of launches].
    """

    def __init__(self, comms: Sequence[Comm], threaded: bool, device: torch.device, asked: Comm | None = None) -> None:
        self.size, self.rank = comms[0].size, comms[0].member
        self.threaded = threaded
        self._device, self._asked = device, asked
        self._lanes = [Lane(comm, threaded, device, number) for number, comm in enumerate(comms)]
        #: Messages on several communicators may be under way at once.
        self.keeps_order = all(comm.keeps_order for comm in comms)
        if not self.keeps_order:
            for lane in self._lanes:
                lane.stream = self._lanes[0].stream

    def __iter__(self) -> Iterator["Lane"]:
        return iter(self._lanes)

    def __getitem__(self, index: int) -> "Lane":
        return self._lanes[index]

    # - in which order

    def orders_of(self, elements: Sequence[int]) -> list[list[tuple[int, int]]]:
        """Return lanes and their groups of so many ``elements``, by index, in each order that ranks keep to.

        That is one for each lane, or where nobody but the caller launches, one of all.
        """
        every = [(lane, i) for i, lane in enumerate(spread(elements, len(self._lanes)))]
        own = [[each for each in every if each[0] == lane.number] for lane in self._lanes]
        return own if self.threaded else [every]

    # - questions to all ranks, between two steps, on every rank

    def on_first(self, work: Callable[["Lane"], T]) -> T:
        """Return what ``work`` returns on the first lane; what it sends counts for no step."""
        self.wait_for_caller()
        result = self._lanes[0].submit(partial(work, self._lanes[0]))
        wait([result])
        self.have_caller_wait()
        return result.result()

    def run_message(self, launch: Callable[[Comm], Pending]) -> Tensor:
        """The result of one message, launched on the first lane."""
        if self._asked is not None:
            return launch(self._asked).wait()
        return self.on_first(lambda lane: launch(lane.comm.everyone).wait())

    def sum_over_members(self, x: Tensor) -> Tensor:
        """The sum of ``x``, which is of this rank's slices or shards, over the members; of other hosts nobody knows."""
        if self._asked is not None or not x.numel():
            return x
        return self.on_first(lambda lane: lane.comm.all_reduce(x).wait())

    def sum_over_slices(self, x: Tensor) -> Tensor:
        """The sum of ``x``, of which each rank of a member has its own, over these."""
        if self._asked is not None:
            return self._asked.all_gather(x).wait().sum(0)

        def summed(lane: Lane) -> Tensor:
            assert lane.comm.inside is not None
            return lane.comm.inside.all_gather(x).wait().sum(0)

        return self.on_first(summed)

    def gather_text(self, text: str) -> list[str]:
        """Return what each rank says, by rank."""
        return self.on_first(lambda lane: everywhere(text, lane.comm.everyone, self._device))

    @property
    def everyone(self) -> Comm:
        """Who answers questions, whose number and rank say which answer is whose."""
        return self._lanes[0].comm.everyone

    def run_message_beside(self, launch: Callable[[Comm], Pending]) -> "Answer":
        """Do as :meth:`run_message` in a lane, within a step and without waiting, once it has done what it has to do.

        ``launch`` makes what it sends itself, on the lane's stream.  What the caller has made might be freed under way.
        """
        return Answer(self._lanes[0], launch)

    # - all of them

    @property
    def latencies(self) -> tuple[int, int, int]:
        """What sums go by, as ``Costs`` has it."""
        return self._lanes[0].comm.costs.latencies

    def set_latencies(self, hop_bytes: int, all_reduce_bytes: int, message_bytes: int = 0) -> None:
        """Have sums go by these from now on.  To be called between two steps, with the same on every rank."""
        for lane in self._lanes:
            lane.comm.costs.latencies = hop_bytes, all_reduce_bytes, message_bytes

    def wait_for_caller(self) -> None:
        """Have all lanes wait for the caller's stream, as :meth:`Lane.wait_for_caller`."""
        for lane in self._lanes:
            lane.wait_for_caller()

    def have_caller_wait(self) -> None:
        """Have the caller's stream wait for all lanes, as :meth:`Lane.have_caller_wait`."""
        for lane in self._lanes:
            lane.have_caller_wait()

    def spent(self) -> list[int]:
        """Bytes that lanes have sent, nanoseconds in compressors' own code, nanoseconds of waiting for messages."""
        every = [(lane.sent_bytes, lane.compress_ns, lane.network_ns) for lane in self._lanes]
        return [sum(each) for each in zip(*every, strict=True)]

    def close(self, within_a_step: bool) -> bool:
        """End the issuing threads; returns whether no message is under way."""
        closed = [lane.close(within_a_step) for lane in self._lanes]
        return all(closed)


class Lane:
    """One process group and its issuer: whoever submits work, or if ``threaded`` a thread that runs it in order.

    Nobody else may launch messages on ``comm``.  Work is done on ``stream``, which is None on the CPU.  ``number`` is
    the lane's among all of them.
    """

    def __init__(self, comm: Comm, threaded: bool, device: torch.device | None = None, number: int = 0) -> None:
        self.comm, self.number = comm, number
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

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent to other members since the start."""
        others = self.comm.everyone
        return self.comm.sent_bytes + (others.sent_bytes if others is not self.comm else 0)

    @without_autocast()
    def run(self, rounds: Rounds[T], meanwhile: Callable[[], None] = lambda: None) -> T:
        """Run a compressor to its end, or a part of one, and ``meanwhile`` while its first message is under way.

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
            returned: T = stop.value
            return returned


class Answer:
    """What a lane was asked for, under way."""

    def __init__(self, lane: Lane, launch: Callable[[Comm], Pending]) -> None:
        self._lane = lane
        lane.wait_for_caller()
        self._arriving = lane.submit(lambda: launch(lane.comm).wait())

    def result(self) -> Tensor:
        """Wait for the answer.  On a device only the lane's stream has waited so far; now the caller's does too."""
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


def spread(elements: Sequence[int], lanes: int) -> list[int]:
    """A lane for each group of so many ``elements``, in their order: the one that has the fewest so far."""
    given = [0] * lanes
    chosen = []
    for n in elements:
        chosen.append(given.index(min(given)))
        given[chosen[-1]] += max(n, 1)
    return chosen
