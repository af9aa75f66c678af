"""Where a process stands among ranks, and the processes that train on one: one after the other, or in turn."""

import ctypes
import faulthandler
import fcntl
import json
import multiprocessing
import os
import random
import signal
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # exported at run time only

from lightning_sparse.bench.compare.schedule import Schedule
from lightning_sparse.bench.compare.strategies import StrategySpec

_SIOCGIFADDR = 0x8915  # of <linux/sockios.h>: the address of an interface


@dataclass(frozen=True)
class RankInfo:
    """The position of this process among the ranks."""

    rank: int  # of all
    local_rank: int  # of those on this host
    size: int  # number of ranks
    local_size: int  # number of ranks on this host
    hosts: int  # number of hosts, which may have different numbers of ranks
    address: str  # of the host of rank 0
    port: int  # there, for the workers' store
    store_is_there: bool  # whether torchrun's agent serves the store
    interface: str  # whose traffic is counted, and which Gloo and NCCL use

    @classmethod
    def find(cls, interface: str | None) -> "RankInfo | None":
        """Read this process's place from what torchrun or SLURM set; None if neither started it.

        ``interface`` is the name of the network interface; None to find the one that leads to rank 0.
        """
        started: TorchElasticEnvironment | SLURMEnvironment
        if TorchElasticEnvironment.detect():
            started = TorchElasticEnvironment()
            local_size, hosts = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["GROUP_WORLD_SIZE"])
        elif SLURMEnvironment.detect():
            started = SLURMEnvironment()
            hosts = int(os.environ["SLURM_NNODES"])
            local_size = started.world_size() // hosts
        else:
            return None
        address, port = started.main_address, started.main_port
        store_is_there = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        interface = interface or os.environ.get("GLOO_SOCKET_IFNAME") or interface_towards(address)
        read_sent(interface)  # complains now if there is none of this name
        ranks = started.global_rank(), started.local_rank(), started.world_size(), local_size, hosts
        return cls(*ranks, address, port, store_is_there, interface)


def on_shared_device(rank: int) -> dict[str, str]:
    """Return what the environment of a rank must hold for NCCL to take it on a device that it shares with others.

    NCCL refuses two ranks of one host on one device, and ``NCCL_HOSTID`` is what tells hosts apart.  What such ranks
    send goes through sockets, as between machines with Ethernet: not over InfiniBand or a plugin, where there is one,
    nor over an NVLink between machines, which NCCL looks for where hosts differ.
    """
    return {"NCCL_HOSTID": f"rank {rank}", "NCCL_NET": "Socket", "NCCL_MNNVL_ENABLE": "0"}


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each interface of this host that has one; nothing where the kernel is not Linux."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, name.encode()[:15].ljust(256, b"\0"))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def interface_towards(address: str) -> str:
    """Name of this host's interface on the way to ``address``, which may be its own; a ValueError if none is found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing; the kernel chooses a source address
        own = probe.getsockname()[0]
    if found := next((name for name, known in interfaces().items() if known == own), None):
        return found
    raise ValueError(f"no interface with the address {own} was found on the way to {address}: give --interface.")


def read_sent(interface: str) -> tuple[int, int]:
    """Read how many bytes and packets the kernel has counted as sent by one of this host's interfaces."""
    lines = [line.partition(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    counts = {name.strip(): numbers.split() for name, _, numbers in lines}
    if interface not in counts:
        raise ValueError(f"an interface must be one of this host's, {', '.join(counts)}; got {interface!r}")
    return int(counts[interface][8]), int(counts[interface][9])


STOPPED = "stopped, since another rank failed"
_FORK = multiprocessing.get_context("fork")
PATIENCE = timedelta(days=1)  # of the workers among themselves; training has a time limit of its own
# Seconds until a worker asks again whether another rank failed: Gloo leaves a rank waiting for one that is gone.  The
# question and its answer are counted with the messages of a step: some 300 bytes.
_GLANCE_S = 5.0
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


class Turn(NamedTuple):
    """One strategy in one round, on this rank; ``store`` is of this turn alone, under ``key`` in the workers' store."""

    schedule: Schedule
    place: RankInfo
    number: int  # of the round
    strategy: StrategySpec
    store: Store
    key: str = "0"

    def go_on(self, times: int) -> None:
        """Let the processes of all ranks go on, which have done so as many ``times``; on rank 0."""
        self.store.set(f"port {times}", str(free_port()))

    def waiting(self, results: Connection) -> Generator[int, None, None]:
        """Wait in a turn's process, at each ``next``, until it may go on; yields a free port of rank 0."""
        store = PrefixStore(self.key, connect(self.place))  # a forked process must not use its parent's
        times = 0
        while True:
            yield int(store.get(f"port {times}"))
            times += 1
            if self.place.rank == 0:
                results.send(None)


def free_port() -> int:
    """A port that is free, and below those the kernel gives to outgoing connections, which might take it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with suppress(OSError), socket.create_server(("", port)):
            return port


def connect(place: RankInfo, patience: timedelta = PATIENCE) -> Store:
    """Connect to the workers' store."""
    return PrefixStore("lightning_sparse_bench", TCPStore(place.address, place.port, is_master=False, timeout=patience))


def results_of(
    turns: Sequence[Turn], train: Callable[[Turn, Connection], None]
) -> Generator[tuple[Turn, str], None, None]:
    """Have each turn ``train`` in a process of its own; yield its MeasuredRun as JSON, or {"error": ...}, as it ends.

    One process trains at a time: the others wait, at first, and whenever they take the next of :meth:`Turn.waiting`.
    One that takes longer than the schedule's limit is ended.
    """
    running: dict[Connection, tuple[Turn, BaseProcess]] = {}
    for turn in turns:
        receiving, sending = _FORK.Pipe(duplex=False)
        running[receiving] = turn, child(_train, turn, sending, train)
        sending.close()  # ours: so that the end of the process is the end of the pipe
    began = time.monotonic()
    line, times = deque(running), Counter[Connection]()  # the first of the line trains; how often it went on

    def go_on() -> None:
        if line and running[line[0]][0].place.rank == 0:
            running[line[0]][0].go_on(times[line[0]])
            times[line[0]] += 1

    try:
        go_on()
        while running:
            ready = wait([*running], _GLANCE_S)
            for receiving, (turn, process) in list(running.items()):
                why = "" if receiving in ready else _why_to_end(turn, began)
                if receiving not in ready and not why:
                    continue
                trained = receiving is line[0]
                result = {"error": why} if why else _sent(receiving, turn.place.rank, process)
                if result is None:
                    line.rotate(-1)
                else:
                    _end(turn, process, result)
                    line.remove(receiving)
                    del running[receiving]
                    yield turn, json.dumps(result)
                if trained:
                    go_on()
    finally:
        for _, process in running.values():
            process.kill()


def _train(turn: Turn, results: Connection, train: Callable[[Turn, Connection], None]) -> None:
    """In a process of its own ``train``, and say on standard error where this is when the limit is reached."""
    if turn.schedule.limit_s is not None:
        faulthandler.dump_traceback_later(turn.schedule.limit_s)
    train(turn, results)


def _why_to_end(turn: Turn, began: float) -> str:
    """Why a process that has sent nothing must end; "" if it may go on."""
    if turn.store.check(["failed"]):
        return STOPPED
    limit_s = turn.schedule.limit_s
    if limit_s is not None and time.monotonic() > began + limit_s + _GLANCE_S:
        return (
            f"it hung: rank {turn.place.rank} had not ended after {limit_s:g} s. Standard error says where its "
            "threads were. Please report it, with all that this command prints."
        )
    return ""


def _end(turn: Turn, process: BaseProcess, result: dict[str, Any]) -> None:
    """End a process that has sent its ``result``, or has failed: then the other ranks stop too."""
    if "error" in result:
        turn.store.set("failed", "")
    else:
        process.join(_GLANCE_S)
    process.kill()


def _sent(receiving: Connection, rank: int, process: BaseProcess) -> dict[str, Any] | None:
    """What a process has sent: its result, or None where it waits for the others."""
    try:
        result: dict[str, Any] | None = receiving.recv()
    except EOFError:
        process.join()
        result = {"error": f"the process of rank {rank} ended with status {process.exitcode}"}
    return result


def child(work: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Start a process that does ``work``, and ends with this one."""
    process = _FORK.Process(target=_die_with_parent, args=(os.getpid(), work, *arguments), daemon=True)
    process.start()
    return process


def _die_with_parent(parent: int, work: Callable[..., None], *arguments: Any) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's business
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if os.getppid() == parent:
        work(*arguments)
