"""The emulated cluster as its user sees it: built on entry, removed on exit, with processes in its hosts."""

import atexit
import math
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import IO, Any

from lightning_sparse.bench.cluster import network
from lightning_sparse.bench.cluster.available import ClusterError, unavailable_reason
from lightning_sparse.bench.cluster.network import INTERFACE, Network
from lightning_sparse.bench.cluster.spec import parse

_TAIL = 4_000  # characters of a standard error that an error shows
_GLANCE_S = 0.05  # between looks at what runs


class Cluster:
    """An emulated cluster; a context manager that builds it on entry and removes every trace of it on exit.

    It is removed as well when the block is left by an exception, SIGINT, SIGTERM or SIGHUP, at the exit of the
    interpreter, and when that is killed by SIGKILL.

    Args:
        spec: its hosts and links as text; see :func:`parse`.

    Raises:
        ValueError: ``spec`` does not describe a cluster.
    """

    def __init__(self, spec: str) -> None:
        self.spec = parse(spec)
        self.network = Network(self.spec)
        self._processes: list[subprocess.Popen[Any]] = []

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return self.spec.hosts

    def __enter__(self) -> "Cluster":
        """Build the cluster.

        Raises:
            ClusterError: ``ip`` or ``tc`` is missing or failed, or this user may not use them.
        """
        if self.network.hosts:
            raise ClusterError("the cluster is built already")
        if reason := unavailable_reason():
            raise ClusterError(reason)
        self.network = Network(self.spec)  # of the process that builds it, which may not have made this object
        try:
            _keep(self)
            self.network.build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Remove the cluster."""
        self.close()

    def close(self) -> None:
        """Kill every process in the cluster and remove its namespaces; a second call does nothing."""
        if os.getpid() != self.network.creator:
            return  # a forked copy: the cluster is its parent's
        try:
            with _deferred_signals():
                self.kill()
                self.network.remove()
        finally:
            _forget(self)

    def kill(self) -> None:
        """Kill every process in the cluster, by SIGKILL, and wait until they are gone."""
        for process in self._processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
        self._processes.clear()
        self.network.namespaces.kill_inside(self.network.hosts)

    def namespace(self, host: int) -> str:
        """Path of a host's network namespace, as ``nsenter --net`` takes it."""
        if not 0 <= host < self.hosts:
            raise IndexError(f"a host must be from 0 to {self.hosts - 1} in this cluster; got {host}")
        if not self.network.hosts:
            raise ClusterError("the cluster is not built: use it inside its with-block")
        return self.network.hosts[host]

    def address(self, host: int) -> str:
        """IPv4 address of a host, valid inside the cluster only."""
        self.namespace(host)  # complains if there is none
        return network.address(host)

    def popen(
        self, host: int, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process in a host, in a session of its own; it is killed with the cluster at the latest.

        Args:
            host: index of the host.
            argv: command and arguments.
            env: variables on top of this process's own and of those that name the interface for Gloo and NCCL.
            **options: of :class:`subprocess.Popen` (``stdout``, ``cwd``, ``text``, ...).
        """
        variables = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE, **(env or {})}
        command = self.network.namespaces.command(self.namespace(host), argv)
        process = subprocess.Popen(command, env=variables, start_new_session=True, **options)
        self._processes.append(process)
        return process

    def run(
        self, argv_per_host: Sequence[Sequence[str]], timeout_s: float, *, env: Mapping[str, str] | None = None
    ) -> list[subprocess.CompletedProcess[str]]:
        """Run one command in each host at the same time, or in the first few; returns what they wrote, by host.

        Args:
            argv_per_host: command and arguments for each host.
            timeout_s: most seconds for all.
            env: see :meth:`popen`.

        Raises:
            ClusterError: a command ended with a status other than 0, or the time was up; all processes are killed.
        """
        with self._jobs(argv_per_host, env) as jobs:
            for _ in _wait(jobs, timeout_s):
                self.network.check()
            return [subprocess.CompletedProcess(p.args, 0, _text(out), _text(err)) for p, out, err in jobs]

    def lines(
        self, argv_per_host: Sequence[Sequence[str]], *, env: Mapping[str, str] | None = None
    ) -> Generator[str, None, None]:
        """Run commands as :meth:`run` does, without a time limit; yield the lines that host 0 writes as they come."""
        with self._jobs(argv_per_host, env) as jobs:
            output, read = jobs[0][1].fileno(), 0
            for _ in _wait(jobs, math.inf):
                self.network.check()
                written = os.pread(output, os.fstat(output).st_size, read)  # the writer's place stays where it is
                complete = written[: written.rfind(b"\n") + 1]
                read += len(complete)
                yield from complete.decode().splitlines()

    @contextmanager
    def _jobs(
        self, argv_per_host: Sequence[Sequence[str]], env: Mapping[str, str] | None
    ) -> "Iterator[Sequence[_Job]]":
        """Start a command in each host, and keep what it writes; after an error kill every process in the cluster."""
        with ExitStack() as files:
            jobs = []
            try:
                for host, argv in enumerate(argv_per_host):
                    out, err = (files.enter_context(tempfile.TemporaryFile()) for _ in range(2))
                    process = self.popen(host, argv, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
                    jobs.append((process, out, err))
                yield jobs
            except BaseException:
                self.kill()
                raise


_Job = tuple[subprocess.Popen[Any], IO[bytes], IO[bytes]]  # a process, its standard output and its standard error


def _wait(jobs: Sequence[_Job], timeout_s: float) -> Iterator[None]:
    """Yield every now and then, and once after all have ended; raise an error if one fails or the time is up."""
    deadline_s = time.monotonic() + timeout_s
    running = True
    while running:
        statuses = [process.poll() for process, _, _ in jobs]
        running = None in statuses
        yield
        for host, status in enumerate(statuses):
            if status:
                raise _failure(host, f"failed with status {status}", jobs)
        if running and time.monotonic() > deadline_s:
            raise _failure(statuses.index(None), f"had not ended after {timeout_s:g} s", jobs)
        time.sleep(_GLANCE_S if running else 0)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _failure(host: int, what: str, jobs: Sequence[_Job]) -> ClusterError:
    end = _text(jobs[host][2])[-_TAIL:].strip()
    return ClusterError(f"host {host} {what}; the end of its standard error:\n{end or '(empty)'}")


_LIVE: list[Cluster] = []
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # Python turns SIGINT into an exception by itself


def _keep(cluster: Cluster) -> None:
    """Note a cluster that exists, and turn the signals that would end the process at once into SystemExit."""
    _LIVE.append(cluster)
    _replace_handlers(signal.SIG_DFL, _exit_on_signal)


def _forget(cluster: Cluster) -> None:
    if cluster in _LIVE:
        _LIVE.remove(cluster)
    if not _LIVE:
        _replace_handlers(_exit_on_signal, signal.SIG_DFL)


def _replace_handlers(old: Any, new: Any) -> None:
    if threading.current_thread() is threading.main_thread():
        for number in _ENDING_SIGNALS:
            if signal.getsignal(number) is old:
                signal.signal(number, new)


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # leaves the with-block, which removes the cluster


@contextmanager
def _deferred_signals() -> Iterator[None]:
    """Hold SIGINT, SIGTERM and SIGHUP back while a cluster is removed, and deliver them after."""
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run in the main thread, so nothing is raised in this one
        return
    held: list[int] = []
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, *_ENDING_SIGNALS)}
    for number in previous:
        signal.signal(number, lambda number, _frame: held.append(number))
    try:
        yield
    finally:
        for number, handler in previous.items():
            # None: not set from Python, and not to be had back; the default is the nearest to it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for late in held:
            signal.raise_signal(late)


@atexit.register
def _close_all() -> None:
    for cluster in list(_LIVE):
        cluster.close()
