"""An emulated cluster on one machine: hosts as network namespaces, joined by links of a set rate.

>>> with Cluster("4x1gbit") as cluster:  # doctest: +SKIP
...     cluster.run([["hostname", "-I"]] * cluster.hosts, timeout_s=10)

Each host is a network namespace with one interface, ``eth0``, that leads to a bridge in a namespace of the cluster's
own. Both ends of each link are limited by ``tc tbf``, so a host sends and receives at most at its rate. No interface,
address or route is ever made outside the cluster's namespaces, and nothing in them leads outside. Hosts share the
machine's files, process ids, processor cores and memory. Several processes started in one host share its loopback
interface, which has no limit, as on a real host. TCP's settings, such as its congestion control, are the machine's.
"""

from __future__ import annotations

import atexit
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

__all__ = [
    "Cluster",
    "ClusterError",
    "ClusterSpec",
    "ClusterUnavailableError",
    "Counters",
    "HostResult",
    "RunFailedError",
    "parse",
    "parse_rate",
    "remove_stale",
    "unavailable_reason",
]

RATE_FORMS = "a number and a unit, such as '100mbit', '2.5gbit' or '1gbit' (bit, kbit, mbit, gbit), or 'unlimited'"
SPEC_FORMS = (
    "'4x1gbit' (4 hosts), '3x1gbit+1x100mbit' (hosts of different rates) or "
    "'2x2x10gbit/1gbit' (2 groups of 2 hosts, 10gbit inside a group, 1gbit between groups)"
)
_UNITS_BITS_PER_S = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_MOST_HOSTS = 254

_INTERFACE = "eth0"
_NETNS_FOLDER = Path("/var/run/netns")  # where `ip netns` keeps the names
_NAME = re.compile(r"lscluster-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]+-\w+")
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21  # bit numbers of CapEff in /proc/self/status

# The bucket of each limiter holds one millisecond of the rate. What it costs and buys, measured on two cores with
# kernel 6.18 and plain TCP sockets:
# - After a pause, up to one bucket passes at once: a message arrives up to 1 ms too early, whatever the rate. Sparse
#   messages are short, and a bucket of 128 KB at 100 Mbit/s would let one of 100 KB pass in 0.25 ms in place of 8 ms.
# - A late timer loses what does not fit in the bucket. With 0.5 ms at 1 Gbit/s, two busy cores brought the rate down
#   to half; with 1 ms it stays above 90 %.
# - A bucket may be smaller than a segment as TCP hands it over (64 KB): tbf then cuts the segment into packets
#   and drops none, so segmentation offload stays on. It must hold one packet, hence the least.
_BUCKET_S = 0.001
_LEAST_BUCKET_BYTES = 3_200
# Packets wait at most this long for their turn, then they are dropped: a queue of 6 MB at 1 Gbit/s.
_QUEUE_MS = 50


class ClusterError(RuntimeError):
    """A cluster could not be built or used; the message holds what ``ip`` or ``tc`` said."""


class ClusterUnavailableError(ClusterError):
    """This machine or this user cannot build a cluster; the message says what is missing and what to do."""


class RunFailedError(ClusterError):
    """A command of :meth:`Cluster.run` failed, or the time was up.

    Attributes:
        host: index of the host whose command failed, or of the first that had not ended when the time was up.
        returncode: its exit status (negative: the signal that ended it), or None when the time was up.
        stderr: the end of what it wrote to its standard error.

    """

    def __init__(self, host: int, returncode: int | None, stderr: str, what: str) -> None:
        super().__init__(f"host {host} {what}; the end of its standard error:\n{stderr or '(empty)'}")
        self.host = host
        self.returncode = returncode
        self.stderr = stderr


def parse_rate(text: str) -> int | None:
    """Read a rate as ``tc`` writes it.

    Args:
        text: such as ``100mbit``, ``2.5gbit`` or ``unlimited``; units are powers of 1000.

    Returns:
        Bits per second, or None for no limit.

    Raises:
        ValueError: the text is no rate.

    """
    word = text.strip().lower()
    if word == "unlimited":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?bit)", word, re.ASCII)
    rate_bits_per_s = round(float(match[1]) * _UNITS_BITS_PER_S[match[2]]) if match else 0
    if rate_bits_per_s < 1:
        raise ValueError(f"bad rate {text!r}: expected {RATE_FORMS}")
    return rate_bits_per_s


@dataclass(frozen=True)
class ClusterSpec:
    """Hosts and the rates of their links.

    Attributes:
        groups: for each group, the rate of each of its hosts' links in bits per second (None: no limit). Hosts are
            numbered through all groups, from 0. One group is a flat cluster.
        trunk_rate_bits_per_s: the rate of the link that joins each group to the others (None: no limit).

    """

    groups: tuple[tuple[int | None, ...], ...]
    trunk_rate_bits_per_s: int | None = None

    def __post_init__(self) -> None:
        if not self.groups or not all(self.groups):
            raise ValueError(f"bad groups {self.groups!r}: expected at least one group, and a host in each")
        if self.hosts > _MOST_HOSTS:
            raise ValueError(f"bad number of hosts {self.hosts}: at most {_MOST_HOSTS}")
        if self.trunk_rate_bits_per_s is not None and len(self.groups) == 1:
            raise ValueError(f"bad trunk rate {self.trunk_rate_bits_per_s}: one group has no trunk, expected None")
        for rate in (*self.host_rates_bits_per_s, self.trunk_rate_bits_per_s):
            if rate is not None and rate < 1:
                raise ValueError(f"bad rate {rate}: expected at least 1 bit per second, or None for no limit")

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return sum(len(group) for group in self.groups)

    @property
    def host_rates_bits_per_s(self) -> tuple[int | None, ...]:
        """Rate of each host's link in bits per second, by host (None: no limit)."""
        return tuple(rate for group in self.groups for rate in group)

    @property
    def group_of_host(self) -> tuple[int, ...]:
        """Index of each host's group, by host."""
        return tuple(index for index, group in enumerate(self.groups) for _ in group)


def parse(text: str) -> ClusterSpec:
    """Read a cluster's text form.

    Args:
        text: ``4x1gbit``, ``3x1gbit+1x100mbit``, or ``2x2x10gbit/1gbit`` for groups: groups x hosts in each x rate
            inside / rate of the trunk between.

    Raises:
        ValueError: the text has none of these forms.

    """
    inside, slash, trunk = text.strip().partition("/")
    try:
        if slash:
            return _parse_groups(inside, trunk)
        return ClusterSpec((tuple(rate for part in inside.split("+") for rate in _parse_hosts(part)),))
    except ValueError as error:
        raise ValueError(f"bad cluster {text!r}: {error}; allowed forms: {SPEC_FORMS}") from None


def _parse_groups(inside: str, trunk: str) -> ClusterSpec:
    count, _, hosts = inside.partition("x")
    groups = _parse_count(count)
    return ClusterSpec((_parse_hosts(hosts),) * groups, parse_rate(trunk))


def _parse_hosts(text: str) -> tuple[int | None, ...]:
    count, _, rate = text.partition("x")
    hosts = _parse_count(count)
    return (parse_rate(rate),) * hosts


def _parse_count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,2}", text.strip(), re.ASCII):
        raise ValueError(f"bad count {text!r}: expected a number from 1 to {_MOST_HOSTS}")
    return int(text)


@dataclass(frozen=True)
class Counters:
    """What the kernel counted on an interface.

    A large segment that TCP leaves to the interface to cut counts as one packet with one header, so bytes are between
    those of the payload and 5 % more, and packets may be fewer than on a real wire.

    Attributes:
        rx_bytes: bytes received.
        tx_bytes: bytes sent.
        rx_packets: packets received.
        tx_packets: packets sent.

    """

    rx_bytes: int
    tx_bytes: int
    rx_packets: int
    tx_packets: int

    def __sub__(self, earlier: Counters) -> Counters:
        """What was counted since ``earlier``."""
        return Counters(
            self.rx_bytes - earlier.rx_bytes,
            self.tx_bytes - earlier.tx_bytes,
            self.rx_packets - earlier.rx_packets,
            self.tx_packets - earlier.tx_packets,
        )


@dataclass(frozen=True)
class HostResult:
    """How a command of :meth:`Cluster.run` ended.

    Attributes:
        host: index of its host.
        returncode: its exit status.
        stdout: what it wrote to its standard output.
        stderr: what it wrote to its standard error.

    """

    host: int
    returncode: int
    stdout: str
    stderr: str


class Cluster:
    """An emulated cluster; a context manager that builds it on entry and removes every trace of it on exit.

    It is removed as well when the block is left by an exception, SIGINT, SIGTERM or SIGHUP, and at the exit of the
    interpreter. What a creator killed by SIGKILL left behind, the next creation removes (:func:`remove_stale`).

    Args:
        spec: a spec, or its text form (see :func:`parse`).
        hosts: in place of ``spec``: number of hosts.
        rate: with ``hosts``: the rate of each host's link, as ``tc`` writes it (None: no limit).

    Raises:
        ValueError: bad spec or rate.

    """

    def __init__(
        self, spec: ClusterSpec | str | None = None, *, hosts: int | None = None, rate: str | None = None
    ) -> None:
        if (spec is None) == (hosts is None) or (spec is not None and rate is not None):
            raise TypeError("expected either a spec, or hosts and (for a limit) rate")
        if spec is None:
            spec = ClusterSpec(((None if rate is None else parse_rate(rate),) * (hosts or 0),))
        self.spec = parse(spec) if isinstance(spec, str) else spec
        self._creator = os.getpid()
        self._prefix = ""
        self._namespaces: list[str] = []
        self._processes: list[subprocess.Popen[Any]] = []

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return self.spec.hosts

    def __enter__(self) -> Cluster:
        """Build the cluster.

        Raises:
            ClusterUnavailableError: no right to build one here, or ``ip`` or ``tc`` is missing.
            ClusterError: ``ip`` or ``tc`` failed; the message holds what it said.

        """
        if self._namespaces:
            raise ClusterError("the cluster is built already")
        if reason := unavailable_reason():
            raise ClusterUnavailableError(reason)
        remove_stale()
        self._creator = os.getpid()
        self._prefix = f"lscluster-{self._creator}-{_start_ticks(self._creator)}-{secrets.token_hex(3)}"
        try:
            _keep(self)
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove the cluster."""
        self.close()

    def close(self) -> None:
        """Kill every process in the cluster and remove its namespaces; a second call does nothing."""
        if os.getpid() != self._creator:
            return  # a forked copy: the cluster is its parent's
        try:
            with _deferred_signals():
                self._remove()
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
        _kill_inside(self._namespaces)

    def namespace(self, host: int) -> str:
        """Name of a host's namespace, as ``ip netns exec`` takes it."""
        self._check_host(host)
        return f"{self._prefix}-host{host}"

    def address(self, host: int) -> str:
        """IPv4 address of a host, valid inside the cluster only."""
        self._check_host(host)
        return _address(host)

    def interface(self, host: int) -> str:
        """Name of a host's interface."""
        self._check_host(host)
        return _INTERFACE

    def counters(self, host: int) -> Counters:
        """What the kernel counted on a host's interface since the cluster was built."""
        return _counters(self.namespace(host), self.interface(host))

    def trunk_counters(self, group: int) -> Counters:
        """What the kernel counted on a group's trunk: sent is what left the group, received what entered it."""
        groups = len(self.spec.groups)
        if not 0 <= group < groups or groups == 1:
            raise IndexError(f"bad group {group}: the cluster has trunks for {groups if groups > 1 else 0} groups")
        return _counters(self._switch, f"up{group}")

    def popen(
        self, host: int, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process in a host, in a session of its own.

        It is killed with the cluster at the latest.

        Args:
            host: index of the host.
            argv: command and arguments.
            env: variables on top of this process's own and of ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME``,
                which name the host's interface.
            **options: of :class:`subprocess.Popen` (``stdout``, ``cwd``, ``text``, ...).

        """
        command = [_tool("ip"), "netns", "exec", self.namespace(host), *argv]
        interface = self.interface(host)
        variables = {**os.environ, "GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface, **(env or {})}
        # `ip netns exec` replaces itself by the command, so the process id is the command's.
        process = subprocess.Popen(command, env=variables, start_new_session=True, **options)
        self._processes.append(process)
        return process

    def run(
        self, argv_per_host: Sequence[Sequence[str]], timeout_s: float, *, env: Mapping[str, str] | None = None
    ) -> list[HostResult]:
        """Run one command in each host at the same time and wait for all.

        When one fails or the time is up, every process in the cluster is killed.

        Args:
            argv_per_host: command and arguments for each host, or for the first few.
            timeout_s: most seconds for all.
            env: see :meth:`popen`.

        Returns:
            The results, by host.

        Raises:
            RunFailedError: a command ended with a status other than 0, or the time was up.

        """
        deadline_s = time.monotonic() + timeout_s
        with ExitStack() as files:
            jobs: list[_Job] = []
            try:
                for host, argv in enumerate(argv_per_host):
                    out, err = (files.enter_context(tempfile.TemporaryFile()) for _ in range(2))
                    process = self.popen(host, argv, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
                    jobs.append(_Job(host, process, out, err))
                _wait(jobs, deadline_s, timeout_s)
            except BaseException:
                self.kill()
                raise
            return [HostResult(job.host, 0, _text(job.stdout), _text(job.stderr)) for job in jobs]

    def _remove(self) -> None:
        self.kill()
        errors = []
        while self._namespaces:
            try:
                _delete_namespace(self._namespaces.pop())
            except ClusterError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    @property
    def _switch(self) -> str:
        return f"{self._prefix}-switch"

    def _check_host(self, host: int) -> None:
        if not 0 <= host < self.hosts:
            raise IndexError(f"bad host {host}: the cluster has hosts 0 to {self.hosts - 1}")
        if not self._namespaces:
            raise ClusterError("the cluster is not built: use it inside its with-block")

    def _build(self) -> None:
        self._add_namespace(self._switch)
        for group in range(len(self.spec.groups)):
            self._add_bridge(f"br{group}")
        if len(self.spec.groups) > 1:
            self._add_trunks()
        for host, (group, rate) in enumerate(
            zip(self.spec.group_of_host, self.spec.host_rates_bits_per_s, strict=True)
        ):
            self._add_host(host, f"br{group}", rate)

    def _add_namespace(self, name: str) -> None:
        self._namespaces.append(name)  # before it exists, so that an interrupted creation is removed too
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")

    def _add_bridge(self, name: str) -> None:
        # Snooping would add packets of its own to the counters.
        _run("ip", "-n", self._switch, "link", "add", name, "type", "bridge", "mcast_snooping", "0")
        _run("ip", "-n", self._switch, "link", "set", name, "addrgenmode", "none", "up")

    def _add_trunks(self) -> None:
        self._add_bridge("core")
        for group in range(len(self.spec.groups)):
            up, down = f"up{group}", f"down{group}"
            _run("ip", "-n", self._switch, "link", "add", up, "type", "veth", "peer", "name", down)
            for interface, bridge in ((up, f"br{group}"), (down, "core")):
                self._plug(interface, bridge, self.spec.trunk_rate_bits_per_s)

    def _add_host(self, host: int, bridge: str, rate_bits_per_s: int | None) -> None:
        name, port = f"{self._prefix}-host{host}", f"port{host}"
        self._add_namespace(name)
        pair = ("type", "veth", "peer", "name", port, "netns", self._switch)
        _run("ip", "-n", name, "link", "add", _INTERFACE, *pair)
        _run("ip", "-n", name, "address", "add", f"{_address(host)}/24", "dev", _INTERFACE)
        _limit(name, _INTERFACE, rate_bits_per_s)
        # No IPv6 address, hence no announcements of it among the counted packets.
        _run("ip", "-n", name, "link", "set", _INTERFACE, "addrgenmode", "none", "up")
        self._plug(port, bridge, rate_bits_per_s)

    def _plug(self, interface: str, bridge: str, rate_bits_per_s: int | None) -> None:
        _limit(self._switch, interface, rate_bits_per_s)
        link = ("link", "set", interface, "master", bridge, "addrgenmode", "none", "up")
        _run("ip", "-n", self._switch, *link)


@dataclass(frozen=True)
class _Job:
    host: int
    process: subprocess.Popen[Any]
    stdout: IO[bytes]
    stderr: IO[bytes]


def unavailable_reason() -> str | None:
    """Why no cluster can be built here and what to do about it, or None."""
    if os.geteuid() != 0:
        return "an emulated cluster needs root, to make network namespaces: run as root, or with sudo"
    for tool in ("ip", "tc"):
        if _find(tool) is None:
            return f"an emulated cluster needs iproute2, but {tool!r} is not found: apt-get install iproute2"
    if not _capable(_CAP_NET_ADMIN, _CAP_SYS_ADMIN):
        return (
            "an emulated cluster needs the capabilities CAP_NET_ADMIN and CAP_SYS_ADMIN, which this process lacks: "
            "in a container, start it with --privileged"
        )
    return None


def remove_stale() -> list[str]:
    """Remove the clusters whose creator is dead, with the processes in them.

    Returns:
        Names of the namespaces removed.

    """
    names = sorted(path.name for path in _NETNS_FOLDER.iterdir()) if _NETNS_FOLDER.is_dir() else []
    stale = [name for name in names if (match := _NAME.fullmatch(name)) and not _alive(match)]
    _kill_inside(stale)
    for name in stale:
        _delete_namespace(name)
    return stale


def _alive(name: re.Match[str]) -> bool:
    # The start time tells the creator from a later process of the same id.
    return _start_ticks(int(name["pid"])) == int(name["start"])


def _start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot, or None when it is dead."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name in parentheses may hold spaces
    state, start = fields[0], fields[19]
    return None if state in "ZX" else int(start)


def _capable(*bits: int) -> bool:
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    mask = int(found[1], 16) if found else 0
    return all(mask >> bit & 1 for bit in bits)


def _find(tool: str) -> str | None:
    # The tools' folders are not on every user's PATH.
    return shutil.which(tool, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))


def _tool(name: str) -> str:
    return _find(name) or name


def _run(tool: str, *arguments: str) -> str:
    """Run ``ip`` or ``tc`` and return its standard output."""
    # In a session of its own: a Ctrl-C in the terminal must not stop it halfway.
    done = subprocess.run(
        [_tool(tool), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        start_new_session=True,
        check=False,
    )
    if done.returncode != 0:
        command = " ".join([tool, *arguments])
        raise ClusterError(f"{command!r} failed with status {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def _limit(namespace: str, interface: str, rate_bits_per_s: int | None) -> None:
    if rate_bits_per_s is None:
        return
    bucket_bytes = max(_LEAST_BUCKET_BYTES, round(rate_bits_per_s / 8 * _BUCKET_S))
    sizes = ("rate", f"{rate_bits_per_s}bit", "burst", f"{bucket_bytes}b", "latency", f"{_QUEUE_MS}ms")
    try:
        _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", *sizes)
    except ClusterError as error:
        raise ClusterError(f"cannot limit a link; does the kernel have sch_tbf (modprobe sch_tbf)? {error}") from None


def _address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def _counters(namespace: str, interface: str) -> Counters:
    table = _run("ip", "netns", "exec", namespace, "cat", "/proc/net/dev")
    for line in table.splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            values = [int(number) for number in numbers.split()]
            return Counters(rx_bytes=values[0], tx_bytes=values[8], rx_packets=values[1], tx_packets=values[9])
    raise ClusterError(f"no interface {interface!r} in namespace {namespace!r}")


def _delete_namespace(name: str) -> None:
    """Delete a namespace, and with it its interfaces; one that is gone already is no error."""
    try:
        _run("ip", "netns", "delete", name)
    except ClusterError:
        if (_NETNS_FOLDER / name).exists():
            raise


def _kill_inside(namespaces: Iterable[str]) -> None:
    """Kill every process in the namespaces and wait, at most 5 seconds, until they are gone."""
    names = list(namespaces)
    deadline_s = time.monotonic() + 5
    while names and (pids := _pids_inside(names)) and time.monotonic() < deadline_s:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _pids_inside(namespaces: Iterable[str]) -> list[int]:
    wanted = {_identity(_NETNS_FOLDER / name) for name in namespaces} - {None}
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [pid for pid in pids if pid != os.getpid() and _identity(Path(f"/proc/{pid}/ns/net")) in wanted]


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None  # gone meanwhile
    return status.st_dev, status.st_ino


def _wait(jobs: Sequence[_Job], deadline_s: float, timeout_s: float) -> None:
    """Wait until all have ended well; raise at the first that fails, and at the deadline (of time.monotonic)."""
    waiting = list(jobs)
    while waiting:
        for job in waiting:
            if job.process.poll():
                code = job.process.returncode
                raise RunFailedError(job.host, code, _tail(job.stderr), f"failed with status {code}")
        waiting = [job for job in waiting if job.process.returncode is None]
        if waiting and time.monotonic() > deadline_s:
            raise RunFailedError(
                waiting[0].host, None, _tail(waiting[0].stderr), f"had not ended after {timeout_s:g} s"
            )
        time.sleep(0.02 if waiting else 0)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _tail(file: IO[bytes], limit_bytes: int = 4000) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - limit_bytes))
    return file.read().decode(errors="replace").strip()


_LIVE: list[Cluster] = []
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # Python turns SIGINT into an exception by itself


def _keep(cluster: Cluster) -> None:
    """Note a cluster that exists, and turn the signals that would end the process at once into SystemExit."""
    _LIVE.append(cluster)
    if threading.current_thread() is threading.main_thread():
        for number in _ENDING_SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _exit_on_signal)


def _forget(cluster: Cluster) -> None:
    if cluster in _LIVE:
        _LIVE.remove(cluster)
    if not _LIVE and threading.current_thread() is threading.main_thread():
        for number in _ENDING_SIGNALS:
            if signal.getsignal(number) is _exit_on_signal:
                signal.signal(number, signal.SIG_DFL)


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
