"""What a host has: versions, cores, devices and network interfaces."""

import fcntl
import os
import platform
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

from lightning_sparse.__about__ import __version__
from lightning_sparse.kernels.ops import HAS_TRITON

_SIOCGIFADDR = 0x8915  # of <linux/sockios.h>: the address of an interface


@dataclass(frozen=True)
class Host:
    """A host, as one of its processes sees it."""

    name: str
    system: str
    versions: dict[str, str]  # of what must be the same on every host
    cores: int  # that this process may use
    load: float  # programs that ran on average in the last minute
    devices: list[str]  # names of CUDA devices
    nccl: bool  # whether PyTorch has NCCL
    triton: bool
    interfaces: dict[str, str]  # name -> IPv4 address
    own_address: str  # that the host's name leads to; "" if it leads nowhere
    gloo: str  # GLOO_SOCKET_IFNAME
    nccl_interface: str  # NCCL_SOCKET_IFNAME

    @classmethod
    def this(cls) -> "Host":
        """Look around.  Asks CUDA, so the process must not be forked afterwards."""
        return cls(
            name=socket.gethostname(),
            system=f"{platform.system()} {platform.release()}",
            versions={
                "python": platform.python_version(),
                "torch": str(torch.__version__),
                "lightning": version("lightning"),
                **_other_lightning(),
                "lightning-sparse": __version__,
            },
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            load=os.getloadavg()[0],
            devices=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            nccl=dist.is_available() and dist.is_nccl_available(),
            triton=HAS_TRITON,
            interfaces=_interfaces(),
            own_address=_own_address(),
            gloo=os.environ.get("GLOO_SOCKET_IFNAME", ""),
            nccl_interface=os.environ.get("NCCL_SOCKET_IFNAME", ""),
        )

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Host":
        """The inverse of ``dataclasses.asdict``."""
        return cls(**values)

    @property
    def used(self) -> str:
        """The interface that Gloo takes; "" if it is not known."""
        if self.gloo:
            return self.gloo
        return next((name for name, address in self.interfaces.items() if address == self.own_address), "")


def _other_lightning() -> dict[str, str]:
    with suppress(PackageNotFoundError):
        return {"pytorch_lightning": version("pytorch-lightning")}
    return {}


def _interfaces() -> dict[str, str]:
    """Return the IPv4 address of each interface that has one; nothing where the kernel is not Linux."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def reach(address: str, port: int, timeout_s: float = 5.0) -> str:
    """Say why ``address`` cannot be reached from here; "" if the host answers, listening or not."""
    try:
        socket.create_connection((address, port), timeout_s).close()
    except ConnectionRefusedError:
        return ""  # the host is there; before a training starts nobody listens
    except OSError as error:
        return str(error)
    return ""
