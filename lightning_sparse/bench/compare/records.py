"""What a benchmark measures: a step, a training, and a strategy's turn in a round."""

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

Key = TypeVar("Key", bound=Hashable)
Each = TypeVar("Each")


@dataclass(frozen=True)
class MeasuredStep:
    """One training step of one rank, or the mean over the ranks.  What is None was not measured, or means nothing."""

    s: float  # seconds since the end of the step before
    loss: float | None  # of the batch
    counted_bytes: float  # payload handed to the network, as the strategy counts it
    wire_bytes: float | None  # what the kernel counted as sent by the host's interface
    wire_packets: float | None  # packets it counted with them
    ms_compress: float | None  # in the compressor's own code
    ms_network: float | None  # that the issuing threads waited for messages
    ms_span: float  # from the first gradient ready to the end of backward
    ms_wait: float  # from the last gradient ready to the end of backward; with local steps until weights have arrived
    ms_apply: float  # from the end of backward to the end of the step
    held_out: float | None = None  # loss after it on held-out data


@dataclass(frozen=True)
class MeasuredRun:
    """One training run, as one rank saw it, or the mean over the ranks."""

    device: str  # what a rank ran on
    threads: int  # torch's, of a rank
    elements: int  # of the gradient
    peak_memory_bytes: int  # of a rank; over several ranks, the largest
    steps: list[MeasuredStep]  # all, the untimed ones at the start included
    predicted_s: float | None = None  # of a step, by LayerFusion; None where it has no plan
    advices: list[dict[str, Any]] = field(default_factory=list)  # rank 0's, on every strategy: for `advise`

    @staticmethod
    def mean(runs: Sequence["MeasuredRun"]) -> "MeasuredRun":
        """Average the same run over several ranks."""
        names = [each.name for each in fields(MeasuredStep)]
        steps = [
            MeasuredStep(**{name: of_known(fmean, (getattr(step, name) for step in same)) for name in names})  # type: ignore[arg-type]
            for same in zip(*(run.steps for run in runs), strict=True)
        ]
        peak = max(run.peak_memory_bytes for run in runs)
        predicted_s = of_known(fmean, (run.predicted_s for run in runs))
        return replace(runs[0], peak_memory_bytes=peak, steps=steps, predicted_s=predicted_s)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "MeasuredRun":
        """The inverse of ``dataclasses.asdict``."""
        return cls(**{**values, "steps": [MeasuredStep(**step) for step in values["steps"]]})


@dataclass(frozen=True)
class Round:
    """One strategy's turn in one round."""

    cluster: str  # as it was asked for, such as "4x1gbit"
    strategy: str  # label of the row it belongs to
    number: int  # from 0
    ranks: int  # how many trained
    warmup: int  # steps at the start that are not timed
    run: MeasuredRun | None  # the mean over the ranks; None if it failed
    error: str = ""  # why it failed
    learning_rate: float | None = None  # None: the workload's own

    @property
    def timed(self) -> list[MeasuredStep]:
        """The steps that count; none if it failed."""
        return self.run.steps[self.warmup :] if self.run else []

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Round":
        """The inverse of ``dataclasses.asdict``; the kind of a line in a results file is no part of it."""
        known = {key: value for key, value in values.items() if key != "kind"}
        return cls(**{**known, "run": MeasuredRun.from_json(known["run"]) if known["run"] else None})


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a results file: what was run where, each round and each summary, in the order of its lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def of_known(statistic: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    """The mean, say, of those values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return statistic(known) if known else None


def grouped(each: Iterable[Each], key: Callable[[Each], Key]) -> dict[Key, list[Each]]:
    """Those with the same key together, in order."""
    found: dict[Key, list[Each]] = {}
    for one in each:
        found.setdefault(key(one), []).append(one)
    return found


def by_row(rounds: Iterable[Round]) -> dict[tuple[str, str], list[Round]]:
    """The rounds of each strategy on each cluster."""
    return grouped(rounds, lambda each: (each.cluster, each.strategy))
