"""The program that runs on each rank: ``python -m lightning_sparse.bench.doctor.ranks SCHEDULE PLACE``.

It looks around, measures the link between hosts, and trains with each strategy in turn, as a benchmark does.
"""

import multiprocessing
import socket
from collections.abc import Generator
from contextlib import closing

from lightning_sparse.bench.compare import worker
from lightning_sparse.bench.compare.place import Place, run_emulated
from lightning_sparse.bench.compare.records import Round
from lightning_sparse.bench.compare.schedule import Schedule
from lightning_sparse.bench.doctor.hosts import Surroundings, look_around
from lightning_sparse.compressors import NAMES

STEPS = 10  # of each strategy
MODEL = "lightning_sparse.bench.doctor.checked_model:CheckedModel"
STRATEGIES = ("ddp", *NAMES, "sparse_dense:local_steps=4")

Found = Generator[Surroundings | Round, None, None]


def plan(accelerator: str, strategies: tuple[str, ...] = STRATEGIES) -> Schedule:
    """Return the turns that check each strategy once."""
    return Schedule("", MODEL, ",".join(strategies), STEPS, warmup=0, rounds=1, accelerator=accelerator)


def examine(schedule: Schedule, place: Place) -> Found:
    """Examine this cluster, on every rank; yields what was found on rank 0, and nothing on the others."""
    found = look_around(place)
    if place.rank == 0:
        yield found
    yield from worker.take_turns(schedule, place)


def here(schedule: Schedule, size: int) -> Found:
    """Examine this machine, with ``size`` ranks on it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    places = [Place(r, r, size, size, "127.0.0.1", port, store_is_there=False, interface="lo") for r in range(size)]
    fork = multiprocessing.get_context("fork")
    others = [fork.Process(target=_follow, args=(schedule, place)) for place in places[1:]]
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
    with closing(run_emulated(cluster, "lightning_sparse.bench.doctor.ranks", schedule)) as lines:
        for found in lines:
            yield Surroundings.from_json(found) if "hosts" in found else Round.from_json(found)


if __name__ == "__main__":
    worker.main(examine)
