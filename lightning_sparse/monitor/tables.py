"""Tables and sentences on what compression did in a training."""

from collections.abc import Mapping, Sequence
from statistics import median

from rich import box
from rich.console import Group
from rich.padding import Padding
from rich.table import Column, Table

from lightning_sparse.engine.sample import STARVING, Waiting
from lightning_sparse.engine.timeline import GroupTime
from lightning_sparse.fusion.model import Plan
from lightning_sparse.monitor.metrics import compression_ratio
from lightning_sparse.monitor.record import Run, Sums

BOTTLENECK = 0.1  # share of a step spent waiting from which the network is called one
STARVES = 0.05  # share of a parameter's elements that starve from which the parameter is said to
MOST_WAITING = 3  # parameters in the summary, those whose gradients wait longest


def epoch_table(number: int, sums: Sums, last: Mapping[str, float]) -> Table:
    """Show means over the steps of epoch ``number``, and what was logged of its ``last`` step."""
    headings = ("sent", "dense", "ratio", "density", "threshold\nerror", "unsent\nnorm", "compress", "wait")
    steps = max(sums.steps, 1)
    table = Table(
        *(Column(heading, justify="right") for heading in headings),
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
    """Show a training in a few lines, and whether the network was its bottleneck."""
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
    if errors := [point.threshold_error for point in run.points]:
        figures = f"{errors[0]:.1%} first, {median(errors):.1%} median, {errors[-1]:.1%} last"
        lines.insert(0, f"Threshold error: {figures}.")
    return Group(table, *_waiting_table(run.waiting), *(Padding(line, (0, 2)) for line in lines if line))


def _waiting_table(waiting: Sequence[Waiting]) -> list[Table]:
    """Show the parameters whose gradients wait longest, if any wait."""
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
    """Return first the parameters of which most starves, then those whose gradients wait longest."""
    return sorted(waiting, key=lambda each: (-each.starving, -each.oldest))


def starvation(waiting: Sequence[Waiting]) -> str:
    """Say which parameters starve and what helps; empty if none does."""
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
    """Say whether the network was the bottleneck, with the figures it follows from."""
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
    """Write ``count`` bytes in the unit one reads best, powers of 1,000: "1.50 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def plan_table(plan: Plan, measured: Sequence[GroupTime]) -> Group:
    """Show what was expected of each group, below it what was measured, and the plans that were compared.

    Times are milliseconds since backward began: the group's last gradient ready, the group taken up, its mean there.
    """
    numbers = ("elements", "ready", "start", "end", "busy")
    groups = Table(
        "group",
        Column("up to", overflow="fold"),
        *(Column(heading, justify="right", no_wrap=True) for heading in numbers),
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


def _cells(time: GroupTime) -> list[str]:
    return [f"{1e3 * s:.1f}" for s in (time.ready_s, time.start_s, time.end_s, time.busy_s)]
