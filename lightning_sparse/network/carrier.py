"""What carries the messages of a process group: asked of the group, for the kind of device their tensors lie on."""

from contextlib import suppress
from enum import Enum

import torch
import torch.distributed as dist


class Carrier(Enum):
    """A library that carries messages, and what follows from it."""

    GLOO = "Gloo"  # the host waits for a message, so a lane has a thread and a process group of its own
    NCCL = "NCCL"  # a stream waits, and launches need one order on every rank, so one thread launches all


_ON = {"cpu": Carrier.GLOO, "cuda": Carrier.NCCL}  # what must carry tensors of these devices


def carrier_of(group: dist.ProcessGroup, device: torch.device) -> Carrier:
    """Return what carries tensors of ``device`` in ``group``.

    A process group has a backend for each kind of device, whatever it was made with: "nccl", "cpu:gloo,cuda:nccl", or
    no name at all.  NCCL is every backend whose name begins with it ("nccl2" and "nccl-lazy" of PyTorch 2.14 and 2.15,
    AMD's RCCL is "nccl"), or that calls itself so.  PyTorch's "fake", which sends nothing, is taken for either.

    Raises:
        ValueError: nothing carries such tensors there, or something that this package does not know.
    """
    names = backends_of(group, device)
    needed = _ON.get(device.type)
    if needed is None:
        raise ValueError(
            f"what is averaged must lie on the CPU or on CUDA; got a tensor on {device}. Move the model to one of them."
        )
    if names != ["fake"] and not any(_is(needed, name) for name in names):
        got = ", which calls itself ".join(map(repr, names)) or f"{_spelt(group)!r}, which carries no such tensors"
        spelling = f"{device.type}:{needed.value.lower()}"
        raise ValueError(
            f"on {device.type.upper()} the process group must be {needed.value}'s; got {got}. Make it with "
            f"'cpu:gloo,cuda:nccl' or {spelling!r}: the backend of init_process_group, or process_group_backend of "
            "Lightning's strategies."
        )
    return needed


def nccl_here() -> str:
    """Say which NCCL this PyTorch has, as "2.27.3, by the backend nccl"; "" if it has none."""
    if not (dist.is_available() and dist.is_nccl_available()):
        return ""
    found = torch.cuda.nccl.version()  # asks the library, and no device
    number = ".".join(map(str, found)) if isinstance(found, tuple) else str(found)
    return f"{number}, by the backend {dist.Backend.default_device_backend_map['cuda']}"


def backends_of(group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """Return the names of what carries tensors of ``device`` in ``group``: as it was made, then as it calls itself."""
    names = []
    for pair in filter(None, _spelt(group).split(",")):
        kind, _, name = pair.partition(":")
        if kind == device.type:
            names.append(name)
    with suppress(RuntimeError):  # it has none for this device, or is a backend itself
        names.append(group._get_backend(device).name().lower())
    return list(dict.fromkeys(names))


def _is(carrier: Carrier, name: str) -> bool:
    return name.startswith("nccl") if carrier is Carrier.NCCL else name == "gloo"


def _spelt(group: dist.ProcessGroup) -> str:
    """What PyTorch has noted of ``group``, as "cpu:gloo,cuda:nccl"; "" if nothing."""
    try:
        return str(dist.get_backend_config(group))
    except (AssertionError, ValueError, TypeError):  # not made by torch.distributed
        return ""
