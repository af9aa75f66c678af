"""Runs a benchmark, on emulated clusters or on the cluster it was started on, and reports."""

import json
import math
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

from rich import box
from rich.progress import Progress

from lightning_sparse.bench.cluster import Cluster, ClusterError, parse, unavailable_reason
from lightning_sparse.bench.compare import plots, report, until_loss
from lightning_sparse.bench.compare.peers import all_names, contenders
from lightning_sparse.bench.compare.report import Round, json_line
from lightning_sparse.bench.compare.worker import Place, Schedule, take_turns
from lightning_sparse.bench.compare.workloads import WORKLOADS, Workload, parameter_sizes, workload_named
from lightning_sparse.monitor.pictures import require_matplotlib

_PORT = 29500  # of the workers' store; every emulated cluster has its ports to itself

#: Takes the turns of a schedule; yields each round on rank 0, and nothing on others.
Measure = Callable[[Schedule], Generator[Round, None, None]]


class BenchError(RuntimeError):
    """A benchmark could not go on; the message says why."""


@dataclass(frozen=True)
class BenchArguments:
    """Arguments of ``lightning-sparse bench``, as its ``--help`` explains them, and the command that was typed."""

    emulate: str
    workload: str
    strategies: str
    steps: int
    warmup: int
    rounds: int
    output: Path
    plot: bool
    until_loss: str
    seconds: float | None
    interface: str | None
    command: str

    def schedules(self) -> list[Schedule]:
        """Return what to run on each cluster; raises a ValueError for an unknown name or a number that is too small."""
        for name, least in (("steps", 1), ("warmup", 0), ("rounds", 1)):
            if (value := getattr(self, name)) < least:
                raise ValueError(f"--{name} must be at least {least}; got {value}")
        workload = workload_named(self.workload)
        losses = self._losses(workload)
        strategies = self.strategies or all_names()
        contenders(strategies)
        clusters = [cluster.strip() for cluster in self.emulate.split(",")]
        accelerator = "cpu" if self.emulate else "auto"
        return [
            Schedule(
                cluster,
                self.workload,
                strategies,
                self.steps,
                self.warmup,
                self.rounds,
                accelerator,
                until_loss=losses,
                seconds=self.seconds,
            )
            for cluster in clusters
        ]

    def _losses(self, workload: Workload) -> list[float]:
        """Return the losses to reach, the largest first."""
        if not self.until_loss:
            if self.seconds is not None:
                raise ValueError(f"--seconds needs --until-loss, with losses to reach; got --seconds {self.seconds:g}")
            return []
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise ValueError(f"--seconds must be above 0; got {self.seconds:g}")
        if workload.held_out is None:
            able = ", ".join(name for name, each in WORKLOADS.items() if each.held_out)
            raise ValueError(f"--until-loss needs a workload with held-out data, one of {able}; got {self.workload!r}")
        with suppress(ValueError):
            return sorted({float(part) for part in self.until_loss.split(",")}, reverse=True)
        raise ValueError(f"--until-loss must be numbers, separated by commas; got {self.until_loss!r}")


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
    schedules: Sequence[Schedule], measure: Measure, facts: Mapping[str, Any], path: Path, progress: Progress
) -> list[Round]:
    """Take all turns of every schedule; write ``facts`` and each round to the file at ``path`` as it comes."""
    rounds = []
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
    return rounds


def _report(arguments: BenchArguments, schedules: Sequence[Schedule], measure: Measure) -> int:
    """Run the schedules; write each result down as it comes, and in the end the tables."""
    console = report.new_console()
    links = {c: words for c in arguments.emulate.split(",") if c and (words := parse(c).differences())}
    for cluster, words in links.items():
        console.print(f"{cluster}: {words}", highlight=False, markup=False, soft_wrap=True)
    workload, strategies = arguments.workload, schedules[0].strategies
    settings = {name: value for name, value in asdict(schedules[0]).items() if name != "cluster"}
    if not schedules[0].until_loss:
        del settings["until_loss"], settings["seconds"]
    facts = report.environment(arguments.command) | settings
    facts |= {"links": links} if links else {}
    facts["parameters"] = sum(parameter_sizes(workload_named(workload)))
    results = _new_file(arguments.output, f"{datetime.now(timezone.utc):%Y-%m-%d-%H%M%S}-{workload}")
    with report.new_progress(console) as progress:
        rounds = measure_all(schedules, measure, facts, results, progress)
        rows = report.summarise(rounds, contenders(strategies)[0].label)
    with results.open("a") as file:
        file.writelines(json_line("summary", row) for row in rows)
    images = plots.draw(rows, rounds, arguments.output, results.stem) if arguments.plot and rows else []
    facts |= {"device": rounds[0].run.device, "threads of a rank": rounds[0].run.threads} if rounds[0].run else {}
    losses = schedules[0].until_loss
    reached = until_loss.section(rounds, losses)
    results.with_suffix(".md").write_text(report.page(rows, rounds, workload, facts, [results.name, *images], reached))
    report.show(console, rows, rounds, workload)
    for table in until_loss.tables(rounds, losses, box.SIMPLE_HEAD) if losses else []:
        console.print(table)
    console.print(f"results: {results}", highlight=False, soft_wrap=True)
    return int(any(measured.error for measured in rounds))


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
