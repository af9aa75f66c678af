"""Hosts of two ranks each end, stop and join: a host is there with both or not at all, and no other host ends."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

import lightning_sparse as ls
from lightning_sparse.local_steps.settings import LocalSteps
from tests.support.elastic import (
    FATAL,
    FAULTS,
    Journals,
    Lighthouse,
    Plan,
    fallen_after,
    train,
    wait_until,
)
from tests.support.local_steps import local
from tests.support.models import Small, data, small, trainer, weights
from tests.support.processes import End, Ranks

pytest.importorskip("torchft")
IN_TIME_S = 120  # to start, to notice and to end, beside other work on few cores
pytestmark = [pytest.mark.processes, pytest.mark.timeout(2 * IN_TIME_S)]
OTHER_DATA = {"use_distributed_sampler": False}  # each rank has its own, in its own order


def ends_of(ranks: Ranks, hosts: int, plan: Plan) -> dict[int, Any]:
    """What the ranks of hosts without a fault have at the end, by number; all ranks of the others have ended."""
    plan.devices = 2
    with ranks.start(train, 2 * hosts, plan) as running:
        ends = {end.rank: end for end in running.ends(IN_TIME_S)}
    return whole(ends, plan)


def whole(ends: dict[int, End], plan: Plan) -> dict[int, Any]:
    broken = {rank // 2 for rank, (name, _) in plan.faults.items() if name != "slowly"}
    assert {rank // 2 for rank, end in ends.items() if end.error} == broken, {r: e.error for r, e in ends.items()}
    assert all(end.error for rank, end in ends.items() if rank // 2 in broken)  # a host ends with all its ranks
    for rank in (rank for rank, (name, _) in plan.faults.items() if FAULTS[name] in FATAL):
        assert ends[rank].error == "died with exit code -9"
    values = {rank: end.value for rank, end in ends.items() if not end.error}
    assert {value["step"] for value in values.values()} == {plan.steps}
    for own in (0, 1):  # each owns a slice
        assert len({value["bits"] for rank, value in values.items() if rank % 2 == own}) == 1
    for rank in values.keys() & set(range(0, 100, 2)):
        one, other = values[rank], values[rank + 1]
        assert torch.equal(one["module"], other["module"])
        assert one["optimizer"] == other["optimizer"]
        assert one["seed"] == other["seed"]
    everyone = list(values.values())
    assert all(torch.equal(each["module"], everyone[0]["module"]) for each in everyone)  # which is x̄
    return values


def members(rank: int, size: int, steps: int, options: dict[str, Any]) -> torch.Tensor:
    """The same training among ranks that are always there."""
    strategy = local("sparse_dense", local_group=2, **options)
    run = trainer(strategy, size, check_every=0, max_steps=steps, **OTHER_DATA)
    model = small(seed=0, optimizer="adam")
    run.fit(model, data(4 * steps, 1, seed=rank))
    return weights(model)


@pytest.mark.parametrize(
    "steps",
    [2, pytest.param(LocalSteps(3, fragments=1, overlap=False), marks=pytest.mark.programs)],
    ids=["2", "3_waits"],
)
def test_hosts_train_as_members_of_as_many_ranks_do(ranks: Ranks, tmp_path: Path, steps: Any) -> None:
    options = {"steps": steps, "wire_dtype": "int4"}
    expected = ranks.run(members, 4, 13, options)
    with Lighthouse(min_hosts=2) as lighthouse:
        given = {"local_steps": steps, "wire_dtype": "int4"}
        ends = ends_of(ranks, 2, Plan(lighthouse.address, tmp_path, 13, local=given, options=OTHER_DATA))
    for rank, end in ends.items():
        assert torch.equal(end["module"], expected[rank])
    Journals(tmp_path, 2).check_columns()


KILLS = {
    "one": {2: ("before", 3), 5: ("within", 6), 6: ("half_a_vote", 9)},
    "other": {3: ("within", 3), 4: ("after", 6), 7: ("half_a_vote", 9)},
    "between_columns": {2: ("last_of_two", 3), 5: ("last_of_two", 6), 6: ("before_others_vote", 9), 7: ("slowly", 9)},
    "between_columns_too": {3: ("before_others_vote", 3), 2: ("slowly", 3), 5: ("after", 6), 6: ("within", 9)},
}


@pytest.mark.parametrize(
    "kills", [x if x == "between_columns" else pytest.param(x, marks=pytest.mark.programs) for x in KILLS]
)
def test_one_of_two_ranks_is_killed_and_its_host_ends_and_no_other(ranks: Ranks, tmp_path: Path, kills: str) -> None:
    with Lighthouse() as lighthouse:
        ends = ends_of(ranks, 4, Plan(lighthouse.address, tmp_path, faults=KILLS[kills]))
    journals = Journals(tmp_path, 2)
    journals.check_bits()
    journals.check_columns()
    assert set(journals.check_law()) == {4, 3, 2, 1}
    assert [end["metrics"]["sparse/lost_hosts"] for end in ends.values()] == [3, 3]


@pytest.mark.programs
def test_a_host_leaves_and_comes_back_with_both_ranks(ranks: Ranks, tmp_path: Path) -> None:
    with Lighthouse() as lighthouse:
        plan = Plan(lighthouse.address, tmp_path, steps=60, faults={3: ("within", 4)}, joins={2: 8}, slow_below=2)
        plan.local = {"local_steps": 3, "wire_dtype": "int4"}
        plan.falls = True
        ends = ends_of(ranks, 3, plan)
    journals = Journals(tmp_path, 2)
    journals.check_bits()
    journals.check_columns()
    assert set(journals.check_law()) >= {1, 2}
    assert {end["hosts"] for end in ends.values()} == {2}
    assert all(end["schedules"] == fallen_after(plan.steps) for end in ends.values())


@pytest.mark.parametrize(
    ("rank", "fault"),
    [
        (3, "stand_still"),
        pytest.param(2, "stand_still", marks=pytest.mark.programs),
        pytest.param(3, "fail", marks=pytest.mark.programs),
    ],
)
def test_a_rank_stands_still_or_fails_and_its_host_ends(ranks: Ranks, tmp_path: Path, rank: int, fault: str) -> None:
    with Lighthouse() as lighthouse:
        plan = Plan(lighthouse.address, tmp_path, steps=30, faults={rank: (fault, 5)}, timeout_s=3.0)
        ends = ends_of(ranks, 3, plan)
    assert {end["hosts"] for end in ends.values()} == {2}
    Journals(tmp_path, 2).check_bits()


@pytest.mark.programs
def test_a_lighthouse_is_killed_and_started_again(ranks: Ranks, tmp_path: Path) -> None:
    with Lighthouse(min_hosts=2) as lighthouse:
        plan = Plan(lighthouse.address, tmp_path, steps=30, devices=2)
        with ranks.start(train, 4, plan) as running:
            wait_until((tmp_path / "0.at6").exists)
            lighthouse.kill()
            lighthouse.start()
            ends = {end.rank: end for end in running.ends(IN_TIME_S)}
    whole(ends, plan)


@pytest.mark.programs
def test_at_its_own_pace_all_ranks_of_a_host_take_as_many_steps(ranks: Ranks, tmp_path: Path) -> None:
    with Lighthouse() as lighthouse:
        plan = Plan(lighthouse.address, tmp_path, steps=80, own_pace=True, falls=True)
        plan.sleeps = {0: 0.02, 1: 0.02, 2: 0.1, 3: 0.1}
        ends = ends_of(ranks, 2, plan)
    assert ends[2]["batches"] == ends[3]["batches"] < ends[0]["batches"] == ends[1]["batches"]
    Journals(tmp_path, 2).check_bits()


class Normed(Small):
    """Has statistics, of which a host keeps its first rank's, as ddp does."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(33))


def normed(seed: int) -> Normed:
    torch.manual_seed(seed)
    return Normed()


def statistics(module: nn.Module) -> torch.Tensor:
    return torch.cat([x.flatten().double() for x in module.buffers()])


def with_ddp(rank: int, size: int, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    run = trainer("ddp", size, check_every=0, max_steps=steps, **OTHER_DATA)
    model = normed(seed=0)
    run.fit(model, data(4 * steps, 1, seed=rank))
    return weights(model), statistics(model)


@pytest.mark.programs
def test_one_host_of_two_ranks_trains_as_ddp_does(ranks: Ranks, tmp_path: Path) -> None:
    expected = ranks.run(with_ddp, 2, 20)
    with Lighthouse() as lighthouse:
        plan = Plan(lighthouse.address, tmp_path, steps=20, model=normed, options=OTHER_DATA)
        plan.local = {"local_steps": LocalSteps(1, lead=1.0, overlap=False), "wire_dtype": "float32"}
        ends = ends_of(ranks, 1, plan)
    for rank, end in ends.items():
        assert torch.allclose(end["module"], expected[rank][0], rtol=0, atol=1e-5)
        assert torch.allclose(end["statistics"], expected[rank][1], rtol=0, atol=1e-5)


def mixed(rank: int, size: int, plan: Plan) -> Any:
    """Train as one of two ranks of a host, or as another of one rank."""
    return train(rank, 2, plan) if rank < 2 else train(1, 2, replace(plan, devices=1))


@pytest.mark.programs
@pytest.mark.parametrize("joins", [None, 5])
def test_hosts_must_have_as_many_devices(ranks: Ranks, tmp_path: Path, joins: int | None) -> None:
    with Lighthouse() as lighthouse:
        plan = Plan(lighthouse.address, tmp_path, steps=40, devices=2, timeout_s=3.0, slow_below=2)
        plan.joins = {} if joins is None else {1: joins}
        with ranks.start(mixed, 3, plan) as running:
            ends = {end.rank: end for end in running.ends(IN_TIME_S)}
    assert "Hosts must be started with the same settings" in str(ends[2].error)
    assert re.search("devices: . on host 0; . on host 1", str(ends[2].error))
    if joins is not None:
        assert [ends[rank].value["step"] for rank in (0, 1)] == [40, 40]


def train_on(rank: int, size: int, path: Path, steps: int) -> torch.Tensor:
    run = trainer(local("sparse_dense", 2), size, check_every=0, max_steps=steps)
    model = small(optimizer="adam")
    run.fit(model, data(20, size), ckpt_path=path)
    return weights(model)


@pytest.mark.programs
def test_files_of_hosts_of_two_ranks_go_on_elsewhere_and_back(ranks: Ranks, tmp_path: Path) -> None:
    first, again, alone = tmp_path / "first", tmp_path / "again", tmp_path / "alone"
    for folder in (first, again, alone):
        folder.mkdir()
    with Lighthouse() as lighthouse:
        ends_of(ranks, 2, Plan(lighthouse.address, first, steps=6, saves=True))
        saved = {host: str(first / f"host{host}" / "last.ckpt") for host in range(2)}
        ends_of(ranks, 2, Plan(lighthouse.address, again, steps=9, checkpoints=saved))
        Journals(again, 2).check_bits()
        with ranks.start(
            train, 2, Plan(lighthouse.address, alone, steps=9, checkpoints=saved)
        ) as running:  # of one rank
            ends = running.values(IN_TIME_S)
        assert torch.equal(ends[0]["module"], ends[1]["module"])
    one, other = ranks.run(train_on, 2, Path(saved[0]), 8)
    assert torch.equal(one, other)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="local_group must be 'auto' or left out; got 2"):
        ls.SparseDDPStrategy("sparse_dense", local_steps=2, elastic=True, local_group=2)
    strategy = ls.SparseDDPStrategy("sparse_dense", local_steps=2, elastic=ls.Elastic(lighthouse="http://localhost:1"))
    run = L.Trainer(strategy=strategy, accelerator="cpu", devices=1, num_nodes=2, logger=False, max_steps=1)
    with pytest.raises(ValueError, match="every machine must be a training of its own; got num_nodes=2"):
        run.strategy.setup_environment()
