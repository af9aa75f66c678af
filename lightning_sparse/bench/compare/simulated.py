"""Seconds to a loss from steps that were measured and losses that were simulated; nothing trains here."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from rich import box

from lightning_sparse.bench.compare import report, until_loss
from lightning_sparse.bench.compare.arguments import BenchArguments, numbers
from lightning_sparse.bench.compare.peers import NO_COMMUNICATION
from lightning_sparse.bench.compare.report import Round
from lightning_sparse.bench.compare.until_loss import Course, Reached, Row, by_row, rank, rate_text
from lightning_sparse.bench.simulate.results import Result, read

WORKLOAD = "byte_lm"  # which the simulation trains too
EXPLANATION = (
    "Nothing was trained for this. Measured, on this cluster: the seconds and bytes of a step, the mean over the "
    "timed steps, and what the untimed first steps took beyond as many of these; of both the median over the rounds. "
    "Simulated: the loss after a number of steps, joined by straight lines between the points of its curve, before the "
    "first of which nothing is known; of `no_communication`, that of one rank. Each cell is the median over the "
    "simulated seeds."
)


class Pace(NamedTuple):
    """What training takes with a strategy on a cluster."""

    first_s: float  # what the first steps take beyond as many others
    step_s: float
    step_bytes: float  # sent by a rank

    @classmethod
    def of(cls, rounds: Sequence[Round]) -> "Pace":
        """Read it from rounds with timed steps, the mean in each: what is sent may differ from step to step."""
        paces = []
        for measured in rounds:
            assert measured.run is not None
            step_s = fmean(step.s for step in measured.timed)
            untimed_s = sum(step.s for step in measured.run.steps[: measured.warmup])
            step_bytes = fmean(step.counted_bytes for step in measured.timed)
            paces.append((untimed_s - measured.warmup * step_s, step_s, step_bytes))
        return cls(*map(median, zip(*paces, strict=True)))

    def after(self, steps: float) -> Reached:
        """What so many steps take."""
        return Reached(self.first_s + steps * self.step_s, steps, steps * self.step_bytes)


def steps_to(curve: Sequence[tuple[int, float]], loss: float) -> float:
    """Return the steps to ``loss`` on the lines between a curve's points, infinite if it stays above.

    Nothing is known before the first point.
    """
    if curve[0][1] <= loss:
        return curve[0][0]
    for (steps, above), (more, below) in pairwise(curve):
        if below <= loss:
            return steps + (more - steps) * (above - loss) / (above - below)
    return math.inf


def course(curve: Sequence[tuple[int, float]], pace: Pace, losses: Sequence[float]) -> Course:
    """Return the training that has this curve, judged where it gets to each of ``losses`` and at its end."""
    found = [(loss, steps) for loss in sorted(losses, reverse=True) if (steps := steps_to(curve, loss)) < math.inf]
    points = [*found, (curve[-1][1], curve[-1][0])]
    return Course([loss for loss, _ in points], [pace.after(steps) for _, steps in points])


def rows(rounds: Sequence[Round], results: Sequence[Result], losses: Sequence[float]) -> dict[str, dict[str, Row]]:
    """Make a row for each strategy that was measured and simulated, by cluster."""
    found: dict[str, dict[str, Row]] = {}
    for (cluster, strategy), own in by_row([r for r in rounds if r.timed]).items():
        simulated = ("ddp", 1) if strategy == NO_COMMUNICATION else (strategy, own[0].ranks)
        pace = Pace.of(own)
        courses = {
            result.run: course(result.curve, pace, losses)
            for result in results
            if (result.run.strategy, result.run.ranks) == simulated and result.run.task == WORKLOAD
        }
        if courses:
            seed = min(run.seed for run in courses)
            tries = [run for run in courses if run.seed == seed]
            best = min(tries, key=lambda run: rank(courses[run], losses))
            rate = rate_text(best.learning_rate, [run.learning_rate for run in tries])
            of_best = [own for run, own in courses.items() if replace(run, seed=seed) == best]
            found.setdefault(cluster, {})[strategy] = Row.of(rate, of_best, losses)
    return found


def combine(arguments: BenchArguments) -> int:
    """Read steps and losses from files, show and write down the tables; returns the exit status."""
    losses = sorted(numbers("--until-loss", arguments.until_loss, float, lambda loss: True, ""), reverse=True)
    if not losses:
        raise ValueError("--simulate needs --until-loss, with losses to reach; got none")
    files = [Path(part.strip()) for part in arguments.simulate.split(",")]
    if len(files) != 2 or not all(file.is_file() for file in files):
        raise ValueError(
            "--simulate must be two files, BENCH.jsonl,SIMULATE.jsonl: the results of bench and of simulate; got "
            f"{arguments.simulate!r}"
        )
    rounds = _read_rounds(files[0])
    found = rows(rounds, list(read(files[1]).values()), losses)
    if not found:
        raise ValueError(f"{files[1]} must have strategies that {files[0]} has, on as many ranks; it has none of them")
    known = {strategy for of_cluster in found.values() for strategy in of_cluster}
    facts = report.environment(arguments.command)
    if left_out := ", ".join(dict.fromkeys(r.strategy for r in rounds if r.strategy not in known)):
        facts["measured, not simulated"] = left_out
    console = report.new_console()
    for table in until_loss.tables(found, losses, box.SIMPLE_HEAD):
        console.print(table)
    lines = ["# Seconds to a loss, from measured steps and simulated losses", "", f"    {arguments.command}", ""]
    lines += [until_loss.section(found, losses, EXPLANATION)]
    lines += [f"- {name}: {value}" for name, value in facts.items() if name != "command"]
    arguments.output.mkdir(parents=True, exist_ok=True)
    page = arguments.output / f"{files[0].stem}-simulated.md"
    page.write_text("\n".join(lines) + "\n")
    console.print(f"results: {page}", highlight=False, soft_wrap=True)
    return 0


def _read_rounds(path: Path) -> list[Round]:
    """Read what a bench measured of the simulation's own model.

    Raises:
        ValueError: it measured something else.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    workload = next((line["workload"] for line in lines if line["kind"] == "environment"), None)
    if workload != WORKLOAD:
        raise ValueError(f"{path} must be of --workload {WORKLOAD}, which the simulation trains; it is of {workload}")
    found = [{key: value for key, value in line.items() if key != "kind"} for line in lines if line["kind"] == "round"]
    return [Round.from_json(values) for values in found]
