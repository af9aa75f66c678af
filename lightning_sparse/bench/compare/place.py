"""Where a process stands among ranks, and what carries their messages."""

import fcntl
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

_SIOCGIFADDR = 0x8915  # of <linux/sockios.h>: the address of an interface


@dataclass(frozen=True)
class Place:
    """The position of this process among the ranks."""

    rank: int  # of all
    local_rank: int  # of those on this host
    size: int  # number of ranks
    local_size: int  # number of ranks on this host
    address: str  # of the host of rank 0
    port: int  # there, for the workers' store
    store_is_there: bool  # whether torchrun's agent serves the store
    interface: str  # whose traffic is counted, and which Gloo and NCCL use

    @property
    def hosts(self) -> int:
        return self.size // self.local_size

    @classmethod
    def find(cls, interface: str | None) -> "Place | None":
        """Read this process's place from what torchrun or SLURM set; None if neither started it.

        ``interface`` is the name of the network interface; None to find the one that leads to rank 0.
        """
        started: TorchElasticEnvironment | SLURMEnvironment
        if TorchElasticEnvironment.detect():
            started = TorchElasticEnvironment()
            local_size = int(os.environ["LOCAL_WORLD_SIZE"])
        elif SLURMEnvironment.detect():
            started = SLURMEnvironment()
            local_size = started.world_size() // int(os.environ["SLURM_NNODES"])
        else:
            return None
        address, port = started.main_address, started.main_port
        store_is_there = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        interface = interface or os.environ.get("GLOO_SOCKET_IFNAME") or interface_towards(address)
        read_sent(interface)  # complains now if there is none of this name
        ranks = started.global_rank(), started.local_rank(), started.world_size(), local_size
        return cls(*ranks, address, port, store_is_there, interface)


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each interface of this host that has one; nothing where the kernel is not Linux."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, name.encode()[:15].ljust(256, b"\0"))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def interface_towards(address: str) -> str:
    """Name of this host's interface on the way to ``address``, which may be its own; a ValueError if none is found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing; the kernel chooses a source address
        own = probe.getsockname()[0]
    if found := next((name for name, known in interfaces().items() if known == own), None):
        return found
    raise ValueError(f"no interface with the address {own} was found on the way to {address}: give --interface.")


def read_sent(interface: str) -> tuple[int, int]:
    """Read how many bytes and packets the kernel has counted as sent by one of this host's interfaces."""
    lines = [line.partition(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    counts = {name.strip(): numbers.split() for name, _, numbers in lines}
    if interface not in counts:
        raise ValueError(f"an interface must be one of this host's, {', '.join(counts)}; got {interface!r}")
    return int(counts[interface][8]), int(counts[interface][9])
