"""The command line: ``lightning-sparse list`` and ``lightning-sparse bench``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_sparse.bench.workloads import WORKLOADS
from lightning_sparse.compressors import COMPRESSORS


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.  Returns the exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = _parser().parse_args(words)
    if arguments.command == "list":
        _list()
        return 0
    return _bench(arguments, " ".join(["lightning-sparse", *words]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("lightning-sparse", description="Gradient compression for PyTorch Lightning.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="list the compressors")
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
        help=f"what to train (%(default)s): one of {', '.join(WORKLOADS)}",
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
    for name, compressor in COMPRESSORS.items():
        table.add_row(name, (compressor.__doc__ or "").strip().partition("\n")[0])
    Console().print(table)


def _bench(arguments: argparse.Namespace, command: str) -> int:
    from lightning_sparse.bench.cluster import ClusterError
    from lightning_sparse.bench.peers import all_names
    from lightning_sparse.bench.run import Bench, BenchError, bench
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
    asked = Bench(clusters, plan, arguments.output, arguments.plot, arguments.interface, command)
    try:
        return bench(asked)
    except (ValueError, ClusterError, BenchError) as error:
        print(f"lightning-sparse: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"lightning-sparse: interrupted; what was measured so far is in {asked.output}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
