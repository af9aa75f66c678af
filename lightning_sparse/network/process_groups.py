"""The process groups an exchange talks over: of all ranks, or in two levels, inside nodes and between them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.network.comm import Comm, Pending, TorchComm, Works
from lightning_sparse.network.node_comm import NodeComm

LANES = 2  # over Gloo; one sends while the other adds


class ProcessGroups:
    """A process group for each lane of an exchange; see [Note: who issues messages].

    With ``local_size`` L > 1 the ranks [0, L), [L, 2L), ... are nodes: their links are fast, so they average their
    gradients densely, and a node then acts as one rank towards the others.  What crosses between nodes is sent by the
    first rank of each, its leader.  All ranks of a node select and keep the same, so no rank waits for another to.

    They are made when an exchange takes them, so that nothing is left of one that is refused.

    Args:
        ddp: whose ranks.
        timeout: of messages; None is PyTorch's, 30 minutes.
        local_size: L, ranks of a node.

    Raises:
        ValueError: L does not divide the number of ranks.
    """

    def __init__(self, ddp: DistributedDataParallel, timeout: timedelta | None = None, local_size: int = 1) -> None:
        ranks = dist.get_process_group_ranks(ddp.process_group)
        if local_size < 1 or len(ranks) % local_size:
            raise ValueError(
                f"local_group={local_size}: {len(ranks)} ranks cannot be cut into nodes of {local_size}; give a number "
                "of ranks that divides theirs, or 1 for none."
            )
        self._timeout = timeout
        self._ranks = ranks
        self._ddp_group = ddp.process_group
        self._nodes = [ranks[i : i + local_size] for i in range(0, len(ranks), local_size)]
        self._node = ranks.index(dist.get_rank()) // local_size
        self.local_size = local_size
        self.nccl = dist.get_backend(ddp.process_group) == "nccl"
        self._made: list[dist.ProcessGroup] = []
        self._inside: list[dist.ProcessGroup] = []  # this node's, one a lane, and the last for backward's thread
        self._leaders: dist.ProcessGroup | None = None

    def comms(self, wire_dtype: torch.dtype) -> list[Comm]:
        """The ranks, or the nodes, once for each lane.  Makes the groups: to be called on every rank, at once."""
        if self.local_size == 1:
            return [TorchComm(lane, wire_dtype) for lane in self._lanes()]
        lanes = [self._new(self._first_ranks()) for _ in range(1 if self.nccl else LANES)]
        self._inside = [self._new_inside() for _ in range(len(lanes) + 1)]
        node = self._nodes[self._node]
        return [
            NodeComm(
                self._node,
                len(self._nodes),
                TorchComm(lane, wire_dtype) if dist.get_rank() == node[0] else None,
                inside,
                node[0],
                wire_dtype,
            )
            for lane, inside in zip(lanes, self._inside, strict=False)
        ]

    @contextmanager
    def leaders(self) -> Iterator[TorchComm | None]:
        """For the main thread: the first rank of each node, None on the others; or all ranks, if there are no nodes.

        To be entered on every rank; also after :meth:`close`.
        """
        if self.local_size == 1:
            yield TorchComm(self._ddp_group)
            return
        if self._leaders is None:
            self._leaders = self._new(self._first_ranks())
        yield TorchComm(self._leaders) if dist.get_rank() == self._nodes[self._node][0] else None
        if not self._inside:  # closed before, so nobody closes this one later
            self.close()

    def close(self) -> None:
        """Give back what the operating system lent, such as file descriptors; no message may be under way.

        Not on NCCL, where that would wait for the other ranks.
        """
        made, self._made, self._inside, self._leaders = self._made, [], [], None
        for group in made if not self.nccl else []:
            with suppress(ValueError):  # it went with the default group
                dist.destroy_process_group(group)

    def sum_inside(self, x: Tensor) -> Pending:
        """Sum over the ranks of this node, in place: for backward's thread, where there are nodes."""
        return Works([dist.all_reduce(x, group=self._inside[-1], async_op=True)], x)

    def _lanes(self) -> list[dist.ProcessGroup]:
        # On NCCL several communicators need one order of launching, which DDP's hook has; over Gloo others may use
        # DDP's group from the main thread.
        return [self._ddp_group] if self.nccl else [self._new(self._ranks) for _ in range(LANES)]

    def _first_ranks(self) -> list[int]:
        return [node[0] for node in self._nodes]

    def _new(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=self._timeout)
        self._made.append(group)
        return group

    def _new_inside(self) -> dist.ProcessGroup:
        return [self._new(node) for node in self._nodes][self._node]  # every rank makes them all
