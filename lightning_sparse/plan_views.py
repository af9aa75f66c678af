"""LayerFusion's plan for people: a table and a picture, what was expected beside what was measured."""

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Group
from rich.table import Column, Table

from lightning_sparse.plan import GroupTime, Plan

HEADINGS = ("group", "up to", "elements", "ready", "start", "end", "busy")


def plan_table(plan: Plan, measured: Sequence[GroupTime]) -> Group:
    """What was expected of each group, and in the line below it what was measured; and the plans that were compared.

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
    from matplotlib.figure import Figure  # an extra, and slow to import

    panels = [("expected", plan.times), ("measured", list(measured))] if measured else [("expected", plan.times)]
    figure = Figure(figsize=(9, (1.2 + 0.3 * len(plan.ends)) * len(panels) + 0.6), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (title, times) in zip(axes, panels, strict=True):
        ready_ms = 1e3 * max(time.ready_s for time in times)
        axis.barh(0, ready_ms, color="tab:gray", label="backward")
        for row, time in enumerate(times, start=1):
            start, busy, end = 1e3 * time.start_s, 1e3 * time.busy_s, 1e3 * time.end_s
            busy = min(busy, end - start)
            axis.barh(row, busy, left=start, color="tab:orange", label="compression" if row == 1 else None)
            axis.barh(row, end - start - busy, left=start + busy, color="tab:blue",
                      label="communication" if row == 1 else None)  # fmt: skip
            axis.plot([1e3 * time.ready_s] * 2, [row - 0.4, row + 0.4], color="black", linewidth=1,
                      label="ready" if row == 1 else None)  # fmt: skip
        axis.set_yticks(range(len(times) + 1), ["backward", *(f"group {i}" for i in range(len(times)))])
        axis.invert_yaxis()
        axis.set_title(f"{title}: {1e3 * max(time.end_s for time in times):.0f} ms", loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel(
        "ms since backward began; compression is drawn in one piece, though it alternates with messages"
    )
    axes[0].legend(loc="lower right", ncols=4, frameon=False, bbox_to_anchor=(1, 1))
    figure.savefig(path)


def _cells(time: GroupTime) -> list[str]:
    return [f"{1e3 * s:.1f}" for s in (time.ready_s, time.start_s, time.end_s, time.busy_s)]
