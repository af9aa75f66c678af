"""What the tests of the training loop train: models, and the ledger that holds a training to the law."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_sparse as ls
from tests.support.models import Small, data, trainer, weights

PLAIN = "ddp"


class Ledger(L.Callback):
    """Writes down, after every optimizer step, what this rank's share of the law comes to.

    ``lost`` [steps, n] float64 is, of the sums since training started, mean applied + unsent - own gradient.  Over all
    ranks it adds up to zero in every step if and only if the law holds in every step.
    """

    def __init__(self) -> None:
        self.lost: list[Tensor] = []
        self.own: dict[str, Tensor] = {}
        self._applied: dict[str, Tensor] = {}
        self._handles: list[Any] = []
        self._averaged = self._stepped = False

    def on_train_start(self, run: L.Trainer, module: L.LightningModule) -> None:
        kept = unsent(run.strategy)  # of an earlier fit: it is still to be sent
        for name, p in parameters(module).items():
            self.own[name] = torch.zeros_like(p, dtype=torch.float64) + kept.get(name, 0)
            self._applied[name] = torch.zeros_like(p, dtype=torch.float64)
            if p.requires_grad:  # called before DDP sees the gradient
                self._handles.append(p.register_hook(partial(self._note, name)))

    def _note(self, name: str, gradient: Tensor) -> None:
        self.own[name] += gradient.double()

    def on_after_backward(self, run: L.Trainer, module: L.LightningModule) -> None:
        self._averaged = True

    def on_before_optimizer_step(self, run: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        if not self._averaged:  # an averaging callback steps once more on gradients already applied
            return
        self._stepped = True
        updated = {p for group in optimizer.param_groups for p in group["params"]}
        for name, p in parameters(module).items():
            if p in updated and p.grad is not None:
                self._applied[name] += p.grad.double()

    def on_train_batch_end(self, run: L.Trainer, *args: Any) -> None:
        if self._stepped:
            kept = unsent(run.strategy)
            shares = [self._applied[name] + kept.get(name, 0) - own for name, own in self.own.items()]
            self.lost.append(torch.cat([share.flatten() for share in shares]))
            self._averaged = self._stepped = False

    def on_train_end(self, run: L.Trainer, module: L.LightningModule) -> None:
        for handle in self._handles:
            handle.remove()


def parameters(module: nn.Module) -> dict[str, Tensor]:
    """By the names a checkpoint of the model without compilation has."""
    return {name.replace("_orig_mod.", ""): p for name, p in module.named_parameters()}


def unsent(strategy: Any) -> dict[str, Tensor]:
    """What this rank has not sent, float64 of each parameter's shape; nothing with plain DDP."""
    averager = getattr(strategy, "averager", None)
    groups = averager.groups if averager else ()
    assert all(group.unsent.dtype == torch.float32 for group in groups)
    return {
        name: slot.double().view(p.shape)
        for group in groups
        for name, p, slot in zip(group.names, group.parameters, group.slots(group.unsent), strict=True)
    }


@dataclass(frozen=True)
class Case:
    """A training to compare: the same model, data and Trainer with each strategy.

    Args:
        tolerance: how far the law may be off for rounding, per element; None where the loop changes gradients before
            the ledger sees them.
        exact: densely, the same bits as plain DDP.
    """

    model: Callable[[], Any]
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    callbacks: Sequence[Callable[[], L.Callback]] = ()
    batches: int = 8
    validated: bool = False
    tolerance: float | None = 1e-5
    exact: bool = True


@dataclass(frozen=True)
class Outcome:
    """One training on one rank."""

    weights: Tensor
    initial: Tensor
    lost: Tensor  # [steps, n]
    given: float  # sum of the magnitudes of this rank's gradients
    kept: float  # sum of the magnitudes of what it has not sent in the end
    metrics: dict[str, float]


def train(rank: int, size: int, case: Case, names: Sequence[str]) -> list[Outcome]:
    """The case with each strategy."""
    return [train_with(case, size, strategy_named(name, case)) for name in names]


def strategy_named(name: str, case: Case) -> Any:
    if name != PLAIN:
        return ls.SparseDDPStrategy(name, **case.strategy)
    return DDPStrategy(**{key: value for key, value in case.strategy.items() if key != "fusion"})


def train_with(case: Case, size: int, strategy: Any) -> Outcome:
    torch.manual_seed(0)
    model, ledger = case.model(), Ledger()
    initial = weights(model).float()
    defaults = {} if "max_epochs" in case.trainer else {"max_steps": case.batches}
    run = trainer(strategy, size, callbacks=[ledger, *[make() for make in case.callbacks]], **(defaults | case.trainer))
    run.fit(model, data(case.batches, size), data(1, size, seed=1) if case.validated else None)
    return Outcome(
        weights(model).float(),
        initial,
        torch.stack(ledger.lost),
        sum(own.abs().sum().item() for own in ledger.own.values()),
        sum(kept.abs().sum().item() for kept in unsent(strategy).values()),
        {key: float(value) for key, value in run.callback_metrics.items()},
    )


# - models


def small_with(change: Callable[[Any], object]) -> Callable[[], Any]:
    """Makes a small model, changed."""

    def make() -> Any:
        model = Small()
        change(model)
        return model

    return make


def compile_inside(model: Any) -> None:
    model.net = torch.compile(model.net, backend="eager")


def compiled_whole() -> Any:
    return torch.compile(Small(), backend="eager")


def transpose(model: Any) -> None:
    """Have the rows and columns of a weight lie the other way round."""
    model.net[2].weight = nn.Parameter(model.net[2].weight.detach().t().contiguous().t())
    assert not model.net[2].weight.is_contiguous()


class Manual(Small):
    """Optimises by itself: backwards without communication, then one with.

    Args:
        every: backwards a step.
        clip: gradients, to a norm.
    """

    def __init__(self, every: int = 3, clip: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.every, self.clip = every, clip

    def training_step(self, batch: Any, index: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        last = index % self.every == self.every - 1
        with optimizer.toggle_model(sync_grad=last):
            self.manual_backward(super().training_step(batch, index) / self.every)
        if last:
            if self.clip:
                self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


class TwoBackwards(Small):
    """Two averaged backwards before one step.

    Args:
        used_again: the second uses the head too; None: on rank 1 only.
    """

    def __init__(self, used_again: bool | None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.head = nn.Linear(8, 3)
        self.used_again = used_again

    def training_step(self, batch: Any, index: int) -> None:  # type: ignore[override]
        x, y = batch
        optimizer: Any = self.optimizers()
        again = self.global_rank == 1 if self.used_again is None else self.used_again
        for head in (True, again):
            self.manual_backward(nn.functional.cross_entropy(self.net(x) + (self.head(x) if head else 0), y))
        optimizer.step()
        optimizer.zero_grad()


class Gan(L.LightningModule):
    """A generator and a discriminator, each with its optimizer.

    Args:
        together: step both optimizers after both backwards.
    """

    def __init__(self, together: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.together = together
        self.make = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.judge = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: Any, index: int) -> None:
        real, _ = batch
        optimizers: Any = self.optimizers()
        noise = real.flip(0)
        for optimizer in optimizers:
            self.toggle_optimizer(optimizer)
            if optimizer is optimizers[0]:
                loss = -self.judge(self.make(noise)).mean()
            else:
                loss = nn.functional.softplus(self.judge(self.make(noise).detach()) - self.judge(real)).mean()
            if not self.together:
                optimizer.zero_grad()
            self.manual_backward(loss)
            if not self.together:
                optimizer.step()
            self.untoggle_optimizer(optimizer)
        if self.together:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.make, self.judge)]


class Heads(Small):
    """Heads used in turn: by one rank only, by all in some steps, only in a backward that is not averaged, never.

    Args:
        zeroed: keep gradients between steps, as zeros.
    """

    def __init__(self, zeroed: bool = False) -> None:
        super().__init__()
        self.zeroed = zeroed
        self.one, self.some, self.early, self.never = (nn.Linear(8, 3) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        out = self.net(x) * self.scale
        if self.global_rank == index // 2 % self.trainer.world_size:
            out = out + self.one(x)
        if index // 2 % 3 == 0:
            out = out + self.some(x)
        if index % 2 == 0:
            out = out + self.early(x)
        return nn.functional.cross_entropy(out, y)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=not self.zeroed)


class Tied(L.LightningModule):
    """Two layers share a weight, and a table is its own output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.table = nn.Embedding(3, 8)
        self.out = nn.Linear(8, 3)
        self.out.weight = self.table.weight

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        x = self.second(self.first(x).tanh()) + self.table((x[:, 0] > 0).long())
        return nn.functional.cross_entropy(self.out(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Tokens(Small):
    """A table of 50 rows, of which a batch uses few."""

    def __init__(self, sparse: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8, sparse=sparse)
        self.table.weight.requires_grad_(not frozen)

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(self.table((x * 10).long().abs() % 50).mean(1)), y)


class Dtypes(Small):
    """A layer of another dtype beside float32 ones."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.net[2].to(dtype)
        self.dtype_of_middle = dtype

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        x = self.net[2](self.net[1](self.net[0](x)).to(self.dtype_of_middle)).float()
        return nn.functional.cross_entropy(self.net[4](self.net[3](x)), y)


class Conv(Small):
    """Convolutions whose weights lie channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 4, 3, padding=1), nn.Flatten(), nn.Linear(16, 3)
        ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        weight: Any = self.net[2].weight
        assert not weight.is_contiguous()

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        x = x.view(-1, 2, 2, 2).to(memory_format=torch.channels_last)
        return nn.functional.cross_entropy(self.net(x), y)


class Recomputed(Small):
    """Computes activations again in backward.

    Args:
        reentrant: in a backward of its own inside the backward.
        calls: of the layers that are computed again.
    """

    def __init__(self, reentrant: bool = False, calls: int = 1) -> None:
        super().__init__()
        self.reentrant, self.calls = reentrant, calls

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        x = x.requires_grad_()  # else a reentrant checkpoint has no gradient
        hidden: Any = sum(checkpoint(self.net[:3], x, use_reentrant=self.reentrant) for _ in range(self.calls))
        return nn.functional.cross_entropy(self.net[3:](hidden), y)


class Lbfgs(Small):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3, tolerance_change=0)


class Rated(Small):
    """With a learning rate that can be looked for."""

    lr = 0.1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Uneven(Small):
    """Batches of another size on each rank, and smaller ones in the end."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        rows = max(1, len(x) - self.global_rank - 2 * (index > 4))
        return super().training_step((x[:rows], y[:rows]), index)


class Scheduled(Small):
    """With a learning-rate schedule, and losses logged while training and validating."""

    def __init__(self, schedule: str = "one_cycle") -> None:
        super().__init__()
        self.schedule = schedule

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if self.schedule == "one_cycle":
            steps = int(self.trainer.estimated_stepping_batches)
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class Surgery(Small):
    """Manual optimisation with two losses; what of the second gradient opposes the first is removed (PCGrad)."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        x, y = batch
        optimizer: Any = self.optimizers()
        kept: list[list[Tensor]] = []
        for loss in (lambda out: nn.functional.cross_entropy(out, y), lambda out: out.square().mean()):
            optimizer.zero_grad(set_to_none=True)
            self.manual_backward(loss(self.net(x)))
            kept.append([p.grad for p in self.parameters() if p.grad is not None])
        for p, first, second in zip(self.parameters(), *kept, strict=True):
            against = (first * second).sum().clamp(max=0) / first.square().sum().clamp(min=1e-30)
            p.grad = first + second - against * first
        optimizer.step()


class LastGradient(torch.optim.SGD):
    """Remembers the gradient before, as DiffGrad does; PyTorch's own optimizers copy what they keep."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for p in self.param_groups[0]["params"]:
            with torch.no_grad():
                p -= 0.1 * (p.grad - 0.5 * self.state[p].get("last", torch.zeros(())))
            self.state[p]["last"] = p.grad
        return loss


class Remembers(Small):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return LastGradient(self.parameters(), lr=0.1)


class Unfreeze(BaseFinetuning):
    """Trains the first layer from the second epoch on.

    Args:
        before_setup: freeze as Lightning's callbacks do, before DDP sees the parameters; else once training starts.
    """

    def __init__(self, before_setup: bool) -> None:
        super().__init__()
        self.before_setup = before_setup

    def freeze_before_training(self, pl_module: Any) -> None:
        if self.before_setup:
            self.freeze(pl_module.net[0])

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if not self.before_setup:
            self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.make_trainable(pl_module.net[0])
