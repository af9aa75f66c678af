"""The links between hosts: what is built with ``ip`` and ``tc``."""

import json
import os
import subprocess
import sys
from pathlib import Path

from lightning_sparse.bench.cluster.namespaces import ClusterError, Namespaces, start
from lightning_sparse.bench.cluster.spec import ClusterSpec, LinkSpec

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


class Network:
    """The hosts and links of one cluster: a namespace for each host, and one with the bridge that joins them."""

    def __init__(self, spec: ClusterSpec) -> None:
        self.creator = os.getpid()  # the process that is to build and to remove them
        self.namespaces = Namespaces()
        self._spec = spec
        self._delaying: subprocess.Popen[str] | None = None

    @property
    def switch(self) -> str:
        return self.namespaces.paths[0]

    @property
    def hosts(self) -> list[str]:
        return self.namespaces.paths[1:]

    def build(self) -> None:
        switch = self.namespaces.add()
        # Snooping would add packets of its own to the counters.
        self._ip(switch, "link", "add", _BRIDGE, "type", "bridge", "mcast_snooping", "0")
        self._ip(switch, "link", "set", _BRIDGE, "addrgenmode", "none", "up")
        for number, link in enumerate(self._spec.links):
            self._add_host(number, link)
        if self._spec.longest_delay_s:
            self._delay()

    def remove(self) -> None:
        """End every process, and with them the namespaces and their interfaces."""
        self.namespaces.remove()
        if self._delaying:
            self._delaying.wait(timeout=5)  # it was in the bridge's namespace

    def _add_host(self, number: int, link: LinkSpec) -> None:
        host, port = self.namespaces.add(), f"port{number}"
        self._ip(host, "link", "add", INTERFACE, "type", "veth", "peer", "name", port, "netns", self.switch)
        self._ip(host, "address", "add", f"{address(number)}/24", "dev", INTERFACE)
        self._limit(host, INTERFACE, link)
        self._limit(self.switch, port, link)
        # No IPv6 address, hence no announcements of it among the counted packets.
        self._ip(host, "link", "set", INTERFACE, "addrgenmode", "none", "up")
        self._ip(self.switch, "link", "set", port, "master", _BRIDGE, "addrgenmode", "none", "up")

    def _limit(self, namespace: str, interface: str, link: LinkSpec) -> None:
        if link.rate_bits_per_s is None:
            return
        bucket_bytes = max(_LEAST_BUCKET_BYTES, round(link.rate_bits_per_s / 8 * _BUCKET_S))
        sizes = ("rate", f"{link.rate_bits_per_s}bit", "burst", f"{bucket_bytes}b", "latency", f"{_QUEUE_MS}ms")
        try:
            self.namespaces.run(namespace, "tc", "qdisc", "add", "dev", interface, "root", "tbf", *sizes)
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
        command = self.namespaces.command(self.switch, [sys.executable, "-IS", str(_DELAY), json.dumps(tasks)])
        needs = (
            "cannot delay packets; does the kernel have nfnetlink_queue, and nft_queue or nft_compat with xt_NFQUEUE "
            "(modprobe nfnetlink_queue nft_queue)?"
        )
        self._delaying = start(command, subprocess.DEVNULL, needs)

    def _ip(self, namespace: str, *arguments: str) -> None:
        self.namespaces.run(namespace, "ip", *arguments)


def address(host: int) -> str:
    """IPv4 address of a host."""
    return f"10.77.0.{host + 1}"
