"""Plots of a benchmark: step time by cluster, loss by time and by bytes."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from lightning_sparse.bench.peers import NO_COMMUNICATION
from lightning_sparse.bench.probe import Step
from lightning_sparse.bench.report import Round, Summary, by_cluster


def require_matplotlib() -> None:
    """Say what to install if it is missing.

    Raises:
        ValueError: it is.
    """
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed: pip install lightning-sparse[bench]")


def draw(rows: Sequence[Summary], rounds: Sequence[Round], folder: Path, stem: str) -> list[str]:
    """Draw every plot there is data for, as SVG files in ``folder``.  Returns their names."""
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": stem, "figure.figsize": (7, 4), "figure.constrained_layout.use": True}):
        figures = {"step-time": _step_time(rows)}
        for cluster in by_cluster(rows):
            learning = [r for r in rounds if r.cluster == cluster and r.strategy != NO_COMMUNICATION and _learns(r)]
            if learning:
                name = "".join(c if c.isalnum() else "-" for c in cluster)
                figures[f"{name}-loss-by-time"] = _loss(learning, "seconds", lambda step: step.s)
                figures[f"{name}-loss-by-bytes"] = _loss(
                    learning, "MB counted as sent by a rank", lambda step: step.counted_bytes / 1e6
                )
        names = []
        for name, figure in figures.items():
            names.append(f"{stem}-{name}.svg")
            figure.savefig(folder / names[-1], metadata={"Date": None})
        return names


def _step_time(rows: Sequence[Summary]) -> Any:
    """Bars for each cluster, with the middle half of the steps."""
    figure, axes = _figure()
    clusters = list(by_cluster(rows))
    strategies = list(dict.fromkeys(row.strategy for row in rows))
    width = 0.8 / len(strategies)
    for i, strategy in enumerate(strategies):
        own = [row for row in rows if row.strategy == strategy]
        places = [clusters.index(row.cluster) + (i - (len(strategies) - 1) / 2) * width for row in own]
        middle = [1e3 * row.s.value for row in own]
        below = [1e3 * (row.s.value - row.s.low) for row in own]
        above = [1e3 * (row.s.high - row.s.value) for row in own]
        axes.bar(places, middle, width, yerr=(below, above), label=strategy, color=f"C{i}", error_kw={"lw": 0.8})
    axes.set_xticks(range(len(clusters)), clusters)
    axes.set_ylabel("ms a step")
    axes.legend(fontsize="small")
    return figure


def _loss(rounds: Sequence[Round], label: str, cost: Callable[[Step], float]) -> Any:
    """The loss, the mean over rounds at each step, over what the steps up to there cost."""
    figure, axes = _figure()
    for strategy in dict.fromkeys(r.strategy for r in rounds):
        runs = [r.run.steps for r in rounds if r.strategy == strategy and r.run]
        costs = [fmean(at) for at in zip(*(accumulate(map(cost, steps)) for steps in runs), strict=True)]
        losses = [fmean(step.loss or 0 for step in same) for same in zip(*runs, strict=True)]
        axes.plot(costs, losses, label=strategy)
    axes.set_xlabel(label)
    axes.set_ylabel("training loss")
    axes.legend(fontsize="small")
    return figure


def _learns(measured: Round) -> bool:
    return measured.run is not None and measured.run.steps[-1].loss is not None


def _figure() -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # without pyplot: no display, no state

    figure = Figure()
    return figure, figure.add_subplot()
