"""Tables and sentences on what compression did in a training."""

from collections.abc import Mapping, Sequence
from statistics import median

from rich import box
from rich.console import Group
from rich.padding import Padding
from rich.table import Column, Table

from lightning_sparse.engine.observers import STARVING, Waiting
from lightning_sparse.engine.timeline import GroupTime
from lightning_sparse.fusion.model import Plan
from lightning_sparse.monitor.record import Notes, Sums
from lightning_sparse.settings import counted

BOTTLENECK = 0.1  # share of a step spent waiting from which the network is called one
STARVES = 0.05  # share of a parameter's elements that starve from which the parameter is said to
WORTH_SHOWING = 2  # steps that a gradient must have waited
MOST_WAITING = 3  # parameters in the summary, those whose gradients wait longest


def epoch_table(epochs: range, notes: Notes, sums: Sums, last: Mapping[str, float]) -> Table:
    """Show means over the steps of ``epochs`` of ``notes``, and what was logged of the ``last`` of them."""
    steps = max(sums.steps, 1)
    which = f"epoch {epochs[0]}" if len(epochs) == 1 else f"epochs {epochs[0]} to {epochs[-1]}"
    cells = {
        "sent": human_bytes(sums.sent_bytes / steps),
        notes.dense.replace(" ", "\n"): human_bytes(sums.dense_bytes / steps),
        "sent\nof it": percent(sums.sent_bytes, sums.dense_bytes),
    }
    if notes.selects:
        cells |= {
            "elements\nupdated": f"{last['sparse/density']:.2%}",
            "off what was\nasked for": f"{last['sparse/threshold_error']:.1%}",
        }
    cells |= {
        "residual\n(norm)": f"{last['sparse/residual_norm']:.3g}",
        "compress": f"{sums.ms_compress / steps:.1f} ms",
        "wait": f"{sums.ms_wait / steps:.1f} ms",
    }
    table = Table(
        *(Column(heading, justify="right") for heading in cells),
        title=f"{which}: means of {counted(sums.steps, 'step')} on rank 0",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,  # to fit in 80 columns
        pad_edge=False,
    )
    table.add_row(*cells.values())
    return table


def summary(notes: Notes) -> Group:
    """Say what to do, and show in a few lines why."""
    sums, steps = notes.sums, max(notes.sums.steps, 1)
    table = Table(
        "",
        Column("a step", justify="right"),
        Column("in all", justify="right"),
        title=f"{counted(sums.steps, 'step')} on rank 0",
        box=box.SIMPLE_HEAD,
    )
    for name, count in (("sent", sums.sent_bytes), (notes.dense, sums.dense_bytes)):
        table.add_row(name, human_bytes(count / steps), human_bytes(count))
    saved = sums.dense_bytes - sums.sent_bytes
    share = f" ({saved / sums.dense_bytes:.1%})" if sums.dense_bytes else ""
    table.add_row("saved", human_bytes(saved / steps), human_bytes(saved) + share)
    ms_step = sums.ms_step / steps
    table.add_row("time", f"{ms_step:.1f} ms", f"{sums.ms_step / 1e3:.1f} s")
    costs = (("  compressing", sums.ms_compress / steps), ("  waiting for the network", notes.ms_wait()))
    for name, ms in costs if sums.sent_bytes else ():
        table.add_row(name, f"{ms:.1f} ms", f"{ms / ms_step:.1%} of it" if ms_step else "")
    if notes.expected_step_s is not None and notes.planned_s:
        table.add_row("expected by LayerFusion", f"{1e3 * notes.expected_step_s:.1f} ms", "")
        planned_s = notes.planned_s
        table.add_row("  measured", f"{1e3 * median(planned_s):.1f} ms", f"median of {counted(len(planned_s), 'step')}")
    first = [line for line in (verdict(notes), starvation(notes)) if line]
    last = []
    if notes.selects:
        errors = [point.threshold_error for point in notes.points]
        figures = f"{errors[0]:.1%} first, {median(errors):.1%} median, {errors[-1]:.1%} last"
        last = [f"Elements updated, off the number asked for: {figures}."]
    padded = [[Padding(line, (0, 2)) for line in lines] for lines in (first, last)]
    return Group("", *padded[0], table, *_waiting_table(notes), *padded[1])


def _waiting_table(notes: Notes) -> list[Table]:
    """Show the parameters whose gradients wait longest, if any wait while others travel."""
    if not notes.selects or all(each.oldest < WORTH_SHOWING for each in notes.waiting):
        return []
    headings = ("longest", "residual / own\ngradient", "waits\ntoo long")
    table = Table(
        Column("gradients that wait longest", overflow="fold"),
        *(Column(heading, justify="right", no_wrap=True) for heading in headings),
        box=box.SIMPLE_HEAD,
    )
    for each in longest_waiting(notes.waiting)[:MOST_WAITING]:
        cells = counted(each.oldest, "step"), f"{each.unsent_over_gradient:.3g}", f"{each.starving:.0%}"
        table.add_row(each.name, *cells)
    return [table]


def longest_waiting(waiting: Sequence[Waiting]) -> list[Waiting]:
    """Return first the parameters of which most starves, then those whose gradients wait longest."""
    return sorted(waiting, key=lambda each: (-each.starving, -each.oldest))


def starvation(notes: Notes) -> str:
    """Say what helps parameters whose gradients wait too long, and which they are; empty if none does.

    Where nothing is selected, nothing takes another's place.  Where training waits for the network, the density is not
    to be raised.
    """
    starving = [each for each in longest_waiting(notes.waiting) if each.starving >= STARVES]
    if not starving or not notes.selects:
        return ""
    helps = "give layers a share of their own (fusion='none', or a list of groups)"
    helps = f"Raise the density, or {helps}" if _waited(notes) < BOTTLENECK else helps[0].upper() + helps[1:]
    worst, others = starving[0], len(starving) - 1
    more = f" and part of {others} other parameter{'s'[: others - 1]}" if others else ""
    return (
        f"{helps}: {worst.starving:.0%} of {worst.name}{more} waited for more than {STARVING * worst.turn:,.0f} steps, "
        f"though an element is sent every {worst.turn:,.0f} steps on average."
    )


def verdict(notes: Notes) -> str:
    """Say what to do about the time of a step, with the figures it follows from."""
    sums, steps = notes.sums, max(notes.sums.steps, 1)
    ms_step = sums.ms_step / steps
    if not sums.dense_bytes or not ms_step:
        return f"Use strategy='auto', or start more {notes.members}: there was nobody to send to."
    if not sums.sent_bytes:
        return "Train for longer: nothing had been sent yet when training ended."
    share = _waited(notes)
    waited = f"training waited {share:.1%} of a step ({notes.ms_wait():.1f} of {ms_step:.1f} ms)"
    if share < BOTTLENECK:
        return f"{notes.advice['send more']}: the network was not your bottleneck, {waited} for means of gradients."
    if notes.is_undecided:
        return (
            "Use strategy='ddp' for a model so small, or train for longer: sparse_auto had chosen nothing when "
            f"training ended, and {waited} for means of gradients."
        )
    advice = notes.advice["send no sparser" if starvation(notes) else "send less"]
    cause = f"the network was your bottleneck, or a slower rank; {waited} for means of gradients"
    is_known = not notes.cuda and sums.sent_bytes < sums.dense_bytes  # on CUDA the host's clock cannot tell them apart
    if is_known and sums.ms_compress > sums.ms_network:
        advice = notes.advice["compress less"]
        costs = f"compressing took {sums.ms_compress / steps:.1f} ms and messages {sums.ms_network / steps:.1f} ms"
        cause = f"compression was your bottleneck, {waited} and {costs}"
    return f"{advice}: {cause}."


def _waited(notes: Notes) -> float:
    """The part of a step in which training waited for means."""
    ms_step = notes.sums.ms_step / max(notes.sums.steps, 1)
    return notes.ms_wait() / ms_step if ms_step else 0.0


UNITS = {"GB": 1e9, "MB": 1e6, "kB": 1e3}


def percent(part: float, whole: float) -> str:
    """Write a share in two digits or more: "1.3 %", "0.42 %", "25 %"."""
    share = 100 * part / whole if whole else 100.0
    return f"{share:.0f} %" if share >= 9.95 else f"{share:.2g} %"


def of_dense(notes: Notes) -> str:
    """Write what was sent, and what part that is of what dense averages would have sent."""
    sums = notes.sums
    if not sums.dense_bytes:
        return "nothing, to nobody"
    return (
        f"{human_bytes(sums.sent_bytes)}, {percent(sums.sent_bytes, sums.dense_bytes)} of {notes.dense}'s "
        f"{human_bytes(sums.dense_bytes)}"
    )


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
        title="LayerFusion: expected (and measured), in ms since the backward pass began",
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
