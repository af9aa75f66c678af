"""``lightning-sparse doctor``: looks around, checks every strategy, and says what is wrong.

The module is also the program that runs on each rank of an emulated cluster, as a worker of the bench is.
"""

import multiprocessing
import os
import socket
import sys
from collections.abc import Generator
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from lightning_sparse.auto.policy import NAMES
from lightning_sparse.bench import kernels
from lightning_sparse.bench.cluster import parse, unavailable_reason
from lightning_sparse.bench.compare import worker
from lightning_sparse.bench.compare.peers import NO_COMMUNICATION
from lightning_sparse.bench.compare.place import Place, run_emulated
from lightning_sparse.bench.compare.records import Round
from lightning_sparse.bench.compare.run import check_clusters
from lightning_sparse.bench.compare.schedule import Schedule
from lightning_sparse.bench.doctor import screen
from lightning_sparse.bench.doctor.checked_model import TOLERANCE
from lightning_sparse.bench.doctor.hosts import Host, Surroundings, look_around, reach
from lightning_sparse.bench.output import say
from lightning_sparse.cli.options import Doctor
from lightning_sparse.compressors import COMPRESSORS
from lightning_sparse.kernels.ops import HAS_TRITON
from lightning_sparse.simulation import Simulated, simulate
from lightning_sparse.wire import WIRE_DTYPES

MODEL = "lightning_sparse.bench.doctor.checked_model:CheckedModel"
STRATEGIES = ("ddp", *NAMES, "sparse_dense:local_steps=4")
FEW = ("ddp", "micro", "sparse_dense:local_steps=4")  # on the CPU, where there are CUDA devices to train on
OVER_GLOO = tuple(
    f"{each}:process_group_backend=gloo" for each in ("micro", "sparse_dense:wire_dtype=int4", FEW[-1])
)  # on CUDA tensors, through pinned memory
CPU_RANKS = 2  # that check on one machine, and on one device
RANKS, ELEMENTS = 4, 100_000  # of each compressor among simulated ranks on a CUDA device
MOST_OTHERS = 1e-3  # the part of a mean's elements that may differ from the CPU's by more than rounding

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
                task = progress.add_task("looking around", total=1 + len(STRATEGIES))  # one without a network
                for each in found:
                    if isinstance(each, Round):
                        rounds.append(each)
                        progress.update(task, advance=1, description=f"checked {each.strategy}")
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
    if hosts and hosts[0].devices:
        wrong += conserves(torch.device("cuda")) + codes_as_the_cpu(torch.device("cuda"))
        if HAS_TRITON:
            say(console, f"Kernels, {kernels.ELEMENTS:,} elements on {torch.cuda.get_device_name()}")
            console.print(kernels.measure(kernels.ELEMENTS))
    return screen.of_hosts(hosts, bool(emulate)) + _address(place) + wrong


def _examinations(emulate: str, place: Place | None) -> list[tuple[str, Found]]:
    """Return what is to be examined, none of it begun, and what each is called."""
    if emulate:
        check_clusters([emulate])
        return [(f"{parse(emulate).hosts} emulated hosts, Gloo on the CPU", emulated(plan("cpu"), emulate))]
    if sys.platform != "linux":
        raise ValueError(f"doctor needs Linux; got {sys.platform}. `advise MODEL --link 4x1gbit` does not.")
    if place is not None:
        title = f"{screen.counted(place.size, 'rank')} on {screen.counted(place.hosts, 'host')}"
        return [(title, examine(plan("auto"), place))]
    cuda = torch.cuda.device_count()  # asks the driver's library, and not CUDA, after which nothing may be forked
    on_cpu = plan("cpu", FEW if cuda else STRATEGIES)
    found = [(f"{CPU_RANKS} ranks of this machine, Gloo on the CPU", here(on_cpu, CPU_RANKS))]
    if cuda:
        found.append(
            (f"{screen.counted(cuda, 'rank')} of this machine, NCCL on CUDA", here(plan("cuda"), cuda, "spawn"))
        )
        over_gloo = here(plan("cuda", OVER_GLOO), CPU_RANKS, "spawn", on_one_device=True)
        found.append((f"{CPU_RANKS} ranks on one device, Gloo on CUDA", over_gloo))
    return found


def _address(place: Place | None) -> list[str]:
    """Say what is wrong with MASTER_ADDR, where it was set by hand."""
    address, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", 0) or 0)
    error = reach(address, port) if address and place is None else ""
    must = f"MASTER_ADDR must be a host that answers; got {address!r}, port {port}: {error}."
    return [f"{must} Correct it, or unset it to train on this machine alone."] if error else []


def conserves(device: torch.device) -> list[str]:
    """Simulate ten steps of each compressor among four ranks on ``device``; say which lost or made up gradient."""
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(screen.STEPS, RANKS, ELEMENTS, generator=generator).to(device)
    wrong = []
    for name in COMPRESSORS:
        try:
            result = simulate(name, gradients, torch.ones(ELEMENTS, device=device))
        except Exception as error:
            wrong.append(f"{name} failed on {device} among {RANKS} simulated ranks: {type(error).__name__}: {error}")
            continue
        left = RANKS * result.mean.double().sum(0) + result.unsent.double().sum(0)
        right = gradients.double().sum((0, 1))
        part = float((left - right).abs().max() / right.abs().max())
        if not part <= TOLERANCE:
            wrong.append(
                f"{name} on {device}: gradient was lost or made up ({part:.1e} of the largest). Please report."
            )
    return wrong


def codes_as_the_cpu(device: torch.device) -> list[str]:
    """Simulate three steps of every format among four ranks on ``device`` and on the CPU; say where means differ."""
    gradients = torch.randn(3, RANKS, ELEMENTS // 4, generator=torch.Generator().manual_seed(0))
    wrong = []
    for wire_dtype in map(str, WIRE_DTYPES):
        try:
            ours = simulate("sparse_dense", gradients.to(device), wire_dtype=wire_dtype)
        except Exception as error:
            wrong.append(f"{wire_dtype} failed on {device}: {type(error).__name__}: {error}")
            continue
        part = others(ours, simulate("sparse_dense", gradients, wire_dtype=wire_dtype))
        if not part <= MOST_OTHERS:
            wrong.append(f"{wire_dtype} on {device}: {part:.1%} of the means differ from the CPU's. Please report.")
    return wrong


def others(ours: Simulated, on_cpu: Simulated) -> float:
    """Return the part of the means' elements that differ by more than what is rounded another way."""
    apart = (ours.mean.cpu() - on_cpu.mean).abs() / on_cpu.mean.abs().max()
    return float((~(apart <= TOLERANCE)).float().mean())


# - ranks


def plan(accelerator: str, strategies: tuple[str, ...] = STRATEGIES) -> Schedule:
    """Return the turns that check each strategy once."""
    return Schedule("", MODEL, ",".join(strategies), screen.STEPS, warmup=0, rounds=1, accelerator=accelerator)


def examine(schedule: Schedule, place: Place) -> Found:
    """Examine this cluster, on every rank; yields what was found on rank 0, and nothing on the others."""
    found = look_around(place)
    if place.rank == 0:
        yield found
    yield from worker.take_turns(schedule, place)


def here(schedule: Schedule, size: int, start: str = "fork", on_one_device: bool = False) -> Found:
    """Examine this machine, with ``size`` ranks on it, each on a device of its own unless all are ``on_one_device``.

    Args:
        schedule: what to try.
        size: P, each rank in a process of its own.
        start: how these start: "fork", where no thread or device has been used yet, or "spawn".
        on_one_device: all of them.

    Raises:
        RuntimeError: if the ranks do not find each other, or rank 0 dies.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    on_host = 1 if on_one_device else size  # each rank is then a host of its own, on its first device
    ways = "127.0.0.1", port, False, "lo"
    places = [Place(rank, rank % on_host, size, on_host, *ways) for rank in range(size)]
    context: Any = multiprocessing.get_context(start)
    receiving, sending = context.Pipe(duplex=False)
    ranks = [context.Process(target=_follow, args=(schedule, place, sending)) for place in places]
    for rank in ranks:
        rank.start()
    sending.close()  # ours, so that the end of the ranks is the end of the pipe
    try:
        while (found := receiving.recv()) is not None:
            if isinstance(found, Exception):
                raise found
            yield found
    except EOFError:
        raise RuntimeError("the ranks ended before all was examined; what they wrote says why.") from None
    finally:
        for rank in ranks:
            rank.join(5)
            rank.kill()


def _follow(schedule: Schedule, place: Place, found: Connection) -> None:
    """Examine, and let rank 0 send what was ``found``, or the error, and then None."""
    if place.rank:
        found.close()
    try:
        for each in examine(schedule, place):
            found.send(each)
    except Exception as error:
        if place.rank:
            raise
        found.send(error)
    if place.rank == 0:
        found.send(None)


def emulated(schedule: Schedule, cluster: str) -> Found:
    """Build ``cluster`` and examine it."""
    with closing(run_emulated(cluster, "lightning_sparse.bench.doctor.doctor", schedule)) as lines:
        for found in lines:
            yield Surroundings.from_json(found) if "hosts" in found else Round.from_json(found)


if __name__ == "__main__":
    worker.main(examine)
