"""Shows people what compression did in a training: tables, sentences and a picture."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import BytesIO
from itertools import accumulate
from math import isfinite
from statistics import median
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.padding import Padding
from rich.table import Column, Table

from lightning_sparse.engine.sample import STARVING, Waiting
from lightning_sparse.monitor.metrics import compression_ratio
from lightning_sparse.monitor.plan_views import LEAST_ROWS, MOST_LABELS, draw_times, label_rows, require_matplotlib
from lightning_sparse.monitor.record import Point, Run, Selected, Sums

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # an extra, and slow to import

HEADINGS = ("sent", "dense", "ratio", "density", "threshold\nerror", "unsent\nnorm", "compress", "wait")
BOTTLENECK = 0.1  # share of a step spent waiting from which the network is called one
LABEL = 22  # characters of a group's name in a picture
STARVES = 0.05  # share of a parameter's elements that starve from which it is said to
MOST_WAITING = 3  # parameters in the summary, those whose gradients wait longest
MOST_DRAWN = 8  # of them in a picture


def epoch_table(number: int, sums: Sums, last: Mapping[str, float]) -> Table:
    """Means over the steps of epoch ``number``, and of its ``last`` step what was logged."""
    steps = max(sums.steps, 1)
    table = Table(
        *(Column(heading, justify="right") for heading in HEADINGS),
        title=f"compression, epoch {number}: means of {sums.steps:,} steps on rank 0",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,  # to fit in 80 columns
        pad_edge=False,
    )
    table.add_row(
        human_bytes(sums.sent_bytes / steps),
        human_bytes(sums.dense_bytes / steps),
        f"{float(compression_ratio(sums.dense_bytes, sums.sent_bytes)):.2f}",
        f"{last['sparse/density']:.2%}",
        f"{last['sparse/threshold_error']:.2%}",
        f"{last['sparse/unsent_norm']:.3g}",
        f"{sums.ms_compress / steps:.1f} ms",
        f"{sums.ms_wait / steps:.1f} ms",
    )
    return table


def summary(run: Run) -> Group:
    """A training in a few lines, and whether the network was its bottleneck."""
    sums, steps = run.sums, max(run.sums.steps, 1)
    table = Table(
        "",
        Column("a step", justify="right"),
        Column("in all", justify="right"),
        title=f"compression: {sums.steps:,} steps on rank 0",
        box=box.SIMPLE_HEAD,
    )
    for name, count in (("sent", sums.sent_bytes), ("dense would send", sums.dense_bytes)):
        table.add_row(name, human_bytes(count / steps), human_bytes(count))
    saved = sums.dense_bytes - sums.sent_bytes
    share = f" ({saved / sums.dense_bytes:.1%})" if sums.dense_bytes else ""
    table.add_row("saved", human_bytes(saved / steps), human_bytes(saved) + share)
    ms_step = sums.ms_step / steps
    table.add_row("time", f"{ms_step:.1f} ms", f"{sums.ms_step / 1e3:.1f} s")
    for name, ms in (("  compressing", sums.ms_compress / steps), ("  waiting", run.ms_wait())):
        table.add_row(name, f"{ms:.1f} ms", f"{ms / ms_step:.1%} of it" if ms_step else "")
    if run.expected_step_s is not None and run.planned_s:
        table.add_row("expected by LayerFusion", f"{1e3 * run.expected_step_s:.1f} ms", "")
        table.add_row("  measured", f"{1e3 * median(run.planned_s):.1f} ms", f"median of {len(run.planned_s)} steps")
    lines = [verdict(run), starvation(run.waiting)]
    if errors := [point.threshold_error for point in run.series()]:
        figures = f"{errors[0]:.1%} first, {median(errors):.1%} median, {errors[-1]:.1%} last"
        lines.insert(0, f"Threshold error: {figures}.")
    return Group(table, *_waiting_table(run.waiting), *(Padding(line, (0, 2)) for line in lines if line))


def _waiting_table(waiting: Sequence[Waiting]) -> list[Table]:
    """The parameters whose gradients wait longest, if any wait."""
    if not any(each.oldest for each in waiting):
        return []
    headings = ("oldest", "unsent /\ngradient", "starving")
    table = Table(
        Column("unsent gradients that wait longest", overflow="fold"),
        *(Column(heading, justify="right", no_wrap=True) for heading in headings),
        box=box.SIMPLE_HEAD,
    )
    for each in longest_waiting(waiting)[:MOST_WAITING]:
        cells = f"{each.oldest:,} steps", f"{each.unsent_over_gradient:.3g}", f"{each.starving:.0%}"
        table.add_row(each.name, *cells)
    return [table]


def longest_waiting(waiting: Sequence[Waiting]) -> list[Waiting]:
    """The parameters of which most starves first, then those whose gradients wait longest."""
    return sorted(waiting, key=lambda each: (-each.starving, -each.oldest))


def starvation(waiting: Sequence[Waiting]) -> str:
    """Which parameters starve and what helps, in a sentence or two; empty if none does."""
    starving = [each for each in longest_waiting(waiting) if each.starving >= STARVES]
    if not starving:
        return ""
    worst, others = starving[0], len(starving) - 1
    more = f" and part of {others} other parameter{'s'[: others - 1]}" if others else ""
    return (
        f"Some gradients starve: {worst.starving:.0%} of {worst.name}{more} waited for more than "
        f"{STARVING * worst.turn:,.0f} steps, though an element is sent every {worst.turn:,.0f} steps on average. "
        "A higher density sends all of them sooner; fusion='none', or a list of groups, keeps other layers from taking "
        "their place."
    )


def verdict(run: Run) -> str:
    """Whether the network was the bottleneck, in one sentence with the figures it follows from."""
    steps = max(run.sums.steps, 1)
    ms_step = run.sums.ms_step / steps
    if not run.sums.dense_bytes or not ms_step:
        return "The network was not your bottleneck: there was nobody to send to."
    share = run.ms_wait() / ms_step
    waited = f"training waited {share:.1%} of a step ({run.ms_wait():.1f} of {ms_step:.1f} ms)"
    if share < BOTTLENECK:
        return f"The network was not your bottleneck: {waited} for means of gradients."
    if run.sums.ms_compress > run.sums.ms_network and not run.cuda:  # on CUDA the host's clock cannot tell them apart
        costs = (
            f"compressing took {run.sums.ms_compress / steps:.1f} ms and messages {run.sums.ms_network / steps:.1f} ms"
        )
        return f"The network was not your bottleneck, compression was: {waited}; {costs}."
    return f"The network was your bottleneck, or slower ranks: {waited} for means of gradients."


def human_bytes(count: float) -> str:
    """``count`` bytes in the unit one reads best, powers of 1,000: "1.50 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


# - the picture


def draw(run: Run) -> "Figure":
    """Loss, threshold error and residuals of a training, the density of its groups, and a step of it.

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
    sums, points = run.sums, run.series()
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
    label_rows(axis, [_shortened(group.name) for group in groups])
    axis.set(title="density by group", xlabel="% of its elements, mean of logged steps", xlim=(0, None))
    if groups:  # above, where nothing is hidden
        axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize="small", frameon=False, borderpad=0.2)


def _draw_step(axis: Any, run: Run) -> None:
    """Draw the groups of the last logged step, and when LayerFusion expected it to end."""
    axis.set(title="last logged step", xlabel="ms since backward began")
    if not run.times:
        axis.text(0.5, 0.5, "times are not known", ha="center", transform=axis.transAxes)
        return
    draw_times(axis, run.times)
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
        label_rows(axis, [_shortened(each.name) for each in waiting])
        axis.set_xlim(left=0)


def _shortened(name: str) -> str:
    return name if len(name) <= LABEL else "…" + name[1 - LABEL :]
