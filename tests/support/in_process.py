"""P ranks as P threads of one process: messages, process groups and DistributedDataParallel, without a network."""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.futures import Future

from lightning_sparse.engine.bucket import gradients_of
from lightning_sparse.network.comm import Comm, Pending
from lightning_sparse.network.costs import HOP_BYTES
from lightning_sparse.network.cut import Cut
from lightning_sparse.network.members import Members
from lightning_sparse.network.process_groups import LANES, Between
from lightning_sparse.network.simulated import SimComm, SimNetwork
from lightning_sparse.network.torch_comm import finished
from tests.support.buckets import Bucket

T = TypeVar("T")

PATIENCE_S = 10.0  # for the other ranks to launch a message, on a busy machine
LIMIT_S = 3 * PATIENCE_S  # for a function on all ranks


class ThreadRanks:
    """P threads, one a rank, that live until they are closed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.network = Network(size)
        self._threads = [ThreadPoolExecutor(1, f"rank {rank}", torch.set_num_threads, (1,)) for rank in range(size)]

    def everywhere(self, function: Callable[[int], T]) -> list[T]:
        """``function(rank)`` on all ranks at once, with gradients; returns what each returned.

        Raises:
            BaseException: the first error of a rank, or that one was not done in time.
        """
        done = [thread.submit(self._on_rank, function, rank) for rank, thread in enumerate(self._threads)]
        if late := wait(done, LIMIT_S).not_done:
            ranks = [rank for rank, each in enumerate(done) if each in late]
            self.network.fail(TimeoutError(f"ranks {ranks} were not done in {LIMIT_S:.0f} s"))
        if self.network.failed is not None:
            wait(done, PATIENCE_S)
            raise self.network.failed
        return [each.result() for each in done]

    def _on_rank(self, function: Callable[[int], T], rank: int) -> T:
        try:
            with torch.inference_mode(False), torch.enable_grad():  # both belong to a thread
                return function(rank)
        except BaseException as error:
            self.network.fail(error)
            raise

    def close(self) -> None:
        """End the threads."""
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)


# - messages


class Meeting(SimNetwork):
    """Where P threads hand each other the messages of one process group.  The n-th that each launches is one message.

    Results are the same bits on every rank: sums are added in the order of the ranks.
    """

    def __init__(self, network: "Network", size: int) -> None:
        super().__init__(size)
        self.changed = threading.Condition()
        self._network = network

    def add(self, part: Any) -> Pending:
        """Take a rank's part of a message that it launches."""
        with self.changed:
            self.changed.notify_all()
            return super().add(part)

    def deliver(self, part: Any) -> Tensor:
        """Wait for the other ranks, and return the result of a message for one of them.

        Raises:
            AssertionError: on every rank, if they have not launched the same in time; it says what each launched.
            BaseException: another rank has failed, with its error.
        """
        with self.changed:
            message = self._messages[part.number]
            met = self.changed.wait_for(
                lambda: self._network.failed is not None or len(message.parts) == self.size, PATIENCE_S
            )
            if self._network.failed is not None and len(message.parts) < self.size:
                raise RuntimeError(f"rank {part.rank} waits in vain for {part}") from self._network.failed
            if not met:
                self._check(part.number, message.parts)
            return super().deliver(part)


class Network:
    """All process groups among P threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.failed: BaseException | None = None  # the first error of a rank
        self._meetings: dict[tuple[int, tuple[int, ...]], Meeting] = {}  # by the number of the making, and the ranks
        self._made = [0] * size  # process groups, by rank
        self._lock = threading.Lock()

    def group(self, rank: int, parts: Sequence[Sequence[int]] = ()) -> "ThreadGroup":
        """The next process group that ``rank`` makes, of its one of ``parts`` or of all ranks.

        The n-th that each rank makes is the same, or of the same ``parts``.  Ranks are numbered in rising order, as
        torch does it.
        """
        ranks = tuple(sorted(next((part for part in parts if rank in part), range(self.size))))
        with self._lock:
            number, self._made[rank] = self._made[rank], self._made[rank] + 1
            meeting = self._meetings.setdefault((number, ranks), Meeting(self, len(ranks)))
            return ThreadGroup(self, meeting, ranks.index(rank))

    def fail(self, error: BaseException) -> None:
        """End all waiting: a rank has failed."""
        with self._lock:
            self.failed = self.failed or error
            meetings = list(self._meetings.values())
        for meeting in meetings:
            with meeting.changed:
                meeting.changed.notify_all()


@dataclass(frozen=True)
class ThreadGroup:
    """A process group, as one of its ranks has it."""

    network: Network
    meeting: Meeting
    rank: int


class ThreadComm(SimComm):
    """One thread of a process group; takes the place of :class:`TorchComm`."""

    def __init__(self, group: ThreadGroup) -> None:
        super().__init__(group.meeting, group.rank, HOP_BYTES)

    def gather(self, x: Tensor) -> Tensor:
        """Return what every rank handed over, [n] -> [P, n] on the first rank; [0, n] on the others."""
        every = self._all_gather(x, x.new_empty((self.size, *x.shape))).wait()
        return every if self.rank == 0 else x.new_empty((0, x.numel()))

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean over all ranks, [n] -> [n]."""
        return self._all_reduce(x.clone(), False).wait().div_(self.size)

    def mean_of_bucket(self, x: Tensor, failed: object) -> Future[Tensor]:
        """The mean of ``x`` over all ranks, in place."""
        return finished(self._all_reduce(x.div_(self.size), False).wait(), x.device)


class ThreadGroups:
    """Takes the place of ``ProcessGroups``, of ranks that are threads.

    Args:
        group: of all ranks.
        local_group: L, so many consecutive ranks are a member; or the ranks of each member.
    """

    nccl = False

    def __init__(self, group: ThreadGroup, local_group: int | Sequence[Sequence[int]] = 1) -> None:
        self._ddp_group, size = group, group.network.size
        starts = range(0, size, local_group) if isinstance(local_group, int) else ()
        ranks = [range(i, i + local_group) for i in starts] if isinstance(local_group, int) else local_group
        self.members = Members(tuple(map(tuple, ranks)), "as they are given")
        self.local_size = self.members.local_size
        self.member, place = self.members.place_of(group.rank)
        self.cut = Cut(place, self.local_size)
        self._made: list[ThreadComm] = []
        self._between: Between | None = None

    def comms(self, beside_ddp: bool = False) -> Sequence[Comm]:
        """The ranks, or this rank's column, once for each lane."""
        self._made = self._made or [self._lane() for _ in range(LANES)]
        return self._made

    def _lane(self) -> "ThreadComm":
        if self.local_size == 1:
            return self._new()
        comm = self._new(self.members.columns)
        comm.within(self._new(self.members.ranks), self._new(), self.members, self.member)
        return comm

    def _new(self, parts: Sequence[Sequence[int]] = ()) -> "ThreadComm":
        return ThreadComm(self._ddp_group.network.group(self._ddp_group.rank, parts))

    @property
    def between(self) -> Between:
        """Whom the main thread may send to."""
        if self._between is None:
            everyone: Any = ThreadComm(self._ddp_group)  # what is asked of it, a TorchComm answers too
            if self.local_size == 1:
                return Between(everyone, None, everyone)
            column: Any = self._new(self.members.columns)
            inside: Any = self._new(self.members.ranks)
            self._between = Between(column, inside, everyone)
        return self._between

    @contextmanager
    def between_steps(self) -> Iterator[Between]:
        """Yield whom the main thread may send to."""
        yield self.between

    def close(self, by_all: bool = True) -> None:
        """Forget the groups."""
        self._made, self._between = [], None


# - DistributedDataParallel


class ThreadDDP(nn.Module):
    """Takes the place of DistributedDataParallel, on a rank that is a thread.

    As DDP it sends the first rank's weights and buffers when it is made, and its buffers before a forward; a forward
    with gradients has the next backward hand over buckets, whatever comes between, unless it was within ``no_sync()``.

    Attributes:
        handed_in: of each parameter the sum of what the hook was given, in float64.
        handed_out: of what it gave back.
        backwards: that handed over all their gradients.
    """

    def __init__(self, module: nn.Module, group: ThreadGroup, buckets: int = 2) -> None:
        super().__init__()
        self.module = module
        self.process_group = group
        self.device = torch.device("cpu")
        self.find_unused_parameters = self.static_graph = False
        self.parameters_to_ignore: set[str] = set()
        self.broadcast_buffers = self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.backwards = 0
        self._comm = ThreadComm(group)
        self._hook: Callable[[object, Bucket], Future[Tensor]]
        self._state: object = None
        self._buckets = _cut([p for p in module.parameters() if p.requires_grad], buckets)
        trained = [p for members in self._buckets for p in members]
        self.handed_in = {p: torch.zeros(p.shape, dtype=torch.float64) for p in trained}
        self.handed_out = {p: torch.zeros(p.shape, dtype=torch.float64) for p in trained}
        self._expects_backward = False
        self._arrived: set[Tensor] = set()
        self._waiting: list[tuple[list[Tensor], Future[Tensor]]] = []
        arrive = partial(_arrive, weakref.ref(self))
        self._handles = [p.register_post_accumulate_grad_hook(arrive) for p in trained]
        self._send([*module.parameters(), *module.buffers()])

    def register_comm_hook(self, state: object, hook: Callable[..., Future[Tensor]]) -> None:
        """Have ``hook`` average gradients."""
        self._state, self._hook = state, hook

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it gradients are accumulated."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def forward(self, *args: Any) -> Any:
        """Call the module."""
        if self.require_forward_param_sync and self.broadcast_buffers:
            self._send(list(self.module.buffers()))
        output = self.module(*args)
        self.require_forward_param_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        if self.require_forward_param_sync:
            self.forget_backward()
            self._expects_backward = True
        return output

    def forget_backward(self) -> None:
        """Expect none, and forget what one that has failed has left."""
        self._expects_backward = False
        self._arrived.clear()
        self._waiting.clear()

    def close(self) -> None:
        """Take no more gradients."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def _send(self, tensors: Sequence[Tensor]) -> None:
        for x in filter(Tensor.numel, tensors):
            x.copy_(self._comm.broadcast(x.detach().clone(), 0).wait())

    def arrive(self, parameter: Tensor) -> None:
        """Hand over each bucket that is complete, in their order."""
        if not self._expects_backward:
            return
        self._arrived.add(parameter)
        while len(self._waiting) < len(self._buckets):
            members = self._buckets[len(self._waiting)]
            if not self._arrived.issuperset(members):
                return
            self._hand_over(members)

    def _hand_over(self, members: list[Tensor]) -> None:
        flat = torch.cat([p.grad.reshape(-1) for p in members if p.grad is not None])
        for p, gradient in gradients_of(flat, members):
            self.handed_in[p] += gradient
        number, last = len(self._waiting), len(self._waiting) == len(self._buckets) - 1
        self._waiting.append((members, self._hook(self._state, Bucket(members, number, flat, last))))
        if last:
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_backward)

    @torch.no_grad()
    def _end_backward(self) -> None:
        self._expects_backward = False
        waiting, self._waiting = self._waiting, []
        for members, future in waiting:
            for p, mean in gradients_of(future.wait(), members):
                assert p.grad is not None
                p.grad.copy_(mean)
                self.handed_out[p] += mean
        self.backwards += 1


def _cut(parameters: Sequence[Tensor], buckets: int) -> list[list[Tensor]]:
    """The members of buckets of about as many parameters, in the order of backward."""
    backward = list(reversed(parameters))
    each = -(-len(backward) // buckets)
    return [backward[start : start + each] for start in range(0, len(backward), each)]


def _arrive(ddp: "weakref.ref[ThreadDDP]", parameter: Tensor) -> None:
    """Tell ``ddp``, to which a parameter's hook must not refer itself."""
    if (own := ddp()) is not None:
        own.arrive(parameter)
