"""What the tests share: every compressor, and real processes that end in time."""

import io
import multiprocessing
import os
import queue
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lightning_sparse as ls

# The laws are tested over this list.  A name in COMPRESSORS is in it by itself; add settings worth a test of their own.
EVERY_COMPRESSOR = [
    *(pytest.param(kind(), id=name) for name, kind in ls.COMPRESSORS.items()),
    pytest.param(ls.SkipReduce(skip=0.0), id="skip_reduce-0"),
    pytest.param(ls.SkipReduce(skip=1.0), id="skip_reduce-all"),
    pytest.param(ls.SkipReduce(rotation="static"), id="skip_reduce-static"),
    pytest.param(ls.RandomK(density=1.0), id="random_k-all"),
    pytest.param(ls.TopK(density=0.3), id="top_k-0.3"),
    pytest.param(ls.Warmup(2, ls.TopK(density=0.1)), id="warmup-top_k"),
]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Ranks:
    """Starts functions on real ranks: processes joined by torchrun's environment variables, over Gloo."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "lightning.pytorch", "lightning_sparse", "tests.conftest"])

    def run(self, function: Callable[..., Any], size: int, *args: Any, timeout_s: float = 60) -> list[Any]:
        """``function(rank, size, *args)`` on each rank; returns what each returned.

        Raises:
            AssertionError: if a rank raises, dies or is not done in time; all ranks are killed first.
        """
        results: Any = self._context.Queue()
        port = _free_port()
        processes = [
            self._context.Process(target=_rank, args=(function, rank, size, port, results, args), daemon=True)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(results, processes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.join(timeout=5)
                process.kill()


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    return Ranks()


def _collect(results: Any, processes: list[Any], deadline: float) -> list[Any]:
    collected: dict[int, Any] = {}
    while len(collected) < len(processes):
        try:
            rank, value, error = results.get(timeout=0.2)
        except queue.Empty:
            dead = [i for i, p in enumerate(processes) if p.exitcode not in (None, 0) and i not in collected]
            assert not dead, f"rank {dead[0]} died with exit code {processes[dead[0]].exitcode}"
            missing = sorted(set(range(len(processes))) - set(collected))
            assert time.monotonic() < deadline, f"ranks {missing} were not done in time"
            continue
        if error is not None:
            for process in processes:
                process.kill()
        assert error is None, f"rank {rank} failed:\n{error}"
        collected[rank] = torch.load(io.BytesIO(value), weights_only=False)
    return [collected[rank] for rank in range(len(processes))]


def _rank(function: Callable[..., Any], rank: int, size: int, port: int, results: Any, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size), GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="tests", GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    try:
        answer = io.BytesIO()
        torch.save(function(rank, size, *args), answer)  # as bytes: a tensor in a queue dies with its process
        results.put((rank, answer.getvalue(), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
