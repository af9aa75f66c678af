"""Starts what takes the turns of a schedule, on the ranks that are there, an emulated cluster, or this machine.

All of it yields the rounds as they end, on rank 0, and nothing on the others.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace

from lightning_sparse.bench.cluster import Cluster, ClusterError, parse, unavailable_reason
from lightning_sparse.bench.compare.place import Place
from lightning_sparse.bench.compare.records import Round
from lightning_sparse.bench.compare.schedule import Schedule
from lightning_sparse.bench.compare.worker import take_turns

Rounds = Generator[Round, None, None]
Measure = Callable[[Schedule], Rounds]
_PORT = 29500  # of the workers' store in an emulated cluster, each of which has its ports to itself


def find_ranks(clusters: Sequence[str], interface: str | None, otherwise: str = "") -> tuple[Place | None, Measure]:
    """Find this process's place among the ranks it was started with, None if it emulates; and what measures on them.

    A ValueError where there are no ranks, which ends with ``otherwise``, and for a cluster without hosts to send to; a
    ClusterError where none can be emulated.
    """
    for cluster in clusters:
        if parse(cluster).hosts < 2:
            raise ValueError(f"an emulated cluster must have at least 2 hosts; got {cluster!r}")
    if clusters:
        if reason := unavailable_reason():
            raise ClusterError(reason)
        return None, emulate
    place = Place.find(interface)
    if place is None:
        raise ValueError(
            "no ranks to measure between: give --emulate 4x1gbit, say, or start this command on every host with "
            f"torchrun or srun.{otherwise}"
        )
    return place, lambda schedule: take_turns(schedule, place)


def emulate(schedule: Schedule) -> Rounds:
    """Build the cluster of a schedule, and start a worker in each host."""
    threads = os.environ.get("OMP_NUM_THREADS", "1")  # the hosts share the machine's cores
    with Cluster(schedule.cluster) as built:
        place = Place(0, 0, built.hosts, 1, built.address(0), _PORT, store_is_there=False, interface="eth0")
        commands = [_worker(schedule, replace(place, rank=rank)) for rank in range(built.hosts)]
        with closing(built.lines(commands, env={"OMP_NUM_THREADS": threads})) as lines:
            for line in lines:
                yield Round.from_json(json.loads(line))


def on_this_machine(schedule: Schedule, size: int, on_one_device: bool = False) -> Rounds:
    """Start ``size`` workers here, each with a device of its own unless all are ``on_one_device``.

    Raises:
        RuntimeError: rank 0 failed, and has written why on standard error.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    on_host = 1 if on_one_device else size  # each rank is then a host of its own, on its first device
    places = [Place(rank, rank % on_host, size, on_host, "127.0.0.1", port, False, "lo") for rank in range(size)]
    with ExitStack() as stack:
        processes = []
        for place in places:
            process = subprocess.Popen(_worker(schedule, place), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        first = processes[0]
        assert first.stdout is not None
        for line in first.stdout:
            yield Round.from_json(json.loads(line))
        if first.wait():
            raise RuntimeError("the ranks ended before all was measured; what they wrote says why.")


def _worker(schedule: Schedule, place: Place) -> list[str]:
    """The command of a worker."""
    program = [sys.executable, "-m", "lightning_sparse.bench.compare.worker"]
    return [*program, json.dumps(asdict(schedule)), json.dumps(asdict(place))]
