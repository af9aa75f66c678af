"""``lightning-sparse scale``: how traffic and time of communication grow with the number of ranks.

Bytes are counted, by running the compressors among all ranks in this process; time is modelled from them and a link.
With ``--emulate`` the bench measures both among 2, 4, 8 and 16 ranks, and the link of the model is fitted to that.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

from lightning_sparse.bench.cluster.spec import parse, parse_link
from lightning_sparse.bench.compare import report
from lightning_sparse.bench.compare.run import find_ranks, measure_all
from lightning_sparse.bench.compare.worker import Schedule
from lightning_sparse.bench.compare.workloads import parameter_sizes, workload_named
from lightning_sparse.bench.scale import plot
from lightning_sparse.bench.scale.model import Fit, Measurement, fit, measured_points, model_s
from lightning_sparse.bench.scale.ranks import MOST_FLOATS, StepTraffic, count_traffic
from lightning_sparse.compressors import COMPRESSORS
from lightning_sparse.fusion.costs import Link
from lightning_sparse.monitor.pictures import require_matplotlib
from lightning_sparse.monitor.tables import human_bytes

WORKLOAD = "mlp_1m"
MEASURED = (2, 4, 8, 16)  # ranks the bench measures: more keep few cores busy with computing, not with messages
LEAST, MOST = 2, 1024  # ranks
STEPS, WARMUP, ROUNDS = 10, 3, 3  # of the bench
GROUPS = "fusion=bucket"  # so that the model travels in one group, as it is counted


@dataclass(frozen=True)
class ScaleArguments:
    """Arguments of ``lightning-sparse scale``, as its ``--help`` explains them, and the command that was typed."""

    emulate: str
    link: str
    most: int
    output: Path
    command: str

    def check(self) -> None:
        """Raise an error for what cannot work, before anything starts."""
        if not LEAST <= self.most <= MOST:
            raise ValueError(f"--most must be a number of ranks from {LEAST} to {MOST}; got {self.most}")
        for option, rate in (("--emulate", self.emulate), ("--link", self.link)):
            try:
                parse_link(rate or "unlimited")
            except ValueError as error:
                raise ValueError(f"{option}: {error}") from None
        require_matplotlib()

    def sizes(self) -> list[int]:
        """Return the numbers of ranks to count: 2, 4, 8, ..."""
        return [2**i for i in range(1, self.most.bit_length())]

    def schedules(self) -> list[Schedule]:
        """Return what to measure; nothing without ``emulate``."""
        strategies = ",".join(["ddp", *(f"{name}:{GROUPS}" for name in COMPRESSORS)])
        clusters = [f"{size}x{self.emulate}" for size in MEASURED if self.emulate and size <= self.most]
        return [Schedule(cluster, WORKLOAD, strategies, STEPS, WARMUP, ROUNDS, "cpu") for cluster in clusters]


def scale(arguments: ScaleArguments) -> int:
    """Count, measure if asked to, print and write down; returns the exit status: 1 if a strategy failed."""
    arguments.check()
    console = report.new_console()
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / f"{datetime.now(timezone.utc):%Y-%m-%d-%H%M%S}-scale.json"
    elements = sum(parameter_sizes(workload_named(WORKLOAD)))
    facts = report.environment(arguments.command)
    rounds: list[report.Round] = []
    with report.new_progress(console) as progress:
        if schedules := arguments.schedules():
            _, measure = find_ranks([schedule.cluster for schedule in schedules], None)
            measure_all(schedules, measure, facts, path.with_suffix(".jsonl"), progress, rounds)
        counts = count_all(arguments.sizes(), elements, progress)
    measured = measured_points(report.summarise(rounds, "ddp"))
    fitted = fit(measured, counts)
    given = parse(f"2x{arguments.emulate or arguments.link}")
    link = fitted.link if fitted else Link(given.hop_s, given.s_per_byte)
    modelled = [_modelled(each, elements, link) for each in counts]

    results = {
        "environment": facts,
        "workload": WORKLOAD,
        "elements": elements,
        "link": asdict(link),
        "fit": asdict(fitted) if fitted else None,
        "counted": [asdict(c) | {"modelled_s": m.seconds} for c, m in zip(counts, modelled, strict=True)],
        "measured": [asdict(each) for each in measured],
    }
    path.write_text(json.dumps(results, indent=1) + "\n")
    title = words(arguments, link, fitted)
    plot.draw(modelled, measured, elements, path.with_suffix(".svg"), title)
    show(console, modelled, measured, elements)
    if shorter := [each.ranks for each in counts if each.elements < elements]:
        title += (
            f"\nFrom {min(shorter)} ranks on, gradients were shorter, for all together to have {MOST_FLOATS:,} "
            "elements at most, and bytes are scaled up."
        )
    for line in (title, *report.notes(rounds)):
        console.print(line, highlight=False, markup=False)
    console.print(f"results: {path} and .svg", highlight=False, soft_wrap=True)
    return int(any(each.error for each in rounds))


def count_all(sizes: Sequence[int], elements: int, progress: Progress) -> list[StepTraffic]:
    """Count what every compressor sends, for gradients of ``elements``, or fewer where memory is short."""
    task = progress.add_task("counting", total=len(COMPRESSORS) * len(sizes))
    found = []
    for name in COMPRESSORS:
        for size in sizes:
            progress.update(task, description=f"counting {name} {size}", refresh=True)
            found.append(count_traffic(name, size, elements))
            progress.advance(task)
    return found


def _modelled(count: StepTraffic, elements: int, link: Link) -> Measurement:
    """Model what a gradient of ``elements`` takes, in proportion to the one counted.

    That is a little much where the one counted is shorter: parts of fixed size weigh less in longer messages.
    """
    sent_bytes = count.sent_bytes * (elements / count.elements)
    return Measurement(count.strategy, count.ranks, sent_bytes, model_s(count.hops, sent_bytes, link))


# - for people


def words(arguments: ScaleArguments, link: Link, fitted: Fit | None) -> str:
    """Say which link the model has, and how well it fits."""
    rate = f"{8e-6 / link.s_per_byte:,.0f} Mbit/s" if link.s_per_byte else "no limit"
    described = f"{1e3 * link.latency_s:.2f} ms a hop, {rate}"
    if fitted is None:
        return f"link as given: {described}" + ("; too little was measured to fit one" if arguments.emulate else "")
    return (
        f"link fitted to {fitted.points} points measured at {arguments.emulate}: {described}; "
        f"it misses them by {1e3 * fitted.rms_s:.1f} ms (root mean square), half of them by {fitted.median_share:.0%} "
        "or less"
    )


def show(console: Console, modelled: Sequence[Measurement], measured: Sequence[Measurement], elements: int) -> None:
    """Print two tables: bytes and milliseconds."""
    sizes = list(dict.fromkeys(each.ranks for each in modelled))
    known = {(each.strategy, each.ranks): each for each in modelled}
    seen = {(each.strategy, each.ranks): f"({1e3 * each.seconds:.1f})" for each in measured}
    of_bytes, of_time = (
        Table(
            "ranks",
            *(Column(f"{size:,}", justify="right", no_wrap=True) for size in sizes),
            title=title,
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        for title in (
            f"bytes that a rank sends in a step with a gradient of {human_bytes(4 * elements)}",
            "ms of communication in a step: modelled" + (" (measured)" if measured else ""),
        )
    )
    for name in dict.fromkeys(each.strategy for each in modelled):
        own = [known[name, size] for size in sizes]
        of_bytes.add_row(name, *(human_bytes(each.sent_bytes) for each in own))
        of_time.add_row(name, *(f"{1e3 * each.seconds:.1f} {seen.get((name, each.ranks), '')}".strip() for each in own))
    if any(name == "ddp" for name, _ in seen):
        of_time.add_row("ddp", *(seen.get(("ddp", size), "") for size in sizes))
    console.print(of_bytes, of_time)
