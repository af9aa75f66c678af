"""The command line: ``lightning-sparse list``, ``advise``, ``bench`` and ``scale``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_sparse.bench import own_model, scale
from lightning_sparse.bench.workloads import WORKLOADS
from lightning_sparse.compressors import NAMES


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.  Returns the exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = _parser().parse_args(words)
    if arguments.command == "list":
        _list()
        return 0
    from lightning_sparse.bench.cluster import ClusterError
    from lightning_sparse.bench.run import BenchError

    try:
        if arguments.command == "scale":
            typed = f"lightning-sparse {' '.join(words)}"
            return scale.scale(scale.Asked(arguments.emulate, arguments.link, arguments.most, arguments.output, typed))
        return _advise(arguments) if arguments.command == "advise" else _bench(arguments, words)
    except (ValueError, ClusterError, BenchError) as error:
        print(f"lightning-sparse: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("lightning-sparse", description="Gradient compression for PyTorch Lightning.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="list the compressors")
    advise = commands.add_parser(
        "advise",
        help="say whether compression pays for your model and link, and which",
        description="Train a few steps of your model, measure, and say what to expect of every strategy. The link is "
        "measured between ranks (--emulate, or started on every host with torchrun or srun), or given (--link).",
    )
    advise.add_argument("model", help=f"{own_model.FORMS}, or one of {', '.join(WORKLOADS)}")
    advise.add_argument("--link", metavar="CLUSTER", default="", help="reckon with a cluster such as 4x1gbit; no root")
    advise.add_argument("--emulate", metavar="CLUSTER", default="", help="build such a cluster here (root on Linux)")
    advise.add_argument("--interface", help="network interface of a real cluster (default: the one towards rank 0)")
    scale.add_scale_command(commands)
    bench = commands.add_parser(
        "bench",
        help="compare strategies on a cluster, emulated or real",
        description="Train the same model with each strategy in turn, and compare time, bytes and loss. Start it once "
        "with --emulate, or on every host of a cluster with torchrun or srun.",
    )
    bench.add_argument(
        "--emulate",
        metavar="CLUSTERS",
        default="",
        help="clusters to build on this machine, such as 4x1gbit or 4x1gbit,4x100mbit (needs root on Linux)",
    )
    bench.add_argument(
        "--workload",
        metavar="NAME",
        default="mlp_25m",
        help=f"what to train (%(default)s): one of {', '.join(WORKLOADS)}, or your own: {own_model.FORMS}",
    )
    bench.add_argument(
        "--strategies",
        metavar="LIST",
        default="",
        help="comma-separated, such as ddp,skip_reduce:skip=0.5:wire_dtype=bfloat16; the first is the reference of the "
        "ratios; one named twice runs twice (default: all, ddp first)",
    )
    bench.add_argument("--steps", type=int, default=10, help="timed steps of each strategy in a round (%(default)s)")
    bench.add_argument("--warmup", type=int, default=3, help="untimed steps before them (%(default)s)")
    bench.add_argument("--rounds", type=int, default=5, help="turns of each strategy (%(default)s)")
    bench.add_argument("--output", metavar="DIR", type=Path, default=Path("bench-results"), help="(%(default)s)")
    bench.add_argument("--plot", action="store_true", help="draw plots too")
    bench.add_argument(
        "--interface", help="network interface to use and to count on a real cluster (default: the one towards rank 0)"
    )
    return parser


def _list() -> None:
    table = Table("strategy", "how it compresses", box=box.SIMPLE_HEAD)
    for name, compressor in NAMES.items():
        table.add_row(name, (compressor.__doc__ or "").strip().partition("\n")[0])
    Console().print(table)


def _advise(arguments: argparse.Namespace) -> int:
    from lightning_sparse.bench.advise import Asked, advise

    return advise(Asked(arguments.model, arguments.emulate, arguments.link, arguments.interface))


def _bench(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    from lightning_sparse.bench.peers import all_names
    from lightning_sparse.bench.run import Bench, bench
    from lightning_sparse.bench.worker import Plan

    plan = Plan(
        cluster="",
        workload=arguments.workload,
        strategies=arguments.strategies or all_names(),
        steps=arguments.steps,
        warmup=arguments.warmup,
        rounds=arguments.rounds,
        accelerator="cpu" if arguments.emulate else "auto",
    )
    clusters = [cluster.strip() for cluster in arguments.emulate.split(",")] if arguments.emulate else []
    command = " ".join(["lightning-sparse", *words])
    asked = Bench(clusters, plan, arguments.output, arguments.plot, arguments.interface, command)
    try:
        return bench(asked)
    except KeyboardInterrupt:
        print(f"lightning-sparse: interrupted; what was measured so far is in {asked.output}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
