"""``lightning-sparse bench --simulate``: seconds to a loss from measured steps and simulated losses; nothing trains."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from lightning_sparse.bench.compare import until_loss
from lightning_sparse.bench.compare.peers import NO_COMMUNICATION
from lightning_sparse.bench.compare.records import Round, by_row, read_lines
from lightning_sparse.bench.compare.until_loss import LossCurve, Reached, Training
from lightning_sparse.bench.output import environment, listed, new_console, say
from lightning_sparse.bench.simulate.results import Result, read
from lightning_sparse.cli.options import Bench, losses

WORKLOAD = "byte_lm"  # which the simulation trains too


class Pace(NamedTuple):
    """What training takes with a strategy on a cluster."""

    first_s: float  # what the first steps take beyond as many others
    step_s: float
    step_bytes: float  # sent by a rank

    @classmethod
    def of(cls, rounds: Sequence[Round]) -> "Pace":
        """Read it from rounds with timed steps, the mean in each: what is sent may differ from step to step."""
        paces = []
        for each in rounds:
            assert each.run is not None
            step_s = fmean(step.s for step in each.timed)
            first_s = sum(step.s - step_s for step in each.run.steps[: each.warmup])
            paces.append((first_s, step_s, fmean(step.counted_bytes for step in each.timed)))
        return cls(*map(median, zip(*paces, strict=True)))

    def course(self, curve: Sequence[tuple[int, float]]) -> LossCurve:
        """Return the training that has this curve: steps, and the loss after them."""
        reached = [Reached(self.first_s + n * self.step_s, n, n * self.step_bytes) for n, _ in curve]
        return LossCurve([loss for _, loss in curve], reached)


def trainings(rounds: Sequence[Round], results: Sequence[Result]) -> list[Training]:
    """Those with a strategy that was measured and simulated, on as many ranks."""
    found = []
    for row, own in by_row(r for r in rounds if r.timed).items():
        pace, silent = Pace.of(own), row[1] == NO_COMMUNICATION
        simulated = ("ddp", 1, WORKLOAD) if silent else (row[1], own[0].ranks, WORKLOAD)
        these = [r for r in results if (r.run.strategy, r.run.ranks, r.run.task) == simulated]
        first = min((r.run.seed for r in these), default=0)
        for run, curve in ((r.run, r.curve) for r in these):
            setting = replace(run, seed=first)
            found.append(Training(row, setting, run.learning_rate, run.seed == first, pace.course(curve)))
    return found


def combine(options: Bench) -> int:
    """Read steps and losses from files, show and write down the tables; returns the exit status."""
    reached = losses(options.until_loss)
    if not reached:
        raise ValueError("--simulate needs --until-loss, with losses to reach; got none")
    files = [Path(part.strip()) for part in options.simulate.split(",")]
    if len(files) != 2 or not all(file.is_file() for file in files):
        raise ValueError(
            "--simulate must be two files, BENCH.jsonl,SIMULATE.jsonl: the results of bench and of simulate; got "
            f"{options.simulate!r}"
        )
    lines = read_lines(files[0])
    workload = next((line["workload"] for line in lines if line["kind"] == "environment"), None)
    if workload != WORKLOAD:
        raise ValueError(
            f"{files[0]} must be of --workload {WORKLOAD}, which the simulation trains; it is of {workload}"
        )
    rounds = [Round.from_json(line) for line in lines if line["kind"] == "round"]
    found = until_loss.rows(trainings(rounds, list(read(files[1]).values())), reached)
    if not found:
        raise ValueError(f"{files[1]} must have strategies that {files[0]} has, on as many ranks; it has none of them")
    known = {strategy for of_cluster in found.values() for strategy in of_cluster}
    facts = environment(options.command)
    if left_out := ", ".join(dict.fromkeys(r.strategy for r in rounds if r.strategy not in known)):
        facts["measured, not simulated"] = left_out
    console = new_console()
    for table in until_loss.tables(found, reached):
        console.print(table)
    title = "# Seconds to a loss, from measured steps and simulated losses"
    section = until_loss.section(found, reached, until_loss.COMBINED)
    options.output.mkdir(parents=True, exist_ok=True)
    page = options.output / f"{files[0].stem}-simulated.md"
    page.write_text(f"{title}\n\n    {options.command}\n\n{section}\n{listed(facts)}")
    say(console, f"results: {page}")
    return 0
