"""The turns of a benchmark: which strategy trains when, for how long, and at which learning rate."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

import torch

from lightning_sparse.bench.compare.records import Round
from lightning_sparse.bench.compare.strategies import NO_COMMUNICATION, StrategySpec, all_names, parse_strategies
from lightning_sparse.bench.compare.until_loss import best_rate
from lightning_sparse.bench.compare.workloads import WORKLOADS, workload_named
from lightning_sparse.checks import check_one_of
from lightning_sparse_cli import Bench, losses, rates, seeds

ROUNDS = 5  # where neither they nor seeds are given
COMPILING = -1  # Number of the round before the first: it is not timed, and what it trains has its kernels compiled.


@dataclass(frozen=True)
class Schedule:
    """The turns to run; the same on every rank."""

    cluster: str  # what the rows are called
    workload: str  # as `workload_named` reads it
    strategies: str  # separated by commas, as `parse_strategies` reads them
    steps: int  # timed steps of each strategy in each round
    warmup: int  # steps before them that are not timed
    rounds: int  # turns of each strategy
    accelerator: str  # of Lightning
    until_loss: Sequence[float] = ()  # held-out losses to reach; a training ends with the lowest
    seconds: float | None = None  # after which a training ends, in place of ``steps``
    learning_rates: Sequence[float] = ()  # to try in the first round; the others use the best of each strategy
    seeds: Sequence[int] = ()  # of the rounds, in turn; nothing: 0, 1, 2, ...
    floor: bool = False  # whether to train without communication too
    interleave: bool = False  # whether the trainings of a round go on in turn, each from one evaluation to its next
    limit_s: float | None = None  # after which turns that go on together are taken to hang
    compile_first: bool = False  # whether there is a round in which kernels are compiled

    @property
    def shares_a_device(self) -> bool:
        """Whether emulated hosts are all on one device, and send over Gloo; real ranks have "auto"."""
        return bool(self.cluster) and self.accelerator == "cuda"

    def turns(self) -> list[tuple[int, StrategySpec]]:
        """Rounds and strategies in the order in which they run: what is to compile, and that without communication.

        Every other round runs backwards, so that none is favoured by its place.  Where learning rates are tried, the
        strategies of later rounds do not have theirs yet.
        """
        rows = parse_strategies(f"{NO_COMMUNICATION},{self.strategies}" if self.floor else self.strategies)
        tried = [
            [row] if row.learning_rate or not self.learning_rates else [row.at(rate) for rate in self.learning_rates]
            for row in rows
        ]
        later = [(number, row) for number in range(1, self.rounds) for row in (rows[::-1] if number % 2 else rows)]
        compiling = [(COMPILING, each[0]) for each in tried if each[0].has_kernels] if self.compile_first else []
        return compiling + [(0, row) for each in tried for row in each] + later

    def groups(self) -> list[list[tuple[int, StrategySpec]]]:
        """The turns, together those that are interleaved: all of a round."""
        if not self.interleave:
            return [[turn] for turn in self.turns()]
        return [list(turns) for _, turns in groupby(self.turns(), key=itemgetter(0))]

    def seed(self, number: int) -> int:
        number = max(number, 0)
        return self.seeds[number % len(self.seeds)] if self.seeds else number

    def at_best_rate(self, row: StrategySpec, rounds: Sequence[Round]) -> StrategySpec:
        """Return ``row`` with the best of the learning rates that it tried in ``rounds``, unless it has its own."""
        if row.learning_rate or not self.learning_rates:
            return row
        rate = best_rate((r for r in rounds if r.strategy == row.label), self.until_loss)
        return row if rate is None else row.at(rate)


def schedules(options: Bench) -> list[Schedule]:
    """Return what to run on each cluster; raises a ValueError for an unknown name or a number that is too small."""
    for name, least in (("steps", 1), ("warmup", 0), ("rounds", 1)):
        if (value := getattr(options, name)) is not None and value < least:
            raise ValueError(f"--{name} must be at least {least}; got {value}")
    until, tried, given = _until_loss(options), rates(options.learning_rates), seeds(options.seeds)
    if tried and not until:
        raise ValueError(f"--learning-rates needs --until-loss, to judge them by; got {options.learning_rates!r}")
    if options.interleave and not until:
        raise ValueError("--interleave needs --until-loss, whose evaluations trainings take turns at.")
    strategies = options.strategies or all_names()
    parse_strategies(strategies)
    counts = options.steps, options.warmup, options.rounds or len(given) or ROUNDS
    check_one_of("--accelerator", options.accelerator, ("cpu", "cuda"))
    if options.accelerator == "cuda" and not options.emulate:
        raise ValueError("--accelerator cuda is for --emulate; ranks of a cluster take the devices that they have.")
    if options.accelerator == "cuda" and not torch.cuda.device_count():
        raise ValueError("--accelerator must be cpu where PyTorch finds no CUDA device; got 'cuda'. See nvidia-smi.")
    where = options.accelerator if options.emulate else "auto"
    on_device = options.accelerator == "cuda" or (not options.emulate and torch.cuda.is_available())
    first = Schedule(
        "",
        options.workload,
        strategies,
        *counts,
        where,
        until,
        options.seconds,
        tried,
        given,
        floor=True,
        interleave=options.interleave,
        compile_first=on_device,
    )
    return [replace(first, cluster=cluster.strip()) for cluster in options.emulate.split(",")]


def _until_loss(options: Bench) -> list[float]:
    """Return the losses to reach, the largest first."""
    workload, seconds = workload_named(options.workload), options.seconds
    if not options.until_loss:
        if seconds is not None:
            raise ValueError(f"--seconds needs --until-loss, with losses to reach; got --seconds {seconds:g}")
        return []
    if seconds is not None and not 0 < seconds < math.inf:
        raise ValueError(f"--seconds must be above 0; got {seconds:g}")
    if workload.held_out is None:
        able = ", ".join(name for name, each in WORKLOADS.items() if each.held_out)
        raise ValueError(f"--until-loss needs a workload with held-out data, one of {able}; got {options.workload!r}")
    return losses(options.until_loss)
