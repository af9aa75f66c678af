"""Results of simulated trainings: a line of JSON each, and a table of all."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from rich.table import Table

from lightning_sparse.bench.compare.until_loss import rate_text
from lightning_sparse.bench.output import new_table
from lightning_sparse.bench.simulate.task import TASKS

FURTHER = {"accuracy": 3, "delivered": 3, "age": 2}  # columns, if all results have them, with so many digits


@dataclass(frozen=True)
class Run:
    """One training to be simulated."""

    strategy: str
    ranks: int
    steps: int
    learning_rate: float
    seed: int
    optimizer: str = "adamw"
    task: str = "byte_lm"


@dataclass(frozen=True)
class Result:
    """What a training ended with.  Losses are of validation."""

    run: Run
    loss: float
    curve: list[tuple[int, float]]  # steps and the loss after them
    sent_bytes: float  # of a rank in a step, for each parameter
    seconds: float
    accuracy: float | None = None  # of validation, where something is classified
    delivered: float | None = None  # of what is unsent, by a step: see CompressionError
    age: float | None = None  # steps that a gradient waits

    @classmethod
    def from_json(cls, line: str) -> "Result":
        """The inverse of ``json.dumps(asdict(result))``."""
        values = json.loads(line)
        curve = [(step, loss) for step, loss in values["curve"]]
        return cls(**{**values, "run": Run(**values["run"]), "curve": curve})


def read(path: Path) -> dict[Run, Result]:
    """Read the results of trainings that have ended, if there are any; a ValueError names a damaged line."""
    found = {}
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], start=1):
        try:
            result = Result.from_json(line)
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{path} must have a result in each line; line {number} has none. Remove it.") from None
        found[result.run] = result
    return found


def table(rows: Sequence[Sequence[Result]], rates: Sequence[float]) -> Table:
    """A row for each strategy, of its results with each seed; the first row is the reference."""
    further = [name for name in FURTHER if all(getattr(each, name) is not None for row in rows for each in row)]
    headings = "bytes", "learning rate", "loss", f"above {rows[0][0].run.strategy}"
    found = new_table(None, "strategy", *headings, *further)
    for row in rows:
        above = [100 * (own.loss / reference.loss - 1) for own, reference in zip(row, rows[0], strict=True)]
        found.add_row(
            row[0].run.strategy,
            f"{row[0].sent_bytes:.3f}",
            rate_text(row[0].run.learning_rate, rates),
            _spread([result.loss for result in row], 3),
            "-" if row is rows[0] else f"{_spread(above, 1)} %",
            *(f"{fmean(getattr(result, name) for result in row):.{FURTHER[name]}f}" for name in further),
        )
    return found


def _spread(values: Sequence[float], digits: int) -> str:
    """The mean, and the standard deviation where it is known."""
    deviation = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{deviation}"


def caption(rows: Sequence[Sequence[Result]], rates: Sequence[float]) -> str:
    """Say what the table shows."""
    run, seeds = rows[0][0].run, ", ".join(str(result.run.seed) for result in rows[0])
    return (
        f"Validation loss {TASKS[run.task].loss}, after {run.steps:,} steps, {run.ranks} simulated "
        f"rank{'s' if run.ranks > 1 else ''} with {run.optimizer}; mean ± standard deviation over seeds {seeds}. "
        "Bytes: sent by a rank in a step, for each parameter. Learning rate: the best of "
        f"{', '.join(f'{rate:g}' for rate in rates)} with the first seed, * where it is at an edge of these; the other "
        "seeds were trained with that one alone. Above: by how much a strategy's loss is above the first one's with "
        "the same seed. Delivered: the part of what is unsent on all ranks (gradients included, squared norm) that a "
        "step delivers. Age: steps that a gradient waits."
    )
