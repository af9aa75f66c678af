"""``lightning-sparse scale``: how traffic and time of communication grow with the number of ranks.

Bytes are counted, by running the compressors among all ranks in this process; time is modelled from them and a link.
"""

import json
from dataclasses import asdict, dataclass
from datetime import datetime, timezone

import torch
from torch import Tensor

from lightning_sparse.bench.cluster import ClusterSpec, parse_link
from lightning_sparse.bench.compare.workloads import count_parameters, workload_named
from lightning_sparse.bench.output import environment, new_console, new_progress, new_table, say
from lightning_sparse.compressors import COMPRESSORS, Dense
from lightning_sparse.compressors.base import take_steps
from lightning_sparse.compressors.group import Group
from lightning_sparse.monitor.tables import human_bytes
from lightning_sparse.network.costs import Link
from lightning_sparse.network.simulated import SimNetwork
from lightning_sparse.selection.streams import draw
from lightning_sparse_cli import Scale

STEPS = 3  # of which the last is counted: then thresholds and partitions are known
SPREAD = 3.0  # deviation of the logarithm of the elements' scales: of the large, most are large in every step


@dataclass(frozen=True)
class StepTraffic:
    """Messages of each rank in one step of one strategy, for one group of gradients."""

    strategy: str  # its name
    ranks: int  # P
    elements: int  # n, of the gradient
    sent_bytes: int  # payload of a rank; all send as much, since sizes of messages do not depend on data
    hops: int  # from rank to rank that follow one another


def count_traffic(strategy: str, ranks: int, elements: int) -> StepTraffic:
    """Run a compressor on all ranks for ``STEPS`` steps, and count what the last one sends.

    Nothing is estimated anew in that step (Ok-Topk does in every 32nd).  The gradients are made up: normally
    distributed, each element with a scale of its own that all ranks share.

    Args:
        strategy: name of the compressor.
        ranks: P, 2 or more.
        elements: n, of the gradient.
    """
    compressor = COMPRESSORS[strategy]()
    if compressor.is_dense("gradient", elements):
        compressor = Dense()
    weights, scale = torch.zeros(elements), scales(elements)
    groups = [Group(0, ("gradient",), (weights,)) for _ in range(ranks)]
    for step in range(STEPS):
        for rank, group in enumerate(groups):
            add_gradient(group.unsent, scale, step, rank)
        network = SimNetwork(ranks, checks=False)
        take_steps(compressor, groups, network)
    first = network.comms[0]
    return StepTraffic(strategy, ranks, elements, first.sent_bytes, first.hops)


def scales(n: int) -> Tensor:
    """The scale of each element of a made-up gradient, [n]."""
    return _normal(n, 0).mul_(SPREAD).exp_()


def add_gradient(unsent: Tensor, scale: Tensor, step: int, rank: int) -> None:
    """Add the made-up gradient of a rank in a step to ``unsent`` [n]; ``scale`` [n] is of its elements."""
    unsent.addcmul_(scale, _normal(unsent.numel(), draw(step, rank)))


def _normal(n: int, seed: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


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
    two = ClusterSpec((parse_link(options.link),) * 2, (1, 1))
    return Link(two.hop_s, two.s_per_byte)


def modelled_s(count: StepTraffic, link: Link) -> float:
    """Return the seconds of communication in a step: a latency for every hop after another, and time for every byte."""
    return count.hops * link.latency_s + count.sent_bytes * link.s_per_byte
