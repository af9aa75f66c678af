"""``lightning-sparse simulate``: the loss that strategies end with, all ranks in this process."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from statistics import fmean

import torch

from lightning_sparse.bench.compare.byte_lm import learning_rate
from lightning_sparse.bench.output import environment, listed, markdown, new_console, new_progress, say
from lightning_sparse.bench.simulate.replicas import LocalReplicas, Replicas, options_of
from lightning_sparse.bench.simulate.results import Result, Run, caption, read, table
from lightning_sparse.bench.simulate.task import TASKS
from lightning_sparse.cli.options import Simulate, rates, seeds
from lightning_sparse.engine.observers import CompressionError

POINTS = 6  # of a run's loss that are written down
UNCOUNTED = 5  # of so many parts of a run's steps, the first is not counted in what is delivered
FILE = "simulate.jsonl"


def simulate(options: Simulate) -> int:
    """Train what has not been trained yet, write each result down as it comes, and in the end the table."""
    kind = TASKS[options.task]
    steps = kind.steps if options.steps is None else options.steps
    for name, value in (("ranks", options.ranks), ("steps", steps)):
        if value < 1:
            raise ValueError(f"--{name} must be at least 1; got {value}")
    names = list(dict.fromkeys(each.strip() for each in options.strategies.split(",")))
    for name in names:
        options_of(name)  # complains if it cannot be simulated
    tried = rates(kind.rates if options.learning_rates is None else options.learning_rates, needed=True)
    first, *others = seeds(options.seeds, needed=True)
    torch.set_num_threads(1)  # the sums of several threads depend on how many there are
    console = new_console()
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / FILE
    known = read(path)
    rows = []
    with new_progress(console) as progress:
        task = progress.add_task("", total=len(names) * (len(tried) + len(others)) * steps)

        def result_of(strategy: str, rate: float, seed: int) -> Result:
            optimizer = options.optimizer or kind.optimizer
            run = Run(strategy, options.ranks, steps, rate, seed, optimizer, options.task)
            progress.update(task, description=f"{strategy}, learning rate {rate:g}, seed {seed}", refresh=True)
            if run in known:
                progress.advance(task, run.steps)
                return known[run]
            result = train(run, lambda: progress.update(task, advance=1, refresh=True))
            with path.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
            return result

        for name in names:
            results = [result_of(name, rate, first) for rate in tried]
            best = min(results, key=lambda each: each.loss if math.isfinite(each.loss) else math.inf)
            rows.append([best, *(result_of(name, best.run.learning_rate, seed) for seed in others)])
    facts, shown, says = environment(options.command), table(rows, tried), caption(rows, tried)
    path.with_suffix(".md").write_text(f"    {options.command}\n\n{markdown(shown)}\n{says}\n\n{listed(facts)}")
    console.print(shown, says, highlight=False)
    say(console, f"results: {path} and .md")
    return 0


def train(run: Run, progress: Callable[[], None] = lambda: None) -> Result:
    """Train on simulated ranks; ``progress`` is called after each step."""
    start_s = time.perf_counter()
    task, options = TASKS[run.task].make(run.seed), options_of(run.strategy)
    kind = LocalReplicas if options.local else Replicas
    replicas = kind(task.model, options, run.ranks, run.optimizer)
    replicas.judged_by = error = CompressionError(run.steps // UNCOUNTED)
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
    judged = task.accuracy(), error.delivered, error.staleness
    return Result(run, curve[-1][1], curve, sent_bytes, seconds, *judged)
