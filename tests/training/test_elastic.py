"""Hosts of an elastic training end, stop and join, and those that go on have the same bits and keep the law."""

from pathlib import Path
from typing import Any

import pytest

import lightning_sparse as ls
from tests.support.elastic import Journals, Lighthouse, Plan, train, wait_until
from tests.support.processes import Ranks

pytest.importorskip("torchft")
IN_TIME_S = 90  # to start, to notice and to end, beside other work on few cores
pytestmark = [pytest.mark.processes, pytest.mark.timeout(2 * IN_TIME_S)]


def ends_of(ranks: Ranks, hosts: int, plan: Plan) -> dict[int, Any]:
    """What the hosts that were not killed have at the end, by number."""
    with ranks.start(train, hosts, plan) as running:
        ends = list(running.ends(IN_TIME_S))
    killed = [end.rank for end in ends if end.error == "died with exit code -9"]
    assert set(killed) == {rank for rank, (name, _) in plan.faults.items() if name != "stop_for_a_while"}
    failed = [f"host {end.rank}: {end.error}" for end in ends if end.error and end.rank not in killed]
    assert not failed, "\n".join(failed)
    values = {end.rank: end.value for end in ends if not end.error}
    assert {value["step"] for value in values.values()} == {plan.steps}
    assert len({value["bits"] for value in values.values()}) == 1, values
    return values


def test_hosts_are_killed_before_within_and_after_an_exchange(ranks: Ranks, tmp_path: Path) -> None:
    faults = {2: ("before", 3), 3: ("within", 6), 4: ("half_a_vote", 9), 5: ("after", 12)}
    with Lighthouse() as lighthouse:
        ends = ends_of(ranks, 6, Plan(lighthouse.address, tmp_path, faults=faults))
    journals = Journals(tmp_path)
    journals.check_bits()
    assert set(journals.check_law()) == {6, 5, 4, 3, 2}
    assert [end["metrics"]["sparse/lost_hosts"] for end in ends.values()] == [4, 4]


def test_two_of_four_hosts_are_killed_at_once(ranks: Ranks, tmp_path: Path) -> None:
    faults = {1: ("within", 4), 2: ("within", 4)}
    micro = {"compressor": ls.MiCRO(density=0.1), "faults": faults}
    with Lighthouse() as lighthouse:
        ends = ends_of(ranks, 4, Plan(lighthouse.address, tmp_path, **micro))
    journals = Journals(tmp_path)
    journals.check_bits()
    assert set(journals.check_law()) == {4, 2}
    assert [end["hosts"] for end in ends.values()] == [2, 2]


def test_a_host_joins_while_another_is_killed(ranks: Ranks, tmp_path: Path) -> None:
    plan = Plan("", tmp_path, steps=40, joins={2: 5}, faults={1: ("within", 12)}, slow_below=2)
    with Lighthouse() as lighthouse:
        plan.lighthouse = lighthouse.address
        ends = ends_of(ranks, 3, plan)
    journals = Journals(tmp_path)
    journals.check_bits()
    assert journals.check_law().keys() >= {2}
    assert min(step for kind, *_, step in journals.entries[2] if kind == "state") >= 5  # the others' step
    assert {end["hosts"] for end in ends.values()} == {2}


def test_a_host_that_has_stopped_and_goes_on_joins_again(ranks: Ranks, tmp_path: Path) -> None:
    faults = {2: ("stop_for_a_while", 5)}
    signs = {"local_steps": 3, "wire_dtype": "sign"}
    with Lighthouse() as lighthouse:
        plan = Plan(lighthouse.address, tmp_path, faults=faults, local=signs, timeout_s=2.0, steps=80)
        plan.slow_below = 3
        ends = ends_of(ranks, 3, plan)
    journals = Journals(tmp_path)
    journals.check_bits()
    assert set(journals.check_law()) == {3, 2}
    assert {end["hosts"] for end in ends.values()} == {3}


def test_a_lighthouse_that_is_killed_and_started_again_costs_its_absence(ranks: Ranks, tmp_path: Path) -> None:
    with Lighthouse() as lighthouse:
        plan = Plan(lighthouse.address, tmp_path, steps=30)
        with ranks.start(train, 2, plan) as running:
            wait_until((tmp_path / "0.at6").exists)
            lighthouse.kill()
            lighthouse.start()
            ends = [end.value for end in running.ends(IN_TIME_S)]
    assert len({end["bits"] for end in ends}) == 1
    assert [end["step"] for end in ends] == [30, 30]
    Journals(tmp_path).check_bits()
