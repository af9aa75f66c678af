"""Runs a benchmark, on emulated clusters or on the cluster it was started on, and reports."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from itertools import chain, count
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_sparse.bench import plots
from lightning_sparse.bench.cluster import Cluster, ClusterUnavailableError, parse, unavailable_reason
from lightning_sparse.bench.peers import contenders
from lightning_sparse.bench.report import Round, environment, json_line, page, show, summarise
from lightning_sparse.bench.worker import Place, Plan, run
from lightning_sparse.bench.workloads import parameter_sizes, workload_named

_PORT = 29500  # of the workers' store; every emulated cluster has its ports to itself
_TABLE_WIDTH = 170  # characters, where no terminal says how wide it is
_ERROR_BYTES = 4_000  # of a worker's standard error that an error shows


class BenchError(RuntimeError):
    """A benchmark could not go on; the message says why."""


@dataclass(frozen=True)
class Bench:
    """What was asked for.

    Attributes:
        clusters: emulated clusters in the form of :func:`~lightning_sparse.bench.cluster.parse`; empty to use the
            ranks that torchrun or SLURM started.
        plan: what to run on each; its ``cluster`` is filled in.
        output: folder of the results.
        plot: draw plots too.
        interface: whose traffic is counted on a real cluster; None to find it.
        command: what the user typed.
    """

    clusters: Sequence[str]
    plan: Plan
    output: Path
    plot: bool
    interface: str | None
    command: str

    def check(self) -> None:
        """Find what cannot work before anything starts.

        Raises:
            ValueError: for a name or a number that means nothing.
            ClusterUnavailableError: no cluster can be emulated here.
        """
        workload_named(self.plan.workload)
        contenders(self.plan.strategies)
        for name, least in (("steps", 1), ("warmup", 0), ("rounds", 1)):
            if (value := getattr(self.plan, name)) < least:
                raise ValueError(f"--{name} {value} is too small: give {least} or more.")
        for cluster in self.clusters:
            if parse(cluster).hosts < 2:
                raise ValueError(f"cluster {cluster!r} has one host, which has nobody to talk to: give 2 or more.")
        if self.clusters and (reason := unavailable_reason()):
            raise ClusterUnavailableError(reason)
        if self.plot:
            plots.require_matplotlib()


def bench(asked: Bench) -> int:
    """Run and report.  Returns the exit status: 1 if a strategy failed."""
    asked.check()
    if asked.clusters:
        return _report(asked, emulate)
    place = Place.find(asked.interface)
    if place is None:
        raise BenchError(
            "no cluster: give --emulate 4x1gbit, say, or start this command on every host with torchrun or srun."
        )
    here = replace(asked, clusters=[f"{place.hosts} hosts"])
    if place.rank == 0:
        return _report(here, lambda plan: run(plan, place))
    for _ in run(replace(asked.plan, cluster=here.clusters[0]), place):
        pass  # rank 0 reports
    return 0


def _report(asked: Bench, take_turns: Callable[[Plan], Generator[Round, None, None]]) -> int:
    """Run the plan on every cluster; write each result down as it comes, and in the end the tables."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_TABLE_WIDTH)
    plan = asked.plan
    facts = environment(asked.command) | _asked(plan)
    results = _new_file(asked.output, f"{datetime.now(timezone.utc):%Y-%m-%d-%H%M%S}-{plan.workload}")
    stem = results.stem
    rounds: list[Round] = []
    with results.open("a") as file, _progress(console) as progress:
        file.write(json_line("environment", facts))
        task = progress.add_task("starting", total=len(asked.clusters) * len(plan.turns()))
        for cluster in asked.clusters:
            with closing(take_turns(replace(plan, cluster=cluster))) as turns:
                for measured in turns:
                    rounds.append(measured)
                    file.write(json_line("round", measured))
                    file.flush()
                    progress.update(task, advance=1, description=_last(measured), refresh=True)
        rows = summarise(rounds, contenders(plan.strategies)[0].label)
        file.writelines(json_line("summary", row) for row in rows)
    images = plots.draw(rows, rounds, asked.output, stem) if asked.plot and rows else []
    facts |= {"device": rounds[0].run.device, "threads of a rank": rounds[0].run.threads} if rounds[0].run else {}
    (asked.output / f"{stem}.md").write_text(page(rows, rounds, plan.workload, facts, [results.name, *images]))
    show(console, rows, rounds, plan.workload)
    console.print(f"results: {results}", highlight=False, soft_wrap=True)
    return int(any(measured.error for measured in rounds))


def _new_file(folder: Path, stem: str) -> Path:
    """An empty file of results, with a name that no run beside this one has taken."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in chain([stem], (f"{stem}-{i}" for i in count(2))):
        with suppress(FileExistsError):
            path = folder / f"{name}.jsonl"
            path.touch(exist_ok=False)
            return path
    raise AssertionError("unreachable")


def _asked(plan: Plan) -> dict[str, Any]:
    """The plan, and the size of its model."""
    settings = {name: value for name, value in asdict(plan).items() if name != "cluster"}
    return {**settings, "parameters": sum(parameter_sizes(workload_named(plan.workload)))}


def _progress(console: Console) -> Progress:
    # Without a thread that redraws: on a real cluster this process forks.
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=console, auto_refresh=False, transient=True)


def _last(measured: Round) -> str:
    if not measured.timed:
        return f"{measured.cluster} {measured.strategy}: failed"
    seconds = sum(step.s for step in measured.timed) / len(measured.timed)
    return f"{measured.cluster} {measured.strategy}: {1e3 * seconds:.0f} ms a step"


# - an emulated cluster


def emulate(plan: Plan) -> Generator[Round, None, None]:
    """Build the cluster, start a worker in each host, and yield what rank 0 writes."""
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(plan.cluster))
        errors = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(cluster.hosts)]
        workers = [_start_worker(cluster, host, plan, errors[host]) for host in range(cluster.hosts)]
        output = workers[0].stdout
        assert output is not None
        for line in _lines(workers, stack.enter_context(output), errors):
            yield Round.from_json(json.loads(line))


def _start_worker(cluster: Cluster, host: int, plan: Plan, errors: IO[bytes]) -> "subprocess.Popen[bytes]":
    variables = {  # as torchrun would set them
        "RANK": str(host),
        "LOCAL_RANK": "0",
        "GROUP_RANK": str(host),
        "WORLD_SIZE": str(cluster.hosts),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": cluster.address(0),
        "MASTER_PORT": str(_PORT),
        "TORCHELASTIC_RUN_ID": "bench",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # the hosts share the machine's cores
    }
    return cluster.popen(
        host,
        [sys.executable, "-m", "lightning_sparse.bench.worker", json.dumps(asdict(plan))],
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if host == 0 else subprocess.DEVNULL,
        stderr=errors,
        bufsize=0,
    )


def _lines(
    workers: "Sequence[subprocess.Popen[bytes]]", output: IO[bytes], errors: Sequence[IO[bytes]]
) -> Iterator[bytes]:
    """The lines of ``output``, which rank 0 writes, until all workers have ended.

    Raises:
        BenchError: a worker failed.
    """
    os.set_blocking(output.fileno(), False)
    rest = b""
    running = True
    while running:
        statuses = [worker.poll() for worker in workers]  # before reading, so that nothing is missed at the end
        *lines, rest = (rest + (output.read() or b"")).split(b"\n")
        yield from lines
        for host, status in enumerate(statuses):
            if status:
                raise BenchError(f"the worker of host {host} ended with status {status}:\n{_tail(errors[host])}")
        running = None in statuses
        time.sleep(0.1 if running else 0)


def _tail(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - _ERROR_BYTES))
    return file.read().decode(errors="replace").strip()
