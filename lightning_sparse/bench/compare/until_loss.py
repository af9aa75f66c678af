"""Tables of the seconds in which trainings reached losses on held-out data."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.table import Table

from lightning_sparse.bench.compare.records import Round, by_row
from lightning_sparse.bench.compare.strategies import NO_COMMUNICATION
from lightning_sparse.bench.output import markdown, new_table
from lightning_sparse.monitor.tables import human_bytes

EXPLANATION = Path(__file__).with_name("until_loss.md")  # of the tables and their marks


class Reached(NamedTuple):
    """What a training, or the median training, took until some moment; infinite where that did not come."""

    seconds: float
    steps: float
    sent_bytes: float  # of a rank, as counted


NEVER = Reached(math.inf, math.inf, math.inf)


class LossCurve(NamedTuple):
    """A training as it was judged."""

    losses: list[float]  # at each evaluation
    reached: list[Reached]  # by then

    @classmethod
    def of(cls, measured: Round) -> "LossCurve":
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
        """What it took to ``loss``, taken to fall evenly from one evaluation to the next."""
        above, before = math.inf, NEVER
        for found, by_then in zip(self.losses, self.reached, strict=True):
            if found <= loss:
                if not math.isfinite(above):
                    return by_then
                part = (above - loss) / (above - found)
                return Reached(*(b + part * (t - b) for b, t in zip(before, by_then, strict=True)))
            above, before = found, by_then
        return NEVER

    def rank(self, losses: Sequence[float]) -> list[float]:
        """By what the best training is found: the seconds to the lowest loss, to the next, ..., and its last loss."""
        last = self.losses[-1] if self.losses else math.inf
        return [*(self.until(loss).seconds for loss in sorted(losses)), last if math.isfinite(last) else math.inf]


@dataclass(frozen=True)
class Row:
    """What trainings with a strategy on a cluster took, the median."""

    rate: str  # learning rate
    to_each: list[Reached]  # to each of the losses
    in_all: Reached
    last: float  # loss at the end

    @classmethod
    def of(cls, rate: str, curves: Sequence[LossCurve], losses: Sequence[float]) -> "Row":
        """The medians of trainings with ``rate``, whose curves are known."""
        to_each = [middle([curve.until(loss) for curve in curves]) for loss in losses]
        return cls(rate, to_each, middle([c.reached[-1] for c in curves]), median(c.losses[-1] for c in curves))


def middle(reached: Sequence[Reached]) -> Reached:
    """The median of each number."""
    return Reached(*(median(numbers) for numbers in zip(*reached, strict=True)))


def best_rate(rounds: Iterable[Round], losses: Sequence[float]) -> float | None:
    """The learning rate of the best of a strategy's trainings on a cluster in the first round."""
    return min((r for r in rounds if r.number == 0), key=lambda r: LossCurve.of(r).rank(losses)).learning_rate


def rate_text(best: float | None, tried: Collection[float | None]) -> str:
    """Write a learning rate, with a mark if it is at the edge of those tried."""
    known = [rate for rate in tried if rate is not None]
    return "-" if best is None else f"{best:g}{'*' if len(set(known)) > 1 and best in (min(known), max(known)) else ''}"


def rows(rounds: Iterable[Round], losses: Sequence[float]) -> dict[str, dict[str, Row]]:
    """Make a row for each strategy that trained, of its best learning rate, by cluster."""
    found: dict[str, dict[str, Row]] = {}
    for (cluster, strategy), own in by_row(rounds).items():
        rate = best_rate(own, losses)
        if curves := [curve for r in own if r.learning_rate == rate and (curve := LossCurve.of(r)).losses]:
            tried = rate_text(rate, [r.learning_rate for r in own if r.number == 0])
            found.setdefault(cluster, {})[strategy] = Row.of(tried, curves, losses)
    return found


def at_best_rates(rounds: Sequence[Round], losses: Sequence[float]) -> list[Round]:
    """Return the rounds of each strategy with its best learning rate on each cluster."""
    rates = {row: best_rate(own, losses) for row, own in by_row(rounds).items()}
    return [r for r in rounds if r.learning_rate == rates[r.cluster, r.strategy]]


def tables(rows: Mapping[str, Mapping[str, Row]], losses: Sequence[float]) -> list[Table]:
    """Make a table for each cluster: the seconds to each of ``losses``, and what was taken in all."""
    return [_table(f"Seconds to a loss on {cluster}", of_cluster, losses) for cluster, of_cluster in rows.items()]


def _table(title: str, rows: Mapping[str, Row], losses: Sequence[float]) -> Table:
    headings = "rate", *(f"{loss:g}" for loss in losses), "last", "in all", "steps", "sent"
    table = new_table(title, "strategy", *headings)
    alone = rows[NO_COMMUNICATION].to_each if NO_COMMUNICATION in rows else [NEVER] * len(losses)
    for strategy, row in rows.items():
        cells = []
        for reached, floor in zip(row.to_each, alone, strict=True):
            cell = f"{reached.seconds:.1f}" if reached.steps < math.inf else "-"
            beaten = strategy != NO_COMMUNICATION and floor.seconds < math.inf and reached.seconds >= floor.seconds
            cells.append(f"({cell})" if beaten else cell)
        in_all = f"{row.in_all.seconds:.1f}", f"{row.in_all.steps:.0f}", human_bytes(row.in_all.sent_bytes)
        table.add_row(strategy, row.rate, *cells, f"{row.last:.3f}", *in_all)
    return table


def section(rows: Mapping[str, Mapping[str, Row]], losses: Sequence[float]) -> str:
    """Write the tables in Markdown, with what they mean."""
    parts = [f"## {table.title}\n\n{markdown(table)}" for table in tables(rows, losses)]
    return "\n".join([*parts, EXPLANATION.read_text()])
