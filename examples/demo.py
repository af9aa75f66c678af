"""Train a language model on four hosts over a slow network, with plain DDP and with `sparse_auto`, and compare.

    python examples/demo.py
    python examples/demo.py --no-emulation     # as where no network can be emulated: its time is computed

The hosts are network namespaces of this machine, joined by links of a limited rate, which takes Linux, and root or user
namespaces. Elsewhere they are processes, each step's bytes are counted, and the time they take on such a link is added.
"""

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from lightning_sparse.bench.advise import busy, predict
from lightning_sparse.bench.cluster import Cluster, ClusterError, link_text, parse, parse_link, unavailable_reason
from lightning_sparse.monitor.tables import human_bytes

HOSTS = 4
PORT = 29500  # every emulated cluster has its ports to itself
ALONE = "no_communication"
STYLES = ("red", "green", "blue")  # of ddp, the strategy to compare with it, and one host alone
TELL_S = 5  # between two lines of progress, where output is no terminal
COLUMNS, LINES = 64, 14  # of the picture


@dataclass
class Training:
    """What is known so far of a training."""

    name: str
    style: str
    seconds: float = 0.0
    steps: int = 0
    sent_bytes: float = 0.0  # by a host
    judged: list[tuple[float, float, float]] = field(default_factory=list)  # seconds, loss and bytes sent by then

    @property
    def label(self) -> str:
        return "one host alone" if self.name == ALONE else self.name

    def sent(self, sent_bytes: float) -> str:
        """Say how much; a host alone has nobody to send to."""
        return "-" if self.name == ALONE else human_bytes(sent_bytes)

    @property
    def best(self) -> float:
        return min(loss for _, loss, _ in self.judged)

    def add(self, seconds: float, steps: int, sent_bytes: float, loss: float | None) -> None:
        self.seconds, self.steps, self.sent_bytes = seconds, steps, sent_bytes
        if loss is not None:
            self.judged.append((seconds, loss, sent_bytes))

    def until(self, wanted: float) -> tuple[float, float] | None:
        """Return the seconds and the bytes until a loss was found; None if it was not."""
        return next(((seconds, sent_bytes) for seconds, loss, sent_bytes in self.judged if loss <= wanted), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="of each of the three trainings (default: 20)")
    parser.add_argument("--link", default="100mbit", help="rate of each host's link (default: 100mbit)")
    parser.add_argument("--no-emulation", action="store_true", help="compute the network's time; do not emulate one")
    parser.add_argument("--picture", type=Path, default=Path("demo.svg"), help="file to write (default: demo.svg)")
    args = parser.parse_args()
    console, doubt = Console(), busy()
    try:
        parse_link(args.link)  # which says what is wrong with it
        reason = "as --no-emulation asks" if args.no_emulation else why_not(f"{HOSTS}x{args.link}")
        how = "computed" if reason else "emulated on this machine"
        if reason:
            console.print(f"No network is emulated: {reason}.\n", highlight=False)
        ours = chosen(args.link, console) if reason else "sparse_auto"
        trainings = [Training(*each) for each in zip(("ddp", ours, ALONE), STYLES, strict=True)]
        console.print(introduction(args, how))
        train(trainings, args, bool(reason), console)
    except (ClusterError, ValueError) as error:
        sys.exit(f"The demo failed: {error}")
    except KeyboardInterrupt:
        sys.exit("Interrupted.")
    title = f"Loss on held-out text by seconds, {HOSTS} hosts, {link_text(parse_link(args.link))} ({how})"
    shown = Group(picture(trainings, title), result(trainings), Text(closing_words(trainings, bool(reason), doubt)))
    console.print(shown)
    with open(os.devnull, "w") as nowhere:
        (drawing := Console(record=True, width=100, file=nowhere)).print(shown)
    drawing.save_svg(str(args.picture), title="lightning_sparse: make demo")
    console.print(f"picture: {args.picture}", highlight=False)


# - hosts


def why_not(network: str) -> str | None:
    """Say why the network cannot be emulated here; None if it can."""
    if reason := unavailable_reason():
        return reason
    try:
        with Cluster(network):
            return None
    except ClusterError as error:
        return str(error)


def chosen(link: str, console: Console) -> str:
    """Return the name of what `sparse_auto` would choose for a link, which it cannot measure here."""
    console.print("sparse_auto measures the network; there is none, so `lightning-sparse advise` predicts its choice:")
    found = next(each for each in predict("byte_lm", f"{HOSTS}x{link}") if each.chosen)
    console.print(f"{found.name}.\n", highlight=False)
    return found.name


def command(host: int, address: str, port: int, arguments: Sequence[str]) -> list[str]:
    """Return what runs in a host, with the environment that torchrun would give it."""
    variables = {"RANK": host, "LOCAL_RANK": 0, "GROUP_RANK": host, "WORLD_SIZE": HOSTS, "LOCAL_WORLD_SIZE": 1}
    variables |= {"MASTER_ADDR": address, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}  # the hosts share the cores
    rank = Path(__file__).with_name("demo_rank.py")
    return ["env", *(f"{name}={value}" for name, value in variables.items()), sys.executable, str(rank), *arguments]


def emulated(link: str, arguments: Sequence[str]) -> Iterator[str]:
    """Yield the lines of host 0 of an emulated network."""
    with Cluster(f"{HOSTS}x{link}") as cluster:
        own = [*arguments, "--interface", "eth0"]
        commands = [command(host, cluster.address(0), PORT, own) for host in range(HOSTS)]
        with closing(cluster.lines(commands)) as lines:
            yield from lines


def computed(link: str, arguments: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the first of as many processes as there would be hosts."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    own = [*arguments, "--s-per-byte", str(parse(f"{HOSTS}x{link}").s_per_byte)]
    loopback = {**os.environ, "GLOO_SOCKET_IFNAME": "lo0" if platform.system() == "Darwin" else "lo"}
    with ExitStack() as stack:
        processes, errors = [], stack.enter_context(tempfile.TemporaryFile("w+"))
        for host in range(HOSTS):
            out = subprocess.DEVNULL if host else subprocess.PIPE
            argv = command(host, "127.0.0.1", port, own)
            process = subprocess.Popen(argv, env=loopback, stdout=out, stderr=errors, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        assert processes[0].stdout is not None
        yield from processes[0].stdout
        if any(process.wait() for process in processes):
            errors.seek(0)
            raise ClusterError(f"a process failed; the end of what it wrote:\n{errors.read()[-4000:]}")


def train(trainings: Sequence[Training], args: argparse.Namespace, compute: bool, console: Console) -> None:
    """Run the trainings, one after the other, and show how far they are."""
    arguments = [";".join(each.name for each in trainings), "--seconds", str(args.seconds)]
    lines = (computed if compute else emulated)(args.link, arguments)
    spinner = Spinner("dots", f"starting {HOSTS} hosts: each imports torch and Lightning ...")
    told_s = 0.0  # where nobody sees a live table, a line every now and then says how far it is
    with Live(console=console, refresh_per_second=8) as live, closing(lines):
        live.update(Group(live_table(trainings, args.seconds), spinner))
        for line in lines:
            figures = json.loads(line)
            name = figures.pop("strategy")
            now = next(each for each in trainings if each.name == name)
            now.add(**figures)
            if not console.is_terminal and time.monotonic() > told_s + TELL_S:
                told_s = time.monotonic()
                far = f"{now.seconds:.0f} of {args.seconds:g} s, {now.steps} steps"
                console.print(f"{now.label}: {far}", highlight=False)
            spinner.update(text=f"training: {now.label}" if now.seconds < args.seconds else "starting the next one ...")
            live.update(Group(live_table(trainings, args.seconds), spinner))
        live.update(live_table(trainings, args.seconds))


# - what is shown


def introduction(args: argparse.Namespace, how: str) -> Text:
    """Say in a sentence what is happening."""
    link, cores = link_text(parse_link(args.link)), os.cpu_count() or 1
    return Text(
        f"Four hosts, joined by links of {link} ({how}; they share {cores} core{'s' if cores > 1 else ''}), train "
        "a language model of 279,168 parameters on the source of Python's library, "
        f"{args.seconds:g} seconds with each strategy; then each host alone, all four at once: without a network.\n"
    )


def live_table(trainings: Sequence[Training], seconds: float) -> Table:
    numbers = (Column(name, justify="right", no_wrap=True) for name in ("seconds", "steps", "loss", "a host sent"))
    table = Table(Column("strategy", no_wrap=True), "", *numbers, box=box.SIMPLE_HEAD)
    for each in trainings:
        loss = f"{each.judged[-1][1]:.3f}" if each.judged else ""
        bar = ProgressBar(seconds, min(each.seconds, seconds), 24, complete_style=each.style, finished_style=each.style)
        name = Text(each.label, each.style)
        table.add_row(name, bar, f"{each.seconds:.1f}", f"{each.steps}", loss, each.sent(each.sent_bytes))
    return table


def picture(trainings: Sequence[Training], title: str) -> Text:
    """Draw the losses by seconds, after the steep ones at the start, each training with a mark of its own."""
    end = max(each.seconds for each in trainings)
    shown = [[(s, loss) for s, loss, _ in each.judged if s >= end / 5] for each in trainings]
    losses = [loss for points in shown for _, loss in points]
    top, bottom = max(losses), min(losses)
    cells = [[(" ", "")] * COLUMNS for _ in range(LINES)]
    for each, points, mark in reversed(list(zip(trainings, shown, "●■·", strict=True))):  # what matters on top
        for (start, above), (stop, below) in pairwise(points):
            for column in range(int(start / end * (COLUMNS - 1)), int(stop / end * (COLUMNS - 1)) + 1):
                part = min(1.0, max(0.0, (column * end / (COLUMNS - 1) - start) / (stop - start)))
                loss = above + part * (below - above)
                line = round((top - loss) / max(top - bottom, 1e-9) * (LINES - 1))
                cells[line][column] = (mark, each.style)
    text = Text(f"\n{title}\n\n", "bold")
    for number, line in enumerate(cells):
        text.append(f"{top - number * (top - bottom) / (LINES - 1):6.2f} │", "default not bold")
        text.append_text(Text.assemble(*line, "\n"))
    text.append(f"       └{'─' * COLUMNS}\n        0{f'{end:.0f} s':>{COLUMNS - 1}}\n", "default not bold")
    for each, mark in zip(trainings, "●■·", strict=True):
        text.append(f"        {mark} {each.label}", f"{each.style} not bold")
    return text.append("\n")


def result(trainings: Sequence[Training]) -> Table:
    wanted = trainings[0].best
    headings = ("last loss", f"s to {wanted:.2f}", "times faster", "sent by then", "steps")
    numbers = (Column(each, justify="right", no_wrap=number == 3) for number, each in enumerate(headings))
    table = Table(Column("strategy", no_wrap=True), *numbers, box=box.SIMPLE_HEAD)
    ddp = trainings[0].until(wanted)
    for each in trainings:
        cells = ("-", "-", "-")
        if ddp and (found := each.until(wanted)):
            cells = (f"{found[0]:.1f}", f"{ddp[0] / found[0]:.1f}", each.sent(found[1]))
        table.add_row(Text(each.label, each.style), f"{each.judged[-1][1]:.3f}", *cells, f"{each.steps}")
    return table


def closing_words(trainings: Sequence[Training], compute: bool, doubt: str) -> str:
    """Say who was faster, if anybody was, and what to think of it."""
    ddp, ours, alone = trainings
    wanted = ddp.best
    before, now = ddp.until(wanted), ours.until(wanted)
    single, four = alone.until(alone.best), ours.until(alone.best)
    said = f"{ours.label} did not get to ddp's best loss, {wanted:.2f}, in the time: no gain here."
    if before and now and now[0] >= before[0]:
        said = (
            f"{ours.label} got to ddp's best loss, {wanted:.2f}, after {now[0]:.1f} s, ddp in {before[0]:.1f}: no gain."
        )
    elif before and now:
        said = (
            f"{ours.label} got to ddp's best loss, {wanted:.2f}, in {now[0]:.1f} s in place of {before[0]:.1f}: "
            f"{before[0] / now[0]:.1f} times faster, and a host sent {human_bytes(now[1])} in place of "
            f"{human_bytes(before[1])}."
        )
    if single:
        said += f" One host alone got to its best loss, {alone.best:.2f}, in {single[0]:.1f} s, {ours.label} "
        if four and four[0] < single[0]:
            said += f"in {four[0]:.1f}: four are {single[0] / four[0]:.1f} times faster."
        else:
            said += "no sooner: here the other three are not worth their network."
    if compute:
        said += (
            " Computation and bytes were measured; the bytes' time on the link was computed, and added to each step's."
        )
    return " ".join(filter(None, (said, doubt)))


if __name__ == "__main__":
    main()
