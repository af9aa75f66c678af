"""``lightning-sparse scale``: how traffic and time of communication grow with the number of ranks.

Bytes are counted, by running the compressors among all ranks in this process; time is modelled from them and a link.
"""

import json
from dataclasses import asdict
from datetime import datetime, timezone

from lightning_sparse.bench.cluster.spec import parse
from lightning_sparse.bench.compare.workloads import count_parameters, workload_named
from lightning_sparse.bench.output import environment, new_console, new_progress, new_table, say
from lightning_sparse.bench.scale.ranks import StepTraffic, count_traffic
from lightning_sparse.cli.options import Scale
from lightning_sparse.compressors import COMPRESSORS
from lightning_sparse.monitor.tables import human_bytes
from lightning_sparse.network.costs import Link

WORKLOAD = "mlp_1m"
LEAST, MOST = 2, 256  # ranks, whose gradients together take 1.1 GB


def scale(options: Scale) -> int:
    """Count, model, print and write down; returns the exit status."""
    link = check(options)
    console, elements, facts = new_console(), count_parameters(workload_named(WORKLOAD)), environment(options.command)
    sizes = [2**i for i in range(1, options.most.bit_length())]
    with new_progress(console) as progress:
        wanted = [(name, size) for name in COMPRESSORS for size in sizes]
        counts = [count_traffic(*each, elements) for each in progress.track(wanted, description="counting")]
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{datetime.now(timezone.utc):%Y-%m-%d-%H%M%S}-scale.json"
    rows = [asdict(each) | {"modelled_s": modelled_s(each, link)} for each in counts]
    results = {"environment": facts, "workload": WORKLOAD, "elements": elements, "link": asdict(link), "counted": rows}
    path.write_text(json.dumps(results, indent=1) + "\n")
    gradient = f"a gradient of {human_bytes(4 * elements)}"
    of_bytes = new_table(f"bytes that a rank sends in a step, {gradient}", "ranks", *map(str, sizes))
    way = f"{options.link} and {1e3 * link.latency_s:.2f} ms a hop"
    of_time = new_table(f"ms of communication in a step, modelled: {gradient}, {way}", "ranks", *map(str, sizes))
    for name in COMPRESSORS:
        own = [each for each in counts if each.strategy == name]
        of_bytes.add_row(name, *(human_bytes(each.sent_bytes) for each in own))
        of_time.add_row(name, *(f"{1e3 * modelled_s(each, link):.1f}" for each in own))
    console.print(of_bytes, of_time)
    say(console, f"results: {path}")
    return 0


def check(options: Scale) -> Link:
    """Return the link to model; raises a ValueError for what cannot work, before anything starts."""
    if not LEAST <= options.most <= MOST:
        raise ValueError(f"--most must be a number of ranks from {LEAST} to {MOST}; got {options.most}")
    two = parse(f"2x{options.link}")
    return Link(two.hop_s, two.s_per_byte)


def modelled_s(count: StepTraffic, link: Link) -> float:
    """Return the seconds of communication in a step: a latency for every hop after another, and time for every byte."""
    return count.hops * link.latency_s + count.sent_bytes * link.s_per_byte
