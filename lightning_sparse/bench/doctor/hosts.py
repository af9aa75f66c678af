"""What a host has, versions, cores, devices and network interfaces, and the link to it from the one before."""

import multiprocessing
import os
import platform
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # exported at run time only

from lightning_sparse.__about__ import __version__
from lightning_sparse.bench.compare.place import Place, interfaces
from lightning_sparse.fusion.costs import Link
from lightning_sparse.kernels.ops import HAS_TRITON
from lightning_sparse.network.comm import Comm
from lightning_sparse.network.torch_comm import TorchComm

PATIENCE = timedelta(seconds=60)  # until hosts must have found each other
TINY, RUNS = 8, 20  # bytes of the messages that the latency is measured with, and their number
LEAST_BYTES, MOST_BYTES = 2**16, 2**28  # of the messages that the rate is measured with
LONG_S = 0.3  # seconds: a message that takes so long shows the rate


@dataclass(frozen=True)
class Host:
    """A host, as one of its processes sees it."""

    name: str
    system: str
    versions: dict[str, str]  # of what must be the same on every host
    cores: int  # that this process may use
    load: float  # programs that ran on average in the last minute
    devices: list[str]  # names of CUDA devices
    nccl: str  # its version, if PyTorch has NCCL
    triton: bool
    interfaces: dict[str, str]  # name -> IPv4 address
    own_address: str  # that the host's name leads to; "" if it leads nowhere
    gloo: str  # GLOO_SOCKET_IFNAME
    nccl_interface: str  # NCCL_SOCKET_IFNAME

    @classmethod
    def this(cls) -> "Host":
        """Look around.  Asks CUDA, so the process must not be forked afterwards."""
        versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
        for package in ("lightning", "pytorch-lightning"):
            with suppress(PackageNotFoundError):
                versions[package.replace("-", "_")] = version(package)
        own_address = ""
        with suppress(OSError):
            own_address = socket.gethostbyname(socket.gethostname())
        return cls(
            name=socket.gethostname(),
            system=f"{platform.system()} {platform.release()}",
            versions=versions | {"lightning-sparse": __version__},
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            load=os.getloadavg()[0],
            devices=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            nccl=".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "",
            triton=HAS_TRITON,
            interfaces=interfaces(),
            own_address=own_address,
            gloo=os.environ.get("GLOO_SOCKET_IFNAME", ""),
            nccl_interface=os.environ.get("NCCL_SOCKET_IFNAME", ""),
        )


# - links


@dataclass(frozen=True)
class Surroundings:
    """Every host, and the link to each from the one before it, the last before the first; no link for one host.

    Over Gloo the latency of a short message is the way there and back: the receiver says that it is ready.
    """

    hosts: list[Host]
    links: list[Link]

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Surroundings":
        """The inverse of ``dataclasses.asdict``."""
        return cls([Host(**each) for each in values["hosts"]], [Link(**each) for each in values["links"]])


def look_around(place: Place) -> Surroundings:
    """Look around on every host, in a process of its own, so that the caller may fork afterwards.

    To be called on every rank; a RuntimeError if the hosts do not find each other in time.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as apart:
        return apart.submit(_look_around, place).result()


def _look_around(place: Place) -> Surroundings:
    here = Host.this()  # with the interfaces as the user has set them
    if place.hosts == 1:
        return Surroundings([here], [])
    if place.local_rank:
        return Surroundings([], [])
    os.environ["GLOO_SOCKET_IFNAME"] = place.interface
    number = place.rank // place.local_size
    # Whoever serves a store serves it at the next port: at the port itself the workers' store comes later.
    port = place.port if place.store_is_there else place.port + 1
    serves = number == 0 and not place.store_is_there
    store = TCPStore(place.address, port, is_master=serves, wait_for_workers=False, timeout=PATIENCE)
    own = PrefixStore("lightning_sparse_doctor", store)
    dist.init_process_group("gloo", store=own, rank=number, world_size=place.hosts, timeout=PATIENCE)
    everyone = dist.group.WORLD
    assert everyone is not None
    link = measure(TorchComm(everyone))
    gathered: list[Any] = [None] * place.hosts
    dist.all_gather_object(gathered, (asdict(here), asdict(link)))
    dist.destroy_process_group()
    own.set(f"bye {number}", "")
    if serves:
        own.wait([f"bye {each}" for each in range(place.hosts)])
    return Surroundings([Host(**host) for host, _ in gathered], [Link(**each) for _, each in gathered])


def measure(comm: Comm) -> Link:
    """Measure the link from the rank before this one; to be called on every rank."""
    _seconds(comm, LEAST_BYTES)  # connects
    latency_s = _seconds(comm, TINY, RUNS)
    nbytes, longest_s, own_s = LEAST_BYTES, 0.0, 0.0
    while longest_s < LONG_S and nbytes < MOST_BYTES:
        nbytes *= 4
        own_s = _seconds(comm, nbytes)
        longest_s = max(_of_all(comm, own_s))
    return Link(latency_s, max(own_s - latency_s, 1e-9) / nbytes)


def _seconds(comm: Comm, nbytes: int, runs: int = 1) -> float:
    """Time a message of ``nbytes`` from the rank before; of several, each is sent when the one before has arrived."""
    x = torch.zeros(nbytes, dtype=torch.uint8)
    out = torch.empty_like(x)
    _of_all(comm, 0.0)
    start_s = time.perf_counter()
    for _ in range(runs):
        comm.shift(x, out).wait()
    return (time.perf_counter() - start_s) / runs


def _of_all(comm: Comm, number: float) -> Sequence[float]:
    """Return the ``number`` of every rank; none goes on before all are here."""
    found: list[float] = comm.all_gather(torch.tensor([number], dtype=torch.float64)).wait().view(-1).tolist()
    return found
