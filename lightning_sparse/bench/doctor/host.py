"""What a host has, versions, cores, devices and network interfaces, and what is wrong with it."""

import os
import platform
import socket
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from lightning_sparse.__about__ import __version__
from lightning_sparse.bench.compare.place import interfaces
from lightning_sparse.kernels.ops import HAS_TRITON


@dataclass(frozen=True)
class Host:
    """A host, as one of its processes sees it."""

    system: str
    versions: dict[str, str]
    cores: int  # that this process may use
    load: float  # programs that ran on average in the last minute
    devices: int  # of CUDA
    nccl: str  # its version, if PyTorch has NCCL
    triton: bool
    interfaces: dict[str, str]  # name -> IPv4 address
    own_address: str  # that the host's name leads to; "" if it leads nowhere
    gloo: str  # GLOO_SOCKET_IFNAME
    nccl_interface: str  # NCCL_SOCKET_IFNAME

    @classmethod
    def this(cls) -> "Host":
        """Look around.  CUDA is not started, so the process may be forked afterwards."""
        versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
        for package in ("lightning", "pytorch-lightning"):
            with suppress(PackageNotFoundError):
                versions[package] = version(package)
        own_address = ""
        with suppress(OSError):
            own_address = socket.gethostbyname(socket.gethostname())
        return cls(
            system=f"{platform.system()} {platform.release()}",
            versions=versions | {"lightning-sparse": __version__},
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            load=os.getloadavg()[0],
            devices=torch.cuda.device_count(),
            nccl=".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "",
            triton=HAS_TRITON,
            interfaces=interfaces(),
            own_address=own_address,
            gloo=os.environ.get("GLOO_SOCKET_IFNAME", ""),
            nccl_interface=os.environ.get("NCCL_SOCKET_IFNAME", ""),
        )

    def wrong(self, hosts: int) -> list[str]:
        """Say what is wrong with it as one of so many hosts; nothing if it is as it must be."""
        found, known = [], ", ".join(self.interfaces)
        if self.devices and not self.nccl:
            found.append(
                "PyTorch must have NCCL to train on its CUDA devices; this build has none. Install PyTorch's own build "
                "for CUDA (https://pytorch.org/get-started/locally)."
            )
        if self.gloo and not set(self.gloo.split(",")) <= self.interfaces.keys():
            found.append(f"GLOO_SOCKET_IFNAME must be one of {known}; got {self.gloo!r}. Correct or unset it.")
        nccl = self.nccl_interface
        begins = tuple(nccl.split(","))
        if nccl[:1] not in ("", "^", "=") and not any(name.startswith(begins) for name in self.interfaces):
            found.append(f"NCCL_SOCKET_IFNAME must be how one of {known} begins; got {nccl!r}. Correct or unset it.")
        if hosts > 1 and not self.gloo and self.own_address.startswith("127."):
            others = [name for name, address in self.interfaces.items() if not address.startswith("127.")]
            found.append(
                f"this host's own name leads to {self.own_address}, which Gloo would tell the other hosts. export "
                f"GLOO_SOCKET_IFNAME={others[0] if others else '...'} on it before training."
            )
        return found
