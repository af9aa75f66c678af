"""``lightning-sparse bench``: measures on emulated clusters, or on the one it was started on, and reports."""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from lightning_sparse.bench.cluster import ClusterError, parse, unavailable_reason
from lightning_sparse.bench.compare import report, until_loss
from lightning_sparse.bench.compare.peers import contenders
from lightning_sparse.bench.compare.place import Place, run_emulated
from lightning_sparse.bench.compare.records import Round
from lightning_sparse.bench.compare.schedule import Schedule, schedules
from lightning_sparse.bench.compare.worker import take_turns
from lightning_sparse.bench.compare.workloads import count_parameters, workload_named
from lightning_sparse.bench.output import environment, json_line, new_console, new_file, new_progress, say
from lightning_sparse.cli.options import Bench
from lightning_sparse.monitor.pictures import require_matplotlib

#: Takes the turns of a schedule; yields each round on rank 0, and nothing on others.
Measure = Callable[[Schedule], Generator[Round, None, None]]


def bench(options: Bench) -> int:
    """Run and report; returns the exit status: 1 if a strategy failed."""
    wanted = schedules(options)
    if options.plot:
        require_matplotlib()
    place, measure = find_ranks(options.emulate.split(",") if options.emulate else [], options.interface)
    if place is not None:
        wanted = [replace(each, cluster=f"{place.hosts} hosts") for each in wanted]
        if place.rank:
            list(measure(wanted[0]))  # rank 0 reports
            return 0
    return _report(options, wanted, measure)


def check_clusters(clusters: Sequence[str]) -> None:
    """Raise a ValueError unless all have hosts to send to, and a ClusterError if none can be emulated here."""
    for cluster in clusters:
        if parse(cluster).hosts < 2:
            raise ValueError(f"an emulated cluster must have at least 2 hosts; got {cluster!r}")
    if reason := unavailable_reason():
        raise ClusterError(reason)


def find_ranks(clusters: Sequence[str], interface: str | None, otherwise: str = "") -> tuple[Place | None, Measure]:
    """Find this process's place among the ranks it was started with, None if it emulates; and what measures on them.

    Where there are no ranks, the ValueError ends with ``otherwise``.
    """
    if clusters:
        check_clusters(clusters)
        return None, emulate
    place = Place.find(interface)
    if place is None:
        raise ValueError(
            "no ranks to measure between: give --emulate 4x1gbit, say, or start this command on every host with "
            f"torchrun or srun.{otherwise}"
        )
    return place, lambda schedule: take_turns(schedule, place)


def emulate(schedule: Schedule) -> Generator[Round, None, None]:
    """Build the cluster, start a worker in each host, and yield what rank 0 writes."""
    with closing(run_emulated(schedule.cluster, "lightning_sparse.bench.compare.worker", schedule)) as found:
        for measured in found:
            yield Round.from_json(measured)


def _report(options: Bench, schedules: Sequence[Schedule], measure: Measure) -> int:
    """Run the schedules; write each result down as it comes, and in the end, or when interrupted, the tables."""
    console = new_console()
    links = {c: words for c in options.emulate.split(",") if c and (words := parse(c).differences())}
    for cluster, words in links.items():
        say(console, f"{cluster}: {words}")
    facts, settings = environment(options.command), asdict(schedules[0])
    facts |= {name: value for name, value in settings.items() if name != "cluster" and value not in ([], None)}
    facts |= {"links": links} if links else {}
    facts["parameters"] = count_parameters(workload_named(options.workload))
    results = new_file(options.output, f"{datetime.now(timezone.utc):%Y-%m-%d-%H%M%S}-{options.workload}")
    rounds: list[Round] = []
    turns = sum(len(schedule.turns()) for schedule in schedules)
    try:
        found = closing(_measured(schedules, measure))
        with results.open("a") as file, found as measured, new_progress(console) as progress:
            task = progress.add_task("starting", total=turns)
            file.write(json_line("environment", facts))
            for each in measured:
                rounds.append(each)
                file.write(json_line("round", each))
                file.flush()
                took = f"{1e3 * fmean(s.s for s in each.timed):.0f} ms a step" if each.timed else "failed"
                said = f"{each.cluster} {each.strategy}: {took}"
                progress.update(task, advance=1, description=said, refresh=True)
    finally:
        if rounds:
            facts["turns"] = f"{len(rounds)} of {turns}"
            _write(options, schedules[0], rounds, facts, results, console)
    return int(any(each.error for each in rounds))


def _measured(schedules: Sequence[Schedule], measure: Measure) -> Generator[Round, None, None]:
    """Take all turns of every schedule."""
    for schedule in schedules:
        with closing(measure(schedule)) as rounds:
            yield from rounds


def _write(
    options: Bench, schedule: Schedule, rounds: Sequence[Round], facts: dict[str, Any], results: Path, console: Console
) -> None:
    """Add the summaries to the file of ``results``, write the page and the plots, and show the tables."""
    losses, workload = schedule.until_loss, schedule.workload
    best = until_loss.at_best_rates(rounds, losses)
    rows = report.summarise(best, contenders(schedule.strategies)[0].label)
    with results.open("a") as file:
        file.writelines(json_line("summary", row) for row in rows)
    images = report.draw(best, options.output, results.stem) if options.plot else []
    if rounds[0].run:
        facts |= {"device": rounds[0].run.device, "threads of a rank": rounds[0].run.threads}
    reached = until_loss.rows(rounds, losses) if losses else {}
    section = until_loss.section(reached, losses) if losses else ""
    results.with_suffix(".md").write_text(report.page(rows, rounds, workload, facts, [results.name, *images], section))
    for table in (*report.tables(rows, workload), *until_loss.tables(reached, losses)):
        console.print(table)
    for line in (*report.notes(rounds), f"results: {results}"):
        say(console, line)
