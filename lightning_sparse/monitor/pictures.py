"""Pictures of what compression did in a training."""

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from io import BytesIO
from itertools import accumulate
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_sparse.engine.observers import STARVING, Waiting
from lightning_sparse.engine.timeline import GroupTime
from lightning_sparse.fusion.model import Plan
from lightning_sparse.monitor.record import Notes, Selected
from lightning_sparse.monitor.tables import UNITS, WORTH_SHOWING, longest_waiting, of_dense

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # an extra, and slow to import

LABEL = 34  # characters of a group's or parameter's name
MOST_LABELS = 25  # beside the rows of a panel
LEAST_ROWS = 3  # a panel has room for
MOST_DRAWN = 8  # parameters, those whose gradients wait longest


def require_matplotlib() -> None:
    """Raise a ModuleNotFoundError that says what to install if it is missing."""
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            "pictures need matplotlib, which is not installed: pip install matplotlib", name="matplotlib"
        )


def draw(notes: Notes) -> "Figure":
    """Draw the loss of a training and what it sent, and of the rest what means something for its strategy.

    The figure shows itself where it is the last expression of a notebook's cell.
    """
    require_matplotlib()
    from matplotlib import rc_context

    with rc_context({"axes.titlelocation": "left", "axes.titlesize": "medium", "font.size": 9}):
        figure = _draw(notes)
    # A notebook that has not imported pyplot does not know how to show a Figure; IPython asks the object itself.
    figure._repr_png_ = partial(_png, figure)  # type: ignore[attr-defined]
    return figure


def _draw(notes: Notes) -> "Figure":
    from matplotlib.figure import Figure  # without pyplot: no display, no state

    rows = _panels(notes)
    figure = Figure(figsize=(10, 0.6 + sum(height for height, _ in rows)), dpi=96, layout="constrained")
    names: Any = [
        [name for name, _ in panels] * (3 - len(panels)) for _, panels in rows
    ]  # a single one is twice as wide
    axes = figure.subplot_mosaic(names, height_ratios=[height for height, _ in rows])
    sums = notes.sums
    figure.suptitle(f"{sums.steps:,} steps: rank 0 sent {of_dense(notes)}")
    for _, panels in rows:
        for name, draw_panel in panels:
            draw_panel(axes[name])
            axes[name].grid(lw=0.3)
            axes[name].set_axisbelow(True)
            axes[name].spines[["top", "right"]].set_visible(False)
    return figure


Panel = tuple[str, Callable[[Any], None]]  # a name, and what draws it on a matplotlib axis


def _panels(notes: Notes) -> list[tuple[float, list[Panel]]]:
    """Return the rows of the figure, each a height in inches and one or two panels, without those that are empty."""
    waiting = longest_waiting(notes.waiting)[:MOST_DRAWN]
    waits = notes.selects and any(each.oldest >= WORTH_SHOWING for each in waiting)
    groups = 1.2 + 0.2 * min(max(len(notes.groups), LEAST_ROWS), MOST_LABELS)
    rows: list[tuple[float, list[tuple[bool, str, Callable[[Any], None]]]]] = [
        (2.3, [(True, "loss", partial(_draw_loss, notes)), (True, "bytes", partial(_draw_bytes, notes))]),
        (
            1.7,
            [
                (any(point.unsent_norm for point in notes.points), "norm", partial(_draw_norm, notes)),
                (notes.selects, "error", partial(_draw_error, notes)),
            ],
        ),
        (
            groups,
            [
                (notes.selects, "density", partial(_draw_density, groups=notes.groups)),
                (bool(notes.times), "step", partial(_draw_step, notes)),
            ],
        ),
        (
            1.2 + 0.2 * max(len(waiting), LEAST_ROWS),
            [
                (waits, "oldest", partial(_draw_oldest, waiting=waiting)),
                (waits, "ratio", partial(_draw_ratio, waiting=waiting)),
            ],
        ),
    ]
    drawn = [(height, [(name, panel) for wanted, name, panel in panels if wanted]) for height, panels in rows]
    return [(height, panels) for height, panels in drawn if panels]


def _png(figure: "Figure") -> bytes:
    file = BytesIO()
    figure.savefig(file, format="png", bbox_inches="tight")  # whole, however long a label is
    return file.getvalue()


def _draw_loss(notes: Notes, axis: Any) -> None:
    """Draw the loss of single batches, and its moving mean over a twentieth of the points."""
    known = [point for point in notes.points if isfinite(point.loss)]
    last_s = max(point.seconds for point in notes.points)
    axis.set(title="training loss", xlabel="seconds since training began", xlim=(0, 1.02 * last_s or 1))
    if not known:
        axis.text(0.5, 0.5, "training_step returned no loss", ha="center", transform=axis.transAxes)
        return
    seconds, losses = [point.seconds for point in known], [point.loss for point in known]
    width = max(len(known) // 20, 1)
    sums = list(accumulate(losses, initial=0.0))
    means = [(sums[i] - sums[max(i - width, 0)]) / min(i, width) for i in range(1, len(sums))]
    axis.plot(seconds, losses, color="tab:blue", lw=0.7, alpha=0.35 if width > 1 else 1)
    if width > 1:
        axis.plot(seconds, means, color="tab:blue", lw=1.5)


def _draw_bytes(notes: Notes, axis: Any) -> None:
    """Draw what rank 0 has sent by each step, below what dense DDP would have sent."""
    sums, last = notes.sums, notes.points[-1].step + 1
    first = max(last - sums.steps, 0)  # where a training was resumed
    steps = [first, *(point.step + 1 for point in notes.points)]
    dense = [(step - first) * sums.dense_bytes / max(sums.steps, 1) for step in steps]
    sent = [0, *(point.sent_bytes for point in notes.points)]
    unit = next((unit for unit in ("GB", "MB", "kB") if max(dense) >= UNITS[unit]), "kB")
    axis.plot(steps, [each / UNITS[unit] for each in dense], color="tab:gray", ls="--", lw=1.2, label=notes.dense)
    axis.plot(steps, [each / UNITS[unit] for each in sent], color="tab:blue", lw=1.5, label="this training")
    axis.set(title="sent by rank 0", xlabel="step", ylabel=unit, xlim=(first, None), ylim=(0, None))
    axis.legend(loc="upper left", fontsize="small", frameon=False)


def _draw_norm(notes: Notes, axis: Any) -> None:
    steps = [point.step for point in notes.points]
    axis.plot(steps, [point.unsent_norm for point in notes.points], color="tab:purple", lw=1)
    axis.set(title="residual, which later steps send", xlabel="step", ylabel="norm", ylim=(0, None))


def _draw_error(notes: Notes, axis: Any) -> None:
    steps = [point.step for point in notes.points]
    axis.plot(steps, [100 * point.threshold_error for point in notes.points], color="tab:red", lw=1)
    axis.set(title="how far from the number of elements asked for", xlabel="step", ylabel="%", ylim=(0, None))


def _draw_density(axis: Any, groups: Sequence[Selected]) -> None:
    """Draw for each group a bar of the elements updated, and a mark at the target."""
    height = 0.8 if len(groups) <= MOST_LABELS else 1.0
    for row, group in enumerate(groups):
        n = max(group.steps * group.elements, 1) / 100
        updated, target = ("updated", "asked for") if row == 0 else (None, None)
        axis.barh(row, group.picked / n, height, color="tab:green", label=updated)
        axis.plot([group.target / n] * 2, [row - 0.45, row + 0.45], color="black", lw=1.2, label=target)
    _label_rows(axis, [_shortened(group.name) for group in groups])
    axis.set(title="elements updated in a step", xlabel="% of those that travel together", xlim=(0, None))
    if groups:
        _legend_above(axis)


def _draw_step(notes: Notes, axis: Any) -> None:
    """Draw the groups of the last logged step, and when LayerFusion expected it to end."""
    axis.set(title="one step", xlabel="ms since the backward pass began")
    _draw_times(axis, notes.times)
    if notes.expected_span_s is not None:
        axis.axvline(1e3 * notes.expected_span_s, color="tab:red", ls="--", lw=1, label="expected")
    _legend_above(axis)


def _draw_oldest(axis: Any, waiting: Sequence[Waiting]) -> None:
    """Draw for each parameter how long its oldest gradient waits."""
    limit = STARVING * waiting[0].turn
    axis.barh(range(len(waiting)), [each.oldest for each in waiting], color="tab:brown")
    if 0 < limit <= max(each.oldest for each in waiting):
        axis.axvline(limit, color="tab:red", ls="--", lw=1, label="too long")
        _legend_above(axis)
    axis.set(title="longest wait of a residual", xlabel="steps", xlim=(0, None))
    _label_rows(axis, [_shortened(each.name) for each in waiting])


def _draw_ratio(axis: Any, waiting: Sequence[Waiting]) -> None:
    """Draw for each parameter how much of its gradient waits; the rows are those beside."""
    ratios = [each.unsent_over_gradient for each in waiting]
    axis.barh(range(len(ratios)), [value if isfinite(value) else 0 for value in ratios], color="tab:purple")
    axis.set(title="residual of the same parameters", xlabel="times the norm of a gradient", xlim=(0, None))
    _label_rows(axis, [""] * len(waiting))


def _legend_above(axis: Any) -> None:
    """Put the legend where it hides nothing."""
    axis.legend(
        loc="lower right", bbox_to_anchor=(1, 1), ncols=4, fontsize="x-small", frameon=False, borderpad=0.2,
        columnspacing=1.0, handlelength=1.0,
    )  # fmt: skip


def _shortened(name: str) -> str:
    return name if len(name) <= LABEL else "…" + name[1 - LABEL :]


def draw_timeline(plan: Plan, measured: Sequence[GroupTime], path: str | Path) -> None:
    """Draw backward, and each group's compression and communication, expected above and ``measured``, if any, below.

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
        compression, communication, ready = ("compressing", "sending", "ready") if row == 0 else (None,) * 3
        axis.barh(row, busy, left=start, color="tab:orange", label=compression)
        axis.barh(row, end - start - busy, left=start + busy, color="tab:blue", label=communication)
        axis.plot([1e3 * time.ready_s] * 2, [row - 0.4, row + 0.4], color="black", linewidth=1, label=ready)
    _label_rows(axis, ["backward", *(f"group {i}" for i in range(len(times)))], first=-1)


def _label_rows(axis: Any, labels: Sequence[str], first: int = 0) -> None:
    """Write ``labels`` beside the rows of a matplotlib axis, ``first`` on top; not more than there is room for."""
    every = max(-(-len(labels) // MOST_LABELS), 1)
    axis.set_yticks(range(first, first + len(labels), every), labels[::every])
    axis.set_ylim(first + max(len(labels), LEAST_ROWS) - 0.5, first - 0.5)
