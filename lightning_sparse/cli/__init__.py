"""The command line: ``lightning-sparse``, and ``python -m lightning_sparse.cli`` where a module is wanted.

Until a command runs, this package imports the standard library and rich alone.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

from lightning_sparse.cli.arguments import parser
from lightning_sparse.cli.names import STRATEGIES


def command() -> int:
    """Be ``lightning-sparse``: ``--help``, ``list`` and mistakes are answered at once, the rest goes to the module."""
    if parser().parse_args().command != "list":
        os.execv(sys.executable, [sys.executable, "-m", "lightning_sparse.cli", *sys.argv[1:]])
    _list()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.  Returns the exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = vars(parser().parse_args(words))
    name = arguments.pop("command")
    if name == "list":
        _list()
        return 0
    from lightning_sparse.bench.cluster import ClusterError
    from lightning_sparse.bench.compare.run import BenchError

    try:
        return _run(name, arguments, " ".join(["lightning-sparse", *words]))
    except (ValueError, ModuleNotFoundError, ClusterError, BenchError) as error:
        print(f"lightning-sparse: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        kept = f"; what was measured so far is in {arguments['output']}" if "output" in arguments else ""
        print(f"lightning-sparse: interrupted{kept}", file=sys.stderr)
        return 130


def _run(name: str, arguments: dict[str, Any], typed: str) -> int:
    """Run command ``name`` with its arguments; ``typed`` is the whole command, for those who write it down."""
    if name == "doctor":
        from lightning_sparse.bench.doctor.doctor import DoctorArguments, doctor

        return doctor(DoctorArguments(**arguments))
    if name == "advise":
        from lightning_sparse.bench.advise.advise import AdviseArguments, advise

        return advise(AdviseArguments(**arguments))
    if name == "scale":
        from lightning_sparse.bench.scale.scale import ScaleArguments, scale

        return scale(ScaleArguments(**arguments, command=typed))
    if name == "simulate":
        from lightning_sparse.bench.simulate.simulate import SimulateArguments, simulate

        return simulate(SimulateArguments(**arguments, command=typed))
    from lightning_sparse.bench.compare.arguments import BenchArguments
    from lightning_sparse.bench.compare.run import bench
    from lightning_sparse.bench.compare.simulated import combine

    wanted = BenchArguments(**arguments, command=typed)
    return combine(wanted) if wanted.simulate else bench(wanted)


def _list() -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table("strategy", "how it compresses", box=box.SIMPLE_HEAD)
    for name, line in STRATEGIES.items():
        table.add_row(name, line)
    Console().print(table)
