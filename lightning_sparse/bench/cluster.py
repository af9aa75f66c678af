"""An emulated cluster on one machine: hosts as network namespaces, joined by links of a set rate and delay.

>>> with Cluster("2x2x1gbit") as cluster:  # doctest: +SKIP
...     cluster.run([["python", "train.py"]] * cluster.ranks, timeout_s=600)

Each host is a network namespace with one interface, ``eth0``, that leads to a bridge in a namespace of the cluster's
own. Both ends of each link are limited by ``tc tbf``, so a host sends and receives at most at its rate. A delay, as in
``4x100mbit+50ms``, comes after the limiters of both ends. No interface, address or route is ever made outside the
cluster's namespaces, and nothing in them leads outside. Hosts share the machine's files, process ids, processor cores
and memory. Ranks of one host share its interface and its link. What they send each other, also to the address of
``eth0``, goes over the host's loopback interface, which has neither limit nor delay, as on a real host: it is not among
what the kernel counts on ``eth0``. ``/sys`` shows the machine's interfaces, not the host's. TCP's settings are the
machine's, such as its congestion control; with delays its buffers may grow to what the link can have under way, and its
window is kept after pauses, as on hosts that were tuned for such a link.

A user who is not root gets the namespaces within a user namespace, in which programs see the user as root.
"""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

RATE_FORMS = "a number and a unit, such as '100mbit', '2.5gbit' or '1gbit' (bit, kbit, mbit, gbit), or 'unlimited'"
DELAY_FORMS = "a number and a unit, such as '50ms' or '0.5ms' (us, ms, s)"
SPEC_FORMS = (
    "'4x1gbit' (4 hosts), '2x4x1gbit' (2 hosts of 4 ranks), '4x100mbit+50ms' (50 ms from each host to another) or "
    "'3x1gbit+1x100mbit' (hosts of different rates)"
)
MOST_HOSTS, MOST_LOCAL_RANKS = 254, 999
_HOP_S = 0.0002  # a message's way to the next rank, where a link is given and not measured
_QUEUES_S = 0.05  # that packets may wait on their way
_UNITS_BITS_PER_S = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class LinkSpec:
    """A link."""

    rate_bits_per_s: int | None = None  # None: no limit
    delay_s: float = 0.0  # one way, between two hosts with such links: half of it is on each


@dataclass(frozen=True)
class ClusterSpec:
    """Hosts, by their links to one switch and the ranks on each; ranks of a host follow one another."""

    links: tuple[LinkSpec, ...]
    local_sizes: tuple[int, ...]  # number of ranks on each host, which share its link

    def __post_init__(self) -> None:
        if self.hosts > MOST_HOSTS:
            raise ValueError(f"a cluster must have at most {MOST_HOSTS} hosts; got {self.hosts}")

    @property
    def hosts(self) -> int:
        return len(self.links)

    @property
    def ranks(self) -> int:
        return sum(self.local_sizes)

    @property
    def places(self) -> list[tuple[int, int]]:
        """The host of each rank, and its local rank, which is its number on that host."""
        return [(host, local_rank) for host, size in enumerate(self.local_sizes) for local_rank in range(size)]

    @property
    def s_per_byte(self) -> float:
        """Seconds that a byte takes on the slowest link; 0 if no link is limited."""
        rates = [link.rate_bits_per_s for link in self.links if link.rate_bits_per_s]
        return 8 / min(rates) if rates else 0.0

    @property
    def hop_s(self) -> float:
        """Seconds that a message takes to the next rank besides its bytes' time, at most."""
        return _HOP_S + self.longest_delay_s

    @property
    def longest_delay_s(self) -> float:
        """Seconds between the two hosts that are farthest apart, one way."""
        longest = sorted(link.delay_s for link in self.links)[-2:]
        return sum(longest) / len(longest)

    @property
    def window_bytes(self) -> int:
        """What TCP's buffers must hold, with its own overhead, for one stream to fill the fastest link."""
        rate_bits_per_s = max(link.rate_bits_per_s or 10**9 for link in self.links)
        return min(round(4 * rate_bits_per_s / 8 * (2 * self.longest_delay_s + _QUEUES_S)), 2**30)

    def delay_s(self, source: int, target: int) -> float:
        return (self.links[source].delay_s + self.links[target].delay_s) / 2


def link_text(link: LinkSpec) -> str:
    """Describe a link."""
    rate = f"{link.rate_bits_per_s / 1e6:g} Mbit/s" if link.rate_bits_per_s else "no limit"
    return f"{rate} and {1e3 * link.delay_s:g} ms" if link.delay_s else rate


def parse(text: str) -> ClusterSpec:
    """Read a cluster's text form, one of ``SPEC_FORMS``; raises a ValueError for any other."""
    try:
        # A plus before a number of hosts begins other hosts, any other one a delay.
        hosts = [host for part in re.split(r"\+(?=[^+]*x)", text.strip()) for host in _parse_hosts(part)]
        return ClusterSpec(tuple(link for link, _ in hosts), tuple(local_size for _, local_size in hosts))
    except ValueError as error:
        raise ValueError(f"cluster {text!r}: {error}. Write {SPEC_FORMS}.") from None


def parse_link(text: str) -> LinkSpec:
    """Read a rate and perhaps a delay, such as ``100mbit+50ms``; raises a ValueError for anything else."""
    rate, plus, delay = text.partition("+")
    delay_s = _with_unit(delay, _UNITS_S) if plus else 0.0
    if delay_s is None:
        raise ValueError(f"a delay must be {DELAY_FORMS}; got {delay!r}")
    return LinkSpec(parse_rate(rate), delay_s)


def parse_rate(text: str) -> int | None:
    """Read a rate, one of ``RATE_FORMS``: bits per second, or None for no limit; raises a ValueError for any other."""
    word = text.strip().lower()
    if word == "unlimited":
        return None
    rate_bits_per_s = round(_with_unit(word, _UNITS_BITS_PER_S) or 0)
    if rate_bits_per_s < 1:
        raise ValueError(f"a rate must be {RATE_FORMS}; got {text!r}")
    return rate_bits_per_s


def _with_unit(text: str, units: Mapping[str, float]) -> float | None:
    """Read a number and one of ``units``; None if it is anything else."""
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)({'|'.join(units)})", text.strip().lower(), re.ASCII)
    return float(match[1]) * units[match[2]] if match else None


def _parse_hosts(text: str) -> list[tuple[LinkSpec, int]]:
    """Read hosts that are alike, such as ``2x4x1gbit``: the link of each, and the number of its ranks."""
    hosts, x, rest = text.partition("x")
    if not x:
        raise ValueError(f"a number of hosts must be followed by 'x' and a rate; got {text!r}")
    local_size, x, link = rest.partition("x")
    if not x:
        local_size, link = "1", rest
    count = _parse_count(hosts, "hosts", MOST_HOSTS)
    return count * [(parse_link(link), _parse_count(local_size, "ranks on a host", MOST_LOCAL_RANKS))]


def _parse_count(text: str, what: str, most: int) -> int:
    if not re.fullmatch(r"[1-9]\d{0,2}", text.strip(), re.ASCII) or int(text) > most:
        raise ValueError(f"a number of {what} must be an integer from 1 to {most}; got {text!r}")
    return int(text)


INTERFACE, _BRIDGE = "eth0", "bridge"
_DELAY = Path(__file__).with_name("delay.py")  # the program that delays packets

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
_NEW_USER = ("--user", "--map-root-user")  # what unshare needs where this is not root
_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_CAPABILITIES = (12, 21)  # CAP_NET_ADMIN, CAP_SYS_ADMIN: bit numbers of CapEff in /proc/self/status
# Kills what runs in the namespace of this shell, but for itself and process $1, again and again until nothing is left.
_KILL = """
left=99
while [ $left -gt 0 ]; do
  more=0
  for process in /proc/[0-9]*; do
    [ $process != /proc/$$ ] && [ $process != /proc/$1 ] && [ $process/ns/net -ef /proc/$$/ns/net ] || continue
    kill -9 ${process#/proc/}
    more=$((left - 1))
  done
  left=$more
done
"""
_HOLD = f"""
echo ready
exec > /dev/null 2>&1  # nobody reads it
read never  # by the shell itself: no process of its own is in the namespace to be killed
{_KILL}"""


class ClusterError(OSError):
    """A cluster could not be built or used, or a command in a host failed; the message says why and what to do."""


def find(tool: str) -> str | None:
    """Path of ``ip``, say."""
    # The tools' folders are not on every user's PATH.
    return shutil.which(tool, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))


def capable() -> bool:
    """Whether this process may make network namespaces, as root may; else it needs a user namespace for them."""
    status = Path("/proc/self/status")
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status.read_text() if status.exists() else "", re.MULTILINE)
    mask = int(found[1], 16) if found else 0
    return all(mask >> bit & 1 for bit in _CAPABILITIES)


def unavailable_reason() -> str | None:
    """Say why no cluster can be built here and what to do about it; None if one can."""
    for tool, package in _PACKAGES.items():
        if find(tool) is None:
            return (
                f"an emulated cluster needs Linux and {package}, but {tool!r} is not found: apt-get install {package}"
            )
    if capable():
        return None
    # What this process may do is seen best by doing it.
    attempt = [find("unshare") or "unshare", *_NEW_USER, "--net", find("ip") or "ip", "link", "set", "lo", "up"]
    tried = _run(attempt)
    if tried.returncode == 0:
        return None
    return (
        "an emulated cluster needs root, or a user namespace, which this process may not make "
        f"({tried.stderr.strip()}): run with sudo, in a container with --privileged, or allow user namespaces "
        "(docs/measuring.md, Without root)"
    )


def _run(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    # In a session of its own: a Ctrl-C in the terminal must not stop it halfway.
    settings: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "start_new_session": True}
    return subprocess.run(command, text=True, timeout=30, check=False, **settings)


class Network:
    """A cluster's network namespaces, one with the bridge and one for each host, their links, and what runs in them."""

    def __init__(self, spec: ClusterSpec) -> None:
        self.creator = os.getpid()  # the process that is to build and to remove them
        self._spec = spec
        self._processes: list[subprocess.Popen[str]] = []  # of the namespaces, in the order in which they were made
        self._entry: list[str] = []  # the command that enters the user namespace, where there is one
        self._delaying: subprocess.Popen[str] | None = None

    @property
    def paths(self) -> list[str]:
        """Of the bridge's namespace, then the hosts'."""
        return [f"/proc/{process.pid}/ns/net" for process in self._processes]

    @property
    def switch(self) -> str:
        return self.paths[0]

    @property
    def hosts(self) -> list[str]:
        return self.paths[1:]

    def build(self) -> None:
        switch = self._add_namespace()
        # Snooping would add packets of its own to the counters.
        self.run(switch, "ip", "link", "add", _BRIDGE, "type", "bridge", "mcast_snooping", "0")
        self.run(switch, "ip", "link", "set", _BRIDGE, "addrgenmode", "none", "up")
        for number, link in enumerate(self._spec.links):
            self._add_host(number, link)
        if self._spec.longest_delay_s:
            self._delay()

    def remove(self) -> None:
        """End every process, and with them the namespaces and their interfaces."""
        self.kill_inside(self.paths)
        for process in self._processes:
            process.kill()
            process.wait()
            process.stdin.close()  # type: ignore[union-attr]  # it is a pipe
        self._processes.clear()
        self._entry.clear()
        if self._delaying:
            self._delaying.wait(timeout=5)  # it was in the bridge's namespace

    def _add_namespace(self) -> str:
        """Make one; returns its path."""
        unshare = [find("unshare") or "unshare", "--net"]
        if not capable() and not self._processes:
            unshare.extend(_NEW_USER)
        command = [*self._entry, *unshare, "sh", "-c", _HOLD]
        self._processes.append(_start(command, subprocess.PIPE, "cannot make a network namespace"))
        if not capable():
            user = f"--user=/proc/{self._processes[0].pid}/ns/user"
            self._entry = [find("nsenter") or "nsenter", user, "--preserve-credentials"]
        self.run(self.paths[-1], "ip", "link", "set", "lo", "up")
        return self.paths[-1]

    def command(self, path: str, argv: Sequence[str]) -> list[str]:
        """Return the command that runs another in a namespace, under the same process id."""
        return [*(self._entry or [find("nsenter") or "nsenter"]), f"--net={path}", *argv]

    def run(self, path: str, tool: str, *arguments: str) -> str:
        """Run ``ip`` or ``tc`` in a namespace; returns what it wrote."""
        done = _run(self.command(path, [find(tool) or tool, *arguments]))
        if done.returncode != 0:
            command = " ".join([tool, *arguments])
            raise ClusterError(f"{command!r} failed with status {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def kill_inside(self, paths: Sequence[str]) -> None:
        """Kill every process in the namespaces but those that hold them, and wait until they are gone."""
        for path in filter(os.path.exists, paths):
            self.run(path, "sh", "-c", _KILL, "sh", path.split("/")[2])

    def _add_host(self, number: int, link: LinkSpec) -> None:
        host, port = self._add_namespace(), f"port{number}"
        self.run(host, "ip", "link", "add", INTERFACE, "type", "veth", "peer", "name", port, "netns", self.switch)
        self.run(host, "ip", "address", "add", f"{address(number)}/24", "dev", INTERFACE)
        self._limit(host, INTERFACE, link)
        self._limit(self.switch, port, link)
        # No IPv6 address, hence no announcements of it among the counted packets.
        self.run(host, "ip", "link", "set", INTERFACE, "addrgenmode", "none", "up")
        self.run(self.switch, "ip", "link", "set", port, "master", _BRIDGE, "addrgenmode", "none", "up")

    def _limit(self, namespace: str, interface: str, link: LinkSpec) -> None:
        if link.rate_bits_per_s is None:
            return
        bucket_bytes = max(_LEAST_BUCKET_BYTES, round(link.rate_bits_per_s / 8 * _BUCKET_S))
        sizes = ("rate", f"{link.rate_bits_per_s}bit", "burst", f"{bucket_bytes}b", "latency", f"{_QUEUE_MS}ms")
        try:
            self.run(namespace, "tc", "qdisc", "add", "dev", interface, "root", "tbf", *sizes)
        except ClusterError as error:
            message = f"cannot limit a link; does the kernel have sch_tbf (modprobe sch_tbf)? {error}"
            raise ClusterError(message) from None

    def _delay(self) -> None:
        """Start the process that delays what hosts receive, in the bridge's namespace."""
        numbers = range(self._spec.hosts)
        tasks = [
            (path, self._spec.window_bytes, {address(n): self._spec.delay_s(n, receiver) for n in numbers})
            for receiver, path in enumerate(self.hosts)
        ]
        command = self.command(self.switch, [sys.executable, "-IS", str(_DELAY), json.dumps(tasks)])
        needs = (
            "cannot delay packets; does the kernel have nfnetlink_queue, and nft_queue or nft_compat with xt_NFQUEUE "
            "(modprobe nfnetlink_queue nft_queue)?"
        )
        self._delaying = _start(command, subprocess.DEVNULL, needs)


def _start(command: Sequence[str], stdin: int, what: str) -> "subprocess.Popen[str]":
    """Start a process of the cluster's own, and wait until it says that it is ready; ``what`` begins its error."""
    output, merged = subprocess.PIPE, subprocess.STDOUT
    # In a session of its own: a Ctrl-C in the terminal must not end it.
    process = subprocess.Popen(command, stdin=stdin, stdout=output, stderr=merged, text=True, start_new_session=True)
    assert process.stdout is not None
    with process.stdout as written:
        said = written.readline()
        if said == "ready\n":
            return process
        process.kill()
        said += written.read()
    process.wait()
    raise ClusterError(f"{what}: {said.strip()}")


def address(host: int) -> str:
    """IPv4 address of a host."""
    return f"10.77.0.{host + 1}"


MASTER_PORT = 29500  # of ranks that meet at the first host: every cluster has its ports to itself
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

    @property
    def ranks(self) -> int:
        return self.spec.ranks

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
        self.network.kill_inside(self.network.hosts)

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
        command = self.network.command(self.namespace(host), argv)
        process = subprocess.Popen(command, env=variables, start_new_session=True, **options)
        self._processes.append(process)
        return process

    def run(
        self, argv_per_rank: Sequence[Sequence[str]], timeout_s: float, *, env: Mapping[str, str] | None = None
    ) -> list[subprocess.CompletedProcess[str]]:
        """Run the command of each rank, or of the first few, in its host at the same time.

        Each has the environment that torchrun would give it, such as RANK and MASTER_ADDR, so that a script may call
        ``torch.distributed.init_process_group`` or be a Trainer's; ``env`` comes on top. Returns what they wrote, by
        rank. Where a command ends with a status other than 0, or the time is up, all processes are killed, and a
        ClusterError shows the end of its standard error.
        """
        with self._jobs(argv_per_rank, env) as jobs:
            for _ in self._wait(jobs, timeout_s):
                pass
            return [subprocess.CompletedProcess(job.process.args, 0, _text(job.out), _text(job.err)) for job in jobs]

    def lines(
        self, argv_per_rank: Sequence[Sequence[str]], *, env: Mapping[str, str] | None = None
    ) -> Generator[str, None, None]:
        """Run commands as :meth:`run` does, without a time limit; yield the lines that rank 0 writes as they come."""
        with self._jobs(argv_per_rank, env) as jobs:
            output, read = jobs[0].out.fileno(), 0
            for _ in self._wait(jobs, math.inf):
                written = os.pread(output, os.fstat(output).st_size, read)  # the writer's place stays where it is
                complete = written[: written.rfind(b"\n") + 1]
                read += len(complete)
                yield from complete.decode().splitlines()

    @contextmanager
    def _jobs(
        self, argv_per_rank: Sequence[Sequence[str]], env: Mapping[str, str] | None
    ) -> "Iterator[Sequence[_Job]]":
        """Start the command of each rank, and keep what it writes; after an error kill every process in the cluster."""
        if len(argv_per_rank) > self.ranks:
            raise ValueError(f"commands must be at most one for each of {self.ranks} ranks; got {len(argv_per_rank)}")
        with ExitStack() as files:
            jobs = []
            try:
                for rank, argv in enumerate(argv_per_rank):
                    host, own = self.spec.places[rank][0], {**self._variables(rank), **(env or {})}
                    out, err = (files.enter_context(tempfile.TemporaryFile()) for _ in range(2))
                    process = self.popen(host, argv, env=own, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
                    jobs.append(_Job(rank, host, process, out, err))
                yield jobs
            except BaseException:
                self.kill()
                raise

    def _variables(self, rank: int) -> dict[str, str]:
        """Return the environment that torchrun would give a rank."""
        host, local_rank = self.spec.places[rank]
        variables = {"RANK": rank, "WORLD_SIZE": self.ranks, "MASTER_ADDR": address(0), "MASTER_PORT": MASTER_PORT}
        variables |= {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": self.spec.local_sizes[host]}
        variables |= {"GROUP_RANK": host, "GROUP_WORLD_SIZE": self.hosts, "NODE_RANK": host}
        variables |= {"TORCHELASTIC_RUN_ID": "emulated"}  # by this Lightning knows torchrun
        return {name: str(value) for name, value in variables.items()}

    def _wait(self, jobs: "Sequence[_Job]", timeout_s: float) -> Iterator[None]:
        """Yield every now and then, and once after all have ended; raise an error if one fails or the time is up."""
        deadline_s, running = time.monotonic() + timeout_s, True
        while running:
            statuses = [job.process.poll() for job in jobs]
            running = None in statuses
            yield
            for job, status in zip(jobs, statuses, strict=True):
                if status:
                    raise _failure(job, f"failed with status {status}")
            if running and time.monotonic() > deadline_s:
                raise _failure(jobs[statuses.index(None)], f"had not ended after {timeout_s:g} s")
            time.sleep(_GLANCE_S if running else 0)


class _Job(NamedTuple):
    """A command that runs in a host, and the files that it writes to."""

    rank: int
    host: int
    process: subprocess.Popen[Any]
    out: IO[bytes]
    err: IO[bytes]


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _failure(job: _Job, what: str) -> ClusterError:
    end = _text(job.err)[-_TAIL:].strip()
    where = f"rank {job.rank} on host {job.host}"
    return ClusterError(f"{where} {what}; the end of its standard error:\n{end or '(empty)'}")
