"""Measures the link between hosts: each sends to the next, all at once, over Gloo."""

import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # exported at run time only

from lightning_sparse.bench.compare.place import Place
from lightning_sparse.bench.doctor.hosts import Host
from lightning_sparse.network.comm import Comm
from lightning_sparse.network.torch_comm import TorchComm

PATIENCE = timedelta(seconds=60)
TINY, RUNS = 8, 20  # bytes of the messages that the latency is measured with, and their number
LEAST_BYTES, MOST_BYTES = 2**16, 2**28
LONG_S = 0.3  # a message that takes so long shows the rate


@dataclass(frozen=True)
class Link:
    """The way to a host from the one before it."""

    latency_s: float  # of a short message; over Gloo that is the way there and back: the receiver says it is ready
    bytes_per_s: float


def look_around(place: Place) -> tuple[list[Host], list[Link]]:
    """Return every host, and the link to each from the one before it, the last before the first; no link for one host.

    To be called on every rank; takes a process of its own, so that the caller may fork afterwards.

    Raises:
        RuntimeError: the hosts did not find each other in time.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as apart:
        return apart.submit(_look_around, place).result()


def _look_around(place: Place) -> tuple[list[Host], list[Link]]:
    here = Host.this()  # with the interfaces as the user has set them
    if place.hosts == 1:
        return [here], []
    if place.local_rank:
        return [], []
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
    return [Host.from_json(host) for host, _ in gathered], [Link(**each) for _, each in gathered]


def measure(comm: Comm) -> Link:
    """Measure the link from the rank before this one; to be called on every rank."""
    _seconds(comm, LEAST_BYTES)  # connects
    latency_s = _seconds(comm, TINY, RUNS)
    nbytes, longest_s, own_s = LEAST_BYTES, 0.0, 0.0
    while longest_s < LONG_S and nbytes < MOST_BYTES:
        nbytes *= 4
        own_s = _seconds(comm, nbytes)
        longest_s = max(_of_all(comm, own_s))
    return Link(latency_s, nbytes / max(own_s - latency_s, 1e-9))


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
