"""What hosts of an elastic training must have in common is compared, and what one needs that joins is handed over."""

import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lightning_sparse as ls
from tests.support.elastic import Lighthouse, as_a_host, wait_until
from tests.support.models import Does, data, trainer, weights
from tests.support.processes import End, Ranks

pytest.importorskip("torchft")
IN_TIME_S = 90
STEPS, JOINS_AT, EVERY = 90, 20, 3  # EVERY: steps from one step of the schedule to the next
SLOW_S = 0.1  # for a step, while others are to come
pytestmark = [pytest.mark.processes, pytest.mark.timeout(2 * IN_TIME_S)]


class Net(L.LightningModule):
    """A classifier with batch norm, and a schedule that does not step after every step."""

    def __init__(
        self, activation: type[nn.Module] = nn.ReLU, optimizer: Any = torch.optim.AdamW, interval: str = "step"
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), activation(), nn.Linear(16, 3))
        self.optimizer, self.plateau, self.interval = optimizer, False, interval

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer([p for p in self.parameters() if p.requires_grad], lr=0.01)
        if self.plateau:
            return [optimizer], [{"scheduler": ReduceLROnPlateau(optimizer), "monitor": "loss"}]
        schedule = {"scheduler": ExponentialLR(optimizer, 0.99), "interval": self.interval, "frequency": EVERY}
        return [optimizer], [schedule]


class Average(Callback):
    """An exponential average of the weights, which begins with the first step."""

    def on_fit_start(self, run: L.Trainer, module: L.LightningModule) -> None:
        self.average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def on_train_batch_end(self, run: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self.average.update_parameters(module)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average.load_state_dict(state_dict["average"])


class Unfreezes(BaseFinetuning):
    """Freezes a layer before fit, and trains it from a step on."""

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, *_: Any) -> None:
        """Nothing at an epoch's start."""

    def on_train_batch_start(self, run: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if run.global_step == 10 and not module.net[0].weight.requires_grad:
            self.unfreeze_and_add_param_group(module.net[0], run.optimizers[0])


def fit(
    rank: int,
    folder: Path,
    model: Net,
    callbacks: Sequence[Callback] = (),
    waits_for: int = 0,
    own_pace: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train as one host; host 0 is slow until as many others have ended or joined as it ``waits_for``."""
    elastic = ls.Elastic(timeout=20, quorum_timeout=30, replica_id=f"host{rank}", own_pace=own_pace)
    strategy = ls.SparseDDPStrategy("sparse_dense", wire_dtype="int4", local_steps=2, elastic=elastic)
    noted: list[tuple[Any, ...]] = []

    def before(run: L.Trainer) -> None:
        (folder / f"{rank}at{run.global_step}").touch()
        if len(list(folder.glob("come*"))) < waits_for:
            time.sleep(SLOW_S)

    def after(run: L.Trainer) -> None:
        if rank:
            (folder / f"come{rank}").touch()
        schedules: list[Any] = [each.scheduler for each in run.lr_scheduler_configs]
        loggers_step = run.fit_loop.epoch_loop._batches_that_stepped + 1
        batches: Any = model.net[1].num_batches_tracked
        place = run.current_epoch, run.fit_loop.epoch_loop.batch_idx
        noted.append((run.global_step, loggers_step, int(batches), schedules[0].last_epoch, place))

    own = [Does("on_train_batch_start", before), *callbacks, Does("on_train_batch_end", after)]
    run = trainer(strategy, 1, 0, **({"max_steps": STEPS} | options), callbacks=own)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            run.fit(model, data(STEPS, 1, seed=rank))
        finally:
            (folder / f"come{rank}").touch()
    averages = [each.average for each in callbacks if isinstance(each, Average)]
    return {
        "step": run.global_step,
        "hosts": strategy.averager.members,  # type: ignore[union-attr]
        "weights": weights(model),
        "noted": noted,
        "said": [str(each.message) for each in said],
        "averaged": [int(each.n_averaged) for each in averages],
    }


def ends_of(ranks: Ranks, hosts: int, train: Callable[..., Any], folder: Path) -> list[End]:
    with Lighthouse() as lighthouse, ranks.start(train, hosts, lighthouse.address, folder) as running:
        return sorted(running.ends(IN_TIME_S), key=lambda end: end.rank)


def with_an_average(rank: int, size: int, lighthouse: str, folder: Path) -> Any:
    as_a_host(lighthouse)
    if rank:
        wait_until((folder / f"0at{JOINS_AT}").exists)
    return fit(rank, folder, Net(), [Average()], waits_for=1, limit_train_batches=40)


@pytest.mark.programs
def test_who_joins_has_the_place_loggers_schedules_buffers_and_callbacks_of_the_others(
    ranks: Ranks, tmp_path: Path
) -> None:
    first, joined = (end.value for end in ends_of(ranks, 2, with_an_average, tmp_path))
    assert first["step"] == joined["step"] == STEPS
    assert torch.equal(first["weights"], joined["weights"])
    for end in (first, joined):
        for step, logged, seen, count, place in end["noted"]:
            assert step == logged == seen == 40 * place[0] + place[1] + 1
            assert count == step // EVERY
    assert joined["noted"][0][0] > JOINS_AT
    assert first["averaged"] == joined["averaged"] == [STEPS]


ODD: list[Callable[..., Any]] = [
    lambda *where: fit(*where, Net(), accumulate_grad_batches=2),
    lambda *where: fit(*where, Net(), gradient_clip_val=0.5),
    lambda *where: fit(*where, Net(optimizer=torch.optim.NAdam)),
    lambda *where: fit(*where, Net(), precision="bf16-mixed"),
    lambda *where: fit(*where, Net(), own_pace=True),
    lambda *where: fit(*where, Net(interval="epoch")),
    lambda *where: fit(*where, Net(optimizer=lambda p, lr: torch.optim.AdamW(p[::-1], lr))),
]
NAMED = [
    "accumulate_grad_batches: 2 on host 0; 1 on host 1",
    "gradient_clip_val: 0.5 on host 0",
    "optimizer 0: NAdam",
    "precision: '?bf16-mixed'? on host 0",
    "own_pace: True on host 0",
    "schedule 0: ExponentialLR, every 3 of interval='epoch' on host 0",
    r"optimizer 0: .* the first of which are \['net.3.bias'\].* on host 0",
]


def beside_odd_ones(rank: int, size: int, lighthouse: str, folder: Path) -> Any:
    as_a_host(lighthouse)
    if rank:
        wait_until((folder / f"0at{JOINS_AT}").exists)
        return ODD[rank - 1](rank, folder) if rank <= len(ODD) else fit(rank, folder, Net(nn.GELU))
    return fit(rank, folder, Net(), waits_for=size - 1)


@pytest.mark.programs
def test_what_hosts_must_have_in_common_is_compared(ranks: Ranks, tmp_path: Path) -> None:
    first, *odd, other_layers = ends_of(ranks, 2 + len(ODD), beside_odd_ones, tmp_path)
    for end, named in zip(odd, NAMED, strict=True):
        with pytest.raises(RuntimeError, match=named):
            raise RuntimeError(end.error)
    assert first.value["step"] == other_layers.value["step"] == STEPS
    assert any("got `(2): GELU(approximate='none')` on this one" in each for each in other_layers.value["said"])


def whose_optimizers_change(rank: int, size: int, lighthouse: str, folder: Path) -> Any:
    as_a_host(lighthouse)
    if rank:
        wait_until((folder / "0at60").exists)  # it has changed
    averages: list[Callback] = [StochasticWeightAveraging(0.005, swa_epoch_start=2, annealing_epochs=1)]
    options = {"max_steps": 100, "max_epochs": 100, "limit_train_batches": 20}
    return fit(rank, folder, Net(), averages, 0 if rank else 1, **options)


@pytest.mark.programs
def test_who_joins_after_a_callback_has_changed_the_schedule_is_told_what_to_do(ranks: Ranks, tmp_path: Path) -> None:
    first, joins = ends_of(ranks, 2, whose_optimizers_change, tmp_path)
    differ = "schedule 0: ExponentialLR, every 3 of interval='step' on host 0; SWALR, every 1 of interval='epoch'"
    assert differ in str(joins.error)
    assert "start all hosts again from a checkpoint" in str(joins.error)
    assert first.value["step"] == 100


def unfrozen(rank: int, size: int, lighthouse: str, folder: Path) -> Any:
    as_a_host(lighthouse)
    return fit(rank, folder, Net(), [Unfreezes()])


def test_unfreezing_what_was_frozen_before_fit_is_refused_between_hosts_too(ranks: Ranks, tmp_path: Path) -> None:
    (end,) = ends_of(ranks, 1, unfrozen, tmp_path)
    assert "net.0.weight, net.0.bias required no gradient when DDP was set up" in str(end.error)


def of_this_host_alone(rank: int, size: int, lighthouse: str, folder: Path) -> Any:
    as_a_host(lighthouse)
    model = Net()
    model.plateau = True
    said = fit(rank, folder, model, [ls.ReplicaCheck()], max_steps=2)["said"]
    with pytest.raises(ValueError, match="SyncBatchNorm cannot be combined with elastic"):
        fit(rank, folder, Net(), max_steps=2, sync_batchnorm=True)
    with pytest.raises(ValueError, match="WeightAveraging cannot be combined with own_pace=True"):
        fit(rank, folder, Net(), [StochasticWeightAveraging(0.1)], own_pace=True, max_steps=2)
    with pytest.raises(ValueError, match="LearningRateFinder cannot be combined with elastic"):
        fit(rank, folder, Net(), [LearningRateFinder()], max_steps=2)
    return said


def test_what_sees_no_other_host_is_said(ranks: Ranks, tmp_path: Path) -> None:
    (end,) = ends_of(ranks, 1, of_this_host_alone, tmp_path)
    assert not end.error
    assert any("ReduceLROnPlateau goes by what this host has measured" in each for each in end.value)
    assert any("ReplicaCheck compares the ranks of one training" in each for each in end.value)
