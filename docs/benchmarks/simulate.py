"""Train a small model with each strategy among simulated ranks, all in this process, and compare bytes and loss.

Run: python docs/benchmarks/simulate.py [--task digits] [--strategies ddp,micro:density=0.05] ...; --help says the rest.
Each result is a line of simulate.jsonl in --output, and what is known there is not trained again.
"""

import argparse
import json
import math
import sysconfig
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, stdev

import torch
from lightning.pytorch import LightningModule
from rich.table import Table
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from lightning_sparse.bench.compare.strategies import PEERS, StrategySpec
from lightning_sparse.bench.compare.until_loss import rate_text
from lightning_sparse.bench.compare.workloads import (
    CONTEXT,
    Classifier,
    Task,
    byte_lm,
    check_digits,
    handwritten_digits,
    learning_rate,
)
from lightning_sparse.bench.output import new_console, new_progress, new_table, say
from lightning_sparse.compressors import Dense
from lightning_sparse.compressors.base import take_steps
from lightning_sparse.engine.groups import lay_out, lay_out_fragments
from lightning_sparse.engine.observers import CompressionError
from lightning_sparse.local_steps.replica import Replica
from lightning_sparse.local_steps.second_moments import MeanMoments, SecondMoments
from lightning_sparse.network.members import AUTO
from lightning_sparse.network.simulated import SimNetwork
from lightning_sparse.options import Options
from lightning_sparse.trainer.strategy import SparseDDPStrategy
from lightning_sparse.wire import wire_format
from lightning_sparse_cli import rates, seeds

# - what is trained

WEIGHT_DECAY = 0.01
DIGITS = 1437  # of 1,797 to learn from
MODULES = 20  # classes
WINDOW = 64  # bytes, in one of which a module is to be recognised
BEFORE = 600  # steps of a model that is tuned afterwards
NGRAM, BUCKETS = 4, 8192  # bytes of text that are hashed, and to what


def digits(seed: int) -> Task:
    """A convolutional network of 38,282 parameters for scikit-learn's handwritten digits."""
    check_digits("the task digits")
    torch.manual_seed(seed)
    images, labels = handwritten_digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    layers = [
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10)),
    ]
    model = Classifier(layers, learning_rate=0.1)
    return Task(model, (images[:DIGITS], labels[:DIGITS]), (images[DIGITS:], labels[DIGITS:]), 4)


def modules(seed: int) -> Task:
    """A bag of embeddings, 262,804 parameters, that says which of Python's 20 largest modules 64 bytes are from."""
    torch.manual_seed(seed)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"), key=lambda file: (-file.stat().st_size, file))
    texts = [torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8) for file in files[:MODULES]]
    windows = [text.unfold(0, WINDOW, WINDOW) for text in texts]
    labels = torch.arange(MODULES).repeat_interleave(torch.tensor([len(each) for each in windows]))
    grams = torch.cat(windows).long().unfold(1, NGRAM, 1)  # [N, WINDOW - NGRAM + 1, NGRAM]
    hashes = ((grams * torch.tensor([31**i for i in range(NGRAM)])).sum(2) * 2654435761 >> 12) % BUCKETS
    held_out = torch.arange(len(labels)) % 10 == 0
    bag = nn.EmbeddingBag(BUCKETS, 32, mode="sum")
    nn.init.normal_(bag.weight, std=0.02)
    model = Classifier([bag, nn.Linear(32, MODULES)], learning_rate=1e-2)
    return Task(model, (hashes[~held_out], labels[~held_out]), (hashes[held_out], labels[held_out]), 16)


def tuned(seed: int) -> Task:
    """The byte language model, trained on source code before, which is tuned to the prose of Python's manual."""
    text = bytearray((Path(sysconfig.get_paths()["stdlib"]) / "pydoc_data" / "topics.py").read_bytes())
    windows = torch.frombuffer(text, dtype=torch.uint8).unfold(0, CONTEXT + 1, CONTEXT)
    held_out = torch.arange(len(windows)) % 10 == 0
    return Task(deepcopy(_trained(seed)), (windows[~held_out],), (windows[held_out],), 8)


@cache
def _trained(seed: int) -> LightningModule:
    """The byte language model after ``BEFORE`` steps of dense training."""
    task = byte_lm(seed)
    replicas = Replicas(task.model, Options.of(Dense(), "bucket"), 4)
    for step in range(BEFORE):
        batches = [task.batch(seed, step, rank) for rank in range(4)]
        replicas.step(batches, learning_rate(4e-3, step, BEFORE))
    return task.model


@dataclass(frozen=True)
class Kind:
    """A kind of task, and how it is trained unless something else is asked for."""

    make: Callable[[int], Task]  # from a seed
    loss: str  # what its loss is
    optimizer: str  # a name in ``OPTIMIZERS``
    steps: int  # of a training
    rates: str  # largest learning rates to try


#: Name -> kind of task.
TASKS = {
    "byte_lm": Kind(byte_lm, "of a byte language model in nats a byte", "adamw", 600, "2e-3,4e-3,8e-3"),
    "digits": Kind(digits, "of a small network for handwritten digits", "sgd", 300, "0.02,0.05,0.1"),
    "tuned": Kind(tuned, "of a byte language model that is tuned to prose", "adamw", 200, "5e-4,1e-3,2e-3"),
    "modules": Kind(modules, "of a bag of embeddings that tells modules apart", "adamw", 300, "5e-3,1e-2,2e-2"),
}

#: Name -> what makes the optimizer of a model.
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": lambda model: AdamW(model.parameters(), weight_decay=WEIGHT_DECAY),
    "sgd": lambda model: SGD(model.parameters(), momentum=0.9),
}


# - ranks

Batches = Sequence[tuple[Tensor, ...]]  # one for each rank


def options_of(strategy: str) -> Options:
    """Read a strategy as ``lightning-sparse bench`` does; a ValueError says why it cannot be simulated."""
    spec = StrategySpec(strategy, strategy)
    built = spec.build()
    if spec.learning_rate is not None:
        raise ValueError(f"a strategy to simulate must be given without lr; give --learning-rates; got {strategy!r}")
    if strategy == "ddp":
        return Options.of(Dense(), "bucket")
    if not isinstance(built, SparseDDPStrategy):
        peers = ", ".join(name for name in PEERS if name not in ("ddp", "diloco", "sparse_loco"))
        raise ValueError(
            f"strategies to simulate must be ddp, diloco, sparse_loco or this project's, not {peers}; got {strategy!r}"
        )
    if built.options.policy:
        raise ValueError(f"a strategy to simulate must not be one that chooses by time; got {strategy!r}")
    if built.options.local_group not in (1, AUTO):
        raise ValueError(f"local_group must be 1, since members are not simulated; got {strategy!r}")
    return built.options


def _backward(model: LightningModule, batch: tuple[Tensor, ...]) -> None:
    """Set the gradients of ``model`` to those of a batch."""
    model.zero_grad()
    model.training_step(batch).backward()


def _step(optimizer: Optimizer, rate: float, moments: MeanMoments | None = None) -> None:
    """Take a step at this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    if moments:
        moments.before_update(optimizer)
    optimizer.step()
    if moments:
        moments.after_update(optimizer)


class Replicas:
    """P ranks that average gradients.  They hold the same weights, so one model and its optimizer stand for all."""

    judged_by: CompressionError | None = None  # of the steps so far, if it is to be judged

    def __init__(self, model: LightningModule, options: Options, ranks: int, optimizer: str = "adamw") -> None:
        self.network = SimNetwork(ranks, wire_format(options.wire_dtype))
        self._model, self._optimizer = model, OPTIMIZERS[optimizer](model)
        parameters = dict(model.named_parameters())
        self._groups = [  # [P][groups], each with what averages it
            lay_out(parameters, options.averaging, options.fusion, options.bucket_bytes) for _ in range(ranks)
        ]

    def step(self, batches: Batches, rate: float) -> None:
        """Learn from a batch on each rank, at a learning rate."""
        for batch, groups in zip(batches, self._groups, strict=True):
            _backward(self._model, batch)
            for group, compressor in groups:
                compressor.accumulate(group, [p.grad for p in group.parameters], self.network.size)
        before = self._unsent()
        for ranks in zip(*self._groups, strict=True):
            group, compressor = ranks[0]
            total = take_steps(compressor, [own for own, _ in ranks], self.network)
            group.hand_back(total, [p.grad for p in group.parameters if p.grad is not None], self.network.size)
        if self.judged_by is not None:
            self.judged_by.step(before, self._unsent())
        _step(self._optimizer, rate)

    def _unsent(self) -> Tensor:
        return torch.stack([torch.cat([group.unsent for group, _ in groups]) for groups in self._groups])


class LocalReplicas:
    """P ranks that average weights, each with a model and an optimizer of its own; ``model`` is their average x̄.

    As :class:`Replicas`.
    """

    judged_by: CompressionError | None = None

    def __init__(self, model: LightningModule, options: Options, ranks: int, optimizer: str = "adamw") -> None:
        assert options.local is not None
        self.network = SimNetwork(ranks, wire_format(options.wire_dtype))
        self._settings = options.local.with_lead(options.averaging)
        self._average, self._warmup_steps = model, options.warmup_steps
        self._models = [deepcopy(model) for _ in range(ranks)]
        self._optimizers = [OPTIMIZERS[optimizer](each) for each in self._models]
        own = [self._replicas_of(each, options) for each in self._models]  # [P][groups]
        trained = [[x.group for x in of_rank] for of_rank in own]
        self._moments = [SecondMoments(x if self._settings.second_moments == "mean" else ()) for x in trained]
        self._mean_moments = [MeanMoments(each) for each in self._moments]
        self._replicas = list(zip(*own, strict=True))  # [groups][P]
        self._steps = 0
        self._due: list[tuple[Replica, ...]] = []  # exchanged, and not applied yet

    def _replicas_of(self, model: LightningModule, options: Options) -> list[Replica]:
        layout = options.averaging, options.fusion, self._settings.parts, options.bucket_bytes
        groups, fragments = lay_out_fragments(dict(model.named_parameters()), *layout)
        return [Replica(*each, i, self._settings) for each, i in zip(groups, fragments, strict=True)]

    def step(self, batches: Batches, rate: float) -> None:
        """Learn from a batch on each rank, at a learning rate."""
        if self._settings.overlap and self._steps:
            self._exchange()
        ranks = zip(self._models, self._optimizers, self._mean_moments, batches, strict=True)
        for model, optimizer, moments, batch in ranks:
            _backward(model, batch)
            _step(optimizer, rate * (self._settings.lead or 1.0), moments)
        self._steps += 1
        if not self._settings.overlap:
            self._exchange()
        before = self._drift()
        self._apply()
        if self.judged_by is not None:
            self.judged_by.step(before, self._drift())

    @torch.no_grad()
    def _drift(self) -> Tensor:
        """What each rank has not sent, [P, n]."""
        every = [torch.stack([x.unsent(x.tensors()).float() for x in ranks]) for ranks in self._replicas]
        return torch.cat(every, 1)

    def _exchange(self) -> None:
        """Take up the groups whose turn it is after the last step, and average them."""
        step, size, comms = self._steps, self.network.size, self.network.comms
        self._due = [ranks for ranks in self._replicas if all([x.is_due(step, self._warmup_steps) for x in ranks])]
        for ranks in self._due:
            for replica in ranks:
                replica.snapshot(size)
            total = take_steps(ranks[0].compressor, [replica.group for replica in ranks], self.network)
            for replica in ranks:
                replica.set_move(total, size)
        if self._moments[0].is_due(step):
            for moments in self._moments:
                moments.snapshot()
            self.network.run([moments.sum_up(comm) for moments, comm in zip(self._moments, comms, strict=True)])

    @torch.no_grad()
    def _apply(self) -> None:
        """Set the weights of what was exchanged: each rank's own, and the average."""
        shared = self._average.state_dict()
        for ranks in self._due:
            for replica in ranks:
                replica.apply_move()
            for name, average in zip(ranks[0].group.names, ranks[0].averages(), strict=True):
                shared[name].copy_(average)
        for name, _ in self._average.named_buffers():  # statistics, as whoever looks at them has them
            if name in shared and shared[name].is_floating_point():
                own = [model.get_buffer(name) for model in self._models]
                shared[name].copy_(torch.stack(own).mean(0))
        for moments in self._moments:
            moments.receive()
            moments.read(self.network.size)
        self._due = []


# - results

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


# - the command

POINTS = 6  # of a run's loss that are written down
UNCOUNTED = 5  # of so many parts of a run's steps, the first is not counted in what is delivered
FILE = "simulate.jsonl"


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
            curve.append((done, validation_loss(task)))
        progress()
    parameters = sum(p.numel() for p in task.model.parameters())
    sent_bytes = fmean(comm.sent_bytes for comm in replicas.network.comms) / run.steps / parameters
    seconds = round(time.perf_counter() - start_s, 1)
    return Result(run, curve[-1][1], curve, sent_bytes, seconds, accuracy(task), error.delivered, error.staleness)


@torch.no_grad()
def validation_loss(task: Task) -> float:
    """The loss of examples that nobody learns from."""
    parts = list(zip(*(kind.split(128) for kind in task.validation), strict=True))
    return sum(float(task.model.training_step(part)) * len(part[0]) for part in parts) / len(task.validation[0])


@torch.no_grad()
def accuracy(task: Task) -> float | None:
    """The part of the validation examples that is classified as it should be; None where nothing is classified."""
    if not isinstance(task.model, Classifier):
        return None
    examples, classes = task.validation
    return float((task.model.layers(examples).argmax(1) == classes).float().mean())


def compare(options: argparse.Namespace) -> tuple[list[list[Result]], list[float]]:
    """Train what has not been trained yet; return a row of results for each strategy, and the learning rates tried.

    Each strategy tries every learning rate with the first seed, and trains with the best of them with the others.
    """
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
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / FILE
    known, found = read(path), []
    with new_progress(new_console()) as progress:
        bar = progress.add_task("", total=len(names) * (len(tried) + len(others)) * steps)

        def result_of(strategy: str, rate: float, seed: int) -> Result:
            run = Run(strategy, options.ranks, steps, rate, seed, options.optimizer or kind.optimizer, options.task)
            progress.update(bar, description=f"{strategy}, learning rate {rate:g}, seed {seed}", refresh=True)
            if run in known:
                progress.advance(bar, run.steps)
                return known[run]
            result = train(run, lambda: progress.update(bar, advance=1, refresh=True))
            with path.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
            return result

        for name in names:
            results = [result_of(name, rate, first) for rate in tried]
            best = min(results, key=lambda each: each.loss if math.isfinite(each.loss) else math.inf)
            found.append([best, *(result_of(name, best.run.learning_rate, seed) for seed in others)])
    return found, tried


def parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    found = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    steps, tried = (
        ", ".join(f"{name}: {getattr(kind, of)}" for name, kind in TASKS.items()) for of in ("steps", "rates")
    )
    found.add_argument("--task", choices=TASKS, default="byte_lm", help="what is trained (%(default)s)")
    usual = "ddp,sparse_dense:wire_dtype=int4,micro:density=0.05:wire_dtype=int4"
    compared = "as for lightning-sparse bench; the first is what the others are compared with (%(default)s)"
    found.add_argument("--strategies", default=usual, metavar="LIST", help=compared)
    found.add_argument("--ranks", type=int, default=4, help="simulated ranks (%(default)s)")
    found.add_argument("--steps", type=int, help=f"optimizer steps of each training ({steps})")
    largest = f"largest learning rates to try, with the first seed; the best is used with all ({tried})"
    found.add_argument("--learning-rates", metavar="LIST", help=largest)
    found.add_argument("--seeds", default="0,1,2", metavar="LIST", help="of weights and batches (%(default)s)")
    found.add_argument("--optimizer", choices=OPTIMIZERS, help="sgd: with momentum 0.9 (the task's own)")
    found.add_argument("--output", type=Path, default=Path("bench-results"), metavar="DIR", help="(%(default)s)")
    return found


def main() -> None:
    """Train and print the table."""
    options = parser().parse_args()
    try:
        rows, tried = compare(options)
    except (ValueError, ModuleNotFoundError) as error:
        raise SystemExit(f"simulate: error: {error}") from None
    console = new_console()
    console.print(table(rows, tried), caption(rows, tried), highlight=False)
    say(console, f"results: {options.output / FILE}")


if __name__ == "__main__":
    main()
