"""The stored summaries of runs of the bench: which are the newest, and names of their strategies and links."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pages import BENCHMARKS

from lightning_sparse.bench.compare import until_loss
from lightning_sparse.bench.compare.records import Round, by_row, read_lines
from lightning_sparse.bench.compare.report import Summary, summarise
from lightning_sparse.bench.compare.strategies import NO_COMMUNICATION, PEERS
from lightning_sparse.bench.compare.until_loss import LossCurve, Reached

DIGITS = 8  # of a stored number: with fewer, what pages show changes
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
    """The summary of a run."""

    name: str  # of its file, which starts with the date and the time
    environment: dict[str, Any]
    summaries: dict[str, dict[str, Summary]]  # for each cluster a row for each strategy
    reached: dict[str, dict[str, until_loss.Row]]  # what each took to each of the losses

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
    def strategy_count(self) -> int:
        """How many strategies trained, on all links together."""
        return sum(map(len, self.summaries.values()))

    @property
    def round_count(self) -> int:
        """How many rounds there were."""
        return max(row.rounds for rows in self.summaries.values() for row in rows.values())

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
    """Read a summary; None where the file holds something else."""
    environment, *lines = read_lines(file)
    if environment.get("kind") != "environment":
        return None
    run = Run(file.stem, environment, {}, {})
    for line in lines:
        rate, curves = line.pop("rate", None), line.pop("curves", [])
        row = Summary.from_json(line)
        run.summaries.setdefault(row.cluster, {})[row.strategy] = row
        if curves:
            reached = until_loss.Row.of(rate, [_curve(each) for each in curves], run.losses)
            run.reached.setdefault(row.cluster, {})[row.strategy] = reached
    return run


def _curve(columns: dict[str, list[float]]) -> LossCurve:
    losses, *taken = columns.values()
    return LossCurve(losses, [Reached(*each) for each in zip(*taken, strict=True)])


def stored() -> list[Run]:
    """All runs, the oldest first."""
    return [run for file in sorted(BENCHMARKS.glob("*.jsonl")) if (run := read(file))]


def newest(runs: Iterable[Run]) -> dict[tuple[str, str], Run]:
    """The newest run of each workload on each cluster.

    A run on the usual processor goes before others, and one to losses, which shows steps too, before one of steps
    alone; one of few strategies for longer comes after others.
    """
    ordered = sorted(runs, key=lambda run: (run.is_usual, bool(run.losses), run.name not in LONGER, run.name))
    return {(run.workload, cluster): run for run in ordered for cluster in run.summaries}


def store(file: Path) -> Path:
    """Store the summary of a raw run here, with numbers of few digits, and return its file."""
    target = BENCHMARKS / file.name
    lines = [json.dumps(json.loads(json.dumps(line), parse_float=_short)) + "\n" for line in summarised(file)]
    target.write_text("".join(lines))
    return target


def summarised(file: Path) -> Iterator[dict[str, Any]]:
    """Sum up a raw run: a line with its environment, and one for each row of its table, with the curves of its loss."""
    facts, *lines = read_lines(file)
    if {line["kind"] for line in lines} != {"round", "summary"}:
        raise SystemExit(f"{file} is not what `lightning-sparse bench` writes, or that was interrupted.")
    command = re.sub(r" --output \S+", "", facts["command"])
    yield {"kind": "environment", "note": "", **facts, "command": command}  # the note is for the page of results
    rounds = [Round.from_json(line) for line in lines if line["kind"] == "round"]
    losses = facts.get("until_loss") or []
    reached, best = until_loss.rows(rounds, losses), until_loss.at_best_rates(rounds, losses)
    trainings = by_row(best)
    for row in summarise(best, str(facts["strategies"]).split(",")[0]):
        line = {"kind": "summary", **asdict(row)}
        if known := reached.get(row.cluster, {}).get(row.strategy):
            curves = [LossCurve.of(each) for each in trainings[row.cluster, row.strategy]]
            line |= {"rate": known.rate, "curves": [_columns(curve) for curve in curves if curve.losses]}
        yield line


def _columns(curve: LossCurve) -> dict[str, Sequence[float]]:
    return {"loss": curve.losses, **dict(zip(Reached._fields, zip(*curve.reached, strict=True), strict=True))}


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
    "local_group": lambda value: "between machines" if value == "node" else f"members of {value}",
    "outer_momentum": lambda value: f"momentum {value}",
    "lr_factor": lambda value: f"{value} rate",
}


def link(cluster: str) -> str:
    """Name hosts and links in words, where they are alike."""
    match = re.fullmatch(r"(\d+)x(?:(\d+)x)?(\d+)([mg])bit(?:\+(\d+)ms)?", cluster)
    if not match:
        return f"`{cluster}`"
    hosts, ranks, rate, unit, delay = match.groups()
    return f"{hosts} hosts{f' of {ranks} ranks' if ranks else ''}, {rate} {unit.upper()}bit/s" + (
        f", {delay} ms" if delay else ""
    )


def speed(cluster: str) -> float:
    """Bytes a second of a link, less with delay: to put fast links first."""
    match = re.match(r".*?(\d+)([mg])bit(?:\+(\d+)ms)?$", cluster)
    if not match:
        return 0
    rate, unit, delay = match.groups()
    return float(rate) * {"m": 1, "g": 1000}[unit] / (1 + float(delay or 0))
