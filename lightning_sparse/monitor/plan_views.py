"""LayerFusion's plan for people: a table and a picture, what was expected beside what was measured."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Column, Table

from lightning_sparse.engine.timeline import GroupTime
from lightning_sparse.fusion.model import Plan

HEADINGS = ("group", "up to", "elements", "ready", "start", "end", "busy")
MOST_LABELS = 25  # beside the rows of a picture
LEAST_ROWS = 3  # there is room for


def plan_table(plan: Plan, measured: Sequence[GroupTime]) -> Group:
    """Show what was expected of each group, below it what was measured, and the plans that were compared.

    Times are milliseconds since backward began: the group's last gradient ready, the group taken up, its mean there.
    """
    groups = Table(
        HEADINGS[0],
        Column(HEADINGS[1], overflow="fold"),
        *(Column(heading, justify="right", no_wrap=True) for heading in HEADINGS[2:]),
        title="LayerFusion: expected (and measured) in ms since backward began",
        box=box.SIMPLE_HEAD,
    )
    first = 0
    for number, (last, expected) in enumerate(zip(plan.ends, plan.times, strict=True)):
        elements = sum(sum(kinds) for kinds in plan.model.elements[first:last])
        groups.add_row(str(number), plan.names[last - 1], f"{elements:,}", *_cells(expected))
        if measured:
            groups.add_row("", "", "", *(f"({cell})" for cell in _cells(measured[number])))
        first = last
    plans = Table("plan", Column("from backward's start to the last mean", justify="right"), box=box.SIMPLE_HEAD)
    for name, span_s in plan.spans.items():
        plans.add_row(name, f"{1e3 * span_s:.1f} ms")
    if measured:
        plans.add_row("measured in the last step", f"{1e3 * max(time.end_s for time in measured):.1f} ms")
    return Group(groups, plans)


def draw_timeline(plan: Plan, measured: Sequence[GroupTime], path: str | Path) -> None:
    """Draw backward, and each group's compression and communication, expected above and measured below.

    Args:
        plan: what was expected.
        measured: the groups of a step; none to draw what was expected alone.
        path: of the picture, whose ending says its kind: ``.svg``, ``.png``, ...

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure  # an extra, and slow to import

    panels = [("expected", plan.times), ("measured", list(measured))] if measured else [("expected", plan.times)]
    figure = Figure(figsize=(9, (1.2 + 0.3 * len(plan.ends)) * len(panels) + 0.6), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (title, times) in zip(axes, panels, strict=True):
        draw_times(axis, times)
        corrected = f" by the model, {1e3 * plan.span_s:.0f} ms corrected by measured steps"
        corrected = corrected if title == "expected" else ""
        axis.set_title(f"{title}: {1e3 * max(time.end_s for time in times):.0f} ms{corrected}", loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel(
        "ms since backward began; compression is drawn in one piece, though it alternates with messages"
    )
    axes[0].legend(loc="lower left", fontsize="small")  # late groups are never there
    figure.savefig(path)


def require_matplotlib() -> None:
    """Raise a ModuleNotFoundError that says what to install if it is missing."""
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            "pictures need matplotlib, which is not installed: pip install lightning-sparse[bench]", name="matplotlib"
        )


def draw_times(axis: Any, times: Sequence[GroupTime]) -> None:
    """Draw backward and groups on a matplotlib axis, one below the other, in ms since backward began."""
    axis.barh(-1, 1e3 * max(time.ready_s for time in times), color="tab:gray")
    for row, time in enumerate(times):
        start, end = 1e3 * time.start_s, 1e3 * time.end_s
        busy = min(1e3 * time.busy_s, end - start)
        compression, communication, ready = ("compression", "communication", "ready") if row == 0 else (None,) * 3
        axis.barh(row, busy, left=start, color="tab:orange", label=compression)
        axis.barh(row, end - start - busy, left=start + busy, color="tab:blue", label=communication)
        axis.plot([1e3 * time.ready_s] * 2, [row - 0.4, row + 0.4], color="black", linewidth=1, label=ready)
    label_rows(axis, ["backward", *(f"group {i}" for i in range(len(times)))], first=-1)


def label_rows(axis: Any, labels: Sequence[str], first: int = 0) -> None:
    """Write ``labels`` beside the rows of a matplotlib axis, ``first`` on top; not more than there is room for."""
    every = max(-(-len(labels) // MOST_LABELS), 1)
    axis.set_yticks(range(first, first + len(labels), every), labels[::every])
    axis.set_ylim(first + max(len(labels), LEAST_ROWS) - 0.5, first - 0.5)


def _cells(time: GroupTime) -> list[str]:
    return [f"{1e3 * s:.1f}" for s in (time.ready_s, time.start_s, time.end_s, time.busy_s)]
