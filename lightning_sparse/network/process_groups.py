"""The process groups an averager talks over: of all ranks, or in two levels, inside nodes and between them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.network.comm import Comm, Pending
from lightning_sparse.network.node_comm import NodeComm
from lightning_sparse.network.torch_comm import TorchComm, carries_by_nccl

LANES = 2  # over Gloo; one sends while the other adds


class ProcessGroups:
    """A process group for each lane of an averager; see [Note: who issues messages] and [Note: one order of launches].

    With ``local_size`` L > 1 the ranks [0, L), [L, 2L), ... are nodes: their links are fast, so they average their
    gradients densely, and a node then acts as one rank towards the others.  What crosses between nodes is sent by the
    first rank of each, its leader.  All ranks of a node select and keep the same, so no rank waits for another to.

    They are made when an averager takes them, so that nothing is left of one that is refused.

    [Note: one order of launches] Over NCCL a process group is a communicator of the device.  Two messages on different
    communicators may each hold the place on a device that the other needs, and so hang, unless every rank launches
    them in the same order, best of all one after the other (NVIDIA/nccl, issues 195 and 522).  So:

    - No thread of ours launches.  The main thread does, and in a backward, while it waits, the thread that calls our
      hook; the order of launches is the program's, the same on every rank.  Groups are launched in the order of the
      plan, whichever are complete first, which the data of a rank may decide.
    - Where there are nodes, all that an averager launches within a step, whatever the communicator, is launched on one
      stream, and what follows on this stream waits for the message: the sum inside a node, the messages between
      leaders, and those that pass them on are one after the other.  Without nodes there is one communicator.
    - Gradients are averaged on DDP's own communicator, where there are no nodes: what DDP and the user launch there in
      the meantime comes before or after.
    - Local steps, whose messages are under way during the next forward and backward, have one beside it: on DDP's, a
      ``log(..., sync_dist=True)`` would wait for all of them.  They are launched before a forward that trains, or when
      a step is settled; so first ours, then what DDP and the user launch in that step.

    What is then in flight at once on a device is a message of ours and one of DDP's or the user's.  The host launches
    them in one order; with ``NCCL_LAUNCH_ORDER_IMPLICIT=1`` (NCCL 2.26) the device follows it too.

    Args:
        ddp: whose ranks.
        timeout: of messages; None is PyTorch's, 30 minutes.
        local_size: L, ranks of a node.
        columns: of ranks that do the same at once, each among themselves, if ``ddp`` is of one of several.

    Raises:
        TypeError: ``ddp`` is none, but a model by itself, say.
        ValueError: L does not divide the number of ranks, or nothing known carries tensors of the device of ``ddp``.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        timeout: timedelta | None = None,
        local_size: int = 1,
        columns: Sequence[Sequence[int]] = (),
    ) -> None:
        if not hasattr(ddp, "process_group"):
            raise TypeError(
                f"ddp must be a DistributedDataParallel; got {type(ddp).__name__}. Write "
                "SparseHook(DistributedDataParallel(model)), once torch.distributed is initialized."
            )
        ranks = dist.get_process_group_ranks(ddp.process_group)
        if local_size < 1 or len(ranks) % local_size:
            raise ValueError(
                f"local_group must divide the number of ranks, {len(ranks)}; got {local_size}. Give another number, or "
                "1 for none."
            )
        self.local_size = local_size
        device = next(ddp.parameters()).device
        self.nccl, self._on_cpu = carries_by_nccl(ddp.process_group, device), device.type == "cpu"
        self._timeout = timeout
        self._ddp_group = ddp.process_group
        self._columns = columns or [ranks]
        # Others do not pass here, and every rank must call new_group.
        self._is_part = not columns and len(ranks) < dist.get_world_size()
        self._nodes = [ranks[i : i + local_size] for i in range(0, len(ranks), local_size)]
        self._node = ranks.index(dist.get_rank()) // local_size
        self._made: list[dist.ProcessGroup] = []
        self._own: list[dist.ProcessGroup] = []  # of all ranks, once for each lane, unless there are nodes
        self._inside: TorchComm | None = None  # this node, for backward's thread
        self._leaders: dist.ProcessGroup | None = None  # for the main thread

    def comms(self, beside_ddp: bool = False) -> Sequence[Comm]:
        """The ranks, or the nodes, once for each lane.  Makes the groups: to be called on every rank, at once.

        ``beside_ddp``: what is sent may be under way while DDP and others send on DDP's group.
        """
        comms = self._comms(beside_ddp)
        for comm in comms:
            comm.costs.by_backend = self.nccl
        return comms

    def _comms(self, beside_ddp: bool) -> Sequence[Comm]:
        if self.local_size == 1 and (self.nccl or self._is_part) and not beside_ddp:
            return [TorchComm(self._ddp_group) for _ in range(LANES if self.nccl else 1)]
        if self.local_size == 1 and self._is_part:
            raise ValueError(
                f"with local_steps ddp must be of all {dist.get_world_size()} ranks; got one of "
                f"{self._ddp_group.size()}, for which no process group can be made beside it. Leave local_steps out."
            )
        if self.local_size == 1:  # over Gloo others may use DDP's group from the main thread
            self._own = self._own or [self._new_column() for _ in range(1 if self.nccl else LANES)]
            return [TorchComm(group) for group in (self._own * LANES)[:LANES]]
        leaders = [self._between(self._new_leaders()) for _ in range(LANES if self._on_cpu else 1)]
        inside = [self._new_inside() for _ in leaders]
        self._inside = inside[0] if self.nccl else self._new_inside()
        return [NodeComm(self._node, len(self._nodes), *lane) for lane in zip(leaders, inside, strict=True)]

    @contextmanager
    def leaders(self) -> Iterator[TorchComm | None]:
        """Yield, for the main thread, the first rank of each node, None on the others; all ranks if there are no nodes.

        To be entered on every rank; also after :meth:`close`.
        """
        if self.local_size == 1:
            yield TorchComm(self._ddp_group)
            return
        self._leaders = self._leaders or self._new_leaders()
        yield self._between(self._leaders)
        if self._inside is None:  # closed before, so nobody closes this one later
            self.close()

    def close(self) -> None:
        """Give back what the operating system lent, such as file descriptors; no message may be under way.

        Not on NCCL, where that would wait for the other ranks.
        """
        made, self._made, self._own, self._inside, self._leaders = self._made, [], [], None, None
        for group in made if not self.nccl else []:
            with suppress(ValueError):  # it went with the default group
                dist.destroy_process_group(group)

    def sum_inside(self, x: Tensor) -> Pending:
        """Sum over the ranks of this node, in place: for backward's thread, where there are nodes.

        Over NCCL to be launched on the stream of the lane.
        """
        assert self._inside is not None  # the averager has taken its groups
        return self._inside.all_reduce(x)

    def _new(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        backend = dist.get_backend_config(self._ddp_group) if self.nccl else "gloo"
        group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=self._timeout, backend=backend)
        self._made.append(group)
        return group

    def _new_column(self) -> dist.ProcessGroup:
        made = {dist.get_rank() in column: self._new(column) for column in self._columns}  # every rank makes them all
        return made[True]

    def _new_leaders(self) -> dist.ProcessGroup:
        return self._new([node[0] for node in self._nodes])

    def _between(self, leaders: dist.ProcessGroup) -> TorchComm | None:
        return TorchComm(leaders) if dist.get_rank() == self._nodes[self._node][0] else None

    def _new_inside(self) -> TorchComm:
        return TorchComm([self._new(node) for node in self._nodes][self._node])  # every rank makes them all
