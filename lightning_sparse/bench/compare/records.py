"""What a benchmark measures and says: a step, a training, a strategy's turn in a round, and advice on a candidate."""

import json
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from lightning_sparse.auto.chooser import EXACT, soonest
from lightning_sparse.auto.forecast import Forecast, likely
from lightning_sparse.auto.policy import Auto, Candidate

Key = TypeVar("Key", bound=Hashable)
Each = TypeVar("Each")


@dataclass(frozen=True)
class MeasuredStep:
    """One training step of one rank, or the mean over the ranks.  What is None was not measured, or means nothing."""

    s: float  # seconds since the end of the step before
    loss: float | None  # of the batch
    counted_bytes: float  # payload handed to the network, as the strategy counts it
    wire_bytes: float | None  # what the kernel counted as sent by the host's interface, which its ranks share
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
    compiled_s: float | None = None  # in which a rank compiled kernels; None where Triton is missing, or older than 3.4

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
        compiled_s = of_known(fmean, (run.compiled_s for run in runs))
        return replace(runs[0], peak_memory_bytes=peak, steps=steps, predicted_s=predicted_s, compiled_s=compiled_s)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "MeasuredRun":
        """The inverse of ``dataclasses.asdict``."""
        return cls(**{**values, "steps": [MeasuredStep(**step) for step in values["steps"]]})


@dataclass(frozen=True)
class Round:
    """One strategy's turn in one round."""

    cluster: str  # as it was asked for, such as "4x1gbit"
    strategy: str  # label of the row it belongs to
    number: int  # from 0, or that in which kernels are compiled
    ranks: int  # how many trained
    warmup: int  # steps at the start that are not timed
    run: MeasuredRun | None  # the mean over the ranks; None if it failed
    error: str = ""  # why it failed
    learning_rate: float | None = None  # None: the workload's own
    hosts: int | None = None  # on which the ranks were; None: each on its own

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


@dataclass(frozen=True)
class Advice:
    """What to expect of a candidate, as a row of a table."""

    name: str
    step_s: float  # seconds of a step
    sent_bytes: float  # of a rank in a step
    limit: str  # what the step waits for at its end: "backward", "compression" or "network"
    more_steps: float  # times as many steps as dense training to a loss; at least, where it was not tried
    ranks: int  # P, or the number of members
    chosen: bool = False
    measured: bool = False  # the step, and not only expected
    python: str = ""  # to paste
    yaml: str = ""

    @property
    def seconds(self) -> float:
        """Expected to a loss, for each step that dense training needs."""
        return self.step_s * self.more_steps

    @property
    def likely_s(self) -> tuple[float, float]:
        """The least and the most of them that a task may need."""
        least, most = likely(self.more_steps)
        return self.step_s * least, self.step_s * most


def advise_on(
    forecasts: Sequence[Forecast],
    alone: tuple[float, float],
    chosen: Candidate | None = None,
    measured: Container[Candidate] = (),
) -> list[Advice]:
    """Return a row for DDP, one for a machine alone, and one for each candidate.

    Args:
        forecasts: one of each candidate that was looked at, float32 sums among them.
        alone: seconds of a step of one machine, and how many times as many it needs.
        chosen: one of them; None: the one that is expected to be soonest at a loss.
        measured: candidates whose steps were.
    """
    dense = next(f for f in forecasts if f.candidate == EXACT)
    chosen = chosen or soonest([f for f in forecasts if f.delivered is not None], Auto.at_most)[0].candidate
    step_s, more = alone
    found = [
        Advice("ddp", dense.buckets_s, dense.sent_bytes, dense.limit, 1.0, dense.ranks),
        Advice("one machine alone", step_s, 0.0, "nothing", more, 1),
    ]
    for f in forecasts:
        expected = f.step_s, f.sent_bytes, f.limit, f.more_steps, f.ranks
        of_whom = f.candidate == chosen, f.candidate in measured
        found.append(Advice(str(f.candidate), *expected, *of_whom, *to_paste(f.candidate)))
    return found


def to_paste(candidate: Candidate) -> tuple[str, str]:
    """Return the strategy of ``candidate`` in Python and in YAML."""
    settings, name = candidate.settings, type(candidate.compressor).__name__
    given = {"wire_dtype": candidate.wire_dtype, "local_steps": candidate.local_steps}
    options = {key: value for key, value in given.items() if value}
    inner = ", ".join(f"{key}={value!r}" for key, value in settings.items())
    outer = "".join(f", {key}={value!r}" for key, value in options.items())
    of_yaml = ", ".join(f"{key}: {value}" for key, value in settings.items())
    init_args = f", init_args: {{{of_yaml}}}" if settings else ""
    yaml = [
        "trainer:",
        "  strategy:",
        "    class_path: lightning_sparse.SparseDDPStrategy",
        "    init_args:",
        f"      compressor: {{class_path: lightning_sparse.{name}{init_args}}}",
        *(f"      {key}: {value}" for key, value in options.items()),
    ]
    return f"Trainer(strategy=ls.SparseDDPStrategy(ls.{name}({inner}){outer}))", "\n".join(yaml)
