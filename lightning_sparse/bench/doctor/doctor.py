"""``lightning-sparse doctor``: looks around, checks every strategy, and says what is wrong."""

import os
import sys
from contextlib import closing
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import Progress

from lightning_sparse.bench.cluster import ClusterError, parse, unavailable_reason
from lightning_sparse.bench.compare.peers import NO_COMMUNICATION
from lightning_sparse.bench.compare.place import Place
from lightning_sparse.bench.compare.report import Round
from lightning_sparse.bench.doctor import devices, findings, screen
from lightning_sparse.bench.doctor.hosts import Host, reach
from lightning_sparse.bench.doctor.ranks import STRATEGIES, Found, emulated, examine, here, plan

CPU_RANKS = 2  # that check on one machine


@dataclass(frozen=True)
class DoctorArguments:
    """Arguments of ``lightning-sparse doctor``, as its ``--help`` explains them."""

    emulate: str
    interface: str | None


def doctor(arguments: DoctorArguments) -> int:
    """Examine and print; returns the exit status: 1 if anything is wrong."""
    console = Console(soft_wrap=False)
    place = None if arguments.emulate else Place.find(arguments.interface)
    if place is not None and place.rank:
        list(examine(plan("auto"), place))  # rank 0 reports
        return 0
    wrong = _show(console, arguments, place)
    if not wrong:
        console.print("[bold]Nothing is wrong.[/bold]")
    for problem in wrong:
        console.print(f"wrong: {problem}", highlight=False, markup=False, soft_wrap=True)
    return int(bool(wrong))


def _show(console: Console, arguments: DoctorArguments, place: Place | None) -> list[str]:
    """Print what is found as it comes; returns what is wrong."""
    wrong: list[str] = []
    hosts: list[Host] = []
    for title, found in _examinations(arguments, place):
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
                        console.print(screen.surroundings(each, place, arguments.emulate, unavailable_reason()))
        except RuntimeError as error:
            if place is None or rounds:
                raise
            wrong.append(findings.of_link(error, place.address, place.port))
        checked = [each for each in rounds if each.strategy != NO_COMMUNICATION]
        if checked:
            console.print(screen.strategies(checked, title))
        wrong += findings.of_rounds(checked)
    if hosts and hosts[0].devices:
        wrong += devices.show(console)
    return findings.of_hosts(hosts, bool(arguments.emulate)) + _address(place) + wrong


def _examinations(arguments: DoctorArguments, place: Place | None) -> list[tuple[str, Found]]:
    """Return what is to be examined, none of it begun, and what each is called."""
    if arguments.emulate:
        if (hosts := parse(arguments.emulate).hosts) < 2:
            raise ValueError(f"an emulated cluster must have at least 2 hosts; got {arguments.emulate!r}")
        if reason := unavailable_reason():
            raise ClusterError(reason)
        return [(f"{hosts} emulated hosts, Gloo on the CPU", emulated(plan("cpu"), arguments.emulate))]
    if sys.platform != "linux":
        raise ValueError(f"doctor needs Linux; got {sys.platform}. `advise MODEL --link 4x1gbit` does not.")
    if place is not None:
        title = f"{screen.counted(place.size, 'rank')} on {screen.counted(place.hosts, 'host')}"
        return [(title, examine(plan("auto"), place))]
    cuda = torch.cuda.device_count()  # asks the driver's library, and not CUDA, after which nothing may be forked
    found = [(f"{CPU_RANKS} ranks of this machine, Gloo on the CPU", here(plan("cpu"), CPU_RANKS))]
    if cuda:
        found.append((f"{screen.counted(cuda, 'rank')} of this machine, NCCL on CUDA", here(plan("cuda"), cuda)))
    return found


def _address(place: Place | None) -> list[str]:
    """Say what is wrong with MASTER_ADDR, where it was set by hand."""
    address, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", 0) or 0)
    if place is not None or not address:
        return []
    error = reach(address, port)
    return [findings.of_address(address, port, error)] if error else []
