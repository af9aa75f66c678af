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

    with rc_context({"svg.hashsalt": stem, "font.size": 9}):
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
    """Points for each cluster, with the middle half of the steps."""
    figure, axes = _figure()
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
    axes.set_xlim(-0.5, len(clusters) - 0.5)
    axes.set_yscale("log")
    axes.set_ylabel("ms a step")
    axes.grid(axis="y", which="both", lw=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    return figure


def _loss(rounds: Sequence[Round], label: str, cost: Callable[[Step], float]) -> Any:
    """The loss, the mean over rounds at each step, over what the steps up to there cost."""
    figure, axes = _figure()
    for i, strategy in enumerate(dict.fromkeys(r.strategy for r in rounds)):
        runs = [r.run.steps for r in rounds if r.strategy == strategy and r.run]
        costs = [fmean(at) for at in zip(*(accumulate(map(cost, steps)) for steps in runs), strict=True)]
        losses = [fmean(step.loss or 0 for step in same) for same in zip(*runs, strict=True)]
        axes.plot(costs, losses, label=strategy, **_style(i), markevery=max(1, len(costs) // 10))
    axes.set_xlabel(label)
    axes.set_ylabel("training loss")
    axes.grid(lw=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    return figure


def _style(i: int) -> dict[str, Any]:
    """Colour and marker of the i-th strategy."""
    return {"color": f"C{i % 10}", "marker": "osv^D"[i // 10 % 5], "markersize": 4, "linewidth": 1}


def _learns(measured: Round) -> bool:
    return measured.run is not None and measured.run.steps[-1].loss is not None


def _figure() -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # without pyplot: no display, no state

    figure = Figure(figsize=(8, 4), layout="constrained")
    return figure, figure.add_subplot()
