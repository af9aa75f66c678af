"""``lightning-sparse simulate``: the loss that strategies end with, all ranks in this process."""

import json
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TypeVar

import torch
from rich import box

from lightning_sparse.bench.compare import report
from lightning_sparse.bench.simulate.local_replicas import LocalReplicas
from lightning_sparse.bench.simulate.optimizers import learning_rate
from lightning_sparse.bench.simulate.replicas import Replicas, options_of
from lightning_sparse.bench.simulate.results import Result, Run, caption, page, read, table
from lightning_sparse.bench.simulate.task import TASKS
from lightning_sparse.engine.compression_error import CompressionError

POINTS = 6  # of a run's loss that are written down
UNCOUNTED = 5  # of so many parts of a run's steps, the first is not counted in what is delivered
FILE = "simulate.jsonl"

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class SimulateArguments:
    """Arguments of ``lightning-sparse simulate``, as its ``--help`` explains them, and the command that was typed.

    None stands for what the task is trained with.
    """

    task: str
    strategies: str
    ranks: int
    steps: int | None
    learning_rates: str | None
    seeds: str
    optimizer: str | None
    output: Path
    command: str

    def names(self) -> list[str]:
        """Return the strategies, each once; raises a ValueError for one that cannot be simulated."""
        names = list(dict.fromkeys(each.strip() for each in self.strategies.split(",")))
        for name in names:
            options_of(name)
        return names

    def rates(self) -> list[float]:
        """Return the learning rates to try; raises a ValueError for what is none."""
        rates = TASKS[self.task].rates if self.learning_rates is None else self.learning_rates
        return _numbers("--learning-rates", rates, float, lambda rate: 0 < rate < math.inf, "above 0")

    def all_seeds(self) -> list[int]:
        """Return the seeds; raises a ValueError for what is none."""
        return _numbers("--seeds", self.seeds, int, lambda seed: seed >= 0, "of at least 0")


def _numbers(
    option: str, text: str, kind: Callable[[str], Number], fits: Callable[[Number], bool], range_: str
) -> list[Number]:
    with suppress(ValueError):
        numbers = list(dict.fromkeys(kind(part) for part in text.split(",")))
        if all(map(fits, numbers)):
            return numbers
    raise ValueError(f"{option} must be numbers {range_}, separated by commas; got {text!r}")


def simulate(arguments: SimulateArguments) -> int:
    """Train what has not been trained yet, write each result down as it comes, and in the end the table."""
    kind = TASKS[arguments.task]
    steps = kind.steps if arguments.steps is None else arguments.steps
    for name, value in (("ranks", arguments.ranks), ("steps", steps)):
        if value < 1:
            raise ValueError(f"--{name} must be at least 1; got {value}")
    names, rates, seeds = arguments.names(), arguments.rates(), arguments.all_seeds()
    torch.set_num_threads(1)  # the sums of several threads depend on how many there are
    console = report.new_console()
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / FILE
    known = read(path)
    rows = []
    with report.new_progress(console) as progress:
        task = progress.add_task("", total=len(names) * (len(rates) + len(seeds) - 1) * steps)

        def result_of(strategy: str, rate: float, seed: int) -> Result:
            run = Run(
                strategy, arguments.ranks, steps, rate, seed, arguments.optimizer or kind.optimizer, arguments.task
            )
            progress.update(task, description=f"{strategy}, learning rate {rate:g}, seed {seed}", refresh=True)
            if run in known:
                progress.advance(task, run.steps)
                return known[run]
            result = train(run, lambda: progress.update(task, advance=1, refresh=True))
            with path.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
            return result

        for name in names:
            best = min((result_of(name, rate, seeds[0]) for rate in rates), key=_rank)
            rows.append([best, *(result_of(name, best.run.learning_rate, seed) for seed in seeds[1:])])
    path.with_suffix(".md").write_text(page(rows, rates, report.environment(arguments.command)))
    console.print(table(rows, rates, box.SIMPLE_HEAD), caption(rows, rates), highlight=False)
    console.print(f"results: {path} and .md", highlight=False, soft_wrap=True)
    return 0


def _rank(result: Result) -> float:
    """By what the best of several trainings is found: its loss, unless it diverged."""
    return result.loss if math.isfinite(result.loss) else math.inf


def train(run: Run, progress: Callable[[], None] = lambda: None) -> Result:
    """Train on simulated ranks; ``progress`` is called after each step."""
    start_s = time.perf_counter()
    task, options = TASKS[run.task].make(run.seed), options_of(run.strategy)
    kind = LocalReplicas if options.local else Replicas
    replicas = kind(task.model, options, run.ranks, run.optimizer)
    replicas.faithfulness = faithful = CompressionError(run.steps // UNCOUNTED)
    curve = []
    for step in range(run.steps):
        batches = [task.batch(run.seed, step, rank) for rank in range(run.ranks)]
        replicas.step(batches, learning_rate(run.learning_rate, step, run.steps))
        done = step + 1
        if done * POINTS // run.steps > step * POINTS // run.steps:
            curve.append((done, task.validation_loss()))
        progress()
    parameters = sum(p.numel() for p in task.model.parameters())
    seconds = round(time.perf_counter() - start_s, 1)
    sent_bytes = fmean(comm.sent_bytes for comm in replicas.network.comms) / run.steps / parameters
    return Result(
        run, curve[-1][1], curve, sent_bytes, seconds, task.accuracy(), faithful.delivered, faithful.staleness
    )
