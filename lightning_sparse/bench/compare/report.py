"""Reports what a benchmark measured: statistics, tables, plots and a page to keep.  Nothing here trains."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from rich.table import Table

from lightning_sparse.bench.compare.records import Round, by_row, grouped, of_known
from lightning_sparse.bench.compare.strategies import NO_COMMUNICATION
from lightning_sparse.bench.output import known, listed, markdown, ms, new_table, save
from lightning_sparse.monitor.tables import human_bytes

HEADER_BYTES = 14 + 20 + 32  # of a packet: Ethernet, IPv4, TCP with time stamps
COLUMNS = Path(__file__).with_name("columns.md")  # what they mean
ON_CONSOLE = ("step", "ratio", "its middle half", "counted", "wire", "wait", "loss", "memory")  # 100 characters


@dataclass(frozen=True)
class Interval:
    """A median, and the range around it."""

    value: float
    low: float
    high: float


def middle_half(values: Sequence[float]) -> Interval:
    """The median, and the quartiles around it."""
    low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return Interval(middle, low, high)


@dataclass(frozen=True)
class Summary:
    """A row of the table: one strategy on one cluster, over all rounds; units as in :class:`MeasuredStep`."""

    cluster: str
    strategy: str
    ranks: int
    rounds: int
    s: Interval
    predicted_s: float | None
    ratio: Interval | None  # None for the reference itself, and where it failed
    counted_bytes: float
    wire_bytes: float | None
    unexplained: float | None  # (wire without headers - counted) / counted; None where ranks share hosts
    ms_compress: float | None
    ms_wait: float
    ms_apply: float
    loss: float | None
    peak_memory_bytes: int

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Summary":
        """The inverse of ``dataclasses.asdict``; the kind of a line in a results file is no part of it."""
        intervals = {key: Interval(**values[key]) for key in ("s", "ratio") if values[key]}
        return cls(**{key: value for key, value in values.items() if key != "kind"} | intervals)


def summarise(rounds: Sequence[Round], reference: str) -> list[Summary]:
    """A row for each strategy on each cluster, in the order of their first round; ``reference`` is a label."""
    timed = by_row(r for r in rounds if r.timed)
    return [_summary(own, timed.get((cluster, reference), [])) for (cluster, _), own in timed.items()]


def _summary(own: Sequence[Round], reference: Sequence[Round]) -> Summary:
    """The row of the rounds of a strategy, beside those of the reference."""
    steps = [step for r in own for step in r.timed]
    # Over the reference's median in the same round: what slows one slows both.
    theirs = {r.number: median(step.s for step in r.timed) for r in reference}
    ratios = [step.s / theirs[r.number] for r in own if r.number in theirs for step in r.timed]
    counted = fmean(step.counted_bytes for step in steps)
    packets = of_known(fmean, (step.wire_packets for step in steps))
    wire = of_known(fmean, (step.wire_bytes for step in steps))
    runs = [r.run for r in own if r.run]
    comparable = own[0].hosts in (None, own[0].ranks)  # what a rank sends is what its host does
    return Summary(
        cluster=own[0].cluster,
        strategy=own[0].strategy,
        ranks=own[0].ranks,
        rounds=len(own),
        s=middle_half([step.s for step in steps]),
        predicted_s=of_known(median, (run.predicted_s for run in runs)),
        ratio=middle_half(ratios) if ratios and own is not reference else None,
        counted_bytes=counted,
        wire_bytes=wire,
        unexplained=(wire - HEADER_BYTES * packets) / counted - 1
        if comparable and wire and packets and counted
        else None,
        ms_compress=of_known(median, (step.ms_compress for step in steps)),
        ms_wait=median(step.ms_wait for step in steps),
        ms_apply=median(step.ms_apply for step in steps),
        loss=of_known(fmean, (run.steps[-1].loss for run in runs)),
        peak_memory_bytes=max(run.peak_memory_bytes for run in runs),
    )


# - for people


def _cells(row: Summary) -> dict[str, str]:
    """Write the cells of a row, by heading."""
    return {
        "step": ms(row.s.value),
        "middle half": f"{1e3 * row.s.low:.0f}..{1e3 * row.s.high:.0f}",
        "predicted": known(row.predicted_s, ms),
        "ratio": f"{row.ratio.value:.3f}" if row.ratio else "-",
        "its middle half": f"{row.ratio.low:.2f}..{row.ratio.high:.2f}" if row.ratio else "-",
        "counted": human_bytes(row.counted_bytes),
        "wire": known(row.wire_bytes, human_bytes),
        "unexplained": known(row.unexplained, "{:+.1%}".format),
        "compress": known(row.ms_compress, lambda each: ms(each / 1e3)),
        "wait": ms(row.ms_wait / 1e3),
        "apply": ms(row.ms_apply / 1e3),
        "loss": known(row.loss, "{:.3f}".format),
        "memory": human_bytes(row.peak_memory_bytes),
    }


def tables(rows: Sequence[Summary], workload: str, headings: Collection[str] = ()) -> list[Table]:
    """A table for each cluster, of the columns with these ``headings``, or of all."""
    found = []
    for cluster, own in grouped(rows, lambda row: row.cluster).items():
        most = max(row.rounds for row in own)
        title = f"{workload} on {cluster}: {own[0].ranks} ranks, {most} {'round' if most == 1 else 'rounds'}"
        shown = headings or _cells(own[0])
        table = new_table(title, "strategy", *shown)
        for row in own:
            cells = _cells(row)
            table.add_row(row.strategy, *(cells[heading] for heading in shown))
        found.append(table)
    return found


def failures(rounds: Sequence[Round]) -> list[str]:
    """Say which runs failed, and why."""
    return [f"{r.strategy} failed on {r.cluster} in round {r.number}: {r.error}" for r in rounds if r.error]


def compiling(compiled: Sequence[Round], rounds: Sequence[Round]) -> list[str]:
    """Say for how long a rank compiled kernels, in ``compiled`` and in the ``rounds`` that count, where it is known."""
    meanwhile, said = by_row(rounds), []
    for row, own in by_row(compiled).items():
        if (before_s := _compiled_s(own)) is not None:
            said.append(
                f"{row[1]} compiled kernels on {row[0]} for {before_s:.1f} s before it was timed, and for "
                f"{_compiled_s(meanwhile.get(row, [])) or 0.0:.1f} s while it was."
            )
    return said


def _compiled_s(rounds: Sequence[Round]) -> float | None:
    return of_known(sum, (r.run.compiled_s for r in rounds if r.run))


def page(
    rows: Sequence[Summary],
    notes: Sequence[str],
    workload: str,
    facts: Mapping[str, Any],
    files: Sequence[str],
    reached: str = "",
) -> str:
    """A page in Markdown: what was ``reached`` and the tables, what they mean, and where they were measured."""
    lines = [f"# {workload}", "", f"    {facts['command']}", "", *([reached] if reached else [])]
    for table in tables(rows, workload):
        lines += [f"## {table.title}", "", markdown(table)]
    links = (f"![{name}]({name})" if name.endswith(".svg") else f"- [{name}]({name})" for name in files)
    lines += [*(f"- {note}" for note in notes), "", COLUMNS.read_text()]
    return "\n".join([*lines, "## Where it was measured", "", listed(facts), "## Files", "", *links, ""])


# - plots


def draw(rounds: Sequence[Round], folder: Path, stem: str) -> list[str]:
    """Draw the loss over time on each cluster where it is known, as SVG files in ``folder``.  Returns their names."""
    names = []
    trained = (r for r in rounds if r.strategy != NO_COMMUNICATION and r.run and r.run.steps[-1].loss is not None)
    for cluster, own in grouped(trained, lambda each: each.cluster).items():
        names.append(f"{stem}-{''.join(c if c.isalnum() else '-' for c in cluster)}-loss.svg")
        save(_loss_by_time(own), folder / names[-1])
    return names


def _loss_by_time(rounds: Sequence[Round]) -> Any:
    """The loss of each strategy, the mean over rounds at each step that all took, over the seconds up to there."""
    from matplotlib.figure import Figure  # an extra, and slow to import; without pyplot: no display, no state

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="seconds", ylabel="training loss")
    for i, (strategy, own) in enumerate(grouped(rounds, lambda each: each.strategy).items()):
        runs = [r.run.steps for r in own if r.run]
        seconds = [fmean(at) for at in zip(*(accumulate(step.s for step in steps) for steps in runs), strict=False)]
        losses = [fmean(step.loss or 0 for step in same) for same in zip(*runs, strict=False)]
        look: dict[str, Any] = {"color": f"C{i % 10}", "marker": "osv^D"[i // 10 % 5], "markersize": 4, "linewidth": 1}
        axes.plot(seconds, losses, label=strategy, markevery=max(1, len(seconds) // 10), **look)
    axes.grid(lw=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    return figure
