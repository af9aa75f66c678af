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

from lightning_sparse.bench import cluster as module
from lightning_sparse.bench.cluster import (
    Cluster,
    ClusterError,
    ClusterSpec,
    ClusterUnavailableError,
    Counters,
    RunFailedError,
    parse,
    parse_rate,
    remove_stale,
)
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
    return module._start_ticks(pid) is not None


def wait_until(what: Callable[[], bool], timeout_s: float = LONG_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.01)


# --- the text forms; no root needed


@pytest.mark.parametrize(
    ("text", "rate_bits_per_s"),
    [
        ("100mbit", 100 * MBIT),
        ("1gbit", GBIT),
        ("2.5gbit", 2_500_000_000),
        ("64kbit", 64_000),
        ("9600bit", 9600),
        (" 1GBit ", GBIT),
        ("unlimited", None),
    ],
)
def test_parse_rate(text: str, rate_bits_per_s: int | None) -> None:
    assert parse_rate(text) == rate_bits_per_s


@pytest.mark.parametrize("text", ["", "fast", "1", "1gb", "-1gbit", "0mbit", "0.1bit", "1e3mbit", "1gbit/s", "nan"])
def test_bad_rate_is_named_with_the_allowed_forms(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected a number and a unit, such as '100mbit'") as caught:
        parse_rate(text)
    assert repr(text) in str(caught.value)


def test_parse_flat() -> None:
    assert parse("4x1gbit") == ClusterSpec(((GBIT,) * 4,))
    assert parse("2xunlimited") == ClusterSpec(((None, None),))


def test_parse_hosts_of_different_rates() -> None:
    spec = parse("3x1gbit+1x100mbit")
    assert spec.hosts == 4
    assert spec.host_rates_bits_per_s == (GBIT, GBIT, GBIT, 100 * MBIT)


def test_parse_groups() -> None:
    spec = parse("2x3x10gbit/1gbit")
    assert spec == ClusterSpec(((10 * GBIT,) * 3,) * 2, trunk_rate_bits_per_s=GBIT)
    assert spec.hosts == 6
    assert spec.group_of_host == (0, 0, 0, 1, 1, 1)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "''"),
        ("1gbit", "'1gbit'"),
        ("x1gbit", "''"),
        ("0x1gbit", "'0'"),
        ("4x", "''"),
        ("4xfast", "'fast'"),
        ("4x1gbit+", "''"),
        ("2x2x10gbit", "'2x10gbit'"),
        ("2x2x10gbit/", "''"),
        ("2x2x10gbit/slow", "'slow'"),
        ("4x10gbit/1gbit", "'10gbit'"),
        ("1x4x10gbit/1gbit", "1000000000"),
        ("255x1gbit", "255"),
        ("9999x1gbit", "'9999'"),
    ],
)
def test_bad_spec_is_named_with_the_allowed_forms(text: str, part: str) -> None:
    with pytest.raises(ValueError, match=r"'4x1gbit'.*'2x2x10gbit/1gbit'") as caught:
        parse(text)
    message = str(caught.value)
    assert message.startswith(f"bad cluster {text!r}: bad ")
    assert part in message


@pytest.mark.parametrize(
    "spec",
    [{"groups": ()}, {"groups": ((),)}, {"groups": ((0,),)}, {"groups": ((1,), (1,)), "trunk_rate_bits_per_s": -1}],
)
def test_bad_spec_object(spec: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="bad"):
        ClusterSpec(**spec)  # type: ignore[arg-type]


def test_cluster_takes_a_spec_its_text_or_hosts_and_rate() -> None:
    assert Cluster("4x1gbit").spec == Cluster(hosts=4, rate="1gbit").spec == Cluster(parse("4x1gbit")).spec
    assert Cluster(hosts=2).spec == parse("2xunlimited")
    for bad in ({}, {"spec": "4x1gbit", "hosts": 4}, {"spec": "4x1gbit", "rate": "1gbit"}, {"rate": "1gbit"}):
        with pytest.raises(TypeError, match="either a spec, or hosts"):
            Cluster(**bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bad groups"):
        Cluster(hosts=0)


def test_counters_subtract() -> None:
    assert Counters(10, 20, 3, 4) - Counters(1, 2, 3, 1) == Counters(9, 18, 0, 3)


# --- what is missing


def test_without_root_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterUnavailableError, match=r"needs root.*sudo"), Cluster(hosts=2):
        pass


def test_without_iproute2_the_error_names_the_tool_and_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(module, "_find", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    with pytest.raises(ClusterUnavailableError, match="'tc' is not found: apt-get install iproute2"), Cluster(hosts=2):
        pass


def test_without_capabilities_the_error_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(module, "_find", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(module, "_capable", lambda *bits: False)
    with pytest.raises(ClusterUnavailableError, match=r"CAP_NET_ADMIN.*--privileged"), Cluster(hosts=2):
        pass


@emulated
def test_failing_tc_is_quoted_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_QUEUE_MS", "bad")
    cluster = Cluster("2x1gbit")
    with pytest.raises(ClusterError, match=r"sch_tbf.*(?i:illegal value for \"latency\")"), cluster:
        pass
    assert cluster._prefix
    assert namespaces(cluster._prefix) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


# --- creation and removal


@emulated
def test_removed_on_exit_with_all_processes() -> None:
    before = own_interfaces()
    with Cluster("2x1gbit") as cluster:
        assert len(namespaces(cluster._prefix)) == 3
        assert own_interfaces() == before
        plain = cluster.popen(0, ["sleep", "600"])
        # One that leaves its session, as the workers of torchrun do.
        escaped = cluster.popen(1, ["sh", "-c", "setsid sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
        assert escaped.stdout is not None
        with escaped.stdout:
            pids = [plain.pid, escaped.pid, int(escaped.stdout.readline())]
        assert all(alive(pid) for pid in pids)
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert namespaces(cluster._prefix) == []
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
    assert namespaces(cluster._prefix) == []
    assert not alive(pids[0])


@emulated
def test_hosts_have_their_addresses_loopback_and_environment() -> None:
    with Cluster(hosts=2) as cluster:
        show = 'ip -brief -4 address; echo "$GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME $EXTRA"; ip route'
        results = cluster.run([["sh", "-c", show]] * 2, timeout_s=LONG_S, env={"EXTRA": "more"})
        for host, result in enumerate(results):
            assert result.host == host
            lines = result.stdout.splitlines()
            assert lines[0].split()[::2] == ["lo", "127.0.0.1/8"]
            assert lines[1].startswith(f"{cluster.interface(host)}@")
            assert cluster.address(host) in lines[1]
            assert lines[2] == f"{cluster.interface(host)} {cluster.interface(host)} more"
            assert "default" not in result.stdout  # no way out
        assert cluster.namespace(1) != cluster.namespace(0)
        for call in (cluster.address, cluster.interface, cluster.counters, cluster.namespace):
            with pytest.raises(IndexError, match="bad host 2: the cluster has hosts 0 to 1"):
                call(2)
        with pytest.raises(IndexError, match="trunks for 0 groups"):
            cluster.trunk_counters(0)
        with pytest.raises(ClusterError, match="built already"):
            cluster.__enter__()


@emulated
def test_two_clusters_side_by_side() -> None:
    with Cluster("2x1gbit") as left, Cluster("2x1gbit") as right:
        assert left._prefix != right._prefix
        before = right.counters(1)
        transfer(left, 0, 1, payload_bytes=1_000_000)
        assert (right.counters(1) - before).rx_bytes < 10_000
        right.close()
        assert namespaces(right._prefix) == []
        transfer(left, 1, 0, payload_bytes=1_000_000)
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert namespaces(left._prefix) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@emulated
def test_cluster_in_a_thread() -> None:
    outputs = []

    def work() -> None:
        with Cluster(hosts=1) as cluster:
            outputs.append(cluster.run([["echo", "hello"]], timeout_s=LONG_S)[0].stdout)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=LONG_S)
    assert outputs == ["hello\n"]


# --- a creator that is ended by a signal

# Loads the module by its folder: without the package, and so without torch, it starts at once.
HOLDER = """
import json, os, signal, sys, time
sys.path.append(sys.argv[1])
import cluster as module
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
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
    print(json.dumps([cluster._prefix, process.pid]), flush=True)
    time.sleep(600)
"""


@contextmanager
def holder(mode: str = "plain") -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """A child process that holds a cluster, the cluster's prefix, and the id of a process in the cluster."""
    command = [sys.executable, "-c", HOLDER, str(Path(module.__file__).parent), mode]
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
        with Cluster(hosts=1) as cluster:
            assert namespaces(prefix) == []
            assert not alive(pid)
            assert remove_stale() == []
            assert len(namespaces(cluster._prefix)) == 2
        child.wait(timeout=LONG_S)


# --- running commands


@emulated
def test_run_returns_results_by_host() -> None:
    with Cluster(hosts=3) as cluster:
        results = cluster.run([["sh", "-c", f"echo out{i}; echo err{i} >&2"] for i in range(3)], timeout_s=LONG_S)
        assert [(r.host, r.returncode, r.stdout, r.stderr) for r in results] == [
            (i, 0, f"out{i}\n", f"err{i}\n") for i in range(3)
        ]


@emulated
def test_run_kills_all_when_one_fails_and_shows_its_errors() -> None:
    with Cluster(hosts=2) as cluster:
        with pytest.raises(RunFailedError, match=r"host 1 failed with status 3; [^\n]*:\nbroken cable") as caught:
            cluster.run([["sleep", "600"], ["sh", "-c", "echo broken cable >&2; exit 3"]], timeout_s=LONG_S)
        assert (caught.value.host, caught.value.returncode, caught.value.stderr) == (1, 3, "broken cable")
        assert module._pids_inside(cluster._namespaces) == []
        with pytest.raises(RunFailedError, match="no-such-command"):
            cluster.run([["no-such-command"]], timeout_s=LONG_S)


@emulated
def test_run_kills_all_when_the_time_is_up() -> None:
    with Cluster(hosts=2) as cluster:
        with pytest.raises(RunFailedError, match=r"host 1 had not ended after 2 s") as caught:
            cluster.run([["true"], ["sh", "-c", "echo waiting >&2; sleep 600"]], timeout_s=2)
        assert caught.value.returncode is None
        assert caught.value.stderr == "waiting"
        assert module._pids_inside(cluster._namespaces) == []


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
    """The rate of each limited interface, as the kernel tells."""
    shown = subprocess.run(["tc", "-n", namespace, "qdisc"], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^qdisc tbf \S+ dev (\S+) .*\brate (\S+)", shown, re.MULTILINE)
    return {interface: parse_rate(rate.lower()) or 0 for interface, rate in found}


@emulated
def test_both_ends_of_a_link_have_its_rate() -> None:
    with Cluster("1xunlimited+1x100mbit") as cluster:
        assert limits(cluster.namespace(0)) == {}
        assert limits(cluster.namespace(1)) == {cluster.interface(1): 100 * MBIT}
        assert limits(cluster._switch) == {"port1": 100 * MBIT}
    with Cluster("2x2x1gbit/100mbit") as cluster:
        for host in range(4):
            assert limits(cluster.namespace(host)) == {cluster.interface(host): GBIT}
        inside = {f"port{host}": GBIT for host in range(4)}
        assert limits(cluster._switch) == inside | dict.fromkeys(("up0", "down0", "up1", "down1"), 100 * MBIT)


@emulated
def test_counters_agree_with_the_bytes_transferred() -> None:
    size = 5_000_000
    with Cluster(hosts=3, rate="1gbit") as cluster:
        before = [cluster.counters(host) for host in range(3)]
        transfer(cluster, 0, 1, payload_bytes=size)
        sender, receiver, other = (cluster.counters(host) - before[host] for host in range(3))
        for counted in (sender.tx_bytes, receiver.rx_bytes):
            assert size <= counted <= 1.05 * size
        assert 0 < sender.tx_packets <= size // 1000
        assert 0 < receiver.rx_packets <= size // 1000
        assert max(sender.rx_bytes, receiver.tx_bytes) < 0.05 * size
        assert max(other.rx_bytes, other.tx_bytes) < 10_000


@emulated
def test_only_what_leaves_a_group_goes_over_its_trunk() -> None:
    size = 1_000_000
    with Cluster("2x2x1gbit/100mbit") as cluster:
        before = cluster.trunk_counters(0)
        transfer(cluster, 0, 1, payload_bytes=size)
        assert (cluster.trunk_counters(0) - before).tx_bytes < 10_000
        transfer(cluster, 1, 2, payload_bytes=size)
        counted = cluster.trunk_counters(0) - before
        assert counted.tx_bytes >= size
        assert counted.rx_bytes < 0.06 * counted.tx_bytes
        assert cluster.trunk_counters(1).rx_bytes >= size
        with pytest.raises(IndexError, match="bad group 2"):
            cluster.trunk_counters(2)
