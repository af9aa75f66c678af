"""Tables of the seconds, steps and bytes in which trainings reached losses on held-out data."""

import math
from collections.abc import Callable, Sequence
from io import StringIO
from itertools import accumulate
from statistics import median
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_sparse.bench.compare.report import Round
from lightning_sparse.monitor.tables import human_bytes

EXPLANATION = (
    "Median over the rounds of what it took until the loss on held-out data was first found at or below that at the "
    "head of the column, the first steps and LayerFusion's measuring included, evaluations not; nothing is "
    "interpolated. A training is judged whenever a tenth of its time so far has passed again, and where it does not "
    "send in every step, after one in which it did; `-`: reached in half of the rounds or fewer. Local steps are "
    "judged by the average that all ranks share, `no_communication` by the mean over ranks that each train alone. "
    "`last`: loss at the end."
)


class Reached(NamedTuple):
    """What a training, or the median training, took until some moment; infinite where that did not come."""

    seconds: float
    steps: float
    sent_bytes: float  # of a rank, as counted


class Course(NamedTuple):
    """A training as it was judged."""

    losses: list[float]  # at each evaluation
    reached: list[Reached]  # by then

    @classmethod
    def of(cls, measured: Round) -> "Course":
        """Read it from what was measured; empty if it failed."""
        steps = measured.run.steps if measured.run else []
        sums = zip(accumulate(s.s for s in steps), accumulate(s.counted_bytes for s in steps), strict=True)
        found = [
            (step.held_out, Reached(seconds, number, sent_bytes))
            for number, (step, (seconds, sent_bytes)) in enumerate(zip(steps, sums, strict=True), start=1)
            if step.held_out is not None
        ]
        return cls([loss for loss, _ in found], [reached for _, reached in found])

    def until(self, loss: float) -> Reached:
        """What it took to the first evaluation that found ``loss``, or less."""
        never = Reached(math.inf, math.inf, math.inf)
        return next((r for found, r in zip(self.losses, self.reached, strict=True) if found <= loss), never)


def middle(reached: Sequence[Reached]) -> Reached:
    """The median of each number."""
    return Reached(*(median(numbers) for numbers in zip(*reached, strict=True)))


def tables(rounds: Sequence[Round], losses: Sequence[float], lines: box.Box) -> list[Table]:
    """Make three tables for each cluster: seconds, steps and bytes to each of ``losses``."""
    found = []
    for cluster in dict.fromkeys(r.cluster for r in rounds):
        here = [r for r in rounds if r.cluster == cluster]
        courses = {
            strategy: [course for r in here if r.strategy == strategy and (course := Course.of(r)).losses]
            for strategy in dict.fromkeys(r.strategy for r in here)
        }
        trained = {strategy: own for strategy, own in courses.items() if own}
        found += [
            _table(f"Seconds to a loss on {cluster}", trained, losses, lines, lambda r: f"{r.seconds:.1f}"),
            _table(f"Steps to a loss on {cluster}", trained, losses, lines, lambda r: f"{r.steps:.0f}"),
            _table(f"Bytes to a loss on {cluster}", trained, losses, lines, lambda r: human_bytes(r.sent_bytes)),
        ]
    return found


def _table(
    title: str,
    courses: dict[str, list[Course]],
    losses: Sequence[float],
    lines: box.Box,
    text: Callable[[Reached], str],
) -> Table:
    table = Table(title=title, box=lines, padding=(0, 1, 0, 0))
    table.add_column("strategy", overflow="fold")
    for heading in (*(f"{loss:g}" for loss in losses), "in all", "last"):
        table.add_column(heading, justify="right", no_wrap=True)
    for strategy, own in courses.items():
        to_each = [middle([course.until(loss) for course in own]) for loss in losses]
        cells = [text(reached) if reached.steps < math.inf else "-" for reached in to_each]
        last = median(course.losses[-1] for course in own)
        in_all = middle([course.reached[-1] for course in own])
        name = f"`{strategy}`" if lines is box.MARKDOWN else strategy
        table.add_row(name, *cells, text(in_all), f"{last:.3f}")
    return table


def section(rounds: Sequence[Round], losses: Sequence[float]) -> str:
    """Write the tables in Markdown, with what they mean; empty without losses."""
    parts = []
    for table in tables(rounds, losses, box.MARKDOWN) if losses else []:
        parts.append(f"## {table.title}\n")
        table.title = None
        with (wide := Console(width=10_000, file=StringIO())).capture() as shown:
            wide.print(table)
        parts.append(shown.get().strip() + "\n")
    return "\n".join([*parts, EXPLANATION, ""]) if parts else ""
