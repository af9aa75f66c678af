"""What an optimizer's step changes is averaged; what anything else changes is what it was set to, as under DDP.

A table of habits, each under two local steps and ``sparse_auto``, with a save and a resume in the middle.
"""

import shutil
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning, StochasticWeightAveraging
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import lightning_sparse as ls
from lightning_sparse.fusion import layer_fusion
from tests.support.models import trainer
from tests.support.processes import Ranks

try:
    from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging
except ImportError:  # before Lightning 2.6
    EMAWeightAveraging = WeightAveraging = None  # type: ignore[assignment, misc]

pytestmark = [pytest.mark.programs, pytest.mark.xdist_group("state")]  # so that what ranks end with is found once
STEPS = 24  # of an epoch, of which there are two; sparse_auto takes local steps within the first


class Net(L.LightningModule):
    """A classifier with a batch norm, and a list of what is noted on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        self.noted: list[Any] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Queue(Net):
    """MoCo's: keys of one sample each, of norm 1."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", F.normalize(torch.randn(32, 3), dim=1))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        key = F.normalize(self.net(batch[0]), dim=1)
        loss = super().training_step(batch, index) + 0.01 * (key @ self.queue.clone().T).mean()
        at = 8 * index % 32
        self.queue[at : at + 8] = key.detach()
        return loss

    def is_right(self) -> bool:
        return bool((self.queue.norm(dim=1) - 1).abs().max() < 1e-6)


class HardCopy(Net):
    """DQN's target network, in no optimizer and not frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(8, 16)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        if index % 12 == 0:
            self.noted.append(flat(self.net[0]))
            self.target.load_state_dict(self.net[0].state_dict())
        if index == 20:
            before, now = self.noted[-2:]
            self.way = float((flat(self.target) - before) @ (now - before) / (now - before).square().sum())
        with torch.no_grad():
            self.target(batch[0])
        return super().training_step(batch, index)

    def is_right(self) -> bool:
        return abs(self.way - 1) < 0.1

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)


class Clamped(Net):
    """WGAN's weights, clamped after each step."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.net[0].weight.clamp_(-0.1, 0.1)

    def is_right(self) -> bool:
        return bool(self.net[0].weight.abs().max() < 0.11)


class Normalised(Net):
    """Prototypes of norm 1, normalised before each forward."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        with torch.no_grad():
            self.net[3].weight.copy_(F.normalize(self.net[3].weight, dim=1))
        return super().training_step(batch, index)

    def is_right(self) -> bool:
        return bool((self.net[3].weight.norm(dim=1) - 1).abs().max() < 0.1)


class Codebook(Net):
    """Of VQ-VAE: codes follow the batches, and dead ones are drawn anew from this rank's own."""

    codes: Tensor
    uses: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(10, 8) + 5)
        self.register_buffer("uses", torch.ones(10))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x = batch[0]
        nearest = torch.cdist(x, self.codes).argmin(1)
        for i, code in enumerate(nearest.tolist()):
            self.codes[code].lerp_(x[i], 0.1)
        self.uses.mul_(0.8).add_(torch.bincount(nearest, minlength=10) * 0.2)
        dead = self.uses < 0.2
        self.codes[dead], self.uses[dead] = x[: int(dead.sum())] + 0.0, 1.0
        return super().training_step(batch, index)

    def is_right(self) -> bool:
        return bool(self.uses.min() >= 0)


class LateShape(Net):
    """An observer's range, whose shape is known in the first forward, as torch.ao's."""

    low: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.zeros(0))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        least = batch[0].min(0).values
        if not self.low.numel():
            self.low.resize_(8).copy_(least)
        self.low.copy_(torch.minimum(self.low, least))
        return super().training_step(batch, index)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.low.resize_(checkpoint["state_dict"]["low"].shape)

    def is_right(self) -> bool:
        return self.low.shape == (8,)


class Unfrozen(Net):
    """A layer that is frozen while ``sparse_auto`` chooses, and joins the optimizer in the second epoch."""

    resumed = False

    def on_train_start(self) -> None:
        self.net[0].requires_grad_(self.trainer.current_epoch > 0)

    def on_train_epoch_start(self) -> None:
        optimizer = self.trainer.optimizers[0]
        if self.trainer.current_epoch == 1 and len(optimizer.param_groups) == 1:
            self.net[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(self.net[0].parameters()), "lr": 1e-2})

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.resumed = len(checkpoint["optimizer_states"][0]["param_groups"]) > 1

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for n, p in self.net.named_parameters() if not n.startswith("0.")], lr=1e-2)
        if self.resumed:
            optimizer.add_param_group({"params": list(self.net[0].parameters()), "lr": 1e-2})
        return optimizer

    def is_right(self) -> bool:
        replicas = self.trainer.strategy.averager.weights.replicas  # type: ignore[attr-defined]
        names = [name for replica in replicas for name in replica.group.names]
        return len(names) == len(set(names))


class FrozenLater(Net):
    """A layer that is frozen after ``sparse_auto`` has chosen, and unfrozen again."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.net[3].requires_grad_(not 16 <= index < 20)
        return super().training_step(batch, index)


class Spectrum(Net):
    """A running mean of complex numbers, and one that is not saved."""

    spectrum: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("spectrum", torch.zeros(8, dtype=torch.cfloat))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.spectrum.mul_(0.9).add_(torch.fft.fft(batch[0]).mean(0), alpha=0.1)
        self.seen[batch[1]] = True
        return super().training_step(batch, index)


class OwnThreshold(Net):
    """A buffer that each rank sets from its own batches, in training, and from its validation."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.loss = super().training_step(batch, index)
        return self.loss / self.scale.clone()

    def on_train_batch_end(self, *_: Any) -> None:
        self.scale.mul_(0.95).add_(self.loss.detach(), alpha=0.05)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.last = F.cross_entropy(self.net(batch[0]), batch[1])

    def on_validation_epoch_end(self) -> None:
        self.scale.copy_(self.last)


class Guard(Net):
    """Rank 1 leaves out its step, as one that guards against NaN does, in the last batch before the save."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.is_last = index == STEPS - 1
        return super().training_step(batch, index)

    def on_after_backward(self) -> None:
        if self.global_rank == 1 and self.is_last:
            self.zero_grad()


class Pictures(Net):
    """Rank 0 alone runs the model in training mode, for pictures."""

    def on_train_epoch_end(self) -> None:
        if self.global_rank == 0:
            with torch.no_grad():
                self.net(torch.ones(4, 8).cumsum(0))


class Priorities(Net):
    """Errors of samples, never negative; and a batch norm with a large momentum, looked at in evaluation mode."""

    priorities: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net[1].momentum = 0.7
        self.register_buffer("priorities", torch.ones(64))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.noted.append(min(float(self.priorities.min()), float(self.net[1].running_var.min())))
        x = batch[0] * (3 if self.global_rank else 0.3)
        self.priorities[(8 * index + torch.arange(8) + self.global_rank) % 64] = x.square().sum(1)
        self.net[1].eval()
        with torch.no_grad():
            target = self.net(x)
        self.net[1].train()
        return F.cross_entropy(self.net(x), batch[1]) + 0.1 * F.mse_loss(self.net(x + 0.01), target)

    def is_right(self) -> bool:
        return min(self.noted) >= 0 and all(bool(p.isfinite().all()) for p in self.parameters())


class Averaged(L.Callback):
    """An exponential average of weights and buffers, in place of which the model's wait while it is validated."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not hasattr(self, "average"):
            self.average = AveragedModel(pl_module.net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if hasattr(trainer.strategy, "show_average"):
            trainer.strategy.show_average()
        self.average.update_parameters(pl_module.net)

    @torch.no_grad()
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for x, y in zip(state(pl_module.net).values(), state(self.average.module).values(), strict=True):
            before = x.clone()
            x.copy_(y)
            y.copy_(before)

    on_validation_end = on_validation_start

    def state_dict(self) -> dict[str, Any]:
        return self.average.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if hasattr(self, "_loaded"):
            self.average.load_state_dict(self._loaded)


@dataclass
class Case:
    """What a user does, and whether what comes of it is right."""

    model: Callable[[], Net]
    callbacks: Callable[[], list[L.Callback]] = list
    validates: bool = False
    resumes: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    epochs: int = 2


UNUSED = {"find_unused_parameters": True}
CASES = {
    "batch norm": Case(Net),
    "a queue of keys": Case(Queue),
    "a hard copy into a target network": Case(HardCopy, options=UNUSED),
    "clamped after a step": Case(Clamped),
    "normalised": Case(Normalised),
    "a codebook": Case(Codebook),
    "a buffer of late shape": Case(LateShape),
    "unfrozen after the choice": Case(Unfrozen, options=UNUSED),
    "frozen after the choice": Case(FrozenLater, options=UNUSED),
    "complex and bool": Case(Spectrum),
    "a buffer that a rank sets": Case(OwnThreshold, validates=True),
    "a step that a rank leaves out": Case(Guard),
    "pictures on rank 0": Case(Pictures),
    "priorities": Case(Priorities),
    "batch norm recalibrated": Case(
        Net, lambda: [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1)], resumes=False
    ),
    "an average swapped in": Case(Net, lambda: [Averaged()], validates=True),
    "pruned": Case(Net, lambda: [ModelPruning("l1_unstructured", amount=0.3)], resumes=False),
}
if WeightAveraging is not None:
    CASES["WeightAveraging"] = Case(Net, lambda: [WeightAveraging()], validates=True)
    CASES["EMAWeightAveraging"] = Case(Net, lambda: [EMAWeightAveraging(decay=0.9)], validates=True)

WAYS: dict[str, Callable[..., Any]] = {
    "local": lambda **options: ls.SparseDDPStrategy("sparse_dense", wire_dtype="int4", local_steps=2, **options),
    "auto": lambda **options: ls.SparseDDPStrategy(ls.Auto([ls.Candidate(ls.Dense(), "int4", 2)]), **options),
}


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in module.parameters()])


def state(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@dataclass
class End:
    """What a rank has after a training, and after one that went on from its half."""

    state: dict[str, Tensor]
    resumed: dict[str, Tensor]
    is_right: bool
    is_local: bool
    error: str = ""


def data(rank: int, batches: int) -> DataLoader[Any]:
    x = torch.randn(8 * batches, 8, generator=torch.Generator().manual_seed(rank))
    return DataLoader(TensorDataset(x, (x.sum(1).abs() % 3).long()), batch_size=8)


def _train(rank: int, size: int, path: Path) -> dict[tuple[str, str], End]:
    layer_fusion.WORTH_PLANNING = 1  # small models choose too
    found = {}
    for name, case in CASES.items():
        for way in WAYS:
            try:
                found[name, way] = _end(case, way, path, rank, size)
            except Exception:
                found[name, way] = End({}, {}, False, False, traceback.format_exc())
    return found


def _end(case: Case, way: str, path: Path, rank: int, size: int) -> End:
    def fit(callbacks: list[L.Callback], file: Path | None = None) -> tuple[Net, L.Trainer]:
        L.seed_everything(3, verbose=False)
        model = case.model()
        run = trainer(
            WAYS[way](**case.options), size, 0, max_epochs=case.epochs, callbacks=case.callbacks() + callbacks,
            use_distributed_sampler=False, num_sanity_val_steps=0,
        )  # fmt: skip
        run.fit(model, data(rank, STEPS), data(rank + size, 2) if case.validates else None, ckpt_path=file)
        return model, run

    saver = ModelCheckpoint(path / "now", "{epoch}", every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True)
    model, run = fit([saver] if case.resumes else [])
    now = {name: x.detach().clone() for name, x in state(model).items()}
    is_right = getattr(model, "is_right", lambda: True)()
    resumed = fit([], path / "now" / "epoch=0.ckpt")[0] if case.resumes else model
    run.strategy.barrier()
    if rank == 0:
        shutil.rmtree(path / "now", ignore_errors=True)
    run.strategy.barrier()
    return End(now, state(resumed), is_right, run.strategy.averager.local is not None)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def ends(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], End]]:
    return ranks.run(_train, 2, tmp_path_factory.mktemp("state"), timeout_s=300)


@pytest.mark.timeout(330)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_all_ranks_end_with_the_same_that_is_right_and_a_resume_is_bit_for_bit(
    ends: list[dict[tuple[str, str], End]], case: str, way: str
) -> None:
    first, second = (each[case, way] for each in ends)
    assert not first.error + second.error
    assert first.is_local
    assert [name for name, x in first.state.items() if not torch.equal(x, second.state[name])] == []
    for end in (first, second):
        assert end.is_right
        assert [name for name, x in end.state.items() if not torch.equal(x, end.resumed[name])] == []
