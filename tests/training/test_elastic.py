"""Hosts of an elastic training end, stop and join, and those that go on have the same bits and keep the law."""

import os
import random
import re
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time only

import lightning_sparse as ls
from lightning_sparse.bench.cluster import Cluster
from lightning_sparse.fabric import SparseDDPStrategy as FabricStrategy
from lightning_sparse.local_steps.settings import LocalSteps
from lightning_sparse.network.hosts import Hosts, _parts
from tests import conftest
from tests.support.elastic import (
    CALM,
    FATAL,
    FAULTS,
    LONG_S,
    Journals,
    Lighthouse,
    Plan,
    fallen_after,
    rate_after,
    train,
    train_in,
    wait_until,
)
from tests.support.local_steps import local
from tests.support.models import data, small, trainer, weights
from tests.support.processes import Ranks
from tests.support.same import same

pytest.importorskip("torchft")
AT_RANDOM = ("before", "within", "half_a_vote", "after")
ROUNDS, SEED = int(os.environ.get("ELASTIC_ROUNDS", "0")), int(os.environ.get("ELASTIC_SEED", "0"))
IN_TIME_S = 90  # to start, to notice and to end, beside other work on few cores
pytestmark = [pytest.mark.processes, pytest.mark.timeout(2 * IN_TIME_S)]


def ends_of(ranks: Ranks, hosts: int, plan: Plan) -> dict[int, Any]:
    """What the hosts that were not killed have at the end, by number."""
    with ranks.start(train, hosts, plan) as running:
        ends = list(running.ends(IN_TIME_S))
    killed = [end.rank for end in ends if end.error == "died with exit code -9"]
    assert set(killed) == {rank for rank, (name, _) in plan.faults.items() if FAULTS[name] in FATAL}
    failed = [f"host {end.rank}: {end.error}" for end in ends if end.error and end.rank not in killed]
    assert not failed, "\n".join(failed)
    values = {end.rank: end.value for end in ends if not end.error}
    assert {value["step"] for value in values.values()} == {plan.steps}
    assert len({value["bits"] for value in values.values()}) == 1, values
    assert len({value["seed"] for value in values.values()}) == len(values)  # of the order of their data
    return values


def test_hosts_are_killed_before_within_and_after_an_exchange(ranks: Ranks, tmp_path: Path) -> None:
    faults = {2: ("before", 3), 3: ("within", 6), 4: ("half_a_vote", 9), 5: ("after", 12)}
    with Lighthouse() as lighthouse:
        ends = ends_of(ranks, 6, Plan(lighthouse.address, tmp_path, faults=faults))
    journals = Journals(tmp_path)
    journals.check_bits()
    assert set(journals.check_law()) == {6, 5, 4, 3, 2}
    assert [end["metrics"]["sparse/lost_hosts"] for end in ends.values()] == [4, 4]


@pytest.mark.programs
def test_a_host_joins_when_two_of_four_were_killed_at_once(ranks: Ranks, tmp_path: Path) -> None:
    faults = {1: ("within", 4), 2: ("within", 4)}
    plan = Plan("", tmp_path, steps=40, compressor=ls.MiCRO(density=0.1), faults=faults, joins={4: 8}, slow_below=3)
    with Lighthouse() as lighthouse:
        plan.lighthouse = lighthouse.address
        ends = ends_of(ranks, 5, plan)
    journals = Journals(tmp_path)
    journals.check_bits()
    assert set(journals.check_law()) == {4, 3, 2}
    assert min(step for kind, *_, step in journals.entries[4] if kind == "state") >= 8  # the others' step
    assert {end["hosts"] for end in ends.values()} == {3}


@pytest.mark.programs
def test_hosts_are_killed_while_another_joins(ranks: Ranks, tmp_path: Path) -> None:
    faults = {0: ("handing_on", 8), 1: ("within", 9)}
    with Lighthouse() as lighthouse:
        plan = Plan(lighthouse.address, tmp_path, steps=100, faults=faults, joins={4: 8}, timeout_s=4.0)
        plan.slow_below = 3  # whoever waits, for 4 s, for a dead host to connect, is to catch up in time
        ends = ends_of(ranks, 5, plan)
    Journals(tmp_path).check_bits()
    assert {3, 4} & set(Journals(tmp_path).check_law())
    assert {end["hosts"] for end in ends.values()} == {3}


@pytest.mark.programs
def test_a_host_that_has_stopped_and_goes_on_joins_again(ranks: Ranks, tmp_path: Path) -> None:
    faults = {2: ("stop_for_a_while", 5)}
    signs = {"local_steps": 3, "wire_dtype": "sign"}
    with Lighthouse() as lighthouse:
        plan = Plan(lighthouse.address, tmp_path, faults=faults, local=signs, timeout_s=2.0, steps=80)
        plan.slow_below, plan.falls, plan.batches = 3, True, 7
        ends = ends_of(ranks, 3, plan)
    journals = Journals(tmp_path)
    journals.check_bits()
    journals.check_epochs()
    journals.check_steps(plan.steps)
    assert set(journals.check_law()) == {3, 2}
    assert {end["hosts"] for end in ends.values()} == {3}
    assert all(end["schedules"] == fallen_after(plan.steps) for end in ends.values())


@pytest.mark.programs
@pytest.mark.parametrize(
    "local_steps",
    [{"local_steps": 2}, {"local_steps": LocalSteps(6, fragments=1, overlap=False)}],
    ids=["2", "6_waits"],
)
def test_at_its_own_pace_a_slow_host_takes_fewer_steps(ranks: Ranks, tmp_path: Path, local_steps: dict) -> None:
    slow = 2
    with Lighthouse() as lighthouse:
        plan = Plan(lighthouse.address, tmp_path, steps=160, local=local_steps | {"wire_dtype": "int4"})
        plan.slow_below, plan.own_pace, plan.falls = 3, True, True
        plan.sleeps = {0: 0.02, 1: 0.02, slow: 0.3}
        ends = ends_of(ranks, 3, plan)
    journals = Journals(tmp_path)
    journals.check_bits()
    assert journals.check_law()[3] > 5
    batches = [ends[rank]["batches"] for rank in range(3)]
    assert max(batches) <= plan.steps
    assert 2 * batches[slow] < min(batches[:slow]), batches
    rates = [end["rate"] for end in ends.values()]
    assert rates == pytest.approx([rate_after(plan.steps)] * 3)  # schedules go by the training's steps


@pytest.mark.programs
def test_a_lighthouse_that_is_killed_and_started_again_costs_its_absence(ranks: Ranks, tmp_path: Path) -> None:
    with Lighthouse(min_hosts=2) as lighthouse:
        plan = Plan(lighthouse.address, tmp_path, steps=30)
        with ranks.start(train, 2, plan) as running:
            wait_until((tmp_path / "0.at6").exists)
            lighthouse.kill()
            lighthouse.start()
            ends = [end.value for end in running.ends(IN_TIME_S)]
    assert len({end["bits"] for end in ends}) == 1
    assert [end["step"] for end in ends] == [30, 30]
    Journals(tmp_path).check_bits()


@pytest.mark.programs
@pytest.mark.parametrize(("step", "is_restarted"), [(6, True), (28, False)], ids=["restarted", "last_exchange"])
def test_an_answer_of_the_lighthouse_is_lost(ranks: Ranks, tmp_path: Path, step: int, is_restarted: bool) -> None:
    with Lighthouse(min_hosts=2) as lighthouse:
        plan = Plan(lighthouse.address, tmp_path, steps=30, faults={1: ("answer_lost", step)}, timeout_s=3.0)
        with ranks.start(train, 2, plan) as running:
            wait_until((tmp_path / "lost").exists)
            if is_restarted:  # and counts anew while the other host waits in an exchange
                lighthouse.kill()
                lighthouse.start()
            ends = [end.value for end in running.ends(IN_TIME_S)]
    assert len({end["bits"] for end in ends}) == 1
    assert [end["step"] for end in ends] == [30, 30]
    assert {end["metrics"]["sparse/dropped_exchanges"] for end in ends} == {0}  # it costs a meeting
    Journals(tmp_path).check_bits()


@pytest.mark.programs
def test_a_host_that_joins_at_the_last_exchange_takes_part_in_it(ranks: Ranks, tmp_path: Path) -> None:
    with Lighthouse() as lighthouse:
        plan = Plan(lighthouse.address, tmp_path, steps=30, joins={2: 24}, slow_below=3)
        plan.local = {"local_steps": LocalSteps(6, fragments=1, overlap=False), "wire_dtype": "int4"}
        ends = ends_of(ranks, 3, plan)
    assert {end["metrics"]["sparse/dropped_exchanges"] for end in ends.values()} == {0}


@pytest.mark.programs
def test_a_host_stops_in_a_meeting_for_longer_than_it_may_wait(ranks: Ranks, tmp_path: Path) -> None:
    with Lighthouse() as lighthouse:
        plan = Plan(lighthouse.address, tmp_path, faults={2: ("stop_in_a_meeting", 5)}, timeout_s=3.0, steps=50)
        plan.quorum_timeout_s, plan.slow_below, plan.slow_s = 4.0, 3, 0.2
        plan.sleeps = {0: 0.6}  # for which the others wait at a meeting
        with ranks.start(train, 3, plan) as running:
            wait_until(lambda: any((tmp_path / f"2.at{step}").exists() for step in range(10, 50)))
            (tmp_path / CALM).touch()
            found = [end.value or end.error for end in running.ends(IN_TIME_S)]
    assert [end["step"] for end in found] == [plan.steps] * 3, found
    assert len({end["bits"] for end in found}) == 1
    Journals(tmp_path).check_bits()


@pytest.mark.programs
def test_a_host_that_catches_up_at_the_last_exchange_takes_no_step_more(ranks: Ranks, tmp_path: Path) -> None:
    at_once = {"local_steps": LocalSteps(6, fragments=1, overlap=False), "wire_dtype": "int4"}
    faults = {2: ("stop_for_a_while", 18)}
    with Lighthouse() as lighthouse:
        plan = Plan(lighthouse.address, tmp_path, faults=faults, local=at_once, timeout_s=2.0, steps=30)
        plan.slow_below, plan.slow_s, plan.stops_until, plan.falls = 3, 0.6, 25, True
        ends = ends_of(ranks, 3, plan)
    assert ends[2]["batches"] == 20  # of which the last does not count: it has met the others meanwhile
    for end in ends.values():
        assert (end["hosts"], end["optimizer"], end["schedules"]) == (3, {plan.steps}, fallen_after(plan.steps))
    Journals(tmp_path).check_bits()


@pytest.mark.programs
def test_a_host_that_loses_the_first_answer_ends_as_the_others(ranks: Ranks, tmp_path: Path) -> None:
    with Lighthouse() as lighthouse:
        ends_of(ranks, 2, Plan(lighthouse.address, tmp_path, steps=1, faults={1: ("answer_lost", 0)}, timeout_s=3.0))


@pytest.mark.programs
def test_a_host_with_other_settings_is_refused_and_the_others_go_on(ranks: Ranks, tmp_path: Path) -> None:
    with Lighthouse() as lighthouse:
        plan = Plan(lighthouse.address, tmp_path, steps=30, joins={2: 5}, odd=2)
        with ranks.start(train, 3, plan) as running:
            ends = {end.rank: end for end in running.ends(IN_TIME_S)}
    assert "Hosts must be started with the same settings, optimizers and model; got others." in str(ends[2].error)
    assert re.search(r"local: LocalSteps\(steps=7.*host 0.*LocalSteps\(steps=2.*host 1", str(ends[2].error))
    assert ends[0].value["bits"] == ends[1].value["bits"]
    assert ends[0].value["step"] == ends[1].value["step"] == 30


@pytest.mark.programs
def test_too_few_hosts_wait_and_are_told_how_many_are_there(ranks: Ranks, tmp_path: Path) -> None:
    with Lighthouse(min_hosts=2) as lighthouse:
        plan = Plan(lighthouse.address, tmp_path, min_hosts=3, quorum_timeout_s=3.0)
        with ranks.start(train, 2, plan) as running:
            errors = [str(end.error) for end in running.ends(IN_TIME_S)]
    assert all("at least 3 hosts must meet" in error for error in errors)
    assert any("got: 2 are there" in error for error in errors), errors


@pytest.mark.programs
@pytest.mark.skipif(os.geteuid() != 0, reason="a host that joins its network namespace must be root")
@conftest.emulated(2 * IN_TIME_S)
@pytest.mark.parametrize(
    ("cut_s", "timeout_s"),
    [
        pytest.param(5, 40.0, id="within_the_limit"),
        pytest.param(8, 2.0, id="for_longer"),
        pytest.param(
            60, 5.0, id="for_a_minute", marks=pytest.mark.skipif(not ROUNDS, reason="ELASTIC_ROUNDS=1 runs it")
        ),
    ],
)
def test_a_link_is_cut_for_a_while(ranks: Ranks, tmp_path: Path, cut_s: int, timeout_s: float) -> None:
    lighthouse = Lighthouse()
    with Cluster("3x1gbit") as cluster:
        cluster.popen(0, lighthouse.command)
        plan = Plan(
            f"http://{cluster.address(0)}:{lighthouse.port}", tmp_path, steps=120 + 10 * cut_s, timeout_s=timeout_s
        )
        plan.slow_below, plan.faults, plan.cut_s = 3, {2: ("cut_for_a_while", 5)}, cut_s
        plan.quorum_timeout_s += 2 * cut_s  # which goes on while the link is cut
        with ranks.start(train_in, 3, [cluster.namespace(host) for host in range(3)], plan) as running:
            ends = [end.value or end.error for end in running.ends(IN_TIME_S + cut_s)]
    assert {end["step"] for end in ends} == {plan.steps}, ends
    assert len({end["bits"] for end in ends}) == 1
    Journals(tmp_path).check_bits()
    assert Journals(tmp_path).check_law()[3] > 10


def train_ranks(rank: int, size: int, path: Path, steps: int) -> Any:
    """Train with local steps on ranks that are always the same, from a checkpoint, and save another."""
    run = trainer(local("sparse_dense", 2), size, max_steps=steps)
    model = small(optimizer="adam")
    run.fit(model, data(20, size), ckpt_path=path)
    run.save_checkpoint(path.with_name("ranks.ckpt"))
    return run.global_step, weights(model)


def test_a_checkpoint_of_one_host_resumes_on_any_number_of_hosts_and_ranks(ranks: Ranks, tmp_path: Path) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    for folder in (first, again):
        folder.mkdir()
    with Lighthouse() as lighthouse:
        ends_of(ranks, 2, Plan(lighthouse.address, first, steps=6, saves=True))
        saved = {rank: str(first / f"host{rank}" / "last.ckpt") for rank in range(2)}
        averages = [torch.load(path, weights_only=True)["state_dict"] for path in saved.values()]
        assert same(*averages)
        ends_of(ranks, 3, Plan(lighthouse.address, again, steps=9, checkpoints=saved))  # one host more, which has none
        Journals(again).check_bits()

        (steps, mine), (_, theirs) = ranks.run(train_ranks, 2, Path(saved[0]), 8)
        assert steps == 8
        assert torch.equal(mine, theirs)
        of_ranks = str(Path(saved[0]).with_name("ranks.ckpt"))
        elsewhere = Plan(lighthouse.address, tmp_path, steps=10, checkpoints={0: of_ranks, 1: of_ranks})
        ends_of(ranks, 2, elsewhere)


def test_who_dies_before_it_connects_is_waited_for_no_longer_than_for_a_message() -> None:
    limit = timedelta(seconds=10)
    group, _ = _parts("127.0.0.1", limit)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group.configure(f"127.0.0.1:{store.port}/test", "alone", 0, 1)
    of_gloo = group.parent._get_backend(torch.device("cpu")).options._timeout
    assert 5 * of_gloo == limit  # Gloo waits five times its own limit for others to connect
    group.abort(errored=False)


def test_without_torchft_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchft", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"In a checkout of this project: pip install .\.\[elastic\]"
    ) as raised:
        Hosts(ls.Elastic(lighthouse="http://localhost:1"), dict)
    assert "\n" not in str(raised.value)


def test_a_host_without_a_lighthouse_is_told_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    with pytest.raises(ValueError, match="Start one with `torchft_lighthouse --min_replicas 1`"):
        Hosts(ls.Elastic(), dict)


def test_a_lighthouse_whose_name_nobody_knows_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match=r"an address that this host can reach; got http://nowhere\.invalid:1"):
        Hosts(ls.Elastic(lighthouse="http://nowhere.invalid:1"), dict).meet(0)


def test_a_host_may_stand_still_as_it_commits() -> None:
    hosts = Hosts(ls.Elastic(lighthouse="http://localhost:1"), dict)
    hosts._manager = Mock(should_commit=Mock(side_effect=[TimeoutError("deadline has elapsed"), True]))
    assert hosts.commit()


def test_a_host_waits_for_a_lighthouse_that_comes_later() -> None:
    lighthouse = Lighthouse()
    hosts = Hosts(ls.Elastic(lighthouse=lighthouse.address, timeout=1.0, quorum_timeout=LONG_S), dict)
    later = threading.Timer(3.0, lighthouse.start)
    later.start()
    try:
        assert hosts.meet(0)
    finally:
        hosts.close()
        later.join()
        lighthouse.kill()


def test_options_that_cannot_be_elastic_are_refused() -> None:
    with pytest.raises(ValueError, match="elastic must be combined with local_steps"):
        ls.SparseDDPStrategy("micro", elastic=True)
    with pytest.raises(ValueError, match=r"elastic must be True, False or ls.Elastic\(...\); got 3"):
        ls.SparseDDPStrategy("micro", local_steps=2, elastic=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout must be a number of seconds above 0"):
        ls.Elastic(timeout=0)
    with pytest.raises(ValueError, match="replica_id must be a name, which no other host has"):
        ls.Elastic(replica_id=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Hosts come and go with SparseDDPStrategy and local_steps alone"):
        ls.SparseHSDPStrategy("micro", elastic=True)
    with pytest.raises(TypeError, match=r"elastic must be an option of this strategy.*Leave it out"):
        FabricStrategy("sparse_dense", local_steps=2, elastic=True)


@pytest.mark.skipif(not ROUNDS, reason="ELASTIC_ROUNDS=50 has so many rounds of random faults")
@pytest.mark.timeout(60 * (ROUNDS + 1))
def test_random_faults(ranks: Ranks, tmp_path: Path) -> None:
    """ELASTIC_SEED=7 begins with round 7."""
    for seed in range(SEED, SEED + ROUNDS):
        draw = random.Random(seed)
        hosts, steps = draw.randint(3, 5), 24
        doomed = draw.sample(range(1, hosts), draw.randint(1, hosts - 1))
        faults = {host: (draw.choice(AT_RANDOM), draw.randint(0, 16)) for host in doomed}
        joins = {hosts: draw.randint(1, 16)} if draw.random() < 0.5 else {}
        compressor = draw.choice(["sparse_dense", "micro", "ok_topk", "skip_reduce", "low_rank", "sparse_topk"])
        steps_of = {"local_steps": draw.choice([1, 2, 3]), "wire_dtype": draw.choice(["float32", "int4", "sign"])}
        print(f"seed {seed}: {hosts} hosts, {faults}, joins {joins}, {compressor}, {steps_of}", flush=True)
        folder = tmp_path / str(seed)
        folder.mkdir()
        with Lighthouse() as lighthouse:
            plan = Plan(lighthouse.address, folder, steps, compressor, steps_of, faults, joins)
            plan.slow_below = hosts - len(doomed) + 1 if joins else 0  # until it has come
            ends_of(ranks, hosts + len(joins), plan)
        journals = Journals(folder)
        journals.check_bits()
        print(f"seed {seed}: the law over so many hosts, so often: {journals.check_law()}", flush=True)
