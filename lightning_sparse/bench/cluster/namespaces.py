"""Hosts as network namespaces, joined by links of a set rate: what is built and removed with ``ip`` and ``tc``."""

import os
import re
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from lightning_sparse.bench.cluster.spec import ClusterSpec

INTERFACE = "eth0"
_NETNS_FOLDER = Path("/var/run/netns")  # where `ip netns` keeps the names
_NAME = re.compile(r"lscluster-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]+-\w+")
_CAPABILITIES = (12, 21)  # CAP_NET_ADMIN, CAP_SYS_ADMIN: bit numbers of CapEff in /proc/self/status

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
    """A cluster could not be built or used, or a command in a host failed; the message says why and what to do."""


class Network:
    """The namespaces of one cluster: one for each host, and one with the bridges that join them."""

    def __init__(self, spec: ClusterSpec) -> None:
        self.creator = os.getpid()  # the process that is to build and to remove them
        self.prefix = f"lscluster-{self.creator}-{start_ticks(self.creator)}-{secrets.token_hex(3)}"
        self.namespaces: list[str] = []  # that may exist
        self._spec = spec

    @property
    def switch(self) -> str:
        """The namespace of the bridges."""
        return f"{self.prefix}-switch"

    def host(self, number: int) -> str:
        """The namespace of a host."""
        return f"{self.prefix}-host{number}"

    def build(self) -> None:
        """Make namespaces, bridges and links."""
        self._add_namespace(self.switch)
        several = len(self._spec.groups) > 1
        if several:
            self._add_bridge("core")
        number = 0
        for group, rates in enumerate(self._spec.groups):
            self._add_bridge(f"br{group}")
            if several:
                self._add_trunk(group)
            for rate in rates:
                self._add_host(number, f"br{group}", rate)
                number += 1

    def remove(self) -> None:
        """Delete every namespace, and with it its interfaces; then raise the first error there was."""
        errors = []
        while self.namespaces:
            try:
                _delete_namespace(self.namespaces.pop())
            except ClusterError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _add_namespace(self, name: str) -> None:
        self.namespaces.append(name)  # before it exists, so that an interrupted creation is removed too
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")

    def _add_bridge(self, name: str) -> None:
        # Snooping would add packets of its own to the counters.
        _run("ip", "-n", self.switch, "link", "add", name, "type", "bridge", "mcast_snooping", "0")
        _run("ip", "-n", self.switch, "link", "set", name, "addrgenmode", "none", "up")

    def _add_trunk(self, group: int) -> None:
        up, down = f"up{group}", f"down{group}"
        _run("ip", "-n", self.switch, "link", "add", up, "type", "veth", "peer", "name", down)
        for interface, bridge in ((up, f"br{group}"), (down, "core")):
            self._plug(interface, bridge, self._spec.trunk_rate_bits_per_s)

    def _add_host(self, number: int, bridge: str, rate_bits_per_s: int | None) -> None:
        name, port = self.host(number), f"port{number}"
        self._add_namespace(name)
        _run("ip", "-n", name, "link", "add", INTERFACE, "type", "veth", "peer", "name", port, "netns", self.switch)
        _run("ip", "-n", name, "address", "add", f"{address(number)}/24", "dev", INTERFACE)
        _limit(name, INTERFACE, rate_bits_per_s)
        # No IPv6 address, hence no announcements of it among the counted packets.
        _run("ip", "-n", name, "link", "set", INTERFACE, "addrgenmode", "none", "up")
        self._plug(port, bridge, rate_bits_per_s)

    def _plug(self, interface: str, bridge: str, rate_bits_per_s: int | None) -> None:
        _limit(self.switch, interface, rate_bits_per_s)
        _run("ip", "-n", self.switch, "link", "set", interface, "master", bridge, "addrgenmode", "none", "up")


def address(host: int) -> str:
    """IPv4 address of a host."""
    return f"10.77.0.{host + 1}"


def unavailable_reason() -> str | None:
    """Say why no cluster can be built here and what to do about it; None if one can."""
    if os.geteuid() != 0:
        return "an emulated cluster needs root, to make network namespaces: run as root, or with sudo"
    for tool in ("ip", "tc"):
        if find(tool) is None:
            return f"an emulated cluster needs iproute2, but {tool!r} is not found: apt-get install iproute2"
    if not _capable():
        return (
            "an emulated cluster needs the capabilities CAP_NET_ADMIN and CAP_SYS_ADMIN, which this process lacks: "
            "in a container, start it with --privileged"
        )
    return None


def remove_stale() -> list[str]:
    """Remove the clusters whose creator is dead, with the processes in them; returns the names of the namespaces."""
    names = sorted(path.name for path in _NETNS_FOLDER.iterdir()) if _NETNS_FOLDER.is_dir() else []
    # A later process with the same id has another start time than the creator.
    matches = filter(None, map(_NAME.fullmatch, names))
    stale = [match[0] for match in matches if start_ticks(int(match["pid"])) != int(match["start"])]
    kill_inside(stale)
    for name in stale:
        _delete_namespace(name)
    return stale


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot, or None when it is dead."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name in parentheses may hold spaces
    state, start = fields[0], fields[19]
    return None if state in "ZX" else int(start)


def _capable() -> bool:
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    mask = int(found[1], 16) if found else 0
    return all(mask >> bit & 1 for bit in _CAPABILITIES)


def find(tool: str) -> str | None:
    """Path of ``ip`` or ``tc``."""
    # The tools' folders are not on every user's PATH.
    return shutil.which(tool, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))


def _run(tool: str, *arguments: str) -> None:
    """Run ``ip`` or ``tc``."""
    # In a session of its own: a Ctrl-C in the terminal must not stop it halfway.
    done = subprocess.run(
        [find(tool) or tool, *arguments],
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


def _limit(namespace: str, interface: str, rate_bits_per_s: int | None) -> None:
    """Limit what an interface sends."""
    if rate_bits_per_s is None:
        return
    bucket_bytes = max(_LEAST_BUCKET_BYTES, round(rate_bits_per_s / 8 * _BUCKET_S))
    sizes = ("rate", f"{rate_bits_per_s}bit", "burst", f"{bucket_bytes}b", "latency", f"{_QUEUE_MS}ms")
    try:
        _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", *sizes)
    except ClusterError as error:
        raise ClusterError(f"cannot limit a link; does the kernel have sch_tbf (modprobe sch_tbf)? {error}") from None


def _delete_namespace(name: str) -> None:
    """Delete a namespace; one that is gone already is not an error."""
    try:
        _run("ip", "netns", "delete", name)
    except ClusterError:
        if (_NETNS_FOLDER / name).exists():
            raise


def kill_inside(namespaces: Iterable[str]) -> None:
    """Kill every process in the namespaces and wait, at most 5 seconds, until they are gone."""
    names = list(namespaces)
    deadline_s = time.monotonic() + 5
    while names and (pids := pids_inside(names)) and time.monotonic() < deadline_s:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def pids_inside(namespaces: Iterable[str]) -> list[int]:
    """Ids of the processes in the namespaces, without this one."""
    wanted = {_identity(_NETNS_FOLDER / name) for name in namespaces} - {None}
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [pid for pid in pids if pid != os.getpid() and _identity(Path(f"/proc/{pid}/ns/net")) in wanted]


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None  # gone meanwhile
    return status.st_dev, status.st_ino
