"""What a benchmark measured: statistics, the table, JSON lines and a page to keep.  Nothing here runs anything."""

import json
import os
import platform
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_sparse.bench.peers import NO_COMMUNICATION, note_of
from lightning_sparse.bench.probe import Run, Step, mean
from lightning_sparse.pictures import human_bytes

RESAMPLINGS = 1_000
HEADER_BYTES = 14 + 20 + 32  # of a packet: Ethernet, IPv4, TCP with time stamps
PACKAGES = ("lightning-sparse", "torch", "lightning", "torchmetrics", "numpy")

EXPLANATION = {
    "step": "from the end of one training step to the end of the next (loading data, forward, backward, exchange, "
    "optimizer): the median over all timed steps, and the middle half of them",
    "predicted": "what LayerFusion expected of a step when it made its plan, the median over the rounds",
    "ratio": "median over the rounds of (median step in the round / the reference's in the same round), with its 95 % "
    "bootstrap interval over rounds and steps",
    "counted": "payload a rank handed to the network in a step, as its strategy counts it",
    "wire": "what the kernel counted as sent by a host in a step: the payload, the headers of Ethernet, IP and TCP, "
    "and the acknowledgements of what was received",
    "unexplained": "wire without a header of 66 bytes a packet (Ethernet 14, IPv4 20, TCP with time stamps 32; an "
    "acknowledgement is nothing else), in percent more than counted: messages of Lightning's and Gloo's own, and what "
    "TCP sent again",
    "Mbit/s": "wire, over the time from the first gradient ready to the end of backward",
    "compress": "time in the compressor's own code, beside the backward pass; the peers do not tell",
    "wait": "from the last gradient ready to the end of backward",
    "apply": "from the end of backward to the end of the step: the optimizer",
    "loss": "training loss of the last step, the mean over ranks and rounds",
    "memory": "peak resident memory of a rank's process, libraries included (on CUDA: of the device); the largest "
    "of all ranks and rounds",
}


# - what was measured


@dataclass(frozen=True)
class Round:
    """One strategy's turn in one round.

    Attributes:
        cluster: as it was asked for, such as "4x1gbit".
        strategy: label of the row it belongs to.
        number: of the round, from 0; also the seed of its runs.
        ranks: how many trained.
        warmup: steps at the start that are not timed.
        run: the mean over the ranks; None if it failed.
        error: why it failed, or "".
    """

    cluster: str
    strategy: str
    number: int
    ranks: int
    warmup: int
    run: Run | None
    error: str = ""

    @property
    def timed(self) -> list[Step]:
        """The steps that count; none if it failed."""
        return self.run.steps[self.warmup :] if self.run else []

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Round":
        """The inverse of ``dataclasses.asdict``."""
        return cls(**{**values, "run": Run.from_json(values["run"]) if values["run"] else None})


# - statistics


@dataclass(frozen=True)
class Interval:
    """A number and the interval it is believed to lie in."""

    value: float
    low: float
    high: float


def middle_half(values: Sequence[float]) -> Interval:
    """The median, and the quartiles around it."""
    if len(values) < 2:
        return Interval(values[0], values[0], values[0])
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Interval(middle, low, high)


def ratio(rounds: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Interval:
    """The ratio of two strategies' times, from (steps of one, steps of the reference) for each round.

    Its value is the median over rounds of the ratio of medians: what slows a whole round slows both.  Its interval
    holds 95 % of the values found when rounds, and the steps in them, are drawn again with replacement.
    """
    draw = random.Random(0)

    def again(steps: Sequence[float]) -> float:
        return median(draw.choices(steps, k=len(steps)))

    found = [
        median(again(own) / again(reference) for own, reference in draw.choices(rounds, k=len(rounds)))
        for _ in range(RESAMPLINGS)
    ]
    cuts = quantiles(found, n=40, method="inclusive")
    value = median(median(own) / median(reference) for own, reference in rounds)
    return Interval(value, min(cuts[0], value), max(cuts[-1], value))


@dataclass(frozen=True)
class Summary:
    """A row of the table: one strategy on one cluster, over all rounds; units as in :class:`Step`."""

    cluster: str
    strategy: str
    ranks: int
    rounds: int
    timed_steps: int
    s: Interval
    predicted_s: float | None
    ratio: Interval | None  # None for the reference itself, and where it failed
    s_without_communication: float | None
    counted_bytes: float
    wire_bytes: float | None
    unexplained: float | None  # (wire without headers - counted) / counted
    wire_bits_per_s: float | None
    ms_compress: float | None
    ms_wait: float
    ms_apply: float
    loss: float | None
    peak_memory_bytes: int


def summarise(rounds: Sequence[Round], reference: str) -> list[Summary]:
    """A row for each strategy on each cluster, in the order of their first round; ``reference`` is a label."""
    timed = [r for r in rounds if r.timed]
    rows = dict.fromkeys((r.cluster, r.strategy) for r in timed)
    return [_summary([r for r in timed if (r.cluster, r.strategy) == row], timed, reference) for row in rows]


def _summary(own: Sequence[Round], timed: Sequence[Round], reference: str) -> Summary:
    cluster = own[0].cluster
    steps = [step for r in own for step in r.timed]
    here = [r for r in timed if r.cluster == cluster]
    theirs = {r.number: r for r in here if r.strategy == reference}
    silent = [step.s for r in here if r.strategy == NO_COMMUNICATION for step in r.timed]
    pairs = [([s.s for s in r.timed], [s.s for s in theirs[r.number].timed]) for r in own if r.number in theirs]
    counted = fmean(step.counted_bytes for step in steps)
    packets = mean(step.wire_packets for step in steps)
    wire = mean(step.wire_bytes for step in steps)
    span_s = fmean(step.ms_span for step in steps) / 1e3
    return Summary(
        cluster=cluster,
        strategy=own[0].strategy,
        ranks=own[0].ranks,
        rounds=len(own),
        timed_steps=len(steps),
        s=middle_half([step.s for step in steps]),
        predicted_s=_median(r.run.predicted_s for r in own if r.run),
        ratio=ratio(pairs) if pairs and own[0].strategy != reference else None,
        s_without_communication=median(silent) if silent else None,
        counted_bytes=counted,
        wire_bytes=wire,
        unexplained=(wire - HEADER_BYTES * packets) / counted - 1 if wire and packets and counted else None,
        wire_bits_per_s=8 * wire / span_s if wire is not None and span_s else None,
        ms_compress=_median(step.ms_compress for step in steps),
        ms_wait=median(step.ms_wait for step in steps),
        ms_apply=median(step.ms_apply for step in steps),
        loss=mean(r.run.steps[-1].loss for r in own if r.run),
        peak_memory_bytes=max(r.run.peak_memory_bytes for r in own if r.run),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


# - the table


def table(rows: Sequence[Summary], title: str) -> Table:
    """The rows of one cluster, for people."""
    of_time = ("step", "middle half", "predicted", "ratio", "95 % interval")
    of_bytes = ("counted", "wire", "unexplained", "Mbit/s")
    headings = (*of_time, *of_bytes, "compress", "wait", "apply", "loss", "memory")
    result = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    result.add_column("strategy", overflow="fold")
    for heading in headings:
        result.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        result.add_row(row.strategy, *_cells(row))
    return result


def _cells(row: Summary) -> list[str]:
    return [
        _ms(row.s.value * 1e3),
        f"{row.s.low * 1e3:.0f}..{row.s.high * 1e3:.0f}",
        "-" if row.predicted_s is None else _ms(row.predicted_s * 1e3),
        f"{row.ratio.value:.3f}" if row.ratio else "-",
        f"{row.ratio.low:.3f}..{row.ratio.high:.3f}" if row.ratio else "-",
        human_bytes(row.counted_bytes),
        "-" if row.wire_bytes is None else human_bytes(row.wire_bytes),
        "-" if row.unexplained is None else f"{row.unexplained:+.1%}",
        "-" if row.wire_bits_per_s is None else f"{row.wire_bits_per_s / 1e6:.0f}",
        "-" if row.ms_compress is None else _ms(row.ms_compress),
        _ms(row.ms_wait),
        _ms(row.ms_apply),
        "-" if row.loss is None else f"{row.loss:.3f}",
        human_bytes(row.peak_memory_bytes),
    ]


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def title(rows: Sequence[Summary], workload: str) -> str:
    """What the rows of one cluster have in common."""
    most = max(row.rounds for row in rows)
    return f"{workload} on {rows[0].cluster}: {rows[0].ranks} ranks, {most} {'round' if most == 1 else 'rounds'}"


def by_cluster(rows: Sequence[Summary]) -> dict[str, list[Summary]]:
    """The rows of each cluster, in order."""
    clusters = dict.fromkeys(row.cluster for row in rows)
    return {cluster: [row for row in rows if row.cluster == cluster] for cluster in clusters}


def notes(rounds: Sequence[Round]) -> list[str]:
    """What must be known about strategies, and which runs failed."""
    names = dict.fromkeys(r.strategy.partition("#")[0] for r in rounds)
    found = [f"{name}: {note_of(name)}." for name in names if note_of(name)]
    for r in rounds:
        if r.error:
            found.append(f"{r.strategy} failed on {r.cluster} in round {r.number}: {r.error}")
    return found


def show(console: Console, rows: Sequence[Summary], rounds: Sequence[Round], workload: str) -> None:
    """Print the tables and what explains them."""
    for of_cluster in by_cluster(rows).values():
        console.print(table(of_cluster, title(of_cluster, workload)))
    for note in notes(rounds):
        console.print(note, highlight=False, markup=False)


# - what is kept


def environment(command: str) -> dict[str, Any]:
    """The machine and the versions, without any names of hosts or people."""
    kernel = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    return {
        "command": command,
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "tcp_congestion_control": kernel.read_text().strip() if kernel.exists() else None,
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def json_line(kind: str, values: Any) -> str:
    """A line of the results file: a dict or a dataclass, marked with what it is."""
    return json.dumps({"kind": kind, **(values if isinstance(values, dict) else asdict(values))}) + "\n"


def page(
    rows: Sequence[Summary], rounds: Sequence[Round], workload: str, facts: Mapping[str, Any], files: Sequence[str]
) -> str:
    """A page in Markdown: the tables, what they mean, and where they were measured."""
    lines = [f"# {workload}", "", f"    {facts['command']}", ""]
    for of_cluster in by_cluster(rows).values():
        headings = [str(column.header) for column in table(of_cluster, "").columns]
        lines += [f"## {title(of_cluster, workload)}", "", _markdown_row(headings)]
        lines.append(_markdown_row(["---"] + ["---:"] * (len(headings) - 1)))
        lines += [_markdown_row([f"`{row.strategy}`", *_cells(row)]) for row in of_cluster]
        lines.append("")
    lines += [*(f"- {note}" for note in notes(rounds)), "", "## Columns", ""]
    lines += [f"- **{name}**: {meaning}." for name, meaning in EXPLANATION.items()]
    lines += ["", "## Where it was measured", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items() if name != "command"]
    lines += ["", "## Files", "", *(_link(name) for name in files), ""]
    return "\n".join(lines)


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _link(name: str) -> str:
    return f"![{name}]({name})" if name.endswith((".svg", ".png")) else f"- [{name}]({name})"
