from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import pytest

from lightning_sparse.bench import cluster as emulation
from lightning_sparse.bench.cluster import Cluster, ClusterError, parse_rate
from lightning_sparse.bench.compare.ranks import RankInfo
from tests.support.hosts import GBIT, LONG_S, MBIT, emulated, ping, transfer

SWITCH = -1  # where the bridges are, in place of a host


def left(cluster: Cluster) -> list[str]:
    """What is left of a cluster's namespaces."""
    return [path for path in cluster.network.paths if os.path.exists(path)]


def inside(cluster: Cluster) -> list[int]:
    """Ids of the processes in the hosts, without those that hold them."""
    found = []
    for path in Path("/proc").iterdir():
        with suppress(OSError):  # gone meanwhile
            if any(
                (path / "ns/net").samefile(host) and path != Path(host).parents[1] for host in cluster.network.hosts
            ):
                found.append(int(path.name))
    return found


def own_interfaces() -> list[str]:
    return sorted(os.listdir("/sys/class/net"))


def alive(pid: int) -> bool:
    """Whether a process runs (one that has ended and waits for its parent does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(what: Callable[[], bool], timeout_s: float = LONG_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.01)


# --- what is missing


@pytest.mark.parametrize(("tool", "package"), [("tc", "iproute2"), ("nsenter", "util-linux")])
def test_without_a_tool_the_error_names_it_and_its_package(
    monkeypatch: pytest.MonkeyPatch, tool: str, package: str
) -> None:
    monkeypatch.setattr(emulation, "find", lambda wanted: None if wanted == tool else f"/sbin/{wanted}")
    with (
        pytest.raises(ClusterError, match=f"'{tool}' is not found: apt-get install {package}"),
        Cluster("2xunlimited"),
    ):
        pass


def test_without_root_or_user_namespaces_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation, "capable", lambda: False)
    monkeypatch.setattr(emulation, "find", lambda tool: "false" if tool == "unshare" else f"/sbin/{tool}")
    reason = emulation.unavailable_reason()
    assert reason is not None
    assert "needs root, or a user namespace, which this process may not make" in reason


@emulated
def test_failing_tc_is_quoted_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation, "_QUEUE_MS", "bad")
    cluster = Cluster("2x1gbit")
    with pytest.raises(ClusterError, match=r"sch_tbf.*(?i:illegal value for \"latency\")"), cluster:
        pass
    assert not cluster.network.hosts


@emulated
def test_where_nothing_can_delay_packets_the_error_names_what_the_kernel_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failing = tmp_path / "delay.py"
    failing.write_text("import sys; sys.exit('[Errno 2] No such file or directory')")
    monkeypatch.setattr(emulation, "_DELAY", failing)
    with pytest.raises(ClusterError, match=r"cannot delay.*nfnetlink_queue.*: \[Errno 2\]"), Cluster("2x1gbit+1ms"):
        pass


# --- creation and removal


@emulated
def test_removed_on_exit_with_all_processes() -> None:
    before = own_interfaces()
    with Cluster("2x1gbit") as cluster:
        paths = left(cluster)
        assert len(paths) == 3
        assert own_interfaces() == before
        plain = cluster.popen(0, ["sleep", "600"])
        # One that leaves its session, as the workers of torchrun do.
        escaped = cluster.popen(1, ["sh", "-c", "setsid sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
        assert escaped.stdout is not None
        with escaped.stdout:
            pids = [plain.pid, escaped.pid, int(escaped.stdout.readline())]
        assert all(alive(pid) for pid in pids)
    assert not any(os.path.exists(path) for path in paths)
    assert own_interfaces() == before
    assert not any(alive(pid) for pid in pids)
    assert plain.returncode == -signal.SIGKILL
    cluster.close()  # again: nothing happens
    with pytest.raises(ClusterError, match="not built"):
        cluster.address(0)


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
    with Cluster("2x1gbit") as one, Cluster("2x1gbit") as other:
        transfer(one, 0, 1, payload_bytes=1_000_000)
        assert counted(other, 1)["received"] < 10_000
        other.close()
        assert not other.network.hosts
        transfer(one, 1, 0, payload_bytes=1_000_000)


# --- a creator that is ended by a signal

# A stand-in for the package, which would import torch: so it starts at once.
CHILD = """
import json, os, signal, sys, time, types
package = sys.modules["lightning_sparse"] = types.ModuleType("lightning_sparse")
package.__path__ = [sys.argv[1]]
from lightning_sparse.bench import cluster as module
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background ...
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ... or with nohup
with module.Cluster("2x1gbit+1ms") as cluster:
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
    print(json.dumps([[each.pid for each in cluster.network._processes], process.pid]), flush=True)
    time.sleep(600)
"""


@contextmanager
def child_with_cluster(mode: str = "plain") -> Iterator[tuple[subprocess.Popen[str], list[int], int]]:
    """A child process that has a cluster, the ids of those that hold its namespaces, and that of a process in it."""
    command = [sys.executable, "-c", CHILD, str(Path(emulation.__file__).parents[1]), mode]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as child:
        try:
            assert child.stdout is not None
            holding, pid = json.loads(child.stdout.readline())
            assert all(map(alive, [*holding, pid]))
            yield child, holding, pid
        finally:
            child.kill()
            child.wait()


@emulated
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_removed_on_signal(number: signal.Signals) -> None:
    with child_with_cluster() as (child, holding, pid):
        delaying = [i for i in children(child.pid) if "delay.py" in Path(f"/proc/{i}/cmdline").read_text()]
        assert len(delaying) == 1
        child.send_signal(number)
        assert child.wait(timeout=LONG_S) == -number
        wait_until(lambda: not any(map(alive, [*holding, *delaying, pid])))


@emulated
def test_a_second_interrupt_during_removal_leaves_nothing() -> None:
    with child_with_cluster("busy") as (child, holding, pid):
        child.send_signal(signal.SIGINT)
        assert child.stdout is not None
        assert child.stdout.readline() == "removing\n"
        child.send_signal(signal.SIGINT)
        assert child.stdin is not None
        child.stdin.write("sent\n")
        child.stdin.flush()
        assert child.wait(timeout=LONG_S) == -signal.SIGINT
        wait_until(lambda: not any(map(alive, [*holding, pid])))


@emulated
def test_forked_copy_leaves_the_cluster_alone() -> None:
    with child_with_cluster("fork") as (child, holding, pid):
        child.terminate()
        assert child.wait(timeout=LONG_S) == -signal.SIGTERM
        wait_until(lambda: not any(map(alive, [*holding, pid])))


def children(pid: int) -> list[int]:
    return [int(i) for i in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# --- running commands


@emulated
def test_lines_come_as_rank_0_writes_them(tmp_path: Path) -> None:
    with Cluster("2xunlimited") as cluster:
        first = "echo one; read answer < fifo; echo $answer; printf unfinished"
        os.mkfifo(tmp_path / "fifo")
        lines = cluster.lines([["sh", "-c", f"cd {tmp_path}; {first}"], ["echo", "not shown"]])
        assert next(lines) == "one"
        (tmp_path / "fifo").write_text("two\n")
        assert list(lines) == ["two"]
        failing = cluster.lines([["sh", "-c", "echo one; sleep 600"], ["sh", "-c", "echo broken >&2; exit 3"]])
        with pytest.raises(ClusterError, match=r"rank 1 on host 1 failed with status 3; [^\n]*:\nbroken$"):
            list(failing)
        assert inside(cluster) == []


@emulated
def test_run_kills_all_when_one_fails_or_the_time_is_up() -> None:
    with Cluster("2xunlimited") as cluster:
        with pytest.raises(ClusterError, match=r"host 1 failed with status 3; [^\n]*:\nbroken cable$"):
            cluster.run([["sleep", "600"], ["sh", "-c", "echo broken cable >&2; exit 3"]], timeout_s=LONG_S)
        assert inside(cluster) == []
        with pytest.raises(ClusterError, match=r"host 1 had not ended after 1 s; [^\n]*:\nwaiting$"):
            cluster.run([["true"], ["sh", "-c", "echo waiting >&2; sleep 600"]], timeout_s=1)
        assert inside(cluster) == []
        with pytest.raises(ClusterError, match="no-such-command"):
            cluster.run([["no-such-command"]], timeout_s=LONG_S)
        with pytest.raises(ValueError, match="at most one for each of 2 ranks; got 3"):
            cluster.run([["true"]] * 3, timeout_s=LONG_S)


# --- rates and counters


def limits(cluster: Cluster, host: int = SWITCH) -> dict[str, int]:
    """The rate of each limited interface, as the kernel reports it."""
    shown = cluster.network.run(cluster.network.paths[1 + host], "tc", "qdisc")
    found = re.findall(r"^qdisc tbf \S+ dev (\S+) .*\brate (\S+)", shown, re.MULTILINE)
    return {interface: parse_rate(rate.lower()) or 0 for interface, rate in found}


@emulated
def test_both_ends_of_a_link_have_its_rate() -> None:
    with Cluster("1xunlimited+1x100mbit") as cluster:
        assert limits(cluster, 0) == {}
        assert limits(cluster, 1) == {"eth0": 100 * MBIT}
        assert limits(cluster) == {"port1": 100 * MBIT}


def counted(cluster: Cluster, host: int, interface: str = "eth0") -> dict[str, int]:
    """What the kernel counted on an interface since it was made."""
    table = cluster.network.run(cluster.network.paths[1 + host], "cat", "/proc/net/dev")
    numbers = re.search(rf"^\s*{interface}:(.*)$", table, re.MULTILINE)[1].split()  # type: ignore[index]
    return {"received": int(numbers[0]), "sent": int(numbers[8]), "packets": int(numbers[9])}


@emulated
def test_the_kernel_counts_what_was_transferred() -> None:
    size = 5_000_000
    with Cluster("3x1gbit") as cluster:
        transfer(cluster, 0, 1, payload_bytes=size)
        sender, receiver, other = (counted(cluster, host) for host in range(3))
        for transferred in (sender["sent"], receiver["received"]):
            assert size <= transferred <= 1.05 * size
        assert 0 < sender["packets"] <= size // 1000
        assert max(sender["received"], receiver["sent"]) < 0.05 * size
        assert max(other["received"], other["sent"]) < 10_000


# --- several ranks on a host

SHOW = """
import json, os, sys
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE NODE_RANK MASTER_ADDR MASTER_PORT"
print(json.dumps([os.readlink("/proc/self/ns/net"), *(os.environ[name] for name in names.split())]))
"""


@emulated
def test_each_rank_is_in_its_host_and_knows_its_place() -> None:
    with Cluster("1x2xunlimited+1x3xunlimited") as cluster:
        found = cluster.run([[sys.executable, "-S", "-c", SHOW]] * cluster.ranks, timeout_s=LONG_S)
        namespaces, *places = zip(*(json.loads(each.stdout) for each in found), strict=True)
        assert namespaces == tuple(os.readlink(cluster.namespace(host)) for host in (0, 0, 1, 1, 1))
        with pytest.raises(ClusterError, match=r"rank 4 on host 1 failed with status 3"):
            cluster.run([["true"]] * 4 + [["sh", "-c", "exit 3"]], timeout_s=LONG_S)
        assert places == [
            tuple("01234"),
            tuple("01012"),
            tuple("55555"),
            tuple("22333"),
            tuple("00111"),
            tuple("22222"),
            tuple("00111"),
            (cluster.address(0),) * 5,
            ("29500",) * 5,
        ]


@emulated
def test_what_ranks_of_a_host_send_each_other_takes_no_link() -> None:
    """Nor does it count on ``eth0``, though that has the address that it goes to."""
    size = 5_000_000
    with Cluster("2x2x10mbit") as cluster:
        assert transfer(cluster, 1, 0, payload_bytes=size) > 100 * MBIT
        assert all(counted(cluster, host)["sent"] < 10_000 for host in range(2))
        assert counted(cluster, 0, "lo")["sent"] > size
        transfer(cluster, 1, 2, payload_bytes=size // 10)
        assert size // 10 <= counted(cluster, 0)["sent"] <= 1.05 * size // 10


SUM = """
import json, sys
import torch, torch.distributed as dist
from dataclasses import asdict
from lightning_sparse.bench.compare.ranks import RankInfo, read_sent
dist.init_process_group("gloo")
groups = [dist.new_group(each) for each in json.loads(sys.argv[1])]
sent = [read_sent("eth0")[0]]
for group in groups:
    values = torch.full((int(sys.argv[2]),), float(dist.get_rank()))
    if dist.get_rank(group) >= 0:
        dist.all_reduce(values, group=group)
    dist.barrier()
    sent.append(read_sent("eth0")[0])
    dist.barrier()
sent = [after - before for before, after in zip(sent, sent[1:])]
print(json.dumps([float(values[0]), sent, asdict(RankInfo.find(None))]))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.programs
@emulated
def test_gloo_sums_of_ranks_of_a_host_stay_off_its_interface() -> None:
    """Sums within each host, then between all; ranks meet by the environment that they are started with."""
    n, within, between = 250_000, [[0, 1], [2, 3]], [[0, 1, 2, 3]]
    program = [sys.executable, "-c", SUM, json.dumps([*within, *between]), str(n)]
    with Cluster("2x2x100mbit") as cluster:
        found = [json.loads(each.stdout) for each in cluster.run([program] * 4, timeout_s=LONG_S)]
        assert [place for _, _, place in found] == [
            asdict(RankInfo(rank, rank % 2, 4, 2, 2, cluster.address(0), 29500, False, "eth0")) for rank in range(4)
        ]
    assert [value for value, _, _ in found] == [6.0] * 4
    for _, sent, _ in found:
        assert max(sent[:2]) < 50_000
        assert 4 * n <= sent[2] < 2.5 * 4 * n  # what crosses of 4 n bytes from each of four ranks


# --- delays


@emulated
def test_a_round_trip_takes_the_delays_of_both_ways() -> None:
    with Cluster("1x1gbit+40ms+1xunlimited+20ms+1x1gbit") as cluster:
        least_ms = {(0, 1): 60, (1, 0): 60, (0, 2): 40, (1, 2): 20}
        for (source, target), ms in least_ms.items():
            assert min(ping(cluster, source, target)) > 0.99e-3 * ms


@emulated
def test_what_is_delayed_arrives_whole_and_in_windows_that_fill_the_link() -> None:
    with Cluster("2x1gbit+20ms") as cluster:
        transfer(cluster, 0, 1, payload_bytes=5_000_000)
        assert counted(cluster, 1)["received"] < 1.05 * 5_000_000
        read = ["cat", "/proc/sys/net/ipv4/tcp_rmem", "/proc/sys/net/ipv4/tcp_wmem"]
        for line in cluster.run([read], timeout_s=LONG_S)[0].stdout.splitlines():
            assert int(line.split()[2]) >= 2 * 0.04 * GBIT / 8
        with pytest.raises(ClusterError, match="host 0 failed"):
            cluster.run([["false"]], timeout_s=LONG_S)
        assert ping(cluster, 1, 0)  # an error ends the processes in the hosts, not the one that delays


# --- without root

WITHOUT_ROOT = """
import sys, types
package = sys.modules["lightning_sparse"] = types.ModuleType("lightning_sparse")
package.__path__ = [sys.argv[1]]
from lightning_sparse.bench.cluster import Cluster, capable, unavailable_reason
assert not capable()
if reason := unavailable_reason():
    print(reason)
else:
    with Cluster("2x100mbit+1ms") as cluster:
        print(*cluster.run([["ip", "-brief", "-4", "address"], ["tc", "qdisc"]], timeout_s=60))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has capabilities to drop; the other tests run without them")
@emulated
def test_without_roots_capabilities_a_user_namespace_stands_in() -> None:
    drop = ["setpriv", "--bounding-set=-net_admin,-sys_admin"]
    script = [sys.executable, "-S", "-c", WITHOUT_ROOT, str(Path(emulation.__file__).parents[1])]
    done = subprocess.run([*drop, *script], capture_output=True, text=True, timeout=LONG_S, check=False)
    assert done.returncode == 0, done.stderr
    if "needs root, or a user namespace" not in done.stdout:
        assert "10.77.0.1/24" in done.stdout
        assert "qdisc tbf" in done.stdout
