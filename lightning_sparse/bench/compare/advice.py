"""Advice on every candidate: what to expect of it, and how to use it."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_sparse.auto.chooser import about_as_short, least_error
from lightning_sparse.auto.forecast import Forecast
from lightning_sparse.auto.policy import TOLERANCE, Candidate
from lightning_sparse.compressors import Dense


@dataclass(frozen=True)
class Advice:
    """What to expect of a candidate, as a row of a table."""

    name: str
    step_s: float  # seconds of a step
    sent_bytes: float  # of a rank in a step
    limit: str  # what the step waits for at its end: "backward", "compression" or "network"
    delivered: float | None  # the part of what is unsent that a step delivers, where it was tried
    staleness: float | None  # steps after which a gradient arrives
    error: float  # the compression error, by which they are ordered
    chosen: bool
    about_as_short: bool  # as the shortest
    python: str = ""  # to paste
    yaml: str = ""


def advise_on(forecasts: Sequence[Forecast]) -> list[Advice]:
    """Return a row for DDP, and one for each candidate, all of them tried."""
    dense = next(f for f in forecasts if f.candidate == Candidate(Dense()))
    short = about_as_short(forecasts, TOLERANCE)
    chosen = least_error(short)
    found = [Advice("ddp", dense.buckets_s, dense.sent_bytes, dense.limit, 1.0, 0.0, 0.0, False, False)]
    for f in forecasts:
        expected = f.step_s, f.sent_bytes, f.limit, f.delivered, f.staleness, f.error
        found.append(Advice(str(f.candidate), *expected, f is chosen, f in short, *to_paste(f.candidate)))
    return found


def to_paste(candidate: Candidate) -> tuple[str, str]:
    """Return the strategy of ``candidate`` in Python and in YAML."""
    settings, name = candidate.settings, type(candidate.compressor).__name__
    given = {"wire_dtype": candidate.wire_dtype, "local_steps": candidate.local_steps}
    options = {key: value for key, value in given.items() if value}
    inner = ", ".join(f"{key}={value!r}" for key, value in settings.items())
    outer = "".join(f", {key}={value!r}" for key, value in options.items())
    of_yaml = ", ".join(f"{key}: {value}" for key, value in settings.items())
    init_args = f", init_args: {{{of_yaml}}}" if settings else ""
    yaml = [
        "trainer:",
        "  strategy:",
        "    class_path: lightning_sparse.SparseDDPStrategy",
        "    init_args:",
        f"      compressor: {{class_path: lightning_sparse.{name}{init_args}}}",
        *(f"      {key}: {value}" for key, value in options.items()),
    ]
    return f"Trainer(strategy=ls.SparseDDPStrategy(ls.{name}({inner}){outer}))", "\n".join(yaml)
