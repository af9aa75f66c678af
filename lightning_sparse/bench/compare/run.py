"""``lightning-sparse bench``: measures on emulated clusters, or on the one it was started on, and reports."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from lightning_sparse.bench.cluster import INTERFACE, MASTER_PORT, Cluster, ClusterError, parse, unavailable_reason
from lightning_sparse.bench.compare import report, until_loss
from lightning_sparse.bench.compare.ranks import RankInfo, free_port, on_shared_device
from lightning_sparse.bench.compare.records import Round
from lightning_sparse.bench.compare.schedule import COMPILING, Schedule, schedules
from lightning_sparse.bench.compare.strategies import parse_strategies
from lightning_sparse.bench.compare.worker import take_turns
from lightning_sparse.bench.compare.workloads import count_parameters, workload_named
from lightning_sparse.bench.output import environment, json_line, new_console, new_file, new_progress, say
from lightning_sparse.monitor.pictures import require_matplotlib
from lightning_sparse.settings import counted
from lightning_sparse_cli import Bench

Rounds = Generator[Round, None, None]
Measure = Callable[[Schedule], Rounds]


def bench(options: Bench) -> int:
    """Run and report; returns the exit status: 1 if a strategy failed."""
    wanted = schedules(options)
    if options.plot:
        require_matplotlib()
    place, measure = find_ranks(options.emulate.split(",") if options.emulate else [], options.interface)
    if place is not None:
        wanted = [replace(each, cluster=counted(place.hosts, "host")) for each in wanted]
        if place.rank:
            list(measure(wanted[0]))  # rank 0 reports
            return 0
    return _report(options, wanted, measure)


def _report(options: Bench, schedules: Sequence[Schedule], measure: Measure) -> int:
    """Run the schedules; write each result down as it comes, and in the end, or when interrupted, the tables."""
    console = new_console()
    facts, settings = environment(options.command), asdict(schedules[0])
    facts |= {
        name: value for name, value in settings.items() if name not in ("cluster", "floor") and value not in ([], None)
    }
    facts["parameters"] = count_parameters(workload_named(options.workload))
    results = new_file(options.output, f"{datetime.now(timezone.utc):%Y-%m-%d-%H%M%S}-{options.workload}")
    rounds: list[Round] = []
    compiled: list[Round] = []  # of which only the seconds of compiling count
    turns = sum(len(schedule.turns()) for schedule in schedules)
    try:
        with results.open("a") as file, new_progress(console) as progress:
            task = progress.add_task("starting", total=turns)
            file.write(json_line("environment", facts))
            for schedule in schedules:
                before, order = len(rounds), [(number, row.label) for number, row in schedule.turns()]
                with closing(measure(schedule)) as found:
                    for each in found:
                        only_compiled = each.number == COMPILING and not each.error
                        (compiled if only_compiled else rounds).append(replace(each, number=max(each.number, 0)))
                        file.write(json_line("compiled" if only_compiled else "round", each))
                        file.flush()
                        took = f"{1e3 * fmean(s.s for s in each.timed):.0f} ms a step" if each.timed else "failed"
                        took = "kernels are compiled" if only_compiled else took
                        said = f"{each.cluster} {each.strategy}: {took}"
                        progress.update(task, advance=1, description=said, refresh=True)
                rounds[before:] = sorted(rounds[before:], key=lambda r: order.index((r.number, r.strategy)))
    finally:
        if rounds:
            facts["turns"] = f"{len(rounds) + len(compiled)} of {turns}"
            notes = [*report.failures(rounds), *report.compiling(compiled, rounds)]
            _write(options, schedules[0], rounds, notes, facts, results, console)
    return int(any(each.error for each in rounds))


def _write(
    options: Bench,
    schedule: Schedule,
    rounds: Sequence[Round],
    notes: Sequence[str],
    facts: dict[str, Any],
    results: Path,
    console: Console,
) -> None:
    """Add the summaries to the file of ``results``, write the page and the plots, and show the tables and ``notes``."""
    losses, workload = schedule.until_loss, schedule.workload
    best = until_loss.at_best_rates(rounds, losses)
    rows = report.summarise(best, parse_strategies(schedule.strategies)[0].label)
    with results.open("a") as file:
        file.writelines(json_line("summary", row) for row in rows)
    images = report.draw(best, options.output, results.stem) if options.plot else []
    if rounds[0].run:
        facts |= {"device": rounds[0].run.device, "threads of a rank": rounds[0].run.threads}
    reached = until_loss.rows(rounds, losses) if losses else {}
    section = until_loss.section(reached, losses) if losses else ""
    files = [results.name, *images]
    results.with_suffix(".md").write_text(report.page(rows, notes, workload, facts, files, section))
    for table in (*report.tables(rows, workload, report.ON_CONSOLE), *until_loss.tables(reached, losses)):
        console.print(table)
    for line in (*notes, f"results: {results}, and with every column {results.with_suffix('.md')}"):
        say(console, line)


# - starting what takes turns, on the ranks that are there, an emulated cluster, or this machine
# All of it yields the rounds as they end, on rank 0, and nothing on the others.


def find_ranks(clusters: Sequence[str], interface: str | None, otherwise: str = "") -> tuple[RankInfo | None, Measure]:
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
    place = RankInfo.find(interface)
    if place is None:
        raise ValueError(
            "no ranks to measure between: give --emulate 4x1gbit, say, or start this command on every host with "
            f"torchrun or srun.{otherwise}"
        )
    return place, lambda schedule: take_turns(schedule, place)


def emulate(schedule: Schedule) -> Rounds:
    """Build the cluster of a schedule, and start a worker for each rank."""
    threads = os.environ.get("OMP_NUM_THREADS", "1")  # the hosts share the machine's cores
    with Cluster(schedule.cluster) as built:
        commands, meeting = [], (built.address(0), MASTER_PORT, False)
        for rank, (host, local_rank) in enumerate(built.spec.places):
            sizes = built.ranks, built.spec.local_sizes[host], built.hosts
            commands.append(_worker(schedule, RankInfo(rank, local_rank, *sizes, *meeting, INTERFACE)))
        with closing(built.lines(commands, env={"OMP_NUM_THREADS": threads})) as lines:
            for line in lines:
                yield Round.from_json(json.loads(line))


def on_this_machine(schedule: Schedule, size: int, on_one_device: bool = False) -> Rounds:
    """Start ``size`` workers here, each with a device of its own unless all are ``on_one_device``.

    Raises:
        RuntimeError: rank 0 failed, and has written why on standard error.
    """
    on_host = 1 if on_one_device else size  # each rank is then a host of its own, on its first device
    sizes, meeting = (size, on_host, size // on_host), ("127.0.0.1", free_port(), False)
    places = [RankInfo(rank, rank % on_host, *sizes, *meeting, "lo") for rank in range(size)]
    with ExitStack() as stack:
        processes = []
        for place in places:
            own = os.environ | (on_shared_device(place.rank) if on_one_device else {})
            process = subprocess.Popen(
                _worker(schedule, place), env=own, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        first = processes[0]
        assert first.stdout is not None
        for line in first.stdout:
            yield Round.from_json(json.loads(line))
        if first.wait():
            raise RuntimeError("the ranks ended before all was measured; what they wrote says why.")


def _worker(schedule: Schedule, place: RankInfo) -> list[str]:
    """The command of a worker."""
    program = [sys.executable, "-m", "lightning_sparse.bench.compare.worker"]
    return [*program, json.dumps(asdict(schedule)), json.dumps(asdict(place))]
