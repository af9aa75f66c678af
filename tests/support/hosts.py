"""What a test sends between the ranks of an emulated cluster."""

import os
import sys

import pytest

from lightning_sparse.bench.cluster import Cluster
from tests import conftest

GBIT, MBIT = 10**9, 10**6
LONG_S = 60  # that ends what hangs
emulated = conftest.emulated(2 * LONG_S)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="a rank that joins its host's namespace must be root")

RECEIVE = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as server:
    server.settimeout(60)
    link, _ = server.accept()
    with link:
        left = int(sys.argv[2])
        while left:
            left -= len(link.recv(min(left, 1 << 20)))
        link.sendall(b"w")
        while link.recv(1 << 20):
            pass
        link.sendall(b"k")
"""
SEND = """
import socket, sys, time
address, size, first = sys.argv[1], *map(int, sys.argv[2:])
for _ in range(3000):
    try:
        link = socket.create_connection((address, 5000), timeout=60)
        break
    except ConnectionRefusedError:
        time.sleep(0.02)
with link:
    link.sendall(bytes(first))
    assert link.recv(1) == b"w"
    start = time.perf_counter()
    link.sendall(bytes(size))
    link.shutdown(socket.SHUT_WR)
    assert link.recv(1) == b"k"
    print(time.perf_counter() - start)
"""


def transfer(cluster: Cluster, source: int, target: int, payload_bytes: int, first_bytes: int = 0) -> float:
    """Send bytes from one rank to another over TCP, ``first_bytes`` ahead; returns payload bits per second."""
    commands, address = [["true"]] * cluster.ranks, cluster.address(cluster.spec.places[target][0])
    commands[target] = [sys.executable, "-S", "-c", RECEIVE, address, str(first_bytes)]
    commands[source] = [sys.executable, "-S", "-c", SEND, address, str(payload_bytes), str(first_bytes)]
    seconds = float(cluster.run(commands, timeout_s=LONG_S)[source].stdout)
    return payload_bytes * 8 / seconds


# Sends its address to the one given, which sends it back.
PING = """
import socket, struct, sys, time
with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as link:
    link.settimeout(60)
    times = []
    for i in range(int(sys.argv[2])):
        start = time.perf_counter()
        link.sendto(struct.pack(">BBHHH", 8, 0, 0xFFFF - 0x800 - i, 0, i), (sys.argv[1], 0))
        while link.recv(100)[20] != 0:
            pass
        times.append(time.perf_counter() - start)
        time.sleep(0.02)
    print(*times)
"""


def ping(cluster: Cluster, source: int, target: int, times: int = 1) -> list[float]:
    """Seconds of each round trip between two ranks, the first one's exchange of addresses left out."""
    commands, address = [["true"]] * cluster.ranks, cluster.address(cluster.spec.places[target][0])
    commands[source] = [sys.executable, "-S", "-c", PING, address, str(1 + times)]
    return [float(s) for s in cluster.run(commands, timeout_s=LONG_S)[source].stdout.split()][1:]
