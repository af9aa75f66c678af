"""Local steps where members have several ranks: as one rank would take them, the same bits on all ranks of a member."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.monitor.record import delivered_by
from tests.support.models import weights
from tests.support.processes import Ranks
from tests.support.said import refusal

STEPS = 13
SETTINGS: dict[str, dict[str, Any]] = {
    "a step": {"steps": 1},
    "two steps": {"steps": 2},
    "three, at once, waited for": {"steps": 3, "fragments": 1, "overlap": False},
    "outer steps": {"steps": 2, "fragments": 1, "outer_rate": 0.7, "outer_momentum": 0.9},
    "faded errors": {"steps": 2, "error_decay": 0.9},
    "own second moments": {"steps": 4, "second_moments": "own"},
}
FORMATS = [("sparse_dense", "sign"), ("micro", "int4"), ("low_rank", "float32")]
OTHER_FORMATS = [("sparse_dense", "int4")]
OTHER_FORMATS += [
    (name, "bfloat16") for name in ("skip_reduce", "importance", "sketch_fusion", "ok_topk", "sparse_topk")
]


class Net(nn.Module):
    """A small classifier, with a number alone, a parameter of fewer rows than a machine has ranks, and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(7, 31), nn.BatchNorm1d(31), nn.Tanh(), nn.Linear(31, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.row = nn.Parameter(torch.ones(1, 3))
        self.none = nn.Parameter(torch.empty(0, 2))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x) * self.scale * self.row + self.none.sum() + self.frozen.sum()
        return y


def batch(step: int, member: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + member)
    return torch.randn(8, 7, generator=generator), torch.randint(0, 3, (8,), generator=generator)


class Training:
    """A training with local steps, of which a number of ranks are a member and have the same data."""

    def __init__(self, rank: int, local: int, name: str, wire_dtype: str, lr: float = 0.01, **settings: Any) -> None:
        self.member = rank // local
        self.ddp = DistributedDataParallel(Net())
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr)
        self.hook = ls.SparseHook(
            self.ddp,
            name,
            wire_dtype=wire_dtype,
            local_steps=ls.LocalSteps(**settings),
            local_group=local,
        )
        self.step = 0

    def run(self, steps: int) -> None:
        self.ddp.train()
        for _ in range(steps):
            x, y = batch(self.step, self.member)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.ddp(x), y).backward()
            self.optimizer.step()
            self.step += 1

    @property
    def own(self) -> Tensor:
        """What this rank trains."""
        return weights(self.ddp.module).clone()

    def average(self) -> Tensor:
        self.hook.show_average()
        return weights(self.ddp.module).clone()


def train(rank: int, size: int, local: int) -> dict[str, tuple[Tensor, Tensor, float]]:
    found = {}
    for label, settings in SETTINGS.items():
        training = Training(rank, local, "sparse_dense", "float32", **settings)
        training.hook.averager.watch_unsent()
        training.run(STEPS)
        own, average = training.own, training.average()
        found[label] = own, average, delivered_by(training.hook.averager)
        training.hook.close()
    return found


def test_members_train_as_one_rank_each_does(ranks: Ranks) -> None:
    alone, together = ranks.run(train, 2, 1, gloo=True), ranks.run(train, 4, 2, gloo=True)
    for label in SETTINGS:
        for rank in range(4):
            *mine, delivered = together[rank][label]
            for x, of_one in zip(mine, alone[rank // 2][label][:2], strict=True):
                assert x.equal(of_one), (label, rank)
            sends_in_turns = "fragments" not in SETTINGS[label]  # else nothing in some steps
            assert 0.05 * sends_in_turns <= delivered < 1, (label, delivered)
        assert not together[0][label][0].equal(together[2][label][0]), label  # members differ


def drift(rank: int, size: int) -> str:
    """What is said where one rank has an optimizer that draws random numbers of its own."""
    training = Training(rank, 2, "sparse_dense", "float32", steps=2)

    def train_on() -> None:
        for _ in range(25):
            training.run(1)
            if rank == 1:
                with torch.no_grad():
                    training.ddp.module.net[0].weight += 1e-3

    said = refusal(train_on)
    training.hook.close()
    return said


def test_ranks_of_a_member_that_drift_apart_end_all_of_them(ranks: Ranks) -> None:
    for said in ranks.run(drift, 4, gloo=True):
        assert "The ranks of a machine must have the same weights" in said
        assert "rank 1" in said


def compress(
    rank: int, size: int, local: int, formats: list[tuple[str, str]]
) -> list[tuple[str, Tensor, Tensor, dict[str, Any], Tensor]]:
    found = []
    for name, wire_dtype in formats:
        training = Training(rank, local, name, wire_dtype, steps=2)
        training.run(STEPS)
        own, average = training.own, training.average()
        saved = [training.hook.state_dict(optimizers=[training.optimizer])]
        dist.broadcast_object_list(saved)
        kept = copy.deepcopy((training.ddp.module.state_dict(), training.optimizer.state_dict()))
        training.run(STEPS)
        onward = training.average()
        training.hook.close()
        resumed = Training(rank, local, name, wire_dtype, steps=2)
        resumed.ddp.module.load_state_dict(kept[0])
        optimizer_of_first = [kept[1]]
        dist.broadcast_object_list(optimizer_of_first)  # as Lightning gives all ranks what rank 0 had
        resumed.optimizer.load_state_dict(optimizer_of_first[0])
        resumed.hook.load_state_dict(saved[0], [resumed.optimizer], is_loaded=True)
        resumed.step = STEPS
        resumed.run(STEPS)
        again = resumed.average()
        resumed.hook.close()
        assert onward.equal(again), (name, wire_dtype)
        found.append((name, own, average, saved[0], onward))
    return found


@pytest.mark.parametrize(
    "formats", [FORMATS, pytest.param(OTHER_FORMATS, marks=pytest.mark.programs)], ids=["", "other"]
)
def test_ranks_of_a_member_have_the_same_bits_and_resume_with_them(
    ranks: Ranks, formats: list[tuple[str, str]]
) -> None:
    every = ranks.run(compress, 4, 2, formats, gloo=True)
    for i, (name, own, average, saved, onward) in enumerate(every[0]):
        assert own.equal(every[1][i][1]), name
        assert every[2][i][1].equal(every[3][i][1]), name
        assert not own.equal(every[2][i][1]), name
        assert all(average.equal(other[i][2]) for other in every), name
        assert all(onward.equal(other[i][4]) for other in every), name
        assert saved["size"] == 2
        assert saved["slices"] == 2
        assert all(len(rows) == 2 for rows in saved["unsent"].values())
        assert saved["unsent"]["net.0.weight"].shape == (2, 31, 7)


def go_on(rank: int, size: int, local: int, file: Any) -> tuple[Any, Tensor]:
    """Train from the start or from a file, save, and train on; returns what was saved and the average in the end."""
    training = Training(rank, local, "sparse_dense", "float32", steps=3, fragments=1)
    if file is None:
        training.run(STEPS)
        training.hook.show_average()
        model, optimizer = training.ddp.module.state_dict(), training.optimizer.state_dict()
        unsent = training.hook.state_dict(optimizers=[training.optimizer])
        file = copy.deepcopy({"model": model, "optimizer": optimizer, "unsent": unsent})
    else:
        training.ddp.module.load_state_dict(file["model"])
        training.optimizer.load_state_dict(copy.deepcopy(file["optimizer"]))
        training.hook.load_state_dict(file["unsent"], [training.optimizer], is_loaded=True)
        training.step = STEPS
    training.run(STEPS)
    end = training.average()
    training.hook.close()
    return file, end


def test_as_many_members_of_other_ranks_go_on_as_they_would_have(ranks: Ranks) -> None:
    """To the last bit, where all ranks of a member have the same data: each has its own weights and moments again."""
    together, alone = ranks.run(go_on, 4, 2, None, gloo=True), ranks.run(go_on, 2, 1, None, gloo=True)
    with_fewer = ranks.run(go_on, 2, 1, together[0][0], gloo=True)
    with_more = ranks.run(go_on, 4, 2, alone[0][0], gloo=True)
    for _, end in (*alone, *with_fewer, *with_more):
        assert end.equal(together[0][1])
