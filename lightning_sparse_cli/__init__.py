"""The command line of lightning_sparse, beside it: who imports that package imports PyTorch, and help does not wait.

Until a command runs, the standard library and rich are all that is imported.
"""

import pkgutil
import signal
import sys
from collections.abc import Sequence

from lightning_sparse_cli.options import STRATEGIES, parser

MORE_NAMES = (
    "Each also has a name with ddp_ in front, as in ddp_micro, for programs that look for 'ddp' in it; with _spawn, "
    "_fork or _notebook behind, and after that with _find_unused_parameters_true, as DDP's own names; and one with "
    "_hsdp behind."
)


def command() -> int:
    """Be the program ``lightning-sparse``; a signal that ends it lets it write down first what was measured."""
    for number in {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}:  # Windows has no SIGHUP
        if signal.getsignal(number) is signal.SIG_DFL:  # not under nohup
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    return main()


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
