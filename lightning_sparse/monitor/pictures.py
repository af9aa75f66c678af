"""Pictures of what compression did in a training."""

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from io import BytesIO
from itertools import accumulate
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_sparse.engine.sample import STARVING, Waiting
from lightning_sparse.engine.timeline import GroupTime
from lightning_sparse.fusion.model import Plan
from lightning_sparse.monitor.record import Point, Run, Selected
from lightning_sparse.monitor.tables import human_bytes, longest_waiting

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # an extra, and slow to import

LABEL = 22  # characters of a group's name
MOST_LABELS = 25  # beside the rows of a panel
LEAST_ROWS = 3  # a panel has room for
MOST_DRAWN = 8  # parameters, those whose gradients wait longest


def require_matplotlib() -> None:
    """Raise a ModuleNotFoundError that says what to install if it is missing."""
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            "pictures need matplotlib, which is not installed: pip install matplotlib", name="matplotlib"
        )


def draw(run: Run) -> "Figure":
    """Draw the loss, threshold error and residuals of a training, the density of its groups, and a step of it.

    The figure shows itself where it is the last expression of a notebook's cell.
    """
    require_matplotlib()
    from matplotlib import rc_context

    with rc_context({"axes.titlelocation": "left", "axes.titlesize": "medium", "font.size": 9}):
        figure = _draw(run)
    # A notebook that has not imported pyplot does not know how to show a Figure; IPython asks the object itself.
    figure._repr_png_ = partial(_png, figure)  # type: ignore[attr-defined]
    return figure


def _draw(run: Run) -> "Figure":
    from matplotlib.figure import Figure  # without pyplot: no display, no state

    rows = min(max(len(run.groups), LEAST_ROWS), MOST_LABELS)
    bars = max(min(len(run.waiting), MOST_DRAWN), LEAST_ROWS)
    heights = [2.3, 1.7, 1.2 + 0.2 * rows, 1.2 + 0.2 * bars]
    figure = Figure(figsize=(10, 0.6 + sum(heights)), dpi=110, layout="constrained")
    axes = figure.subplot_mosaic(
        [["time", "bytes"], ["error", "norm"], ["density", "step"], ["oldest", "ratio"]], height_ratios=heights
    )
    sums, points = run.sums, run.points
    figure.suptitle(
        f"{sums.steps:,} steps on rank 0: {human_bytes(sums.sent_bytes)} sent in place of "
        f"{human_bytes(sums.dense_bytes)}"
    )
    sizes = {"GB": 1e9, "MB": 1e6, "kB": 1e3}
    unit = next((unit for unit, size in sizes.items() if sums.sent_bytes >= size), "kB")
    _draw_loss(axes["time"], points, lambda point: point.seconds, "seconds since training began")
    _draw_loss(axes["bytes"], points, lambda point: point.sent_bytes / sizes[unit], f"{unit} sent by rank 0")
    steps = [point.step for point in points]
    axes["error"].plot(steps, [100 * point.threshold_error for point in points], color="tab:red", lw=1)
    axes["error"].set(title="threshold error: |updated - target| / target", xlabel="step", ylabel="%", ylim=(0, None))
    axes["norm"].plot(steps, [point.unsent_norm for point in points], color="tab:purple", lw=1)
    axes["norm"].set(title="norm of unsent gradient", xlabel="step", ylim=(0, None))
    _draw_density(axes["density"], run.groups)
    _draw_step(axes["step"], run)
    _draw_waiting(axes["oldest"], axes["ratio"], longest_waiting(run.waiting)[:MOST_DRAWN])
    for axis in axes.values():
        axis.grid(lw=0.3)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def _png(figure: "Figure") -> bytes:
    file = BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _draw_loss(axis: Any, points: Sequence[Point], cost: Callable[[Point], float], label: str) -> None:
    """Draw the loss of single batches, and its moving mean over a twentieth of the points."""
    known = [point for point in points if isfinite(point.loss)]
    axis.set(title="training loss", xlabel=label, xlim=(0, 1.02 * max(map(cost, points)) or 1))
    if not known:
        axis.text(0.5, 0.5, "training_step returned no loss", ha="center", transform=axis.transAxes)
        return
    costs, losses = [cost(point) for point in known], [point.loss for point in known]
    width = max(len(known) // 20, 1)
    sums = list(accumulate(losses, initial=0.0))
    means = [(sums[i] - sums[max(i - width, 0)]) / min(i, width) for i in range(1, len(sums))]
    axis.plot(costs, losses, color="tab:blue", lw=0.7, alpha=0.35 if width > 1 else 1)
    if width > 1:
        axis.plot(costs, means, color="tab:blue", lw=1.5)


def _draw_density(axis: Any, groups: Sequence[Selected]) -> None:
    """Draw for each group a bar of the elements updated, and a mark at the target."""
    height = 0.8 if len(groups) <= MOST_LABELS else 1.0
    for row, group in enumerate(groups):
        n = max(group.steps * group.elements, 1) / 100
        updated, target = ("updated", "target") if row == 0 else (None, None)
        axis.barh(row, group.picked / n, height, color="tab:green", label=updated)
        axis.plot([group.target / n] * 2, [row - 0.45, row + 0.45], color="black", lw=1.2, label=target)
    _label_rows(axis, [_shortened(group.name) for group in groups])
    axis.set(title="density by group", xlabel="% of its elements, mean of logged steps", xlim=(0, None))
    if groups:  # above, where nothing is hidden
        axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize="small", frameon=False, borderpad=0.2)


def _draw_step(axis: Any, run: Run) -> None:
    """Draw the groups of the last logged step, and when LayerFusion expected it to end."""
    axis.set(title="last logged step", xlabel="ms since backward began")
    if not run.times:
        axis.text(0.5, 0.5, "times are not known", ha="center", transform=axis.transAxes)
        return
    _draw_times(axis, run.times)
    if run.expected_span_s is not None:
        axis.axvline(1e3 * run.expected_span_s, color="tab:red", ls="--", lw=1, label="expected end")
    axis.legend(loc="lower left", fontsize="x-small")  # late groups are never there


def _draw_waiting(oldest: Any, ratio: Any, waiting: Sequence[Waiting]) -> None:
    """Draw for each parameter how long its oldest gradient waits, and how much of its gradient waits."""
    limit = STARVING * waiting[0].turn if waiting else 0.0
    oldest.barh(range(len(waiting)), [each.oldest for each in waiting], color="tab:brown")
    if 0 < limit <= max(each.oldest for each in waiting):
        oldest.axvline(limit, color="tab:red", ls="--", lw=1, label="beyond: starving")
        oldest.legend(loc="lower right", bbox_to_anchor=(1, 1), fontsize="small", frameon=False, borderpad=0.2)
    oldest.set(title="oldest unsent gradient", xlabel="steps it has waited")
    ratios = [each.unsent_over_gradient for each in waiting]
    ratio.barh(range(len(ratios)), [value if isfinite(value) else 0 for value in ratios], color="tab:purple")
    ratio.set(title="norm of unsent gradient, by parameter", xlabel="times the norm of this rank's gradient")
    for axis in (oldest, ratio):
        _label_rows(axis, [_shortened(each.name) for each in waiting])
        axis.set_xlim(left=0)


def _shortened(name: str) -> str:
    return name if len(name) <= LABEL else "…" + name[1 - LABEL :]


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

    ends_ms = [1e3 * max(time.end_s for time in times) for times in (plan.times, measured) if times]
    corrected = f"by the model, {1e3 * plan.span_s:.0f} ms corrected by measured steps"
    titles = [f"expected: {ends_ms[0]:.0f} ms {corrected}", f"measured: {ends_ms[-1]:.0f} ms"][: len(ends_ms)]
    figure = Figure(figsize=(9, (1.2 + 0.3 * len(plan.ends)) * len(titles) + 0.6), layout="constrained")
    axes = figure.subplots(len(titles), 1, sharex=True, squeeze=False)[:, 0]
    for axis, title, times in zip(axes, titles, (plan.times, measured), strict=False):
        _draw_times(axis, times)
        axis.set_title(title, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel(
        "ms since backward began; compression is drawn in one piece, though it alternates with messages"
    )
    axes[0].legend(loc="lower left", fontsize="small")  # late groups are never there
    figure.savefig(path)


def _draw_times(axis: Any, times: Sequence[GroupTime]) -> None:
    """Draw backward and groups on a matplotlib axis, one below the other, in ms since backward began."""
    axis.barh(-1, 1e3 * max(time.ready_s for time in times), color="tab:gray")
    for row, time in enumerate(times):
        start, end = 1e3 * time.start_s, 1e3 * time.end_s
        busy = min(1e3 * time.busy_s, end - start)
        compression, communication, ready = ("compression", "communication", "ready") if row == 0 else (None,) * 3
        axis.barh(row, busy, left=start, color="tab:orange", label=compression)
        axis.barh(row, end - start - busy, left=start + busy, color="tab:blue", label=communication)
        axis.plot([1e3 * time.ready_s] * 2, [row - 0.4, row + 0.4], color="black", linewidth=1, label=ready)
    _label_rows(axis, ["backward", *(f"group {i}" for i in range(len(times)))], first=-1)


def _label_rows(axis: Any, labels: Sequence[str], first: int = 0) -> None:
    """Write ``labels`` beside the rows of a matplotlib axis, ``first`` on top; not more than there is room for."""
    every = max(-(-len(labels) // MOST_LABELS), 1)
    axis.set_yticks(range(first, first + len(labels), every), labels[::every])
    axis.set_ylim(first + max(len(labels), LEAST_ROWS) - 0.5, first - 0.5)
