"""Members: what averages with others, a rank alone or the ranks of a machine together."""

import math
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_sparse.network.agreement import everywhere
from lightning_sparse.network.comm import Comm

AUTO, NODE = "auto", "node"  # what local_group may be, beside a number
BOOT_ID, NETWORK = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")


@dataclass(frozen=True)
class Members:
    """Who averages with whom: M members of L ranks each.

    A rank owns a slice of everything, and exchanges it with its column, the ranks at the same place in all members.
    Ranks are numbered as in the group that they are of, P = M * L.

    Attributes:
        ranks: of each member [M][L], rising, as process groups number them; members are sorted by their first.
        why: the ranks are together so, in words.
    """

    ranks: tuple[tuple[int, ...], ...]
    why: str = ""

    @property
    def size(self) -> int:
        """M."""
        return len(self.ranks)

    @property
    def local_size(self) -> int:
        """L."""
        return len(self.ranks[0])

    @property
    def columns(self) -> list[list[int]]:
        """The ranks of each column [L][M]."""
        return [list(column) for column in zip(*self.ranks, strict=True)]

    def place_of(self, rank: int) -> tuple[int, int]:
        """The number of the member that ``rank`` is in, and its place in it."""
        return next((m, ranks.index(rank)) for m, ranks in enumerate(self.ranks) if rank in ranks)

    def __str__(self) -> str:
        if self.local_size == 1:
            return f"{self.size} ranks{f' ({self.why})' if self.why else ''}"
        return f"{self.size} members of {self.local_size} ranks each ({self.why})"


def alone(size: int, why: str = "") -> Members:
    """Every one of ``size`` ranks is a member."""
    return Members(tuple((rank,) for rank in range(size)), why)


def members_of(local_group: int | str, comm: Comm, device: torch.device, is_default: bool) -> Members:
    """Return who averages with whom; to be called on every rank, at once.

    Args:
        local_group: a number L of consecutive ranks; "node": the ranks of a machine; "auto": likewise, from two
            machines on, if that ``is_default`` here.
        comm: all ranks.
        device: of messages.
        is_default: machines are members where nobody says otherwise.

    Raises:
        ValueError: L does not divide the number of ranks.
    """
    ranks = comm.size
    if not isinstance(local_group, str):
        if local_group < 1 or ranks % local_group:
            raise ValueError(
                f"local_group must divide the number of ranks, {ranks}; got {local_group}. Give another number, or 1 "
                "for none."
            )
        starts = range(0, ranks, local_group)
        cut = tuple(tuple(range(start, start + local_group)) for start in starts)
        return Members(cut, f"local_group={local_group}" if local_group > 1 else "")
    if local_group == AUTO and not is_default:
        return alone(ranks)
    machines = _by_machine(everywhere(identity(), comm, device))
    if local_group == AUTO and len(machines) == 1:
        return alone(ranks)
    each = math.gcd(*map(len, machines))
    cut = tuple(sorted(tuple(machine[i : i + each]) for machine in machines for i in range(0, len(machine), each)))
    if each == 1:
        return alone(ranks)  # in their order
    whole = all(len(machine) == each for machine in machines)
    return Members(cut, "those of a machine" if whole else f"of {len(machines)} machines, which have unequal numbers")


def _by_machine(identities: Sequence[str]) -> list[list[int]]:
    """The ranks of each machine, by the first."""
    found: dict[str, list[int]] = {}
    for rank, machine in enumerate(identities):
        found.setdefault(machine, []).append(rank)
    return list(found.values())


def identity() -> str:
    """What tells this machine from others: what NCCL is told, or its boot and its network."""
    if given := os.environ.get("NCCL_HOSTID"):
        return given
    with suppress(OSError):
        return f"{BOOT_ID.read_text().strip()} {os.readlink(NETWORK)}"
    return socket.gethostname()
