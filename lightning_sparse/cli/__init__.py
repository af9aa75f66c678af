"""The command line: ``lightning-sparse``, and ``python -m lightning_sparse.cli`` where a module is wanted.

Until a command runs, this package imports the standard library and rich alone.
"""

import os
import pkgutil
import sys
from collections.abc import Sequence

from lightning_sparse.cli.names import STRATEGIES
from lightning_sparse.cli.options import parser

MORE_NAMES = (
    "Each also has a name with ddp_ in front, as in ddp_micro, for programs that look for 'ddp' in it; with _spawn, "
    "_fork or _notebook behind, and after that with _find_unused_parameters_true, as DDP's own names; and one with "
    "_hsdp behind."
)


def command() -> int:
    """Be ``lightning-sparse``: ``--help``, ``list`` and mistakes are answered at once, the rest goes to the module."""
    if parser().parse_args().name != "list":
        os.execv(sys.executable, [sys.executable, "-m", "lightning_sparse.cli", *sys.argv[1:]])
    _list()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.  Returns the exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = vars(parser().parse_args(words))
    if arguments.pop("name") == "list":
        _list()
        return 0
    options = arguments.pop("options")(**arguments, command=" ".join(["lightning-sparse", *words]))
    try:
        status: int = pkgutil.resolve_name(options.runs)(options)
        return status
    except (ValueError, ModuleNotFoundError, OSError) as error:
        print(f"lightning-sparse: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        kept = f"; what was measured so far is in {arguments['output']}" if "output" in arguments else ""
        print(f"lightning-sparse: interrupted{kept}", file=sys.stderr)
        return 130


def _list() -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table("strategy", "how it compresses", box=box.SIMPLE_HEAD)
    for name, line in STRATEGIES.items():
        table.add_row(name, line)
    Console().print(table)
    Console().print(MORE_NAMES, highlight=False)
