"""``lightning-sparse bench``: measures on emulated clusters, or on the one it was started on, and reports."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from lightning_sparse.bench.compare import report, until_loss
from lightning_sparse.bench.compare.peers import contenders
from lightning_sparse.bench.compare.records import Round
from lightning_sparse.bench.compare.schedule import Schedule, schedules
from lightning_sparse.bench.compare.start import Measure, find_ranks
from lightning_sparse.bench.compare.workloads import count_parameters, workload_named
from lightning_sparse.bench.output import environment, json_line, new_console, new_file, new_progress, say
from lightning_sparse.cli.options import Bench
from lightning_sparse.monitor.pictures import require_matplotlib


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
    turns = sum(len(schedule.turns()) for schedule in schedules)
    try:
        with results.open("a") as file, new_progress(console) as progress:
            task = progress.add_task("starting", total=turns)
            file.write(json_line("environment", facts))
            for schedule in schedules:
                before, order = len(rounds), [(number, row.label) for number, row in schedule.turns()]
                with closing(measure(schedule)) as found:
                    for each in found:
                        rounds.append(each)
                        file.write(json_line("round", each))
                        file.flush()
                        took = f"{1e3 * fmean(s.s for s in each.timed):.0f} ms a step" if each.timed else "failed"
                        said = f"{each.cluster} {each.strategy}: {took}"
                        progress.update(task, advance=1, description=said, refresh=True)
                rounds[before:] = sorted(rounds[before:], key=lambda r: order.index((r.number, r.strategy)))
    finally:
        if rounds:
            facts["turns"] = f"{len(rounds)} of {turns}"
            _write(options, schedules[0], rounds, facts, results, console)
    return int(any(each.error for each in rounds))


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
    for line in (*report.failures(rounds), f"results: {results}"):
        say(console, line)
