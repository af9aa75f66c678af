"""Trainings of two members of two ranks, saved and resumed in new processes: bit for bit, or on others the mean."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.checkpoint.state import KEY
from tests.support.local_steps import CHOSEN, auto, local
from tests.support.models import Counted, Does, Small, data, trainer, weights
from tests.support.processes import Ranks
from tests.support.said import warned
from tests.support.same import same

EPOCH = 5  # batches, after which the model is validated
AFTER = "after.ckpt"  # saved after the fit


class Validated(Small):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__("adam")

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("val_loss", self.training_step(batch, index), sync_dist=True)


@dataclass(frozen=True)
class Case:
    """A training that saves after so many steps, in the middle of an epoch and of an interval of local steps."""

    strategy: Callable[..., ls.SparseDDPStrategy]
    saves: int
    steps: int


GRADIENTS = ls.MomentumCorrection(0.9, ls.MiCRO(density=0.05))
CASES = {
    "gradients": Case(lambda **options: ls.SparseDDPStrategy(GRADIENTS, **options), 4, 2 * EPOCH),
    "local steps": Case(lambda **options: local(steps=ls.LocalSteps(3, fragments=1), **options), 4, 2 * EPOCH),
    "sparse_auto": Case(auto, CHOSEN + 1, CHOSEN + EPOCH),
}


@dataclass
class End:
    """What a rank has after a training."""

    weights: Tensor
    kept: dict[str, Tensor]  # x_r where steps are local, else what is unsent
    optimizer: Any
    losses: Any  # of the last validation, and the step after which it was
    is_local: bool


def kept(run: Any) -> dict[str, Tensor]:
    averager = run.strategy.averager
    if averager.local is not None:
        return {name: x.clone() for name, x in averager.own.items()}
    return {n: x.clone() for g in averager.groups for n, x in zip(g.names, g.slots(g.unsent), strict=True)}


def fit(case: Case, rank: int, size: int, folder: Path, resume: Path | None = None, local_group: int = 2) -> End:
    savers = [
        ModelCheckpoint(folder, "{step}", every_n_train_steps=case.saves, save_top_k=-1),
        ModelCheckpoint(folder, "{epoch}", save_on_train_epoch_end=True, save_top_k=-1),
    ]
    validated = Does("on_validation_end", lambda run: (run.global_step, float(run.callback_metrics["val_loss"])))
    run = trainer(
        case.strategy(local_group=local_group), size, 2, max_steps=case.steps, use_distributed_sampler=False,
        callbacks=[validated] if resume else [validated, *savers], num_sanity_val_steps=0,
    )  # fmt: skip
    model = Validated()
    run.fit(model, Counted(data(EPOCH, 1, seed=rank)), data(1, 1, seed=9 + rank), ckpt_path=resume)
    if resume is None:
        run.save_checkpoint(folder / AFTER)
    is_local = run.strategy.averager.local is not None  # type: ignore[attr-defined]
    return End(weights(model), kept(run), run.optimizers[0].state_dict(), validated.found[-1:], is_local)


def train(rank: int, size: int, folder: Path) -> dict[str, End]:
    return {name: fit(case, rank, size, folder / name) for name, case in CASES.items()}


def train_on(rank: int, size: int, folder: Path) -> dict[tuple[str, str], End]:
    files = [(name, f"step={case.saves}.ckpt") for name, case in CASES.items()]
    files += [(name, "epoch=0.ckpt") for name in ("gradients", "local steps")]
    return {each: fit(CASES[each[0]], rank, size, folder, folder / "/".join(each)) for each in files}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("members")


@pytest.fixture(scope="module")
def straight(ranks: Ranks, folder: Path) -> list[dict[str, End]]:
    """The ends of trainings that were not interrupted, whose files others read."""
    return ranks.run(train, 4, folder)


pytestmark = pytest.mark.xdist_group("members in trainings")  # so that these train once


def test_a_resumed_training_of_members_equals_one_that_never_stopped(
    ranks: Ranks, straight: list[dict[str, End]], folder: Path
) -> None:
    for before, resumed in zip(straight, ranks.run(train_on, 4, folder), strict=True):
        for (name, file), end in resumed.items():
            assert end.is_local == (name != "gradients"), name
            for part, x in vars(before[name]).items():
                assert same(x, getattr(end, part)), (name, file, part)
    for name in CASES:
        state = torch.load(folder / name / AFTER, weights_only=True)
        assert state[KEY]["slices"] == 2
        held = torch.cat([x.flatten() for x in state["state_dict"].values()])
        assert held.equal(straight[0][name].weights), name


def begin(rank: int, size: int, folder: Path, local_group: int) -> list[tuple[dict[str, Tensor], str, Tensor]]:
    """What a rank of other members begins with, what is said of it, and the model after three more steps."""
    found = []
    for name in ("gradients", "local steps"):
        case, begins = CASES[name], Does("on_train_start", lambda run: (kept(run), run.strategy.averager.cut))
        run = trainer(
            case.strategy(local_group=local_group), size, 2, max_steps=case.saves + 3, callbacks=[begins],
            use_distributed_sampler=False,
        )  # fmt: skip
        file, loader = folder / name / f"step={case.saves}.ckpt", Counted(data(EPOCH, 1, seed=rank))
        model = Validated()
        said = warned(run.fit, model, loader, ckpt_path=file)
        own, cut = begins.found[0]
        found.append(({n: (x, cut) for n, x in own.items()}, "".join(said), weights(model)))
    return found


@pytest.mark.parametrize(("size", "local_group"), [(4, 1), (2, 2), (3, 1)])
def test_other_members_begin_with_the_mean_of_a_files_rows(
    ranks: Ranks, straight: list[dict[str, End]], folder: Path, size: int, local_group: int
) -> None:
    results = ranks.run(begin, size, folder, local_group)
    for i, name in enumerate(("gradients", "local steps")):
        takes_none = name == "local steps" and size == local_group  # alone, so that it goes on from the mean weights
        rows = torch.load(folder / name / f"step={CASES[name].saves}.ckpt", weights_only=True)[KEY]["unsent"]
        for of_rank in results:
            own, _, ended = of_rank[i]
            assert ended.equal(results[0][i][2])
            for parameter, (x, cut) in own.items():
                mean = cut.own(rows[parameter].mean(0) * (not takes_none))
                assert torch.allclose(x.flatten(), mean.flatten(), atol=1e-6), (name, parameter)
        said = (
            "all ranks go on from the mean of their own weights" if takes_none else "2 members of 2 ranks wrote it and "
        )
        assert said in results[0][i][1]
