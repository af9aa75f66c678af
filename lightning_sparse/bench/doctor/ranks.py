"""The program that runs on each rank: ``python -m lightning_sparse.bench.doctor.ranks SCHEDULE PLACE``.

It looks around, measures the link between hosts, and trains with each strategy in turn, as a benchmark does.
"""

import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Generator
from contextlib import closing
from dataclasses import asdict, dataclass, replace

from lightning_sparse.auto.policy import NAMES
from lightning_sparse.bench.cluster import Cluster
from lightning_sparse.bench.compare.place import Place
from lightning_sparse.bench.compare.report import Round
from lightning_sparse.bench.compare.worker import Schedule, take_turns
from lightning_sparse.bench.doctor.hosts import Host
from lightning_sparse.bench.doctor.link import Link, look_around

STEPS = 10  # of each strategy
MODEL = "lightning_sparse.bench.doctor.checked_model:CheckedModel"
STRATEGIES = ("ddp", *NAMES, "sparse_dense:local_steps=4")
_PORT = 29500  # every emulated cluster has its ports to itself
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Surroundings:
    """Every host, and the link to each from the one before it."""

    hosts: list[Host]
    links: list[Link]


Found = Generator[Surroundings | Round, None, None]


def plan(accelerator: str, strategies: tuple[str, ...] = STRATEGIES) -> Schedule:
    """Return the turns that check each strategy once."""
    return Schedule("", MODEL, ",".join(strategies), STEPS, warmup=0, rounds=1, accelerator=accelerator)


def examine(schedule: Schedule, place: Place) -> Found:
    """Examine this cluster, on every rank; yields what was found on rank 0, and nothing on the others."""
    hosts, links = look_around(place)
    if place.rank == 0:
        yield Surroundings(hosts, links)
    yield from take_turns(schedule, place)


def here(schedule: Schedule, size: int) -> Found:
    """Examine this machine, with ``size`` ranks on it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    places = [Place(r, r, size, size, "127.0.0.1", port, store_is_there=False, interface="lo") for r in range(size)]
    others = [_FORK.Process(target=_follow, args=(schedule, place)) for place in places[1:]]
    for other in others:
        other.start()
    try:
        yield from examine(schedule, places[0])
    finally:
        for other in others:
            other.join(5)
            other.kill()


def _follow(schedule: Schedule, place: Place) -> None:
    list(examine(schedule, place))


def emulated(schedule: Schedule, cluster: str) -> Found:
    """Build ``cluster`` and examine it."""
    program = [sys.executable, "-m", "lightning_sparse.bench.doctor.ranks", json.dumps(asdict(schedule))]
    threads = os.environ.get("OMP_NUM_THREADS", "1")  # the hosts share the machine's cores
    with Cluster(cluster) as built:
        place = Place(0, 0, built.hosts, 1, built.address(0), _PORT, store_is_there=False, interface="eth0")
        commands = [[*program, json.dumps(asdict(replace(place, rank=host)))] for host in range(built.hosts)]
        with closing(built.lines(commands, env={"OMP_NUM_THREADS": threads})) as lines:
            for line in lines:
                yield _read(json.loads(line))


def _read(found: dict[str, object]) -> Surroundings | Round:
    """The inverse of ``dataclasses.asdict``."""
    if "hosts" not in found:
        return Round.from_json(found)
    hosts, links = found["hosts"], found["links"]
    assert isinstance(hosts, list)
    assert isinstance(links, list)
    return Surroundings([Host.from_json(each) for each in hosts], [Link(**each) for each in links])


def main() -> None:
    """Examine at the place, given as JSON like the schedule; rank 0 writes a line of JSON for all that it finds."""
    schedule, place = (json.loads(word) for word in sys.argv[1:])
    for found in examine(Schedule(**schedule), Place(**place)):
        print(json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    main()
