"""Train other people's models with plain DDP and with this project's strategies, and compare their losses.

    python tests/packages/run.py litgpt darts --seeds 0,1,2

Each training runs in two processes: over the loopback interface, started by the package itself, and with
``sparse_auto`` on two emulated hosts, so that it meets a slow network.  This interpreter must have the packages.
"""

import argparse
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from lightning_sparse.bench.cluster import Cluster

STRATEGIES = ("ddp", "ddp_int4", "ddp_sparse_auto")
AT_MOST = 0.03  # by which a strategy's mean loss may lie above that of DDP
CHOICE = re.compile(r"sparse_auto goes on with (.+)\. A step takes")


def on_loopback(argv: list[str]) -> Iterator[str]:
    """Yield what two processes write that Lightning starts."""
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield from process.stdout
    if process.returncode:
        raise RuntimeError(f"{' '.join(argv)} failed; what it wrote says why.")


def on_hosts(network: str, argv: list[str]) -> Iterator[str]:
    """Yield what the first of two processes writes, each on a host of its own, as torchrun would start them."""
    with Cluster(network) as cluster:
        shared = {"MASTER_ADDR": cluster.address(0), "MASTER_PORT": 29500, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        shared |= {"GROUP_RANK": 0, "OMP_NUM_THREADS": 1, "TORCHELASTIC_RUN_ID": "packages"}
        commands = [
            ["env", *(f"{name}={value}" for name, value in (shared | {"RANK": rank, "LOCAL_RANK": rank}).items()),
             "sh", "-c", 'exec "$0" "$@" 2>&1', *argv]
            for rank in range(2)
        ]  # fmt: skip
        with closing(cluster.lines(commands)) as lines:
            yield from lines


def trainings(package: str, strategies: str, seeds: str, network: str | None) -> Iterator[dict[str, Any]]:
    """Yield the results of trainings of a package as they end."""
    argv = [sys.executable, str(Path(__file__).with_name(f"train_{package.replace('-', '_')}.py")), strategies, seeds]
    choices: list[str] = []
    for line in on_hosts(network, argv) if network else on_loopback(argv):
        if line.startswith('{"strategy"'):
            yield {"package": package, "network": network, **json.loads(line), "choices": choices}
            choices = []
        elif found := CHOICE.search(line):
            choices.append(found[1])
        print(line.rstrip(), file=sys.stderr)


def table(results: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """Return a table of the last losses, mean and standard deviation over seeds, and what is too far above DDP."""
    last: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in results:
        last[each["package"]][each["strategy"]].append(each["losses"][-1])
    lines, high = [f"| | {' | '.join(STRATEGIES)} |", "| --- |" + " --- |" * len(STRATEGIES)], []
    for package, losses in last.items():
        cells = [package]
        for strategy in STRATEGIES:
            above = mean(losses[strategy]) / mean(losses["ddp"]) - 1
            cells.append(f"{mean(losses[strategy]):.4g} ± {stdev(losses[strategy]):.2g}, {above:+.1%}")
            if above > AT_MOST:
                high.append(f"{package} with {strategy}: {above:+.1%}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines), high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", help="as in train_PACKAGE.py; none: the table of what is in --results")
    parser.add_argument("--seeds", default="0,1,2", help="separated by commas (default: 0,1,2)")
    parser.add_argument("--network", default="2x100mbit", help="of ddp_sparse_auto (default: 2x100mbit)")
    parser.add_argument("--results", type=Path, default=Path("bench-results/packages.jsonl"), help="file to add to")
    args = parser.parse_args()
    args.results.parent.mkdir(exist_ok=True)
    for package in args.packages:
        for strategies, network in (("ddp,ddp_int4", None), ("ddp_sparse_auto", args.network)):
            for result in trainings(package, strategies, args.seeds, network):
                with args.results.open("a") as file:
                    file.write(json.dumps(result) + "\n")
    text, high = table([json.loads(line) for line in args.results.read_text().splitlines()])
    print(text)
    if high:
        sys.exit(f"more than {AT_MOST:.0%} above ddp: {'; '.join(high)}")


if __name__ == "__main__":
    main()
