"""``lightning-sparse scale``: how traffic and time of communication grow with the number of ranks.

Bytes are counted, by running the compressors among all ranks in this process; time is modelled from them and a link.
With ``--emulate`` the bench measures both among 2, 4, 8 and 16 ranks, and the link of the model is fitted to that.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_sparse.bench.cluster.spec import parse, parse_link
from lightning_sparse.bench.compare import report
from lightning_sparse.bench.compare.records import Round
from lightning_sparse.bench.compare.run import find_ranks, measure_all
from lightning_sparse.bench.compare.schedule import Schedule
from lightning_sparse.bench.compare.workloads import count_parameters, workload_named
from lightning_sparse.bench.output import environment, new_console, new_figure, new_progress, new_table, save, say
from lightning_sparse.bench.scale.ranks import (
    MOST_FLOATS,
    Fit,
    Measurement,
    StepTraffic,
    count_traffic,
    fit,
    measured_points,
    model_s,
)
from lightning_sparse.cli.options import Scale
from lightning_sparse.compressors import COMPRESSORS
from lightning_sparse.fusion.costs import Link
from lightning_sparse.monitor.pictures import require_matplotlib
from lightning_sparse.monitor.tables import human_bytes

WORKLOAD = "mlp_1m"
MEASURED = (2, 4, 8, 16)  # ranks the bench measures: more keep few cores busy with computing, not with messages
LEAST, MOST = 2, 1024  # ranks
STEPS, WARMUP, ROUNDS = 10, 3, 3  # of the bench
GROUPS = "fusion=bucket"  # so that the model is sent in one group, as it is counted
MARKERS = "os^Dv<>Phd"


def scale(options: Scale) -> int:
    """Count, measure if asked to, print and write down; returns the exit status: 1 if a strategy failed."""
    check(options)
    console = new_console()
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{datetime.now(timezone.utc):%Y-%m-%d-%H%M%S}-scale.json"
    elements = count_parameters(workload_named(WORKLOAD))
    facts = environment(options.command)
    rounds: list[Round] = []
    with new_progress(console) as progress:
        if turns := schedules(options):
            _, measure = find_ranks([schedule.cluster for schedule in turns], None)
            measure_all(turns, measure, facts, path.with_suffix(".jsonl"), progress, rounds)
        wanted = [(name, size) for name in COMPRESSORS for size in sizes(options)]
        counts = [count_traffic(*each, elements) for each in progress.track(wanted, description="counting")]
    measured = measured_points(report.summarise(rounds, "ddp"))
    fitted = fit(measured, counts)
    given = parse(f"2x{options.emulate or options.link}")
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
    title = words(options, link, fitted)
    draw(modelled, measured, elements, path.with_suffix(".svg"), title)
    show(console, modelled, measured, elements)
    if shorter := [each.ranks for each in counts if each.elements < elements]:
        title += (
            f"\nFrom {min(shorter)} ranks on, gradients were shorter, for all together to have {MOST_FLOATS:,} "
            "elements at most, and bytes are scaled up."
        )
    for line in (title, *report.notes(rounds), f"results: {path} and .svg"):
        say(console, line)
    return int(any(each.error for each in rounds))


def check(options: Scale) -> None:
    """Raise an error for what cannot work, before anything starts."""
    if not LEAST <= options.most <= MOST:
        raise ValueError(f"--most must be a number of ranks from {LEAST} to {MOST}; got {options.most}")
    for option, rate in (("--emulate", options.emulate), ("--link", options.link)):
        try:
            parse_link(rate or "unlimited")
        except ValueError as error:
            raise ValueError(f"{option}: {error}") from None
    require_matplotlib()


def sizes(options: Scale) -> list[int]:
    """Return the numbers of ranks to count: 2, 4, 8, ..."""
    return [2**i for i in range(1, options.most.bit_length())]


def schedules(options: Scale) -> list[Schedule]:
    """Return what to measure; nothing unless asked to emulate."""
    strategies = ",".join(["ddp", *(f"{name}:{GROUPS}" for name in COMPRESSORS)])
    clusters = [f"{size}x{options.emulate}" for size in MEASURED if options.emulate and size <= options.most]
    return [Schedule(cluster, WORKLOAD, strategies, STEPS, WARMUP, ROUNDS, "cpu") for cluster in clusters]


def _modelled(count: StepTraffic, elements: int, link: Link) -> Measurement:
    """Model what a gradient of ``elements`` takes, in proportion to the one counted.

    That is a little much where the one counted is shorter: parts of fixed size weigh less in longer messages.
    """
    sent_bytes = count.sent_bytes * (elements / count.elements)
    return Measurement(count.strategy, count.ranks, sent_bytes, model_s(count.hops, sent_bytes, link))


# - for people


def words(options: Scale, link: Link, fitted: Fit | None) -> str:
    """Say which link the model has, and how well it fits."""
    rate = f"{8e-6 / link.s_per_byte:,.0f} Mbit/s" if link.s_per_byte else "no limit"
    described = f"{1e3 * link.latency_s:.2f} ms a hop, {rate}"
    if fitted is None:
        return f"link as given: {described}" + ("; too little was measured to fit one" if options.emulate else "")
    return (
        f"link fitted to {fitted.points} points measured at {options.emulate}: {described}; it misses them by "
        f"{1e3 * fitted.rms_s:.1f} ms (root mean square)"
    )


def show(console: Console, modelled: Sequence[Measurement], measured: Sequence[Measurement], elements: int) -> None:
    """Print two tables: bytes and milliseconds."""
    ranks = list(dict.fromkeys(each.ranks for each in modelled))
    found = {(each.strategy, each.ranks): each for each in modelled}
    seen = {(each.strategy, each.ranks): f"({1e3 * each.seconds:.1f})" for each in measured}
    title = f"bytes that a rank sends in a step with a gradient of {human_bytes(4 * elements)}"
    of_bytes = new_table(title, "ranks", *(f"{size:,}" for size in ranks))
    title = "ms of communication in a step: modelled" + (" (measured)" if measured else "")
    of_time = new_table(title, "ranks", *(f"{size:,}" for size in ranks))
    for name in dict.fromkeys(each.strategy for each in modelled):
        own = [found[name, size] for size in ranks]
        of_bytes.add_row(name, *(human_bytes(each.sent_bytes) for each in own))
        of_time.add_row(name, *(f"{1e3 * each.seconds:.1f} {seen.get((name, each.ranks), '')}".strip() for each in own))
    if any(name == "ddp" for name, _ in seen):
        of_time.add_row("ddp", *(seen.get(("ddp", size), "") for size in ranks))
    console.print(of_bytes, of_time)


def draw(
    modelled: Sequence[Measurement], measured: Sequence[Measurement], elements: int, path: Path, title: str
) -> None:
    """Draw bytes and seconds over ranks to an SVG file: what was measured filled, counted or modelled hollow."""
    from matplotlib.lines import Line2D  # an extra, and slow to import

    figure, every = new_figure(11, 4.8), [*modelled, *measured]
    panels = figure.subplots(1, 2)
    hollow: dict[str, Any] = {"fillstyle": "none", "linewidth": 0.8}
    filled = {"linestyle": "none", "label": "_measured"}
    for i, strategy in enumerate(dict.fromkeys(each.strategy for each in every)):
        look = {"color": f"C{i % 10}", "marker": MARKERS[i % len(MARKERS)], "markersize": 5, "label": strategy}
        for points, style in ((modelled, hollow), (measured, filled)):
            own = [each for each in points if each.strategy == strategy]
            ranks = [each.ranks for each in own]
            panels[0].plot(ranks, [each.sent_bytes for each in own], **{**look, **style})
            panels[1].plot(ranks, [1e3 * each.seconds for each in own], **{**look, **style})
    sent = f"bytes a rank sends in a step\n(gradient of {human_bytes(4 * elements)})"
    for axes, what in zip(panels, (sent, "ms of communication in a step"), strict=True):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(numbers := sorted({each.ranks for each in every}), [str(size) for size in numbers])
        axes.set(xlabel="ranks", ylabel=what)
        axes.grid(which="both", lw=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    black: dict[str, Any] = {"color": "black", "marker": "o", "markersize": 5}
    kinds = [Line2D([], [], **black, **hollow), Line2D([], [], **black, linestyle="none")]
    figure.legend([*handles, *kinds], [*labels, "counted, modelled", "measured"], loc="outside right upper")
    figure.suptitle(title)
    save(figure, path)
