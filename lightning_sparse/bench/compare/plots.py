"""Plots of a benchmark: step time by cluster, loss by time and by bytes."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from lightning_sparse.bench.compare.peers import NO_COMMUNICATION
from lightning_sparse.bench.compare.probe import MeasuredStep
from lightning_sparse.bench.compare.report import Round, Summary, by_cluster


def draw(rows: Sequence[Summary], rounds: Sequence[Round], folder: Path, stem: str) -> list[str]:
    """Draw every plot there is data for, as SVG files in ``folder``.  Returns their names."""
    figures = {"step-time": _step_time(rows)}
    for cluster in by_cluster(rows):
        trained = [r for r in rounds if r.cluster == cluster and r.strategy != NO_COMMUNICATION]
        learning = [r for r in trained if r.run and r.run.steps[-1].loss is not None]
        if learning:
            name = "".join(c if c.isalnum() else "-" for c in cluster)
            figures[f"{name}-loss-by-time"] = _loss(learning, "seconds", lambda step: step.s)
            figures[f"{name}-loss-by-bytes"] = _loss(
                learning, "MB counted as sent by a rank", lambda step: step.counted_bytes / 1e6
            )
    for name, figure in figures.items():
        save(figure, folder / f"{stem}-{name}.svg")
    return [f"{stem}-{name}.svg" for name in figures]


def save(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib to an SVG file, the same in every run."""
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(path, metadata={"Date": None})


def new_figure(width: float, height: float) -> Any:
    """A figure of matplotlib without pyplot: no display, no state."""
    from matplotlib.figure import Figure  # an extra, and slow to import

    return Figure(figsize=(width, height), layout="constrained")


def _step_time(rows: Sequence[Summary]) -> Any:
    """Points for each cluster, with the middle half of the steps."""
    figure = new_figure(8, 4)
    axes = figure.add_subplot()
    clusters = list(by_cluster(rows))
    strategies = list(dict.fromkeys(row.strategy for row in rows))
    for i, strategy in enumerate(strategies):
        own = [row for row in rows if row.strategy == strategy]
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
    for i, strategy in enumerate(dict.fromkeys(r.strategy for r in rounds)):
        runs = [r.run.steps for r in rounds if r.strategy == strategy and r.run]
        costs = [fmean(at) for at in zip(*(accumulate(map(cost, steps)) for steps in runs), strict=False)]
        losses = [fmean(step.loss or 0 for step in same) for same in zip(*runs, strict=False)]
        axes.plot(costs, losses, label=strategy, **_style(i), markevery=max(1, len(costs) // 10))
    axes.grid(lw=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    return figure


def _style(i: int) -> dict[str, Any]:
    """Colour and marker of the i-th strategy."""
    return {"color": f"C{i % 10}", "marker": "osv^D"[i // 10 % 5], "markersize": 4, "linewidth": 1}
