"""Arguments of ``lightning-sparse bench``, and what they ask for."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lightning_sparse.bench.compare.peers import all_names, contenders
from lightning_sparse.bench.compare.worker import Schedule
from lightning_sparse.bench.compare.workloads import WORKLOADS, Workload, workload_named

ROUNDS = 5  # where neither they nor seeds are given

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class BenchArguments:
    """Arguments of ``lightning-sparse bench``, as its ``--help`` explains them, and the command that was typed."""

    emulate: str
    workload: str
    strategies: str
    steps: int
    warmup: int
    rounds: int | None
    output: Path
    plot: bool
    until_loss: str
    seconds: float | None
    learning_rates: str
    seeds: str
    simulate: str
    interface: str | None
    command: str

    def schedules(self) -> list[Schedule]:
        """Return what to run on each cluster; raises a ValueError for an unknown name or a number that is too small."""
        for name, least in (("steps", 1), ("warmup", 0), ("rounds", 1)):
            if (value := getattr(self, name)) is not None and value < least:
                raise ValueError(f"--{name} must be at least {least}; got {value}")
        workload = workload_named(self.workload)
        losses = self._losses(workload)
        rates = numbers("--learning-rates", self.learning_rates, float, lambda rate: 0 < rate < math.inf, " above 0")
        if rates and not losses:
            raise ValueError(f"--learning-rates needs --until-loss, to judge them by; got {self.learning_rates!r}")
        seeds = numbers("--seeds", self.seeds, int, lambda seed: seed >= 0, " of at least 0")
        strategies = self.strategies or all_names()
        contenders(strategies)
        clusters = [cluster.strip() for cluster in self.emulate.split(",")]
        accelerator = "cpu" if self.emulate else "auto"
        return [
            Schedule(
                cluster,
                self.workload,
                strategies,
                self.steps,
                self.warmup,
                self.rounds or len(seeds) or ROUNDS,
                accelerator,
                until_loss=losses,
                seconds=self.seconds,
                learning_rates=rates,
                seeds=seeds,
            )
            for cluster in clusters
        ]

    def _losses(self, workload: Workload) -> list[float]:
        """Return the losses to reach, the largest first."""
        if not self.until_loss:
            if self.seconds is not None:
                raise ValueError(f"--seconds needs --until-loss, with losses to reach; got --seconds {self.seconds:g}")
            return []
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise ValueError(f"--seconds must be above 0; got {self.seconds:g}")
        if workload.held_out is None:
            able = ", ".join(name for name, each in WORKLOADS.items() if each.held_out)
            raise ValueError(f"--until-loss needs a workload with held-out data, one of {able}; got {self.workload!r}")
        return sorted(numbers("--until-loss", self.until_loss, float, lambda loss: True, ""), reverse=True)


def numbers(
    option: str, text: str, kind: Callable[[str], Number], fits: Callable[[Number], bool], range_: str
) -> list[Number]:
    """Read an option's numbers, each once, separated by commas; none of an empty text.

    Raises:
        ValueError: one is no number, or does not fit.
    """
    with suppress(ValueError):
        found = list(dict.fromkeys(kind(part) for part in text.split(",") if text))
        if all(map(fits, found)):
            return found
    raise ValueError(f"{option} must be numbers{range_}, separated by commas; got {text!r}")
