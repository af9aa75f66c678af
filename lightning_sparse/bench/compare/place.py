"""Where a process stands among ranks, and what carries their messages; the ranks of an emulated cluster."""

import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from lightning_sparse.bench.cluster import Cluster

_SIOCGIFADDR = 0x8915  # of <linux/sockios.h>: the address of an interface
_PORT = 29500  # of the workers' store in an emulated cluster, each of which has its ports to itself


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


def run_emulated(cluster: str, program: str, schedule: Any) -> Generator[dict[str, Any], None, None]:
    """Build a cluster, run a program in each of its hosts, and yield what that of rank 0 writes: lines of JSON.

    The program is a module; it is given the schedule, a dataclass, and its place, as JSON.
    """
    threads = os.environ.get("OMP_NUM_THREADS", "1")  # the hosts share the machine's cores
    with Cluster(cluster) as built:
        place = Place(0, 0, built.hosts, 1, built.address(0), _PORT, store_is_there=False, interface="eth0")
        commands = [_command(program, schedule, replace(place, rank=rank)) for rank in range(built.hosts)]
        with closing(built.lines(commands, env={"OMP_NUM_THREADS": threads})) as lines:
            yield from map(json.loads, lines)


def run_here(
    size: int, program: str, schedule: Any, on_one_device: bool = False
) -> Generator[dict[str, Any], None, None]:
    """Run a program as :func:`run_emulated` does, as ``size`` ranks of this machine.

    Each rank has a device of its own, unless all are ``on_one_device``.  A RuntimeError if rank 0 fails.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    on_host = 1 if on_one_device else size  # each rank is then a host of its own, on its first device
    places = [Place(rank, rank % on_host, size, on_host, "127.0.0.1", port, False, "lo") for rank in range(size)]
    with ExitStack() as stack:
        first, *_ = (
            stack.enter_context(_running(_command(program, schedule, place), read=place.rank == 0)) for place in places
        )
        assert first.stdout is not None
        yield from map(json.loads, first.stdout)
        if first.wait():
            raise RuntimeError("the ranks ended before all was examined; what they wrote says why.")


def _command(program: str, schedule: Any, place: Place) -> list[str]:
    return [sys.executable, "-m", program, json.dumps(asdict(schedule)), json.dumps(asdict(place))]


@contextmanager
def _running(command: list[str], read: bool) -> Iterator[subprocess.Popen[str]]:
    """Have a process run until the end of the block; what it writes is thrown away unless it is to be ``read``."""
    output = subprocess.PIPE if read else subprocess.DEVNULL
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


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
