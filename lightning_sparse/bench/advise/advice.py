"""Advice: what to expect of every candidate, which to use, and why.  Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Column, Table

from lightning_sparse.auto.chooser import about_as_short, least_error
from lightning_sparse.auto.forecast import Forecast
from lightning_sparse.auto.policy import TOLERANCE, Candidate
from lightning_sparse.compressors import Dense
from lightning_sparse.engine.compression_error import LOCAL
from lightning_sparse.monitor.tables import human_bytes


@dataclass(frozen=True)
class Advice:
    """What to expect of a candidate, as a row of a table."""

    name: str
    step_s: float  # seconds of a step
    sent_bytes: float  # of a rank in a step
    limit: str  # what the step waits for at its end: "backward", "compression" or "network"
    delivered: float | None  # the part of what is unsent that a step delivers, where it was tried
    age: float | None  # how many steps late it arrives
    undelivered: float  # by which they are ordered
    chosen: bool
    about_as_short: bool  # as the shortest
    python: str = ""  # to paste
    yaml: str = ""
    sums: str = ""  # which way sums of which size take


def advise_on(forecasts: Sequence[Forecast], sums: str) -> list[Advice]:
    """Return a row for DDP, and one for each candidate, all of them tried; ``sums`` say which way sums take."""
    dense = next(f for f in forecasts if f.candidate == Candidate(Dense()))
    short = about_as_short(forecasts, TOLERANCE)
    chosen = least_error(short)
    ddp = Advice("ddp", dense.buckets_s, dense.sent_bytes, dense.limit, 1.0, 0.0, 0.0, False, False, sums=sums)
    return [
        ddp,
        *(
            Advice(
                str(f.candidate),
                f.step_s,
                f.sent_bytes,
                f.limit,
                f.delivered,
                f.staleness,
                f.error,
                f is chosen,
                f in short,
                *to_paste(f.candidate),
            )
            for f in forecasts
        ),
    ]


def to_paste(candidate: Candidate) -> tuple[str, str]:
    """Return the strategy of ``candidate`` in Python and in YAML."""
    settings, options = candidate.settings, {"wire_dtype": candidate.wire_dtype, "local_steps": candidate.local_steps}
    options = {key: value for key, value in options.items() if value}
    name = type(candidate.compressor).__name__
    inner = ", ".join(f"{key}={value!r}" for key, value in settings.items())
    outer = "".join(f", {key}={value!r}" for key, value in options.items())
    yaml = [
        "trainer:",
        "  strategy:",
        "    class_path: lightning_sparse.SparseDDPStrategy",
        "    init_args:",
        f"      compressor: {{class_path: lightning_sparse.{name}{_init_args(settings)}}}",
        *(f"      {key}: {value}" for key, value in options.items()),
    ]
    return f"Trainer(strategy=ls.SparseDDPStrategy(ls.{name}({inner}){outer}))", "\n".join(yaml)


def _init_args(settings: dict[str, object]) -> str:
    inner = ", ".join(f"{key}: {value}" for key, value in settings.items())
    return f", init_args: {{{inner}}}" if settings else ""


def table(advices: Sequence[Advice], title: str) -> Table:
    """Show DDP first, then the fastest; the one to use in bold."""
    numbers = (
        Column(heading, justify="right", no_wrap=True) for heading in ("step", "faster", "delivered", "late", "sends")
    )
    result = Table(
        Column("strategy", no_wrap=True), *numbers, "waits for", title=title, box=box.SIMPLE_HEAD, pad_edge=False
    )
    ddp, *others = advices
    for a in [ddp, *sorted(others, key=lambda a: a.step_s)]:
        result.add_row(
            f"[bold]{a.name}[/bold]" if a.chosen else a.name,
            f"{1e3 * a.step_s:.0f} ms",
            f"{ddp.step_s / a.step_s:.1f} x",
            "" if a.delivered is None else f"{a.delivered:.0%}",
            "" if a.age is None else f"{a.age:.1f}",
            human_bytes(a.sent_bytes),
            a.limit,
        )
    return result


def words(advices: Sequence[Advice], busy: str = "") -> list[str]:
    """Write the recommendation, why this one, and what to paste; before them, whether to trust what was measured."""
    ddp, best = advices[0], next(a for a in advices if a.chosen)
    doubt = [busy, ""] if busy else []
    if ddp.step_s <= (1 + TOLERANCE) * min(a.step_s for a in advices[1:]):
        return [
            *doubt,
            f"Do not compress: no step is expected to be more than {TOLERANCE:.0%} shorter than plain DDP's, "
            f"{1e3 * ddp.step_s:.0f} ms, which waits for its {ddp.limit}. Use plain DDP:",
            "",
            "    Trainer(strategy='ddp')",
        ]
    return [
        *doubt,
        f"Use sparse_auto, which chooses so by itself: {best.name}, a step of about {1e3 * best.step_s:.0f} ms in "
        f"place of {1e3 * ddp.step_s:.0f} ms ({ddp.step_s / best.step_s:.1f} times faster). {_why(advices, best)}",
        "",
        "    import lightning_sparse as ls",
        "    Trainer(strategy='sparse_auto')",
        f"    {best.python}  # the same, fixed",
        "",
        "or in a config file:",
        "",
        *(f"    {line}" for line in best.yaml.split("\n")),
    ]


def _why(advices: Sequence[Advice], best: Advice) -> str:
    """Say why ``best``, and not the next more faithful one."""
    short = [a for a in advices if a.about_as_short]
    why = (
        f"Of the {len(short)} whose steps are about as short as the shortest it is the most faithful: each step "
        f"delivers {best.delivered or 0:.0%} of what is owed, {best.age or 0:.1f} steps late. What local steps leave "
        f"counts {LOCAL:g} times as much as gradients do, since a rank's own weights have its own steps at once."
    )
    slower = [a for a in advices[1:] if not a.about_as_short and a.undelivered < best.undelivered]
    if slower:
        nearest = min(slower, key=lambda a: a.step_s)
        why += f" More faithful, but slower: {nearest.name}, {1e3 * nearest.step_s:.0f} ms a step."
    return why
