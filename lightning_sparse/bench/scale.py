"""``lightning-sparse scale``: how traffic and time of communication grow with the number of ranks.

Bytes are counted, by running the compressors among all ranks in this process; time is modelled from them and a link.
With ``--emulate`` the bench measures both among 2, 4, 8 and 16 ranks, and the link of the model is fitted to that.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from lightning_sparse.bench import scale_plot
from lightning_sparse.bench.cluster import ClusterUnavailableError, parse_rate, unavailable_reason
from lightning_sparse.bench.report import Round, environment, json_line, notes, summarise
from lightning_sparse.bench.scale_model import Fit, Measured, fit, growth, measured_points, model_s, scaled_bytes
from lightning_sparse.bench.scale_ranks import MOST_FLOATS, Traffic, count
from lightning_sparse.bench.workloads import parameter_sizes, workload_named
from lightning_sparse.compressors import COMPRESSORS
from lightning_sparse.pictures import human_bytes
from lightning_sparse.rehearsal import Link

WORKLOAD = "mlp_1m"
MEASURED = (2, 4, 8, 16)  # ranks the bench measures: more keep few cores busy with computing, not with messages
LEAST, MOST = 2, 1024  # ranks
FEW, MANY = 4, 16  # ranks between which growth is told
STEPS, WARMUP, ROUNDS = 10, 3, 3  # of the bench
HOP_S = 0.0002  # of a link that was not measured, as in `advise`
GROUPS = "fusion=bucket"  # so that the model travels in one group, as it is counted
_WIDTH = 170  # characters, where no terminal says how wide it is


@dataclass(frozen=True)
class Asked:
    """What was asked for.

    Attributes:
        emulate: rate of the links of clusters to measure on, such as "1gbit", or "" to measure nothing.
        link: rate of the link to model where nothing is measured.
        most: ranks to count up to, from 2 to 1,024.
        output: folder of the results.
        command: what the user typed.
    """

    emulate: str
    link: str
    most: int
    output: Path
    command: str

    def check(self) -> None:
        """Find what cannot work before anything starts.

        Raises:
            ValueError: for a rate or a number that means nothing, or if matplotlib is missing.
            ClusterUnavailableError: no cluster can be emulated here.
        """
        if not LEAST <= self.most <= MOST:
            raise ValueError(f"--most {self.most} is not a number of ranks from {LEAST} to {MOST:,}.")
        for option, rate in (("--emulate", self.emulate), ("--link", self.link)):
            try:
                parse_rate(rate or "unlimited")
            except ValueError as error:
                raise ValueError(f"{option} is the rate of a link: {error}.") from None
        scale_plot.require_matplotlib()
        if self.emulate and (reason := unavailable_reason()):
            raise ClusterUnavailableError(reason)

    def sizes(self) -> list[int]:
        """Numbers of ranks to count: 2, 4, 8, ..."""
        return [2**i for i in range(1, self.most.bit_length())]


def add_scale_command(commands: Any) -> None:
    """Add ``scale`` to what ``argparse.ArgumentParser.add_subparsers`` returned."""
    command: argparse.ArgumentParser = commands.add_parser(
        "scale",
        help="say how bytes and time of communication grow with the number of ranks",
        description=f"Count what every compressor sends among 2, 4, 8, ... ranks, all of them in this process, for the "
        f"gradient of {WORKLOAD}, and model the time that takes on a link. With --emulate, measure up to "
        f"{MEASURED[-1]} ranks too, and fit the link to that. Writes a plot and a JSON file.",
    )
    command.add_argument(
        "--emulate", metavar="RATE", default="", help="measure on links of this rate, such as 1gbit (root on Linux)"
    )
    command.add_argument(
        "--link", metavar="RATE", default="1gbit", help="rate to model where nothing is measured (%(default)s)"
    )
    command.add_argument(
        "--most",
        metavar="RANKS",
        type=int,
        default=MOST,
        help="count up to so many (%(default)s, which takes half an hour and 7 GB of memory; 256: three minutes)",
    )
    command.add_argument("--output", metavar="DIR", type=Path, default=Path("bench-results"), help="(%(default)s)")


def scale(asked: Asked) -> int:
    """Count, measure if asked to, print and write down.  Returns the exit status: 1 if a strategy failed.

    Raises:
        ValueError: for what :meth:`Asked.check` finds.
        ClusterError: a cluster could not be built.
        BenchError: the ranks could not be started.
    """
    asked.check()
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    asked.output.mkdir(parents=True, exist_ok=True)
    stem = f"{datetime.now(timezone.utc):%Y-%m-%d-%H%M%S}-scale"
    elements = sum(parameter_sizes(workload_named(WORKLOAD)))
    rounds: list[Round] = []
    with _progress(console) as progress:
        if asked.emulate:
            with (asked.output / f"{stem}.jsonl").open("w") as file:
                rounds = _measure(asked, file, progress)
        counts = count_all(asked.sizes(), elements, progress)
    measured = measured_points(summarise(rounds, "ddp"))
    fitted = _fit(measured, counts)
    rate_bits_per_s = parse_rate(asked.emulate or asked.link)
    link = fitted.link if fitted else Link(HOP_S, 8 / rate_bits_per_s if rate_bits_per_s else 0.0)

    results = {
        "environment": environment(asked.command),
        "workload": WORKLOAD,
        "elements": elements,
        "link": asdict(link),
        "fit": asdict(fitted) if fitted else None,
        "counted": [asdict(each) | {"modelled_s": _seconds(each, elements, link)} for each in counts],
        "measured": [asdict(each) for each in measured],
        "growth": {name: asdict(each) for name, each in _growth(counts).items()},
    }
    (asked.output / f"{stem}.json").write_text(json.dumps(results, indent=1) + "\n")
    said = words(asked, link, fitted)
    scale_plot.draw(counts, measured, link, elements, asked.output / f"{stem}.svg", said)
    show(console, counts, measured, link, elements)
    for line in (said, *notes(rounds)):
        console.print(line, highlight=False, markup=False)
    console.print(f"results: {asked.output / stem}.json and .svg", highlight=False, soft_wrap=True)
    return int(any(each.error for each in rounds))


def count_all(sizes: Sequence[int], elements: int, progress: Progress) -> list[Traffic]:
    """What every compressor sends among so many ranks; of gradients of ``elements``, or fewer where memory is short."""
    task = progress.add_task("counting", total=len(COMPRESSORS) * len(sizes))
    found = []
    for name in COMPRESSORS:
        progress.update(task, description=f"counting {name}", refresh=True)
        for each in count(name, sizes, elements):
            found.append(each)
            progress.update(task, advance=1, description=f"counting {name} {each.ranks}", refresh=True)
    return found


def _measure(asked: Asked, file: IO[str], progress: Progress) -> list[Round]:
    """The bench's rounds on every cluster, each written to ``file`` as it comes."""
    from lightning_sparse.bench.run import emulate
    from lightning_sparse.bench.worker import Plan

    strategies = ",".join(["ddp", *(f"{name}:{GROUPS}" for name in COMPRESSORS)])
    clusters = [f"{size}x{asked.emulate}" for size in MEASURED if size <= asked.most]
    plans = [Plan(cluster, WORKLOAD, strategies, STEPS, WARMUP, ROUNDS, "cpu") for cluster in clusters]
    file.write(json_line("environment", environment(asked.command)))
    task = progress.add_task("measuring", total=sum(len(plan.turns()) for plan in plans))
    rounds = []
    for plan in plans:
        with closing(emulate(plan)) as turns:
            for measured in turns:
                rounds.append(measured)
                file.write(json_line("round", measured))
                file.flush()
                said = f"measuring {plan.cluster} {measured.strategy}"
                progress.update(task, advance=1, description=said, refresh=True)
    return rounds


def _progress(console: Console) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=console, auto_refresh=False, transient=True)


def _fit(measured: Sequence[Measured], counts: Sequence[Traffic]) -> Fit | None:
    """The fitted link; None where too little was measured, so that what was counted is not lost."""
    try:
        return fit(measured, counts)
    except ValueError:
        return None


def _growth(counts: Sequence[Traffic]) -> dict[str, Any]:
    return growth(counts, FEW, MANY) if {FEW, MANY} <= {each.ranks for each in counts} else {}


def _seconds(each: Traffic, elements: int, link: Link) -> float:
    return model_s(each.hops, scaled_bytes(each, elements), each.ranks, link)


# - for people


def words(asked: Asked, link: Link, fitted: Fit | None) -> str:
    """Which link the model has, and how well it fits."""
    rate = f"{8e-6 / link.s_per_byte:,.0f} Mbit/s" if link.s_per_byte else "no limit"
    said = f"{1e3 * link.latency_s:.2f} ms a hop, {rate}"
    if fitted is None:
        return f"link as given: {said}" + ("; too little was measured to fit one" if asked.emulate else "")
    return (
        f"link fitted to {fitted.points} points measured at {asked.emulate}: {said}; "
        f"it misses them by {1e3 * fitted.rms_s:.1f} ms (root mean square), half of them by {fitted.median_share:.0%} "
        "or less"
    )


def show(console: Console, counts: Sequence[Traffic], measured: Sequence[Measured], link: Link, elements: int) -> None:
    """Print two tables: bytes with their growth, and milliseconds."""
    grown = _growth(counts)
    of_bytes = _table(
        f"bytes of the rank that sends most, in a step with a gradient of {human_bytes(4 * elements)}",
        counts,
        lambda each: human_bytes(scaled_bytes(each, elements)),
        {
            f"{FEW} to {MANY}": {name: f"{each.plain:+.1%}" for name, each in grown.items()},
            "over dense": {name: f"{each.of_dense:+.1%}" for name, each in grown.items()},
        },
    )
    known = {(each.strategy, each.ranks): each.seconds for each in measured}

    def milliseconds(each: Traffic) -> str:
        modelled = f"{1e3 * _seconds(each, elements, link):.1f}"
        seconds = known.get((each.strategy, each.ranks))
        return modelled if seconds is None else f"{modelled} ({1e3 * seconds:.1f})"

    title = "ms of communication in a step: modelled" + (" (measured)" if measured else "")
    of_time = _table(title, counts, milliseconds, {})
    if ddp := [each for each in measured if each.strategy == "ddp"]:
        told = {each.ranks: f"({1e3 * each.seconds:.1f})" for each in ddp}
        of_time.add_row("ddp", *(told.get(size, "") for size in dict.fromkeys(each.ranks for each in counts)))
    console.print(of_bytes, of_time)
    if shorter := [each for each in counts if each.elements < elements]:
        console.print(
            f"From {min(each.ranks for each in shorter)} ranks on, gradients were shorter, for all together to have "
            f"{MOST_FLOATS:,} elements at most, and bytes are scaled up.",
            highlight=False,
        )


def _table(
    title: str, counts: Sequence[Traffic], cell: Callable[[Traffic], str], more: dict[str, dict[str, str]]
) -> Table:
    """A row for each strategy, a column for each number of ranks, and columns of text by strategy."""
    sizes = list(dict.fromkeys(each.ranks for each in counts))
    headings = [*(f"{size:,}" for size in sizes), *more]
    result = Table("ranks", *(Column(h, justify="right", no_wrap=True) for h in headings), title=title)
    result.box, result.padding = box.SIMPLE_HEAD, (0, 1, 0, 0)
    known = {(each.strategy, each.ranks): each for each in counts}
    for name in dict.fromkeys(each.strategy for each in counts):
        cells = [cell(known[name, size]) if (name, size) in known else "" for size in sizes]
        result.add_row(name, *cells, *(column.get(name, "") for column in more.values()))
    return result
