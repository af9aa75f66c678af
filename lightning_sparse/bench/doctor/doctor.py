"""``lightning-sparse doctor``: looks around, checks every strategy, and says what is wrong.

The module is also the program that runs on each rank, as a worker of the bench is.
"""

import sys
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from lightning_sparse.auto.policy import NAMES
from lightning_sparse.bench.cluster import parse, unavailable_reason
from lightning_sparse.bench.compare import worker
from lightning_sparse.bench.compare.peers import NO_COMMUNICATION
from lightning_sparse.bench.compare.place import Place, run_emulated, run_here
from lightning_sparse.bench.compare.records import Round
from lightning_sparse.bench.compare.run import check_clusters
from lightning_sparse.bench.compare.schedule import Schedule
from lightning_sparse.bench.doctor import screen
from lightning_sparse.bench.doctor.hosts import Host, Surroundings, look_around
from lightning_sparse.bench.output import say
from lightning_sparse.cli.options import Doctor
from lightning_sparse.wire import WIRE_DTYPES

PROGRAM = "lightning_sparse.bench.doctor.doctor"
MODEL = "lightning_sparse.bench.doctor.checked_model:CheckedModel"
LOCAL = "sparse_dense:local_steps=4"
STRATEGIES = ("ddp", *NAMES, LOCAL)
FEW = ("ddp", "micro", LOCAL)  # on the CPU, where there are CUDA devices to train on
FORMATS = tuple(f"sparse_dense:wire_dtype={name}" for name in WIRE_DTYPES)
#: On CUDA tensors, through pinned memory.
OVER_GLOO = tuple(f"{each}:process_group_backend=gloo" for each in (*NAMES, *FORMATS, LOCAL))
CPU_RANKS = 2  # that check on one machine, and on one device

Found = Generator[Surroundings | Round, None, None]


def doctor(options: Doctor) -> int:
    """Examine and print; returns the exit status: 1 if anything is wrong."""
    console = Console(soft_wrap=False)
    place = None if options.emulate else Place.find(options.interface)
    if place is not None and place.rank:
        list(examine(plan("auto"), place))  # rank 0 reports
        return 0
    wrong = _show(console, options.emulate, place)
    if not wrong:
        console.print("[bold]Nothing is wrong.[/bold]")
    for problem in wrong:
        say(console, f"wrong: {problem}")
    return int(bool(wrong))


def _show(console: Console, emulate: str, place: Place | None) -> list[str]:
    """Print what is found as it comes; returns what is wrong."""
    wrong: list[str] = []
    hosts: list[Host] = []
    for title, found in _examinations(emulate, place):
        rounds: list[Round] = []
        try:
            with closing(found), Progress(transient=True) as progress:
                task = progress.add_task("looking around", total=None)
                for each in found:
                    if isinstance(each, Round):
                        rounds.append(each)
                        progress.update(task, description=f"checked {each.strategy}")
                    elif not hosts:
                        hosts = each.hosts
                        console.print(screen.surroundings(each, place, emulate, unavailable_reason()))
        except RuntimeError as error:
            if place is None or rounds:
                raise
            wrong.append(screen.of_link(error, place.address, place.port))
        checked = [each for each in rounds if each.strategy != NO_COMMUNICATION]
        if checked:
            console.print(screen.strategies(checked, title))
        wrong += [f"{each.strategy} failed: {each.error}" for each in checked if each.error]
    return screen.of_hosts(hosts, bool(emulate)) + wrong


def _examinations(emulate: str, place: Place | None) -> Iterator[tuple[str, Found]]:
    """What is to be examined, none of it begun, and what each is called."""
    if emulate:
        check_clusters([emulate])
        yield f"{parse(emulate).hosts} emulated hosts, Gloo on the CPU", _read(run_emulated(emulate, PROGRAM, plan()))
    elif sys.platform != "linux":
        raise ValueError(f"doctor needs Linux; got {sys.platform}. `advise MODEL --link 4x1gbit` does not.")
    elif place is not None:
        title = f"{screen.counted(place.size, 'rank')} on {screen.counted(place.hosts, 'host')}"
        yield title, examine(plan("auto"), place)
    else:
        cuda = torch.cuda.device_count()
        on_cpu = plan("cpu", FEW if cuda else STRATEGIES)
        yield f"{CPU_RANKS} ranks of this machine, Gloo on the CPU", _read(run_here(CPU_RANKS, PROGRAM, on_cpu))
        if cuda:
            title = f"{screen.counted(cuda, 'rank')} of this machine, NCCL on CUDA"
            yield title, _read(run_here(cuda, PROGRAM, plan("cuda")))
            over_gloo = run_here(CPU_RANKS, PROGRAM, plan("cuda", OVER_GLOO), on_one_device=True)
            yield f"{CPU_RANKS} ranks on one device, Gloo on CUDA", _read(over_gloo)


def plan(accelerator: str = "cpu", strategies: tuple[str, ...] = STRATEGIES) -> Schedule:
    """Return the turns that check each strategy once."""
    return Schedule("", MODEL, ",".join(strategies), screen.STEPS, warmup=0, rounds=1, accelerator=accelerator)


def examine(schedule: Schedule, place: Place) -> Found:
    """Examine this cluster, on every rank; yields what was found on rank 0, and nothing on the others."""
    found = look_around(place)
    if place.rank == 0:
        yield found
    yield from worker.take_turns(schedule, place)


def _read(lines: Generator[dict[str, Any], None, None]) -> Found:
    """Read what the program wrote on rank 0."""
    with closing(lines):
        for found in lines:
            yield Surroundings.from_json(found) if "hosts" in found else Round.from_json(found)


if __name__ == "__main__":
    worker.main(examine)
