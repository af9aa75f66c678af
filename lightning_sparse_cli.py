"""The command line of lightning_sparse, beside it: who imports that package imports PyTorch, and help does not wait.

Until a command runs, the standard library and rich are all that is imported.
"""

import argparse
import math
import pkgutil
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

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
    every = parser()
    arguments = vars(every.parse_args(words))
    name = arguments.pop("name")
    if name is None:
        every.print_help()
        return 0
    if name == "list":
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
    for heading, strategies in STRATEGIES.items():
        table.add_row(f"[bold]{heading}[/]")
        for name, line in strategies.items():
            table.add_row(f"  {name}", line)
        table.add_section()
    Console().print(table)
    Console().print(MORE_NAMES, highlight=False)


# - options

Number = TypeVar("Number", int, float)

# Names that help texts show, as text: the classes they stand for import PyTorch.  A test compares the two.

#: Heading -> strategy -> the first line of its class's docstring.
STRATEGIES = {
    "start here": {
        "sparse_auto": "Trains with the candidate that is expected to be soonest at a loss: seconds a step, times the "
        "steps it needs.",
    },
    "methods": {
        "skip_reduce": "A ring all-reduce whose first s = round(skip * P) reduce-scatter steps are left out (at "
        "most P - 1).",
        "micro": "Each rank selects the large elements of a P-th of the gradient, and all sum those (Yoon and Oh, HiPC "
        "2023).",
        "importance": "Sums the elements whose gradient is large for their weight, by the opinion of a few random "
        "ranks.",
        "sketch_fusion": "Ranks sum sketches of their gradients, find the large elements of the sum in it, and sum "
        "those exactly.",
        "ok_topk": "The largest sums of what ranks find large, at nearly the least traffic possible (Li and Hoefler, "
        "PPoPP 2022).",
        "low_rank": "Sums a rank-r approximation of each matrix: two thin factors travel in its place.",
    },
    "baselines": {
        "sparse_dense": "Every rank sends all of its gradient: plain data-parallel training, the baseline of every "
        "comparison.",
        "sparse_topk": "Each rank sends its own k = density * n largest elements (Aji and Heafield, EMNLP 2017): the "
        "usual baseline.",
        "sparse_random_k": "Every rank sends the same k = density * n randomly chosen elements.",
    },
}

#: Models and data of ``bench`` and ``advise``.
WORKLOADS = ("mlp_1m", "mlp_25m", "gpt_3m", "gpt_10m", "gpt_50m", "gpt_124m", "byte_lm")
MODEL_FORMS = "'package.module:Model', 'package.module:Model,package.module:DataModule' or a config file 'config.yaml'"


def _option(help: str, default: Any = MISSING, **settings: Any) -> Any:
    """A field that is an option, or without a default an argument; ``settings`` are those of ``add_argument``."""
    return field(default=default, metadata={"help": help, **settings})


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command: the first line says what it does, the rest is the description that its ``--help`` shows."""

    command: str = ""  # as it was typed, for those who write it down; no option

    @property
    def runs(self) -> str:
        """The function that runs it, as ``pkgutil.resolve_name`` reads it: nothing is imported before."""
        name = type(self).__name__.lower()
        return f"lightning_sparse.bench.{name}:{name}"


@dataclass(frozen=True, kw_only=True)
class _OnCluster(Command):
    interface: str | None = _option(
        "network interface to use and to count on a real cluster (default: the one towards rank 0)", None
    )


@dataclass(frozen=True, kw_only=True)
class _Written(Command):
    output: Path = _option("(%(default)s)", Path("bench-results"), metavar="DIR")  # noqa: RUF009


@dataclass(frozen=True, kw_only=True)
class Advise(_OnCluster):
    """Say whether compression pays for your model and link, and which.

    Train a few steps of your model, measure, and say what to expect of every strategy. The link is measured between
    ranks (--emulate, or started on every host with torchrun or srun), or given (--link).
    """

    model: str = _option(f"{MODEL_FORMS}, or one of {', '.join(WORKLOADS)}")
    link: str = _option("predict for a cluster such as 4x1gbit, or 4x8x25gbit of 8 ranks a host", "", metavar="CLUSTER")
    emulate: str = _option(
        "build a cluster such as 4x1gbit or 2x4x1gbit, 2 hosts of 4 ranks, here (Linux)", "", metavar="CLUSTER"
    )


@dataclass(frozen=True, kw_only=True)
class Bench(_Written, _OnCluster):
    """Compare strategies on a cluster, emulated or real.

    Train the same model with each strategy in turn, and compare time, bytes and loss. Start it once with --emulate, or
    on every host of a cluster with torchrun or srun.
    """

    emulate: str = _option(
        "clusters to build on this machine (Linux), such as 4x1gbit or 4x1gbit,4x100mbit+50ms, where each host is 50 "
        "ms from another, 3x1gbit+1x100mbit, or 2x4x1gbit, 2 hosts of 4 ranks; without root where user namespaces are "
        "allowed",
        "",
        metavar="CLUSTERS",
    )
    accelerator: str = _option(
        "with --emulate, what the ranks compute on (%(default)s): cpu, or cuda, this machine's first device, which all "
        "share; they send over Gloo",
        "cpu",
        metavar="NAME",
    )
    workload: str = _option(
        f"what to train (%(default)s): one of {', '.join(WORKLOADS)}, or your own: {MODEL_FORMS}",
        "mlp_25m",
        metavar="NAME",
    )
    strategies: str = _option(
        "comma-separated, such as ddp,skip_reduce:skip=0.5:wire_dtype=bfloat16; the first is the reference of the "
        "ratios; one named twice runs twice (default: all, ddp first)",
        "",
        metavar="LIST",
    )
    steps: int = _option("timed steps of each strategy in a round (%(default)s)", 10)
    warmup: int = _option("untimed steps before them (%(default)s)", 3)
    rounds: int | None = _option("turns of each strategy (one for each of --seeds, or 5)", None)
    until_loss: str = _option(
        "losses on held-out data, such as 3.2,3,2.8: report the seconds to each; a training ends with "
        "the lowest (byte_lm and those that begin with gpt)",
        "",
        metavar="LIST",
    )
    seconds: float | None = _option("with --until-loss, train each strategy for so long in place of --steps", None)
    learning_rates: str = _option(
        "with --until-loss, try these with each strategy in the first round; the others use its best",
        "",
        metavar="LIST",
    )
    seeds: str = _option("of the rounds, in turn (0,1,2,...)", "", metavar="LIST")
    interleave: bool = _option(
        "with --until-loss, train all of a round in turn, each from one evaluation to its next: a machine whose speed "
        "drifts is then as fast for one as for another; needs memory for all of them",
        False,
    )
    plot: bool = _option("draw plots too", False)

    @property
    def runs(self) -> str:
        """Its room is called after what it does: it compares."""
        return "lightning_sparse.bench.compare.run:bench"


@dataclass(frozen=True, kw_only=True)
class Scale(_Written):
    """Say how bytes and time of communication grow with the number of ranks.

    Count what every compressor sends among 2, 4, 8, ... ranks, all of them in this process, for the gradient of mlp_1m,
    and model the time that takes on a link. Writes a JSON file.
    """

    link: str = _option("rate to model, such as 1gbit or 100mbit+50ms (%(default)s)", "1gbit", metavar="RATE")
    most: int = _option(
        "count up to so many (%(default)s, which takes five minutes)",
        256,
        metavar="RANKS",
    )


@dataclass(frozen=True, kw_only=True)
class Doctor(_OnCluster):
    """Say what this machine or cluster has, what will be used, and what is wrong.

    Look at versions, devices and interfaces, and train ten steps of each strategy on a small model: every step is
    checked for lost gradient and for replicas that differ. Started with torchrun or srun it examines that cluster; else
    this machine, with two ranks on the CPU, one on each CUDA device, and several on one device. The exit status is 1 if
    anything is wrong.
    """

    emulate: str = _option(
        "build one here, such as 2x100mbit or 2x2x100mbit, 2 hosts of 2 ranks (Linux)", "", metavar="CLUSTER"
    )


def parser() -> argparse.ArgumentParser:
    """Make the parser of every command; ``options`` of what it parses is the class of the command, if it has one."""
    every = argparse.ArgumentParser("lightning-sparse", description="Gradient compression for PyTorch Lightning.")
    about = runpy.run_path(str(Path(__file__).with_name("lightning_sparse") / "__about__.py"))
    every.add_argument("--version", action="version", version=f"%(prog)s {about['__version__']}")
    commands = every.add_subparsers(dest="name")
    commands.add_parser("list", help="list the strategies")
    for kind in (Advise, Bench, Scale, Doctor):
        help, _, description = (kind.__doc__ or "").partition(".\n\n")
        own = commands.add_parser(kind.__name__.lower(), help=help[0].lower() + help[1:], description=description)
        own.set_defaults(options=kind)
        hints = get_type_hints(kind)
        for each in sorted(fields(kind), key=lambda each: each.name not in kind.__annotations__):  # its own first
            if each.metadata:
                _add(own, each.name, hints[each.name], each.default, dict(each.metadata))
    return every


def _add(own: argparse.ArgumentParser, name: str, hint: Any, default: Any, settings: dict[str, Any]) -> None:
    """Add the option of a field."""
    if default is MISSING:
        own.add_argument(name, **settings)
    elif hint is bool:
        own.add_argument(f"--{name.replace('_', '-')}", action="store_true", **settings)
    else:
        (kind,) = {*(get_args(hint) or (hint,))} - {NoneType}
        own.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, **settings)


def numbers(
    option: str,
    text: str,
    kind: Callable[[str], Number],
    fits: Callable[[Number], bool] = math.isfinite,
    range_: str = "",
    needed: bool = False,
) -> list[Number]:
    """Read the numbers of an option, each once, separated by commas; of an empty text none, unless some are ``needed``.

    Raises:
        ValueError: one is no number, or does not fit.
    """
    with suppress(ValueError):
        found = list(dict.fromkeys(kind(part) for part in text.split(",") if text or needed))
        if all(map(fits, found)):
            return found
    raise ValueError(f"{option} must be numbers{range_}, separated by commas; got {text!r}")


def rates(text: str, needed: bool = False) -> list[float]:
    """Read ``--learning-rates``."""
    return numbers("--learning-rates", text, float, lambda rate: 0 < rate < math.inf, " above 0", needed)


def seeds(text: str, needed: bool = False) -> list[int]:
    """Read ``--seeds``."""
    return numbers("--seeds", text, int, lambda seed: seed >= 0, " of at least 0", needed)


def losses(text: str) -> list[float]:
    """Read ``--until-loss``, the largest first."""
    return sorted(numbers("--until-loss", text, float), reverse=True)
