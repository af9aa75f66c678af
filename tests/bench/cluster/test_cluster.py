from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lightning_sparse.bench.cluster import (
    Cluster,
    ClusterError,
    parse_rate,
    remove_stale,
)
from lightning_sparse.bench.cluster import namespaces as module
from tests import conftest

GBIT, MBIT = 10**9, 10**6
LONG_S = 60  # that ends what hangs
emulated = conftest.emulated(2 * LONG_S)


def namespaces(prefix: str) -> list[str]:
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in names if name.startswith(prefix)]


def own_interfaces() -> list[str]:
    return sorted(os.listdir("/sys/class/net"))


def alive(pid: int) -> bool:
    """Whether a process runs (one that has ended and waits for its parent does not)."""
    return module.start_ticks(pid) is not None


def wait_until(what: Callable[[], bool], timeout_s: float = LONG_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.01)


# --- what is missing


def test_without_root_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match=r"needs root.*sudo"), Cluster("2xunlimited"):
        pass


def test_without_iproute2_the_error_names_the_tool_and_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(module, "find", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    with (
        pytest.raises(ClusterError, match="'tc' is not found: apt-get install iproute2"),
        Cluster("2xunlimited"),
    ):
        pass


def test_without_capabilities_the_error_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(module, "find", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(module, "_capable", lambda: False)
    with pytest.raises(ClusterError, match=r"CAP_NET_ADMIN.*--privileged"), Cluster("2xunlimited"):
        pass


@emulated
def test_failing_tc_is_quoted_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_QUEUE_MS", "bad")
    cluster = Cluster("2x1gbit")
    with pytest.raises(ClusterError, match=r"sch_tbf.*(?i:illegal value for \"latency\")"), cluster:
        pass
    assert cluster.network.prefix
    assert namespaces(cluster.network.prefix) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


# --- creation and removal


@emulated
def test_removed_on_exit_with_all_processes() -> None:
    before = own_interfaces()
    with Cluster("2x1gbit") as cluster:
        assert len(namespaces(cluster.network.prefix)) == 3
        assert own_interfaces() == before
        plain = cluster.popen(0, ["sleep", "600"])
        # One that leaves its session, as the workers of torchrun do.
        escaped = cluster.popen(1, ["sh", "-c", "setsid sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
        assert escaped.stdout is not None
        with escaped.stdout:
            pids = [plain.pid, escaped.pid, int(escaped.stdout.readline())]
        assert all(alive(pid) for pid in pids)
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert namespaces(cluster.network.prefix) == []
    assert own_interfaces() == before
    assert not any(alive(pid) for pid in pids)
    assert plain.returncode == -signal.SIGKILL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    cluster.close()  # again: nothing happens
    with pytest.raises(ClusterError, match="not built"):
        cluster.address(0)


@emulated
def test_removed_on_exception() -> None:
    cluster = Cluster("2x1gbit")
    pids = []

    def fail() -> None:
        pids.append(cluster.popen(0, ["sleep", "600"]).pid)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), cluster:
        fail()
    assert namespaces(cluster.network.prefix) == []
    assert not alive(pids[0])


@emulated
def test_hosts_have_their_addresses_loopback_and_environment() -> None:
    with Cluster("2xunlimited") as cluster:
        show = 'ip -brief -4 address; echo "$GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME $EXTRA"; ip route'
        results = cluster.run([["sh", "-c", show]] * 2, timeout_s=LONG_S, env={"EXTRA": "more"})
        for host, result in enumerate(results):
            lines = result.stdout.splitlines()
            assert lines[0].split()[::2] == ["lo", "127.0.0.1/8"]
            assert lines[1].startswith("eth0@")
            assert cluster.address(host) in lines[1]
            assert lines[2] == "eth0 eth0 more"
            assert "default" not in result.stdout  # no way out
        assert cluster.namespace(1) != cluster.namespace(0)
        for call in (cluster.address, cluster.namespace):
            with pytest.raises(IndexError, match="a host must be from 0 to 1 in this cluster; got 2"):
                call(2)
        with pytest.raises(ClusterError, match="built already"):
            cluster.__enter__()


@emulated
def test_two_clusters_side_by_side() -> None:
    with Cluster("2x1gbit") as left, Cluster("2x1gbit") as right:
        assert left.network.prefix != right.network.prefix
        transfer(left, 0, 1, payload_bytes=1_000_000)
        assert counted(right.namespace(1))["received"] < 10_000
        right.close()
        assert namespaces(right.network.prefix) == []
        transfer(left, 1, 0, payload_bytes=1_000_000)
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert namespaces(left.network.prefix) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@emulated
def test_cluster_in_a_thread() -> None:
    outputs = []

    def work() -> None:
        with Cluster("1xunlimited") as cluster:
            outputs.append(cluster.run([["echo", "hello"]], timeout_s=LONG_S)[0].stdout)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=LONG_S)
    assert outputs == ["hello\n"]


# --- a creator that is ended by a signal

# A stand-in for the package, which would import torch: so it starts at once.
HOLDER = """
import json, os, signal, sys, time, types
package = sys.modules["lightning_sparse"] = types.ModuleType("lightning_sparse")
package.__path__ = [sys.argv[1]]
from lightning_sparse.bench import cluster as module
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background ...
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ... or with nohup
with module.Cluster("2x1gbit") as cluster:
    process = cluster.popen(0, ["sleep", "600"])
    if sys.argv[2] == "fork":
        copy = os.fork()
        if copy == 0:
            sys.exit(0)  # leaves the block in the copy, which must not remove the cluster
        os.waitpid(copy, 0)
    if sys.argv[2] == "busy":  # a second signal while the cluster is being removed
        kill = cluster.kill
        def slow_kill():
            print("removing", flush=True)
            sys.stdin.readline()  # until that signal was sent
            kill()
        cluster.kill = slow_kill
    print(json.dumps([cluster.network.prefix, process.pid]), flush=True)
    time.sleep(600)
"""


@contextmanager
def holder(mode: str = "plain") -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """A child process that holds a cluster, the cluster's prefix, and the id of a process in the cluster."""
    command = [sys.executable, "-c", HOLDER, str(Path(module.__file__).parents[2]), mode]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as child:
        try:
            assert child.stdout is not None
            prefix, pid = json.loads(child.stdout.readline())
            assert alive(pid)
            assert len(namespaces(prefix)) == 3
            yield child, prefix, pid
        finally:
            child.kill()
            child.wait()
            remove_stale()


@emulated
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_removed_on_signal(number: signal.Signals, status: int) -> None:
    with holder() as (child, prefix, pid):
        child.send_signal(number)
        assert child.wait(timeout=LONG_S) == status
        assert namespaces(prefix) == []
        assert not alive(pid)


@emulated
def test_signal_during_removal_waits_for_its_end() -> None:
    with holder("busy") as (child, prefix, pid):
        child.send_signal(signal.SIGTERM)
        assert child.stdout is not None
        assert child.stdout.readline() == "removing\n"
        child.send_signal(signal.SIGINT)
        assert child.stdin is not None
        child.stdin.write("sent\n")
        child.stdin.flush()
        assert child.wait(timeout=LONG_S) == -signal.SIGINT
        assert namespaces(prefix) == []
        assert not alive(pid)


@emulated
def test_forked_copy_leaves_the_cluster_alone() -> None:
    with holder("fork") as (child, prefix, pid):
        assert len(namespaces(prefix)) == 3
        assert alive(pid)
        child.terminate()
        assert child.wait(timeout=LONG_S) == 143
        assert namespaces(prefix) == []


@emulated
def test_next_creation_removes_what_a_killed_creator_left() -> None:
    with holder() as (child, prefix, pid):
        remove_stale()
        assert len(namespaces(prefix)) == 3  # its creator lives
        child.kill()
        wait_until(lambda: not alive(child.pid))  # dead, not yet waited for
        assert len(namespaces(prefix)) == 3
        with Cluster("1xunlimited") as cluster:
            assert namespaces(prefix) == []
            assert not alive(pid)
            assert remove_stale() == []
            assert len(namespaces(cluster.network.prefix)) == 2
        child.wait(timeout=LONG_S)


# --- running commands


@emulated
def test_run_returns_results_by_host() -> None:
    with Cluster("3xunlimited") as cluster:
        results = cluster.run([["sh", "-c", f"echo out{i}; echo err{i} >&2"] for i in range(3)], timeout_s=LONG_S)
        assert [(r.returncode, r.stdout, r.stderr) for r in results] == [
            (0, f"out{i}\n", f"err{i}\n") for i in range(3)
        ]


@emulated
def test_lines_come_as_host_0_writes_them(tmp_path: Path) -> None:
    with Cluster("2xunlimited") as cluster:
        first = "echo one; read answer < fifo; echo $answer; printf unfinished"
        os.mkfifo(tmp_path / "fifo")
        lines = cluster.lines([["sh", "-c", f"cd {tmp_path}; {first}"], ["echo", "not shown"]])
        assert next(lines) == "one"
        (tmp_path / "fifo").write_text("two\n")
        assert list(lines) == ["two"]
        failing = cluster.lines([["sh", "-c", "echo one; sleep 600"], ["sh", "-c", "echo broken >&2; exit 3"]])
        with pytest.raises(ClusterError, match=r"host 1 failed with status 3; [^\n]*:\nbroken$"):
            list(failing)
        assert module.pids_inside(cluster.network.namespaces) == []


@emulated
def test_run_kills_all_when_one_fails_and_shows_its_errors() -> None:
    with Cluster("2xunlimited") as cluster:
        with pytest.raises(ClusterError, match=r"host 1 failed with status 3; [^\n]*:\nbroken cable$"):
            cluster.run([["sleep", "600"], ["sh", "-c", "echo broken cable >&2; exit 3"]], timeout_s=LONG_S)
        assert module.pids_inside(cluster.network.namespaces) == []
        with pytest.raises(ClusterError, match="no-such-command"):
            cluster.run([["no-such-command"]], timeout_s=LONG_S)


@emulated
def test_run_kills_all_when_the_time_is_up() -> None:
    with Cluster("2xunlimited") as cluster:
        with pytest.raises(ClusterError, match=r"host 1 had not ended after 2 s; [^\n]*:\nwaiting$"):
            cluster.run([["true"], ["sh", "-c", "echo waiting >&2; sleep 600"]], timeout_s=2)
        assert module.pids_inside(cluster.network.namespaces) == []


# --- rates and counters

RECEIVE = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as server:
    server.settimeout(60)
    link, _ = server.accept()
    with link:
        while link.recv(1 << 20):
            pass
        link.sendall(b"k")
"""
SEND = """
import socket, sys, time
address, size = sys.argv[1], int(sys.argv[2])
for _ in range(3000):
    try:
        link = socket.create_connection((address, 5000), timeout=60)
        break
    except ConnectionRefusedError:
        time.sleep(0.02)
with link:
    start = time.perf_counter()
    link.sendall(bytes(size))
    link.shutdown(socket.SHUT_WR)
    assert link.recv(1) == b"k"
    print(time.perf_counter() - start)
"""


def transfer(cluster: Cluster, source: int, target: int, payload_bytes: int) -> float:
    """Send bytes from one host to another over TCP; returns payload bits per second."""
    commands = [["true"]] * cluster.hosts
    commands[target] = [sys.executable, "-S", "-c", RECEIVE, cluster.address(target)]
    commands[source] = [sys.executable, "-S", "-c", SEND, cluster.address(target), str(payload_bytes)]
    seconds = float(cluster.run(commands, timeout_s=LONG_S)[source].stdout)
    return payload_bytes * 8 / seconds


def limits(namespace: str) -> dict[str, int]:
    """The rate of each limited interface, as the kernel reports it."""
    shown = subprocess.run(["tc", "-n", namespace, "qdisc"], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^qdisc tbf \S+ dev (\S+) .*\brate (\S+)", shown, re.MULTILINE)
    return {interface: parse_rate(rate.lower()) or 0 for interface, rate in found}


@emulated
def test_both_ends_of_a_link_have_its_rate() -> None:
    with Cluster("1xunlimited+1x100mbit") as cluster:
        assert limits(cluster.namespace(0)) == {}
        assert limits(cluster.namespace(1)) == {"eth0": 100 * MBIT}
        assert limits(cluster.network.switch) == {"port1": 100 * MBIT}
    with Cluster("2x2x1gbit/100mbit") as cluster:
        for host in range(4):
            assert limits(cluster.namespace(host)) == {"eth0": GBIT}
        inside = {f"port{host}": GBIT for host in range(4)}
        assert limits(cluster.network.switch) == inside | dict.fromkeys(("up0", "down0", "up1", "down1"), 100 * MBIT)


def counted(namespace: str, interface: str = "eth0") -> dict[str, int]:
    """What the kernel counted on an interface since it was made."""
    table = subprocess.run(
        ["ip", "netns", "exec", namespace, "cat", "/proc/net/dev"], capture_output=True, text=True, check=True
    )
    numbers = re.search(rf"^\s*{interface}:(.*)$", table.stdout, re.MULTILINE)[1].split()  # type: ignore[index]
    return {"received": int(numbers[0]), "sent": int(numbers[8]), "packets": int(numbers[9])}


@emulated
def test_the_kernel_counts_what_was_transferred() -> None:
    size = 5_000_000
    with Cluster("3x1gbit") as cluster:
        transfer(cluster, 0, 1, payload_bytes=size)
        sender, receiver, other = (counted(cluster.namespace(host)) for host in range(3))
        for transferred in (sender["sent"], receiver["received"]):
            assert size <= transferred <= 1.05 * size
        assert 0 < sender["packets"] <= size // 1000
        assert max(sender["received"], receiver["sent"]) < 0.05 * size
        assert max(other["received"], other["sent"]) < 10_000


@emulated
def test_only_what_leaves_a_group_goes_over_its_trunk() -> None:
    size = 1_000_000
    with Cluster("2x2x1gbit/100mbit") as cluster:
        transfer(cluster, 0, 1, payload_bytes=size)
        assert counted(cluster.network.switch, "up0")["sent"] < 10_000
        transfer(cluster, 1, 2, payload_bytes=size)
        trunk = counted(cluster.network.switch, "up0")
        assert trunk["sent"] >= size
        assert trunk["received"] < 0.06 * trunk["sent"]
        assert counted(cluster.network.switch, "up1")["received"] >= size
