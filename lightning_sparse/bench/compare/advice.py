"""Advice on every candidate: what to expect of it, and how to use it."""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass

from lightning_sparse.auto.chooser import EXACT, soonest
from lightning_sparse.auto.forecast import Forecast
from lightning_sparse.auto.more_steps import likely
from lightning_sparse.auto.policy import Auto, Candidate


@dataclass(frozen=True)
class Advice:
    """What to expect of a candidate, as a row of a table."""

    name: str
    step_s: float  # seconds of a step
    sent_bytes: float  # of a rank in a step
    limit: str  # what the step waits for at its end: "backward", "compression" or "network"
    delivered: float | None  # the part of what is unsent that a step delivers, where it was tried
    staleness: float | None  # steps after which a gradient arrives
    more_steps: float | None  # times as many steps as dense training to a loss
    chosen: bool
    measured: bool = False  # the step, and not only expected
    python: str = ""  # to paste
    yaml: str = ""

    @property
    def seconds(self) -> float:
        """Expected to a loss, for each step that dense training needs; infinite where it was not tried."""
        return math.inf if self.more_steps is None else self.step_s * self.more_steps

    @property
    def likely_s(self) -> tuple[float, float]:
        """The least and the most of them that a task may need."""
        least, most = likely(self.more_steps or math.inf)
        return self.step_s * least, self.step_s * most


def advise_on(
    forecasts: Sequence[Forecast], chosen: Candidate | None = None, measured: Container[Candidate] = ()
) -> list[Advice]:
    """Return a row for DDP, and one for each candidate; those that cannot be soonest were not tried.

    Args:
        forecasts: one of each candidate that was looked at, float32 sums among them.
        chosen: one of them; None: the one that is expected to be soonest at a loss.
        measured: candidates whose steps were.
    """
    dense = next(f for f in forecasts if f.candidate == EXACT)
    chosen = chosen or soonest([f for f in forecasts if f.delivered is not None], Auto.at_most).candidate
    found = [Advice("ddp", dense.buckets_s, dense.sent_bytes, dense.limit, 1.0, 0.0, 1.0, False)]
    for f in forecasts:
        more = None if f.delivered is None else f.more_steps
        expected = f.step_s, f.sent_bytes, f.limit, f.delivered, f.staleness, more
        of_whom = f.candidate == chosen, f.candidate in measured
        found.append(Advice(str(f.candidate), *expected, *of_whom, *to_paste(f.candidate)))
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
