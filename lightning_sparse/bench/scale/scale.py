"""``lightning-sparse scale``: how traffic and time of communication grow with the number of ranks.

Bytes are counted, by running the compressors among all ranks in this process; time is modelled from them and a link.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone

from lightning_sparse.bench.cluster.spec import parse, parse_link
from lightning_sparse.bench.compare.workloads import count_parameters, workload_named
from lightning_sparse.bench.output import environment, new_console, new_progress, new_table, say
from lightning_sparse.bench.scale.ranks import MOST_FLOATS, StepTraffic, count_traffic
from lightning_sparse.cli.options import Scale
from lightning_sparse.compressors import COMPRESSORS
from lightning_sparse.fusion.costs import Link
from lightning_sparse.monitor.tables import human_bytes

WORKLOAD = "mlp_1m"
LEAST, MOST = 2, 1024  # ranks


@dataclass(frozen=True)
class Modelled:
    """What a step of one strategy takes among some ranks."""

    strategy: str  # name of its compressor
    ranks: int  # P
    sent_bytes: float  # payload of a rank
    seconds: float  # of communication


#: What a table shows, and how it is written.
CELLS: dict[str, Callable[[Modelled], str]] = {
    "bytes that a rank sends in a step": lambda each: human_bytes(each.sent_bytes),
    "ms of communication in a step, modelled": lambda each: f"{1e3 * each.seconds:.1f}",
}


def scale(options: Scale) -> int:
    """Count, model, print and write down; returns the exit status."""
    link = check(options)
    console, elements, facts = new_console(), count_parameters(workload_named(WORKLOAD)), environment(options.command)
    with new_progress(console) as progress:
        wanted = [(name, size) for name in COMPRESSORS for size in sizes(options)]
        counts = [count_traffic(*each, elements) for each in progress.track(wanted, description="counting")]
    modelled = [model(each, elements, link) for each in counts]
    title = f"gradient of {human_bytes(4 * elements)}, {options.link}, {1e3 * link.latency_s:.2f} ms a hop"
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{datetime.now(timezone.utc):%Y-%m-%d-%H%M%S}-scale.json"
    rows = [asdict(c) | {"modelled_s": m.seconds} for c, m in zip(counts, modelled, strict=True)]
    results = {"environment": facts, "workload": WORKLOAD, "elements": elements, "link": asdict(link), "counted": rows}
    path.write_text(json.dumps(results, indent=1) + "\n")
    for what, cell in CELLS.items():
        table = new_table(f"{what}: {title}", "ranks", *(f"{size:,}" for size in sizes(options)))
        for name in COMPRESSORS:
            table.add_row(name, *(cell(each) for each in modelled if each.strategy == name))
        console.print(table)
    if shorter := [each.ranks for each in counts if each.elements < elements]:
        say(
            console,
            f"From {min(shorter)} ranks on, gradients were shorter, for all together to have {MOST_FLOATS:,} elements "
            "at most, and bytes are scaled up.",
        )
    say(console, f"results: {path}")
    return 0


def check(options: Scale) -> Link:
    """Return the link to model; raises an error for what cannot work, before anything starts."""
    if not LEAST <= options.most <= MOST:
        raise ValueError(f"--most must be a number of ranks from {LEAST} to {MOST}; got {options.most}")
    try:
        parse_link(options.link)
    except ValueError as error:
        raise ValueError(f"--link: {error}") from None
    two = parse(f"2x{options.link}")
    return Link(two.hop_s, two.s_per_byte)


def sizes(options: Scale) -> list[int]:
    """Return the numbers of ranks to count: 2, 4, 8, ..."""
    return [2**i for i in range(1, options.most.bit_length())]


def model(count: StepTraffic, elements: int, link: Link) -> Modelled:
    """Model what a gradient of ``elements`` takes: a latency for every hop that follows another, and time for bytes.

    These are in proportion to those counted, which is a little much where the gradient counted is shorter: parts of
    fixed size weigh less in longer messages.
    """
    sent_bytes = count.sent_bytes * (elements / count.elements)
    return Modelled(count.strategy, count.ranks, sent_bytes, count.hops * link.latency_s + sent_bytes * link.s_per_byte)
