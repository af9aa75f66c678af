"""Which ranks are on the same machine, and so make a member together."""

import math
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from lightning_sparse.network.agreement import everywhere
from lightning_sparse.network.comm import Comm
from lightning_sparse.network.members import AUTO, Members, alone

BOOT_ID, NETWORK = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")


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
        return Members(cut, f"local_group={local_group}")
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
    """What tells this machine from others: ``NCCL_HOSTID`` if it is set, or its boot and its network."""
    if given := os.environ.get("NCCL_HOSTID"):
        return given
    with suppress(OSError):
        return f"{BOOT_ID.read_text().strip()} {os.readlink(NETWORK)}"
    return socket.gethostname()
