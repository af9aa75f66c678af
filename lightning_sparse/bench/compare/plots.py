"""Plots of a benchmark: step time by cluster, loss by time and by bytes."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from lightning_sparse.bench.compare.peers import NO_COMMUNICATION
from lightning_sparse.bench.compare.records import MeasuredStep, Round, grouped
from lightning_sparse.bench.compare.report import Summary
from lightning_sparse.bench.output import new_figure, save


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
