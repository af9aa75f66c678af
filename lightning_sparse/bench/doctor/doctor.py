"""``lightning-sparse doctor``: looks around, checks every strategy, and says what is wrong."""

import sys
from collections.abc import Iterator
from contextlib import closing

from rich.console import Console
from rich.progress import Progress

from lightning_sparse.auto.policy import NAMES
from lightning_sparse.bench.cluster import unavailable_reason
from lightning_sparse.bench.compare.place import Place
from lightning_sparse.bench.compare.records import Round
from lightning_sparse.bench.compare.schedule import Schedule
from lightning_sparse.bench.compare.start import Rounds, find_ranks, on_this_machine
from lightning_sparse.bench.compare.worker import take_turns
from lightning_sparse.bench.doctor import screen
from lightning_sparse.bench.doctor.host import Host
from lightning_sparse.bench.output import say
from lightning_sparse.cli.options import Doctor
from lightning_sparse.wire import WIRE_DTYPES

MODEL = "lightning_sparse.bench.doctor.checked_model:CheckedModel"
LOCAL = "sparse_dense:local_steps=4"
STRATEGIES = ("ddp", *NAMES, LOCAL)
FEW = ("ddp", "micro", LOCAL)  # on the CPU, where there are CUDA devices to train on
FORMATS = tuple(f"sparse_dense:wire_dtype={name}" for name in WIRE_DTYPES)
#: On CUDA tensors, through pinned memory.
OVER_GLOO = tuple(f"{each}:process_group_backend=gloo" for each in (*NAMES, *FORMATS, LOCAL))
CPU_RANKS = 2  # that check on one machine
DEVICE_RANKS = 3  # on one device: from three on, sums may take two hops


def doctor(options: Doctor) -> int:
    """Examine and print; returns the exit status: 1 if anything is wrong."""
    place = None if options.emulate else Place.find(options.interface)
    if place is None and not options.emulate and sys.platform != "linux":
        raise ValueError(f"doctor needs Linux; got {sys.platform}. `advise MODEL --link 4x1gbit` does not.")
    if place is not None and place.rank:
        list(take_turns(plan("auto"), place))  # rank 0 reports
        return 0
    console, host = Console(soft_wrap=False), Host.this()
    wrong = host.wrong(1 if place is None else place.hosts)
    console.print(screen.surroundings(host, place, options.emulate, unavailable_reason()))
    for title, rounds in _examinations(options.emulate, place, host.devices):
        wrong += _show(console, title, rounds)
    if not wrong:
        console.print("[bold]Nothing is wrong.[/bold]")
    for problem in wrong:
        say(console, f"wrong: {problem}")
    return int(bool(wrong))


def _examinations(cluster: str, place: Place | None, devices: int) -> Iterator[tuple[str, Rounds]]:
    """What is to be examined, none of it begun, and what each is called."""
    if cluster:
        _, emulate = find_ranks([cluster], None)
        yield f"{cluster}, emulated, Gloo on the CPU", emulate(plan("cpu", cluster=cluster))
    elif place is not None:
        title = f"{screen.counted(place.size, 'rank')} on {screen.counted(place.hosts, 'host')}"
        yield title, take_turns(plan("auto"), place)
    else:
        on_cpu = plan("cpu", FEW if devices else STRATEGIES)
        yield f"{CPU_RANKS} ranks of this machine, Gloo on the CPU", on_this_machine(on_cpu, CPU_RANKS)
        if devices:
            title = f"{screen.counted(devices, 'rank')} of this machine, NCCL on CUDA"
            yield title, on_this_machine(plan("cuda"), devices)
            over_gloo = on_this_machine(plan("cuda", OVER_GLOO), DEVICE_RANKS, on_one_device=True)
            yield f"{DEVICE_RANKS} ranks on one device, Gloo on CUDA", over_gloo


def plan(accelerator: str, strategies: tuple[str, ...] = STRATEGIES, cluster: str = "") -> Schedule:
    """Return the turns that check each strategy once."""
    return Schedule(cluster, MODEL, ",".join(strategies), screen.STEPS, warmup=0, rounds=1, accelerator=accelerator)


def _show(console: Console, title: str, rounds: Rounds) -> list[str]:
    """Print the strategies that were checked, on rank 0; returns what is wrong."""
    checked: list[Round] = []
    try:
        with closing(rounds), Progress(transient=True) as progress:
            task = progress.add_task("starting", total=None)
            for each in rounds:
                progress.update(task, description=f"checked {each.strategy}")
                checked.append(each)
    except RuntimeError as error:
        return [str(error)]
    if checked:
        console.print(screen.strategies(checked, title))
    return [f"{each.strategy} failed: {each.error}" for each in checked if each.error]
