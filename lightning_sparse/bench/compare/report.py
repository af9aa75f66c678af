"""Reports what a benchmark measured: statistics, tables, plots and a page to keep.  Nothing here trains."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from rich.table import Table

from lightning_sparse.bench.compare.peers import NO_COMMUNICATION, PEERS
from lightning_sparse.bench.compare.records import MeasuredStep, Round, by_row, grouped, of_known
from lightning_sparse.bench.output import known, listed, markdown, ms, new_figure, new_table, save
from lightning_sparse.monitor.tables import human_bytes

RESAMPLINGS = 1_000
HEADER_BYTES = 14 + 20 + 32  # of a packet: Ethernet, IPv4, TCP with time stamps
COLUMNS = Path(__file__).with_name("columns.md")  # what they mean


@dataclass(frozen=True)
class Interval:
    """A number and the interval it is believed to lie in."""

    value: float
    low: float
    high: float


def middle_half(values: Sequence[float]) -> Interval:
    """The median, and the quartiles around it."""
    low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
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
    timed = by_row(r for r in rounds if r.timed)
    return [
        _summary(own, timed.get((cluster, reference), []), timed.get((cluster, NO_COMMUNICATION), []))
        for (cluster, _), own in timed.items()
    ]


def _summary(own: Sequence[Round], reference: Sequence[Round], silent: Sequence[Round]) -> Summary:
    """The row of the rounds of a strategy, beside those of the reference and those without communication."""
    steps = [step for r in own for step in r.timed]
    theirs = {r.number: r for r in reference}
    pairs = [([s.s for s in r.timed], [s.s for s in theirs[r.number].timed]) for r in own if r.number in theirs]
    counted = fmean(step.counted_bytes for step in steps)
    packets = of_known(fmean, (step.wire_packets for step in steps))
    wire = of_known(fmean, (step.wire_bytes for step in steps))
    span_s = fmean(step.ms_span for step in steps) / 1e3
    runs = [r.run for r in own if r.run]
    return Summary(
        cluster=own[0].cluster,
        strategy=own[0].strategy,
        ranks=own[0].ranks,
        rounds=len(own),
        timed_steps=len(steps),
        s=middle_half([step.s for step in steps]),
        predicted_s=of_known(median, (run.predicted_s for run in runs)),
        ratio=ratio(pairs) if pairs and own is not reference else None,
        s_without_communication=of_known(median, (step.s for r in silent for step in r.timed)),
        counted_bytes=counted,
        wire_bytes=wire,
        unexplained=(wire - HEADER_BYTES * packets) / counted - 1 if wire and packets and counted else None,
        wire_bits_per_s=8 * wire / span_s if wire is not None and span_s else None,
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
        "95 % interval": f"{row.ratio.low:.3f}..{row.ratio.high:.3f}" if row.ratio else "-",
        "counted": human_bytes(row.counted_bytes),
        "wire": known(row.wire_bytes, human_bytes),
        "unexplained": known(row.unexplained, "{:+.1%}".format),
        "Mbit/s": known(row.wire_bits_per_s, lambda rate: f"{rate / 1e6:.0f}"),
        "compress": known(row.ms_compress, lambda each: ms(each / 1e3)),
        "wait": ms(row.ms_wait / 1e3),
        "apply": ms(row.ms_apply / 1e3),
        "loss": known(row.loss, "{:.3f}".format),
        "memory": human_bytes(row.peak_memory_bytes),
    }


def tables(rows: Sequence[Summary], workload: str) -> list[Table]:
    """A table for each cluster."""
    found = []
    for cluster, own in grouped(rows, lambda row: row.cluster).items():
        most = max(row.rounds for row in own)
        title = f"{workload} on {cluster}: {own[0].ranks} ranks, {most} {'round' if most == 1 else 'rounds'}"
        table = new_table(title, "strategy", *_cells(own[0]))
        for row in own:
            table.add_row(row.strategy, *_cells(row).values())
        found.append(table)
    return found


def notes(rounds: Sequence[Round]) -> list[str]:
    """Say what must be known about strategies, and which runs failed."""
    names = dict.fromkeys(r.strategy.partition("#")[0] for r in rounds)
    failed = [f"{r.strategy} failed on {r.cluster} in round {r.number}: {r.error}" for r in rounds if r.error]
    return [*(f"{name}: {PEERS[name][1]}." for name in names if name in PEERS), *failed]


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
    for table in tables(rows, workload):
        lines += [f"## {table.title}", "", markdown(table)]
    links = (f"![{name}]({name})" if name.endswith(".svg") else f"- [{name}]({name})" for name in files)
    lines += [*(f"- {note}" for note in notes(rounds)), "", COLUMNS.read_text()]
    return "\n".join([*lines, "## Where it was measured", "", listed(facts), "## Files", "", *links, ""])


# - plots


def draw(rows: Sequence[Summary], rounds: Sequence[Round], folder: Path, stem: str) -> list[str]:
    """Draw every plot there is data for, as SVG files in ``folder``.  Returns their names."""
    figures = {"step-time": _step_time(rows)}
    trained = (r for r in rounds if r.strategy != NO_COMMUNICATION and r.run and r.run.steps[-1].loss is not None)
    for cluster, own in grouped(trained, lambda each: each.cluster).items():
        name = "".join(c if c.isalnum() else "-" for c in cluster)
        figures[f"{name}-loss-by-time"] = _loss(own, "seconds", lambda step: step.s)
        sent = "MB counted as sent by a rank"
        figures[f"{name}-loss-by-bytes"] = _loss(own, sent, lambda step: step.counted_bytes / 1e6)
    for name, figure in figures.items():
        save(figure, folder / f"{stem}-{name}.svg")
    return [f"{stem}-{name}.svg" for name in figures]


def _step_time(rows: Sequence[Summary]) -> Any:
    """Points for each cluster, with the middle half of the steps."""
    figure = new_figure(8, 4)
    axes = figure.add_subplot()
    clusters, strategies = list(dict.fromkeys(row.cluster for row in rows)), grouped(rows, lambda row: row.strategy)
    for i, (strategy, own) in enumerate(strategies.items()):
        aside = 0.6 * ((i + 0.5) / len(strategies) - 0.5)
        places = [clusters.index(row.cluster) + aside for row in own]
        below = [1e3 * (row.s.value - row.s.low) for row in own]
        above = [1e3 * (row.s.high - row.s.value) for row in own]
        axes.errorbar(places, [1e3 * row.s.value for row in own], (below, above), label=strategy, **_style(i), ls="")
    axes.set_xticks(range(len(clusters)), clusters)
    axes.set(xlim=(-0.5, len(clusters) - 0.5), yscale="log", ylabel="ms a step")
    axes.grid(axis="y", which="both", lw=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    return figure


def _loss(rounds: Sequence[Round], label: str, cost: Callable[[MeasuredStep], float]) -> Any:
    """The loss, the mean over rounds at each step that all took, over what the steps up to there cost."""
    figure = new_figure(8, 4)
    axes = figure.add_subplot(xlabel=label, ylabel="training loss")
    for i, (strategy, own) in enumerate(grouped(rounds, lambda each: each.strategy).items()):
        runs = [r.run.steps for r in own if r.run]
        costs = [fmean(at) for at in zip(*(accumulate(map(cost, steps)) for steps in runs), strict=False)]
        losses = [fmean(step.loss or 0 for step in same) for same in zip(*runs, strict=False)]
        axes.plot(costs, losses, label=strategy, **_style(i), markevery=max(1, len(costs) // 10))
    axes.grid(lw=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    return figure


def _style(i: int) -> dict[str, Any]:
    """Colour and marker of the i-th strategy."""
    return {"color": f"C{i % 10}", "marker": "osv^D"[i // 10 % 5], "markersize": 4, "linewidth": 1}
