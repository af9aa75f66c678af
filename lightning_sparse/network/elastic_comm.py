"""Messages among hosts that may be lost: whoever loses one gives all up at once, so that nobody waits for it."""

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from lightning_sparse.network.comm import Comm, Pending
from lightning_sparse.network.costs import Costs
from lightning_sparse.network.torch_comm import RankLost, TorchComm, Works

NEVER_BYTES = 2**62  # what the latency of the backend's own sum is taken to be
BROADCAST = 3  # the tag of its messages, beside those of TorchComm


class ElasticComm(TorchComm):
    """The hosts of one meeting, of each the rank of this number; before the first one this host alone.

    Every message goes directly from host to host, none as a collective of the backend: those cannot be given up before
    their time limit.  A message that fails closes all connections of this host, so that the others', which may wait for
    what this one would have sent next, fail too, and not at their time limit.

    Args:
        leave: closes what else is open to the other hosts.
        limit: how long a message may take.
    """

    def __init__(self, leave: Callable[[], None], limit: timedelta) -> None:
        Comm.__init__(self, 0, 1)
        self._groups: list[dist.ProcessGroup] = []
        self._by_nccl = {"cpu": False, "cuda": False}
        self._under_way: set[_Watched] = set()
        self._close, self.limit = leave, limit

    def join(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        """Send to these ``size`` hosts from now on, of which this one is ``rank``."""
        self.rank, self.size, self._groups[:] = rank, size, [group]
        self.costs = Costs(size)
        self.costs.all_reduce_bytes = NEVER_BYTES

    def leave(self) -> None:
        """Give up every message, and close the connections: they stay open as long as anybody refers to them."""
        for watched in list(self._under_way):
            watched.work = None
        self._under_way.clear()
        self._groups.clear()
        self._close()

    def all_reduce(self, x: Tensor, direct: bool | None = None) -> Pending:
        """Sum over all hosts, in place, in one hop."""
        return super().all_reduce(x, direct=True)

    @property
    def group(self) -> dist.ProcessGroup:
        if not self._groups:
            raise RankLost("the connections to the other hosts are closed")
        return self._groups[0]

    def _to_others(self, rows: Sequence[tuple[int, Tensor, Tensor]], tag: int) -> "list[_Watched]":
        arriving = [self._watch("recv", arrives, self._far(-by), tag) for by, _, arrives in rows]
        return arriving + [self._watch("send", leaves, self._far(by), tag) for by, leaves, _ in rows]

    def _broadcast(self, x: Tensor, source: int) -> Pending:
        if self._stages(x):
            return super()._broadcast(x, source)
        if self.rank != source:
            return Works([self._watch("recv", x, source, BROADCAST)], x)
        others = [rank for rank in range(self.size) if rank != source]
        return Works([self._watch("send", x, rank, BROADCAST) for rank in others], x)

    def _watch(self, call: str, x: Tensor, host: int, tag: int) -> "_Watched":
        group = self.group
        try:
            watched = _Watched(group.send([x], host, tag) if call == "send" else group.recv([x], host, tag), self)
        except RuntimeError as error:
            del group
            self.leave()
            raise RankLost(str(error)) from None
        self._under_way.add(watched)
        return watched


class _Watched:
    """A message to or from one host."""

    def __init__(self, work: dist.Work, comm: ElasticComm) -> None:
        self.work: dist.Work | None = work
        self._comm = comm

    def wait(self) -> None:
        """Wait until it has arrived.

        Raises:
            RankLost: it has not, or another was lost before; the connections are closed then.
        """
        if self.work is None:
            raise RankLost("another message was lost before")
        try:
            self.work.wait(self._comm.limit)
        except RuntimeError as error:
            self._comm.leave()
            raise RankLost(str(error)) from None
        self._comm._under_way.discard(self)
        self.work = None
