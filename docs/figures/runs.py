"""The stored runs of ``lightning-sparse bench``: which are the newest, and names of their strategies and links."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from pages import BENCHMARKS

from lightning_sparse.bench.compare import until_loss
from lightning_sparse.bench.compare.peers import NO_COMMUNICATION, PEERS
from lightning_sparse.bench.compare.records import Round, grouped, read_lines
from lightning_sparse.bench.compare.report import Summary, summarise

DIGITS = 5  # of a stored number
LONGER = (  # Runs of few strategies to lower losses, which are shown beside those of more.
    "2026-11-27-170614-byte_lm",
    "2026-11-27-172114-byte_lm",
    "2026-11-27-173306-byte_lm",
    "2026-11-27-175019-byte_lm",
    "2026-11-27-181529-byte_lm",
    "2026-11-27-184250-byte_lm",
)
USUAL_CPU = "AMD EPYC"  # of most runs; where another computes, steps take other times
IN_THE_COMMAND = ("lr", "start")  # Options that a run's command shows, and no label.
PEER_LABELS = {
    "ddp": "plain DDP",
    "bf16_hook": "bfloat16 hook",
    "fp16_hook": "float16 hook",
    "diloco": "DiLoCo",
    NO_COMMUNICATION: "no network",
}


@dataclass(frozen=True)
class Run:
    """A stored run."""

    name: str  # of its file, which starts with the date and the time
    environment: dict[str, Any]
    rounds: list[Round]
    complete: bool  # it was not interrupted

    @property
    def workload(self) -> str:
        """The model that was trained."""
        return str(self.environment["workload"])

    @property
    def is_usual(self) -> bool:
        """Whether it ran on the processor that most did."""
        return bool(self.environment["cpu"] == USUAL_CPU)

    @property
    def losses(self) -> list[float]:
        """Losses that were waited for; none where steps alone were timed."""
        return list(self.environment.get("until_loss") or [])

    @property
    def clusters(self) -> list[str]:
        """The links on which anything trained, as they were asked for."""
        return list(dict.fromkeys(r.cluster for r in self.rounds if r.timed))

    @cached_property
    def summaries(self) -> dict[str, dict[str, Summary]]:
        """For each cluster a row for each strategy."""
        reference = str(self.environment["strategies"]).split(",")[0]
        rounds = until_loss.at_best_rates(self.rounds, self.losses) if self.losses else self.rounds
        rows = grouped(summarise(rounds, reference), lambda row: row.cluster)
        return {cluster: {row.strategy: row for row in own} for cluster, own in rows.items()}

    @cached_property
    def reached(self) -> dict[str, dict[str, until_loss.Row]]:
        """For each cluster what each strategy took to each of the losses."""
        return until_loss.rows(self.rounds, self.losses) if self.losses else {}

    def strategies(self, cluster: str) -> list[str]:
        """Those with something to show: others first, then ours, and the floor."""
        known = [name for name in self.summaries[cluster] if not self.losses or name in self.reached[cluster]]
        known = [name for name in known if not name.startswith(f"{NO_COMMUNICATION}#")]  # the same, again
        return sorted(known, key=lambda name: (name == NO_COMMUNICATION, not is_peer(name)))

    def step_s(self, cluster: str, strategy: str) -> float:
        """Seconds a step: the mean over a training to a loss, measuring and choosing included; else the median."""
        row = self.summaries[cluster][strategy]
        if not self.losses:
            return row.s.value
        in_all = self.reached[cluster][strategy].in_all
        return in_all.seconds / in_all.steps


def read(file: Path) -> Run | None:
    """Read a run; None where the file holds something else."""
    lines = read_lines(file)
    if lines[0].get("kind") != "environment":
        return None
    rounds = [Round.from_json(line) for line in lines if line["kind"] == "round"]
    return Run(file.stem, lines[0], rounds, any(line["kind"] == "summary" for line in lines))


def stored() -> list[Run]:
    """All runs, the oldest first."""
    return [run for file in sorted(BENCHMARKS.glob("*.jsonl")) if (run := read(file))]


def newest(runs: Iterable[Run]) -> dict[tuple[str, str], Run]:
    """The newest run of each workload on each cluster.

    A run on the usual processor goes before others, and one to losses, which shows steps too, before one of steps
    alone; one of few strategies for longer comes after others, and one that was interrupted last.
    """
    ordered = sorted(
        runs, key=lambda run: (run.complete, run.is_usual, bool(run.losses), run.name not in LONGER, run.name)
    )
    return {(run.workload, cluster): run for run in ordered for cluster in run.clusters}


def store(file: Path) -> Path:
    """Copy a run here, with numbers of few digits and a command that names no folder."""
    lines = [json.loads(line, parse_float=_short) for line in file.read_text().splitlines()]
    lines[0]["command"] = re.sub(r" --output \S+", "", lines[0]["command"])
    for line in lines:
        if run := line.get("run"):
            run["advices"] = []  # what `advise` would say: half of the file
    target = BENCHMARKS / file.name
    target.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    return target


def _short(text: str) -> float:
    return float(f"{float(text):.{DIGITS}g}")


# - names for people


def is_peer(strategy: str) -> bool:
    """Whether a strategy is not of this package."""
    return strategy == NO_COMMUNICATION or strategy.partition(":")[0] in {*PEERS, *PEER_LABELS}


def label(strategy: str) -> str:
    """Name a strategy in few words."""
    name, *pairs = strategy.split(":")
    options = dict(pair.split("=", 1) for pair in pairs)
    wire = options.pop("wire_dtype", "")
    options = {key: value for key, value in options.items() if key not in IN_THE_COMMAND}
    words = [PEER_LABELS.get(name, name)]
    if name.startswith("powersgd_"):
        words = [f"PowerSGD, rank {name.rpartition('_')[2]}"]
    elif name == "sparse_dense":
        steps = options.pop("local_steps", "")
        words = [f"{steps} local step{'s'[: steps != '1']}" if steps else "all"]
    for key, write in _OPTIONS.items():
        if key in options:
            words.append(write(options.pop(key)))
    return " ".join([*words, *(f"{key}={value}" for key, value in options.items()), wire]).strip()


_OPTIONS: dict[str, Callable[[str], str]] = {
    "density": lambda value: f"{100 * float(value):g} %",
    "rank": lambda value: f"rank {value}",
    "local_group": lambda value: f"nodes of {value}",
    "outer_momentum": lambda value: f"momentum {value}",
    "lr_factor": lambda value: f"{value} rate",
}


def link(cluster: str) -> str:
    """Name hosts and links in words, where they are alike."""
    match = re.fullmatch(r"(\d+)x(\d+)([mg])bit(?:\+(\d+)ms)?", cluster)
    if not match:
        return f"`{cluster}`"
    hosts, rate, unit, delay = match.groups()
    return f"{hosts} hosts, {rate} {unit.upper()}bit/s" + (f", {delay} ms" if delay else "")


def speed(cluster: str) -> float:
    """Bytes a second of a link, less with delay: to put fast links first."""
    match = re.match(r".*?(\d+)([mg])bit(?:\+(\d+)ms)?$", cluster)
    if not match:
        return 0
    rate, unit, delay = match.groups()
    return float(rate) * {"m": 1, "g": 1000}[unit] / (1 + float(delay or 0))


def mean_bytes(run: Run, cluster: str, strategy: str) -> float:
    """Bytes that a rank sends in a step, with all steps of a training to a loss."""
    if not run.losses:
        return run.summaries[cluster][strategy].counted_bytes
    own = [r for r in run.rounds if (r.cluster, r.strategy) == (cluster, strategy) and r.run]
    return fmean(step.counted_bytes for r in own if r.run for step in r.run.steps)
