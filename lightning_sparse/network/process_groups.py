"""The process groups an averager talks over: of all ranks, or inside members and across them."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.network.agreement import everywhere
from lightning_sparse.network.comm import Comm
from lightning_sparse.network.cut import WHOLE, Cut
from lightning_sparse.network.host_ranks import HostRanks
from lightning_sparse.network.machines import members_of
from lightning_sparse.network.members import AUTO, Members, alone
from lightning_sparse.network.torch_comm import TorchComm, carries_by_nccl, world

LANES = 2  # one sends while the other adds

ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"  # the variable with which NCCL has a device keep to the order of launches
ORDER_SINCE = 2, 26  # of NCCL


def have_devices_keep_order() -> None:
    """Have devices run what NCCL sends in the order in which the host launches it, unless the user has chosen.

    To be called before the first message of the process: NCCL reads the variable once.
    """
    os.environ.setdefault(ORDER, "1")


def devices_keep_order() -> bool:
    """Whether this rank's device runs messages of several communicators in the order in which they are launched."""
    can = dist.is_nccl_available() and torch.cuda.nccl.version()[:2] >= ORDER_SINCE
    return can and os.environ.get(ORDER, "0") not in ("", "0")


def check_has_ranks(ddp: object) -> None:
    """Refuse a model by itself.

    Raises:
        TypeError: ``ddp`` has no process group.
    """
    if not hasattr(ddp, "process_group"):
        raise TypeError(
            f"ddp must be a DistributedDataParallel; got {type(ddp).__name__}. Write "
            "SparseHook(DistributedDataParallel(model)), once torch.distributed is initialized."
        )


class Between(NamedTuple):
    """Whom a rank may send to from the main thread, between two steps, where members have several ranks."""

    column: TorchComm  # of each member the rank at the same place
    inside: TorchComm | None  # the ranks of this member; None where it is one rank
    everyone: TorchComm


class LaneGroups(NamedTuple):
    """The process groups of a lane where members have several ranks."""

    column: dist.ProcessGroup  # this rank's
    inside: dist.ProcessGroup | None  # of its member; None where FSDP2 sends what is sent inside
    everyone: dist.ProcessGroup


class ProcessGroups:
    """A process group for each lane of an averager; see [Note: who issues messages] and [Note: one order of launches].

    Where members have several ranks (:class:`Members`), their links are fast: a lane then has three groups, of the
    ranks of a member, of this rank's column and of all ranks.

    They are made when an averager takes them, so that nothing is left of one that is refused.

    [Note: one order of launches] Over NCCL a process group is a communicator of the device.  Two messages on different
    communicators may each hold the place on a device that the other needs, and so hang, unless every rank launches
    them in the same order, best of all one after the other (NVIDIA/nccl, issues 195 and 522).  So:

    - No thread of ours launches.  The main thread does, and in a backward, while it waits, the thread that calls our
      hook; the order of launches is the program's, the same on every rank.  Groups are launched in the order of the
      plan, whichever are complete first, which the data of a rank may decide.
    - Where members have several ranks, sums inside of group i + 1 are launched before the copies inside of group i,
      which wait for the column: so a member is at work inside while its column sends.
    - Gradients are averaged on DDP's own communicator, where members are ranks: what DDP and the user launch there in
      the meantime comes before or after.
    - Local steps, whose messages are under way during the next forward and backward, have one beside it: on DDP's, a
      ``log(..., sync_dist=True)`` would wait for all of them.  They are launched before a forward that trains, or when
      a step is settled; so first ours, then what DDP and the user launch in that step.

    The device follows the host's order from NCCL 2.26 on, with ``NCCL_LAUNCH_ORDER_IMPLICIT=1``: it begins a message
    once it has begun the one before.  The strategies set it (:func:`have_devices_keep_order`).  Where it is not so on
    every rank, messages of members are on one stream, one after the other; those of local steps are on DDP's own
    communicator, or what a backward sums inside waits for them.

    Args:
        ddp: whose ranks.
        timeout: of messages; None is PyTorch's, 30 minutes.
        local_group: which ranks are a member together, as :func:`members_of` takes it.
        columns: of ranks that do the same at once, each among themselves, if ``ddp`` is of one of several.
        replicas: of a model that FSDP2 shards, the ranks of each; they are members, inside which FSDP2 sends.

    To be made on every rank, at once.

    Raises:
        TypeError: ``ddp`` is none, but a model by itself, say.
        ValueError: L does not divide the number of ranks, or nothing known carries tensors of the device of ``ddp``.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        timeout: timedelta | None = None,
        local_group: int | str = AUTO,
        columns: Sequence[Sequence[int]] = (),
        replicas: Sequence[Sequence[int]] = (),
    ) -> None:
        check_has_ranks(ddp)
        device, self._is_sharded = next(ddp.parameters()).device, bool(replicas)
        self._ddp_group: dist.ProcessGroup = world().group if replicas else ddp.process_group
        self.nccl, self._on_cpu = carries_by_nccl(self._ddp_group, device), device.type == "cpu"
        self._timeout = timeout
        self._ranks = dist.get_process_group_ranks(self._ddp_group)
        self._columns = columns
        # Others do not pass here, and every rank must call new_group.
        self._is_part = not columns and len(self._ranks) < dist.get_world_size()
        everyone = TorchComm(self._ddp_group)
        if replicas:
            self.members: Members = Members(tuple(map(tuple, replicas)), "which FSDP2 shards")
        elif columns or (self._is_part and local_group in (AUTO, 1)):
            self.members = alone(len(self._ranks))
        elif self._is_part:
            raise ValueError(
                f"local_group must be 1 where ddp is of {len(self._ranks)} of {dist.get_world_size()} ranks, since no "
                f"process group can be made beside it; got {local_group!r}. Leave it out."
            )
        else:
            self.members = members_of(local_group, everyone, device, is_default=not self._on_cpu)
        self.member, place = self.members.place_of(everyone.rank)
        self.cut = WHOLE if replicas else Cut(place, self.members.local_size)
        #: Whether several messages may be under way at once on every rank's device, on other communicators.
        self.keeps_order = not self.nccl or _on_all(devices_keep_order(), everyone, device)
        self._made: list[dist.ProcessGroup] = []
        self._own: list[dist.ProcessGroup] = []  # of all ranks, once for each lane, where members are ranks
        self._lanes: list[LaneGroups] = []  # where they are more
        self._between: Between | None = None

    @property
    def local_size(self) -> int:
        """L, ranks of a member."""
        return self.members.local_size

    def comms(self, beside_ddp: bool = False) -> Sequence[Comm]:
        """The ranks, or this rank's column, once for each lane.  Makes the groups: to be called on every rank, at once.

        ``beside_ddp``: what is sent may be under way while DDP and others send on DDP's group.
        """
        comms = self._comms(beside_ddp)
        for comm in comms:
            comm.costs.by_backend = comm.everyone.costs.by_backend = self.nccl
        return comms

    def _comms(self, beside_ddp: bool) -> Sequence[Comm]:
        if self.local_size > 1:
            self._lanes = self._lanes or [self._new_lane() for _ in range(1 if self.nccl else LANES)]
            return [self._lane(groups, beside_ddp) for groups in (self._lanes * LANES)[:LANES]]
        if (self.nccl or self._is_part) and not beside_ddp:
            return [TorchComm(self._ddp_group) for _ in range(LANES if self.nccl else 1)]
        if self._is_part:
            raise ValueError(
                f"with local_steps ddp must be of all {dist.get_world_size()} ranks; got one of "
                f"{self._ddp_group.size()}, for which no process group can be made beside it. Leave local_steps out."
            )
        if self.nccl and not self.keeps_order:
            return [TorchComm(self._ddp_group) for _ in range(LANES)]
        # Over Gloo others may use DDP's group from the main thread.
        self._own = self._own or [self._new_own() for _ in range(1 if self.nccl else LANES)]
        return [TorchComm(group) for group in (self._own * LANES)[:LANES]]

    def _new_lane(self) -> LaneGroups:
        """The groups of a lane where members have several ranks."""
        column = self._new_of(self.members.columns)
        inside = None if self._is_sharded else self._new_of(self.members.ranks)
        return LaneGroups(column, inside, self._new(self._ranks))

    def _lane(self, groups: LaneGroups, beside_ddp: bool) -> TorchComm:
        comm, inside = TorchComm(groups.column), None if groups.inside is None else TorchComm(groups.inside)
        all_ranks = groups.everyone if beside_ddp or not self.nccl else self._ddp_group
        comm.within(inside, TorchComm(all_ranks), self.members, self.member)
        comm.keeps_order = self.keeps_order
        return comm

    @contextmanager
    def between_steps(self) -> Iterator[Between]:
        """Yield whom the main thread may send to; to be entered on every rank, also after :meth:`close`."""
        is_closed = self._between is None and not self._made
        yield self.between
        if is_closed:  # so nobody closes it later
            self.close()

    @property
    def between(self) -> Between:
        """As :meth:`between_steps` yields, while an averager has its groups; to be asked for on every rank, at once."""
        if self._between is None:
            everyone = TorchComm(self._ddp_group)
            if self.local_size == 1 or self._is_sharded:
                return Between(everyone, None, everyone)
            columns, members = self.members.columns, self.members.ranks
            column, inside = TorchComm(self._new_of(columns)), TorchComm(self._new_of(members))
            self._between = Between(column, inside, everyone)
        return self._between

    def host_ranks(self) -> HostRanks:
        """All ranks, which are one host of several; another group in each call, to be made on every rank, at once."""
        return HostRanks(self._new(self._ranks, "gloo") if self.local_size > 1 else None)

    def close(self, by_all: bool = True) -> None:
        """Give back file descriptors, or over NCCL memory of the device; no message may be under way.

        Over NCCL only if it is done ``by_all`` ranks at once.  By PyTorch's sources, which nobody has tried on a device
        here, to destroy a group is to finalize its communicators (``ncclCommFinalize``), which sends what is still to
        be sent, and then to free them; by its notes on ``destroy_process_group`` a rank that does so alone may hang.
        To abort them instead would wait for nobody, but also end what the other ranks are still receiving.
        """
        made, self._made, self._own, self._lanes, self._between = self._made, [], [], [], None
        for group in made if by_all or not self.nccl else []:
            with suppress(ValueError):  # it went with the default group
                dist.destroy_process_group(group)

    def _new(self, ranks: Sequence[int], backend: str = "") -> dist.ProcessGroup:
        backend = backend or (dist.get_backend_config(self._ddp_group) if self.nccl else "gloo")
        group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=self._timeout, backend=backend)
        self._made.append(group)
        return group

    def _new_own(self) -> dist.ProcessGroup:
        made = {dist.get_rank() in column: self._new(column) for column in self._columns or [self._ranks]}
        return made[True]  # every rank makes them all

    def _new_of(self, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """This rank's of the ``parts`` of all ranks, which every rank makes."""
        own = dist.get_rank()
        made = {own in part: self._new(part) for part in ([self._ranks[i] for i in each] for each in parts)}
        return made[True]


def _on_all(is_so: bool, everyone: TorchComm, device: torch.device) -> bool:
    """Whether it ``is_so`` on every rank."""
    return all(each == str(True) for each in everywhere(str(is_so), everyone, device))
