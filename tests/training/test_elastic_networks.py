"""Hosts of an elastic training that are on several networks, or on networks that do not lead to each other."""

import os
import re
import warnings
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from lightning_sparse.bench.cluster import Cluster
from tests import conftest
from tests.support.elastic import Journals, Lighthouse, Plan, join_namespace, train
from tests.support.models import small
from tests.support.processes import Ranks

pytest.importorskip("torchft")
IN_TIME_S = 90
WIDTH = 4_000  # a model of 48,003 parameters, beside which what else travels is little
JOIN_BYTES = 48_003 * 12  # weights and Adam's two moments
pytestmark = [
    pytest.mark.programs,
    pytest.mark.processes,
    pytest.mark.skipif(os.geteuid() != 0, reason="a host that joins its network namespace must be root"),
]


def add_network(cluster: Cluster, hosts: Collection[int], prefix: str, bits: int = 24) -> None:
    """Join these hosts by a second network, on which they are eth1 and have the addresses ``prefix`` 1, 2 and so on."""
    ip, switch = cluster.network.run, cluster.network.switch
    ip(switch, "ip", "link", "add", "second", "type", "bridge")
    ip(switch, "ip", "link", "set", "second", "up")
    for host in hosts:
        where, port = cluster.namespace(host), f"second{host}"
        ip(where, "ip", "link", "add", "eth1", "type", "veth", "peer", "name", port, "netns", switch)
        ip(where, "ip", "address", "add", f"{prefix}{host + 1}/{bits}", "dev", "eth1", *["nodad"] * (":" in prefix))
        ip(where, "ip", "link", "set", "eth1", "up")
        ip(switch, "ip", "link", "set", port, "master", "second", "up")


def received_bytes() -> dict[str, int]:
    """By interface, since it is there."""
    lines = [line.partition(":") for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]]
    return {name.strip(): int(numbers.split()[0]) for name, _, numbers in lines}


def wide(**given: Any) -> nn.Module:
    model = small(**given)
    model.net = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    return model


def on_networks(rank: int, size: int, namespaces: list[str], interfaces: list[str], plan: Plan) -> Any:
    """``train`` on an emulated host; says what it received on which interface, and of what it warned."""
    join_namespace(namespaces[rank])
    os.environ["GLOO_SOCKET_IFNAME"] = interfaces[rank]
    plan.model = partial(wide, optimizer="adam")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        end = train(rank, size, plan)
    return end | {"received": received_bytes(), "warned": "\n".join(str(each.message) for each in caught)}


def plan_of(cluster: Cluster, folder: Path, **given: Any) -> Plan:
    lighthouse = Lighthouse()
    cluster.popen(0, lighthouse.command)
    connected = f"until (exec 3<> /dev/tcp/{cluster.address(0)}/{lighthouse.port}) 2> /dev/null; do sleep 0.1; done"
    cluster.run([["bash", "-c", connected]], timeout_s=IN_TIME_S)
    plan = Plan(f"http://{cluster.address(0)}:{lighthouse.port}", folder, joins={1: 6}, **given)
    plan.slow_below = cluster.hosts
    return plan


@conftest.emulated(2 * IN_TIME_S)
@pytest.mark.parametrize(
    ("interface", "prefix", "address", "used"),
    [
        pytest.param("", "10.78.0.", "", "eth0", id="that_leads_to_the_lighthouse"),
        pytest.param("eth1,eth0", "10.78.0.", "", "eth1", id="of_an_interface"),
        pytest.param("eth1", "fd00:78::", "", "eth1", id="of_an_interface_without_IPv4"),
        pytest.param("", "10.78.0.", "10.78.0.", "eth1", id="of_an_address"),
        pytest.param("eth0", "fd00:78::", "fd00:78::", "eth1", id="of_an_address_of_IPv6_and_no_interface"),
    ],
)
def test_all_travels_on_the_network(
    ranks: Ranks, tmp_path: Path, interface: str, prefix: str, address: str, used: str
) -> None:
    with Cluster("2x1gbit") as cluster:
        add_network(cluster, range(2), prefix, 64 if ":" in prefix else 24)
        plan = plan_of(cluster, tmp_path, steps=24)
        plan.addresses = {host: f"{address}{host + 1}" for host in range(2) if address}
        where = [cluster.namespace(host) for host in range(2)], [interface] * 2
        with ranks.start(on_networks, 2, *where, plan) as running:
            first, joined = running.values(IN_TIME_S)
    assert first["bits"] == joined["bits"]
    (other,) = {"eth0", "eth1"} - {used}
    assert (
        joined["received"][used] > JOIN_BYTES + first["sent"] / 4
    )  # of what host 0 sent before the other came nothing
    assert max(end["received"][other] for end in (first, joined)) < JOIN_BYTES / 4
    assert first["received"][used] > joined["sent"] > JOIN_BYTES / 4
    Journals(tmp_path).check_bits()


@conftest.emulated(2 * IN_TIME_S)
@pytest.mark.parametrize(
    ("interfaces", "failure"),
    [
        (["eth0", "eth1", "eth0"], "Connect timeout .*; hosts that have come: .*10.66.0.2"),
        (["eth1", "eth0", "eth1"], "failed to connect to any network address of .10.66.0.[13]"),
    ],
    ids=["is_not_reached", "does_not_reach"],
)
def test_a_host_on_another_network_ends_and_says_so_and_the_others_go_on(
    ranks: Ranks, tmp_path: Path, interfaces: list[str], failure: str
) -> None:
    with Cluster("3x1gbit") as cluster:
        add_network(cluster, [host for host in range(3) if interfaces[host] == "eth1"], "10.66.0.")
        plan = plan_of(cluster, tmp_path, steps=60, timeout_s=4.0)
        where = [cluster.namespace(host) for host in range(3)], interfaces
        with ranks.start(on_networks, 3, *where, plan) as running:
            ends = {end.rank: end for end in running.ends(IN_TIME_S)}
    assert not ends[0].error, ends[0].error
    assert not ends[2].error, ends[2].error
    own = "10.66.0.2" if interfaces[1] == "eth1" else "10.77.0.2"
    expected = rf"hosts that meet must reach each other's addresses; got 3 failures .* on this one, {own}: .*{failure}"
    assert re.search(expected, str(ends[1].error)), ends[1].error
    assert "Elastic(address=...) or GLOO_SOCKET_IFNAME" in str(ends[1].error)
    healthy = [ends[host].value for host in (0, 2)]
    assert [end["step"] for end in healthy] == [60, 60]
    assert len({end["bits"] for end in healthy}) == 1
    own = "10.66.0.1" if interfaces[0] == "eth1" else "10.77.0.1"
    assert healthy[0]["warned"].count("not all hosts that have met are connected") == 1
    assert f"got on this one, {own}: " in healthy[0]["warned"]
