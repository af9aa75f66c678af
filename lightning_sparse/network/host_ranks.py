"""The ranks of a host that comes and goes, which decide together what they do with other hosts."""

from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class HostRanks:
    """The ranks of one host, for one thread: each calls the same methods in the same order.

    Args:
        group: of all of them, over Gloo; None where the host is one process, which then asks nobody.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())

    def all(self, flag: bool) -> bool:
        """Whether ``flag`` is True on every rank."""
        if self._group is None:
            return flag
        every = torch.tensor([flag], dtype=torch.int32, device="cpu")
        dist.all_reduce(every, dist.ReduceOp.MIN, group=self._group)
        return bool(every)

    def check(self, error: Exception | None) -> None:
        """Raise on every rank if one has an ``error``."""
        if not self.all(error is None):
            raise error or RuntimeError("another rank of this host has failed, whose own output says why")

    def of_first(self, x: T) -> T:
        """What the first rank has given, anything that can be pickled."""
        if self._group is None:
            return x
        given = [x]
        dist.broadcast_object_list(given, dist.get_global_rank(self._group, 0), self._group, torch.device("cpu"))
        return given[0]
