"""Runs a benchmark, on emulated clusters or on the cluster it was started on, and reports."""

import json
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, replace
from datetime import datetime, timezone
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress

from lightning_sparse.bench.cluster import Cluster, ClusterError, parse, unavailable_reason
from lightning_sparse.bench.compare import plots, report, until_loss
from lightning_sparse.bench.compare.arguments import BenchArguments
from lightning_sparse.bench.compare.peers import contenders
from lightning_sparse.bench.compare.place import Place
from lightning_sparse.bench.compare.report import Round, json_line
from lightning_sparse.bench.compare.worker import Schedule, take_turns
from lightning_sparse.bench.compare.workloads import parameter_sizes, workload_named
from lightning_sparse.monitor.pictures import require_matplotlib

_PORT = 29500  # of the workers' store; every emulated cluster has its ports to itself

#: Takes the turns of a schedule; yields each round on rank 0, and nothing on others.
Measure = Callable[[Schedule], Generator[Round, None, None]]


class BenchError(RuntimeError):
    """A benchmark could not go on; the message says why."""


def bench(arguments: BenchArguments) -> int:
    """Run and report; returns the exit status: 1 if a strategy failed."""
    schedules = arguments.schedules()
    if arguments.plot:
        require_matplotlib()
    place, measure = find_ranks(arguments.emulate.split(",") if arguments.emulate else [], arguments.interface)
    if place is not None:
        schedules = [replace(schedule, cluster=f"{place.hosts} hosts") for schedule in schedules]
        if place.rank:
            list(measure(schedules[0]))  # rank 0 reports
            return 0
    return _report(arguments, schedules, measure)


def find_ranks(clusters: Sequence[str], interface: str | None) -> tuple[Place | None, Measure]:
    """Find this process's place among the ranks it was started with, None if it emulates; and what measures on them.

    Raises:
        ValueError: a cluster to emulate, or the interface of a real one, does not exist or has one host.
        ClusterError: no cluster can be emulated here.
        BenchError: neither is there a cluster to emulate, nor was this process started on one.
    """
    if clusters:
        for cluster in clusters:
            if parse(cluster).hosts < 2:
                raise ValueError(f"an emulated cluster must have at least 2 hosts; got {cluster!r}")
        if reason := unavailable_reason():
            raise ClusterError(reason)
        return None, emulate
    place = Place.find(interface)
    if place is None:
        raise BenchError(
            "no ranks to measure between: give --emulate 4x1gbit, say, or start this command on every host with "
            "torchrun or srun."
        )
    return place, lambda schedule: take_turns(schedule, place)


def emulate(schedule: Schedule) -> Generator[Round, None, None]:
    """Build the cluster, start a worker in each host, and yield what rank 0 writes."""
    worker = [sys.executable, "-m", "lightning_sparse.bench.compare.worker", json.dumps(asdict(schedule))]
    threads = os.environ.get("OMP_NUM_THREADS", "1")  # the hosts share the machine's cores
    with Cluster(schedule.cluster) as cluster:
        places = [
            Place(host, 0, cluster.hosts, 1, cluster.address(0), _PORT, store_is_there=False, interface="eth0")
            for host in range(cluster.hosts)
        ]
        commands = [[*worker, json.dumps(asdict(place))] for place in places]
        with closing(cluster.lines(commands, env={"OMP_NUM_THREADS": threads})) as lines:
            for line in lines:
                yield Round.from_json(json.loads(line))


def measure_all(
    schedules: Sequence[Schedule],
    measure: Measure,
    facts: Mapping[str, Any],
    path: Path,
    progress: Progress,
    rounds: list[Round],
) -> None:
    """Take all turns of every schedule; add each to ``rounds``, and after ``facts`` to the file at ``path``."""
    task = progress.add_task("starting", total=sum(len(schedule.turns()) for schedule in schedules))
    with path.open("a") as file:
        file.write(json_line("environment", facts))
        for schedule in schedules:
            with closing(measure(schedule)) as turns:
                for measured in turns:
                    rounds.append(measured)
                    file.write(json_line("round", measured))
                    file.flush()
                    progress.update(task, advance=1, description=_last(measured), refresh=True)


def _report(arguments: BenchArguments, schedules: Sequence[Schedule], measure: Measure) -> int:
    """Run the schedules; write each result down as it comes, and in the end, or when interrupted, the tables."""
    console = report.new_console()
    links = {c: words for c in arguments.emulate.split(",") if c and (words := parse(c).differences())}
    for cluster, words in links.items():
        console.print(f"{cluster}: {words}", highlight=False, markup=False, soft_wrap=True)
    facts = report.environment(arguments.command)
    settings = asdict(schedules[0])
    facts |= {name: value for name, value in settings.items() if name != "cluster" and value not in ([], None)}
    facts |= {"links": links} if links else {}
    facts["parameters"] = sum(parameter_sizes(workload_named(arguments.workload)))
    results = _new_file(arguments.output, f"{datetime.now(timezone.utc):%Y-%m-%d-%H%M%S}-{arguments.workload}")
    rounds: list[Round] = []
    try:
        with report.new_progress(console) as progress:
            measure_all(schedules, measure, facts, results, progress, rounds)
    finally:
        if rounds:
            facts["turns"] = f"{len(rounds)} of {sum(len(schedule.turns()) for schedule in schedules)}"
            _write(arguments, schedules[0], rounds, facts, results, console)
    return int(any(measured.error for measured in rounds))


def _write(
    arguments: BenchArguments,
    schedule: Schedule,
    rounds: Sequence[Round],
    facts: dict[str, Any],
    results: Path,
    console: Console,
) -> None:
    """Add the summaries to the file of ``results``, write the page and the plots, and show the tables."""
    losses, workload = schedule.until_loss, schedule.workload
    best = until_loss.at_best_rates(rounds, losses)
    rows = report.summarise(best, contenders(schedule.strategies)[0].label)
    with results.open("a") as file:
        file.writelines(json_line("summary", row) for row in rows)
    images = plots.draw(rows, best, arguments.output, results.stem) if arguments.plot and rows else []
    if rounds[0].run:
        facts |= {"device": rounds[0].run.device, "threads of a rank": rounds[0].run.threads}
    reached = until_loss.rows(rounds, losses) if losses else {}
    section = until_loss.section(reached, losses) if losses else ""
    results.with_suffix(".md").write_text(report.page(rows, rounds, workload, facts, [results.name, *images], section))
    report.show(console, rows, rounds, workload)
    for table in until_loss.tables(reached, losses, box.SIMPLE_HEAD):
        console.print(table)
    console.print(f"results: {results}", highlight=False, soft_wrap=True)


def _new_file(folder: Path, stem: str) -> Path:
    """Make an empty file of results, with a name that no run beside this one has taken."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}.jsonl"
    for i in count(2):
        with suppress(FileExistsError):
            path.touch(exist_ok=False)
            break
        path = folder / f"{stem}-{i}.jsonl"
    return path


def _last(measured: Round) -> str:
    if not measured.timed:
        return f"{measured.cluster} {measured.strategy}: failed"
    return f"{measured.cluster} {measured.strategy}: {1e3 * fmean(step.s for step in measured.timed):.0f} ms a step"
