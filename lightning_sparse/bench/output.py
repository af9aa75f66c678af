"""What every command writes: tables, on a console and in a page; where it ran; files, and pictures."""

import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from lightning_sparse.__about__ import __version__

PACKAGES = ("torch", "lightning", "torchmetrics", "numpy")
WIDTH = 170  # characters of a table, where no terminal says how wide it is


def new_console() -> Console:
    """A console that is wide enough for the tables where it is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def new_progress(console: Console) -> Progress:
    """A progress bar without a thread that redraws: on a real cluster this process forks."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=console, auto_refresh=False, transient=True)


def say(console: Console, text: str) -> None:
    """Print a line as it is."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def new_table(title: str | None, first: str, *numbers: str) -> Table:
    """A table without rows, whose columns but for the first are of numbers."""
    columns = (Column(heading, justify="right", no_wrap=True) for heading in numbers)
    look: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False}
    return Table(Column(first, overflow="fold"), *columns, title=title, **look)


def markdown(table: Table) -> str:
    """Write a table in Markdown, its first column as code."""
    rows = [list(map(str, row)) for row in zip(*(column.cells for column in table.columns), strict=True)]
    lines = [[str(column.header) for column in table.columns], ["---", *["---:"] * (len(table.columns) - 1)]]
    lines += [[f"`{name}`", *cells] for name, *cells in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def known(value: float | None, text: Callable[[float], str]) -> str:
    """Write a value, or a dash where it is not known."""
    return "-" if value is None else text(value)


def ms(seconds: float) -> str:
    """Write seconds as milliseconds."""
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.1f} ms"


def environment(command: str) -> dict[str, Any]:
    """Describe the machine and the versions, without any names of hosts or people."""
    kernel = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    return {
        "command": command,
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "tcp_congestion_control": kernel.read_text().strip() if kernel.exists() else None,
        "python": platform.python_version(),
        "lightning-sparse": __version__,
        **{package: version(package) for package in PACKAGES},
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def listed(facts: Mapping[str, Any]) -> str:
    """List facts in Markdown, but for the command."""
    return "".join(f"- {name}: {value}\n" for name, value in facts.items() if name != "command")


def json_line(kind: str, values: Any) -> str:
    """A line of a results file: a dict or a dataclass, marked with what it is."""
    return json.dumps({"kind": kind, **(values if isinstance(values, dict) else asdict(values))}) + "\n"


def new_file(folder: Path, stem: str) -> Path:
    """Make an empty file of results, with a name that no run beside this one has taken."""
    folder.mkdir(parents=True, exist_ok=True)
    names = (f"{stem}{f'-{i}' if i > 1 else ''}.jsonl" for i in count(1))
    path = next(folder / name for name in names if not (folder / name).exists())
    path.touch(exist_ok=False)
    return path


def save(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib to an SVG file, the same in every run."""
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(path, metadata={"Date": None})
