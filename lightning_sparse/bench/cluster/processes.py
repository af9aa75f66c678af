"""The emulated cluster as its user sees it: built on entry, removed on exit, with processes in its hosts."""

import math
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, Any, NamedTuple

from lightning_sparse.bench.cluster.namespaces import ClusterError, unavailable_reason
from lightning_sparse.bench.cluster.network import INTERFACE, Network, address
from lightning_sparse.bench.cluster.spec import parse

_TAIL = 4_000  # characters of a standard error that an error shows
_GLANCE_S = 0.05  # seconds between looks at what runs


class Cluster:
    """An emulated cluster; a context manager that builds it on entry and removes every trace of it on exit.

    It is gone as well when its process is, however that ended.  ``spec`` says its hosts and links: see :func:`parse`.
    """

    def __init__(self, spec: str) -> None:
        self.spec = parse(spec)
        self.network = Network(self.spec)
        self._processes: list[subprocess.Popen[Any]] = []

    @property
    def hosts(self) -> int:
        return self.spec.hosts

    def __enter__(self) -> "Cluster":
        """Build the cluster; a ClusterError says what is missing or failed, or what this user may not do."""
        if self.network.hosts:
            raise ClusterError("the cluster is built already")
        if reason := unavailable_reason():
            raise ClusterError(reason)
        self.network = Network(self.spec)  # of the process that builds it, which may not have made this object
        try:
            self.network.build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill every process in the cluster and remove its namespaces; a second call does nothing."""
        if os.getpid() == self.network.creator:  # else a forked copy: the cluster is its parent's
            try:
                self.kill()
            finally:
                self.network.remove()

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
        return address(host)

    def popen(
        self, host: int, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process in a host, in a session of its own; it is killed with the cluster at the latest.

        Variables in ``env`` come on top of this process's own and of those that name the interface for Gloo and NCCL;
        ``options`` are those of :class:`subprocess.Popen`.
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

        Where a command ends with a status other than 0, or the time is up, all processes are killed, and a ClusterError
        shows the end of its standard error.
        """
        with self._jobs(argv_per_host, env) as jobs:
            for _ in self._wait(jobs, timeout_s):
                pass
            return [subprocess.CompletedProcess(job.process.args, 0, _text(job.out), _text(job.err)) for job in jobs]

    def lines(
        self, argv_per_host: Sequence[Sequence[str]], *, env: Mapping[str, str] | None = None
    ) -> Generator[str, None, None]:
        """Run commands as :meth:`run` does, without a time limit; yield the lines that host 0 writes as they come."""
        with self._jobs(argv_per_host, env) as jobs:
            output, read = jobs[0].out.fileno(), 0
            for _ in self._wait(jobs, math.inf):
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
                    jobs.append(_Job(process, out, err))
                yield jobs
            except BaseException:
                self.kill()
                raise

    def _wait(self, jobs: "Sequence[_Job]", timeout_s: float) -> Iterator[None]:
        """Yield every now and then, and once after all have ended; raise an error if one fails or the time is up."""
        deadline_s, running = time.monotonic() + timeout_s, True
        while running:
            statuses = [job.process.poll() for job in jobs]
            running = None in statuses
            yield
            for host, status in enumerate(statuses):
                if status:
                    raise _failure(host, f"failed with status {status}", jobs)
            if running and time.monotonic() > deadline_s:
                raise _failure(statuses.index(None), f"had not ended after {timeout_s:g} s", jobs)
            time.sleep(_GLANCE_S if running else 0)


class _Job(NamedTuple):
    """A command that runs in a host, and the files that it writes to."""

    process: subprocess.Popen[Any]
    out: IO[bytes]
    err: IO[bytes]


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _failure(host: int, what: str, jobs: Sequence[_Job]) -> ClusterError:
    end = _text(jobs[host].err)[-_TAIL:].strip()
    return ClusterError(f"host {host} {what}; the end of its standard error:\n{end or '(empty)'}")
