"""Reports what a benchmark measured: statistics, tables, JSON lines and a page to keep.  Nothing here trains."""

import json
import os
import platform
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lightning_sparse.__about__ import __version__
from lightning_sparse.bench.compare.peers import NO_COMMUNICATION, PEERS
from lightning_sparse.bench.compare.probe import MeasuredRun, MeasuredStep, of_known
from lightning_sparse.monitor.tables import human_bytes

RESAMPLINGS = 1_000
HEADER_BYTES = 14 + 20 + 32  # of a packet: Ethernet, IPv4, TCP with time stamps
PACKAGES = ("torch", "lightning", "torchmetrics", "numpy")
COLUMNS = Path(__file__).with_name("columns.md")  # what they mean
WIDTH = 170  # characters of a table, where no terminal says how wide it is


# - what was measured


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
        """The inverse of ``dataclasses.asdict``."""
        return cls(**{**values, "run": MeasuredRun.from_json(values["run"]) if values["run"] else None})


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
    """A row of the table: one strategy on one cluster, over all rounds; units as in :class:`MeasuredStep`."""

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
    packets = of_known(fmean, (step.wire_packets for step in steps))
    wire = of_known(fmean, (step.wire_bytes for step in steps))
    span_s = fmean(step.ms_span for step in steps) / 1e3
    return Summary(
        cluster=cluster,
        strategy=own[0].strategy,
        ranks=own[0].ranks,
        rounds=len(own),
        timed_steps=len(steps),
        s=middle_half([step.s for step in steps]),
        predicted_s=of_known(median, (r.run.predicted_s for r in own if r.run)),
        ratio=ratio(pairs) if pairs and own[0].strategy != reference else None,
        s_without_communication=median(silent) if silent else None,
        counted_bytes=counted,
        wire_bytes=wire,
        unexplained=(wire - HEADER_BYTES * packets) / counted - 1 if wire and packets and counted else None,
        wire_bits_per_s=8 * wire / span_s if wire is not None and span_s else None,
        ms_compress=of_known(median, (step.ms_compress for step in steps)),
        ms_wait=median(step.ms_wait for step in steps),
        ms_apply=median(step.ms_apply for step in steps),
        loss=of_known(fmean, (r.run.steps[-1].loss for r in own if r.run)),
        peak_memory_bytes=max(r.run.peak_memory_bytes for r in own if r.run),
    )


# - for people


def new_console() -> Console:
    """A console that is wide enough for the tables where it is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def new_progress(console: Console) -> Progress:
    """A progress bar without a thread that redraws: on a real cluster this process forks."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=console, auto_refresh=False, transient=True)


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def _known(value: float | None, text: Callable[[float], str]) -> str:
    return "-" if value is None else text(value)


def _cells(row: Summary) -> dict[str, str]:
    """Write the cells of a row, by heading."""
    return {
        "step": _ms(1e3 * row.s.value),
        "middle half": f"{1e3 * row.s.low:.0f}..{1e3 * row.s.high:.0f}",
        "predicted": _known(row.predicted_s, lambda s: _ms(1e3 * s)),
        "ratio": f"{row.ratio.value:.3f}" if row.ratio else "-",
        "95 % interval": f"{row.ratio.low:.3f}..{row.ratio.high:.3f}" if row.ratio else "-",
        "counted": human_bytes(row.counted_bytes),
        "wire": _known(row.wire_bytes, human_bytes),
        "unexplained": _known(row.unexplained, "{:+.1%}".format),
        "Mbit/s": _known(row.wire_bits_per_s, lambda rate: f"{rate / 1e6:.0f}"),
        "compress": _known(row.ms_compress, _ms),
        "wait": _ms(row.ms_wait),
        "apply": _ms(row.ms_apply),
        "loss": _known(row.loss, "{:.3f}".format),
        "memory": human_bytes(row.peak_memory_bytes),
    }


def title(rows: Sequence[Summary], workload: str) -> str:
    """Name what the rows of one cluster have in common."""
    most = max(row.rounds for row in rows)
    return f"{workload} on {rows[0].cluster}: {rows[0].ranks} ranks, {most} {'round' if most == 1 else 'rounds'}"


def by_cluster(rows: Sequence[Summary]) -> dict[str, list[Summary]]:
    """The rows of each cluster, in order."""
    clusters = dict.fromkeys(row.cluster for row in rows)
    return {cluster: [row for row in rows if row.cluster == cluster] for cluster in clusters}


def notes(rounds: Sequence[Round]) -> list[str]:
    """Say what must be known about strategies, and which runs failed."""
    names = dict.fromkeys(r.strategy.partition("#")[0] for r in rounds)
    failed = [f"{r.strategy} failed on {r.cluster} in round {r.number}: {r.error}" for r in rounds if r.error]
    return [*(f"{name}: {PEERS[name][1]}." for name in names if name in PEERS), *failed]


def _table(rows: Sequence[Summary], lines: box.Box, title: str | None = None) -> Table:
    """The rows of one cluster."""
    table = Table(title=title, box=lines, padding=(0, 1, 0, 0))
    table.add_column("strategy", overflow="fold")
    for heading in _cells(rows[0]):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(f"`{row.strategy}`" if lines is box.MARKDOWN else row.strategy, *_cells(row).values())
    return table


def show(console: Console, rows: Sequence[Summary], rounds: Sequence[Round], workload: str) -> None:
    """Print the tables and what explains them."""
    for of_cluster in by_cluster(rows).values():
        console.print(_table(of_cluster, box.SIMPLE_HEAD, title(of_cluster, workload)))
    for note in notes(rounds):
        console.print(note, highlight=False, markup=False)


# - what is kept


def environment(command: str) -> dict[str, Any]:
    """Describe the machine and the versions, without any names of hosts or people."""
    kernel = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    return {
        "command": command,
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "tcp_congestion_control": kernel.read_text().strip() if kernel.exists() else None,
        "python": platform.python_version(),
        "lightning-sparse": __version__,
        **{package: version(package) for package in PACKAGES},
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def json_line(kind: str, values: Any) -> str:
    """A line of the results file: a dict or a dataclass, marked with what it is."""
    return json.dumps({"kind": kind, **(values if isinstance(values, dict) else asdict(values))}) + "\n"


def page(
    rows: Sequence[Summary],
    rounds: Sequence[Round],
    workload: str,
    facts: Mapping[str, Any],
    files: Sequence[str],
    reached: str = "",
) -> str:
    """A page in Markdown: what was ``reached`` and the tables, what they mean, and where they were measured."""
    lines = [f"# {workload}", "", f"    {facts['command']}", "", *([reached] if reached else [])]
    for of_cluster in by_cluster(rows).values():
        with (wide := Console(width=10_000, file=StringIO())).capture() as table:
            wide.print(_table(of_cluster, box.MARKDOWN))
        lines += [f"## {title(of_cluster, workload)}", "", table.get().strip(), ""]
    lines += [*(f"- {note}" for note in notes(rounds)), "", COLUMNS.read_text(), "## Where it was measured", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items() if name != "command"]
    lines += ["", "## Files", "", *(_link(name) for name in files), ""]
    return "\n".join(lines)


def _link(name: str) -> str:
    return f"![{name}]({name})" if name.endswith((".svg", ".png")) else f"- [{name}]({name})"
