"""Real ranks: processes that end in time, over Gloo."""

import io
import multiprocessing
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from lightning_sparse.bench.compare.ranks import free_port

LIMIT_S = 100  # for what ranks do in a test
IMPORTED = [  # once, for all ranks: what every test file imports, and what takes long
    "lightning_sparse", "sklearn.datasets", "tests.support.models", "pytest", "hypothesis", "torch.distributed.optim",
]  # fmt: skip


class Ranks:
    """Starts functions on real ranks: processes joined by torchrun's environment variables, over Gloo."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(IMPORTED)

    def run(
        self, function: Callable[..., Any], size: int, *args: Any, timeout_s: float = LIMIT_S, gloo: bool = False
    ) -> list[Any]:
        """``function(rank, size, *args)`` on each rank, in a process group if ``gloo``; returns what each returned.

        Raises:
            AssertionError: if a rank raises, dies or is not done in time; all ranks are killed first.
        """
        if gloo:
            function, args = _with_gloo, (function, *args)
        try:
            with self.start(function, size, *args) as running:
                return running.values(timeout_s)
        except AssertionError as error:
            if "EADDRINUSE" not in str(error):  # else another program has taken the port, which was free
                raise
        with self.start(function, size, *args) as running:
            return running.values(timeout_s)

    def start(self, function: Callable[..., Any], size: int, *args: Any) -> "Running":
        """``function(rank, size, *args)`` on each rank, in the background; killed when the context ends."""
        return Running(self.context, function, size, args)

    def apart(self, function: Callable[..., Any], output: Path, *args: Any, timeout_s: float = LIMIT_S) -> Any:
        """``function(*args)`` in a process that is no rank and may start others; returns what it returned.

        What it and they print goes to the file ``output``.

        Raises:
            AssertionError: as ``run``.
        """
        with Running(self.context, _apart, 1, (function, output, *args), daemon=False) as running:
            return running.values(timeout_s)[0]


@dataclass
class End:
    """How a rank ended: with what its function returned, or a traceback or exit code."""

    rank: int
    value: Any
    error: str | None


class Running:
    """Ranks at work."""

    def __init__(
        self, context: Any, function: Callable[..., Any], size: int, args: tuple[Any, ...], daemon: bool = True
    ) -> None:
        port = free_port()
        self._pipes: dict[Connection, int] = {}  # what a rank says at its end, and which rank
        self.processes = []
        for rank in range(size):
            receiving, sending = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(function, rank, size, port, sending, args), daemon=daemon)
            process.start()
            sending.close()  # ours, so that the end of the process is the end of the pipe
            self.processes.append(process)
            self._pipes[receiving] = rank

    def ends(self, timeout_s: float) -> Iterator[End]:
        """The ranks in the order in which they end.

        Raises:
            AssertionError: if one has not ended in time.
        """
        deadline = time.monotonic() + timeout_s
        while self._pipes:
            ready = wait(list(self._pipes), timeout=max(0.0, deadline - time.monotonic()))
            assert ready, f"ranks {sorted(self._pipes.values())} were not done in {timeout_s} s"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = self._pipes.pop(pipe)
                value = error = None
                try:
                    answer, error = pipe.recv()
                    value = torch.load(io.BytesIO(answer), weights_only=False) if error is None else None
                except EOFError:
                    self.processes[rank].join(timeout=5)
                    error = f"died with exit code {self.processes[rank].exitcode}"
                yield End(rank, value, error)

    def values(self, timeout_s: float) -> list[Any]:
        """What each rank returned.

        Raises:
            AssertionError: if a rank raised, died or has not ended in time.
        """
        values = [None] * len(self.processes)
        for end in self.ends(timeout_s):
            assert end.error is None, f"rank {end.rank} failed:\n{end.error}"
            values[end.rank] = end.value
        return values

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, failed: object, *error: object) -> None:
        for process in self.processes:
            process.join(timeout=0 if failed else 5)
            process.kill()


def _rank(
    function: Callable[..., Any], rank: int, size: int, port: int, end: Connection, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size), GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="tests", GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    try:
        answer = io.BytesIO()
        torch.save(function(rank, size, *args), answer)
        end.send((answer.getvalue(), None))
    except BaseException:
        end.send((None, traceback.format_exc()))
        raise
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _with_gloo(rank: int, size: int, function: Callable[..., Any], *args: Any) -> Any:
    torch.distributed.init_process_group("gloo")
    return function(rank, size, *args)


def _apart(rank: int, size: int, function: Callable[..., Any], output: Path, *args: Any) -> Any:
    print_to(output)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR"):
        del os.environ[name]
    del os.environ["TORCHELASTIC_RUN_ID"]
    os.environ["MASTER_PORT"] = str(free_port())  # that Lightning gives to the processes it starts
    warnings.simplefilter("ignore")
    return function(*args)


def print_to(output: Path) -> None:
    """Have this process, and what it starts, print to a file."""
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
