"""Small models, data and Trainers for the tests on real processes."""

from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_sparse as ls
from tests.support.on_one_device import ACCELERATOR


class Small(L.LightningModule):
    """A classifier of 4 layers; notes its losses."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 3))
        self.optimizer = optimizer

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "adam":
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def data(batches: int, size: int, seed: int = 0) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * batches * size, 8, generator=generator)
    return DataLoader(TensorDataset(x, (x.sum(1).abs() % 3).long()), batch_size=4)


class Counted(DataLoader[Any]):
    """Goes on where it was, as Lightning lets a loader that has a state."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader.dataset, batch_size=4)
        self.given = 0

    def __iter__(self) -> Any:
        for number, batch in enumerate(super().__iter__()):
            if number >= self.given:
                self.given += 1
                yield batch
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


def small(seed: int = 0, **kwargs: Any) -> Small:
    torch.manual_seed(seed)
    return Small(**kwargs)


def trainer(strategy: Any, size: int, check_every: int = 2, **kwargs: Any) -> L.Trainer:
    """A Trainer whose replicas are compared every so many steps, if at all."""
    callbacks = [*kwargs.pop("callbacks", []), *([ls.ReplicaCheck(check_every)] if check_every else [])]
    defaults: dict[str, Any] = {
        "accelerator": ACCELERATOR,
        "devices": size,
        "logger": False,
        "enable_checkpointing": any(isinstance(each, Checkpoint) for each in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": callbacks,
    }
    return L.Trainer(strategy=strategy, **(defaults | kwargs))


class Does(L.Callback):
    """Calls ``act`` with the Trainer whenever Lightning calls this hook, and keeps what it returns."""

    def __init__(self, hook: str, act: Callable[[Any], Any]) -> None:
        self.found: list[Any] = []
        setattr(self, hook, lambda run, *_: self.found.append(act(run)))


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All elements one after the other, in float64 on the CPU."""
    return torch.cat([x.detach().cpu().double().flatten() for x in tensors])


def unsent(strategy: ls.SparseDDPStrategy | ls.SparseHook) -> dict[str, Tensor]:
    """What this rank has not sent, flat, by parameter; copies on the CPU."""
    return {
        name: slot.to("cpu", copy=True)
        for group in strategy.averager.groups
        for name, slot in zip(group.names, group.slots(group.unsent), strict=True)
    }


# - without a Trainer


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """What a rank sees in a step."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))
    return x, (x.sum(1).abs() % 3).long()


def take_steps(ddp: nn.Module, optimizer: Any, first: int, last: int, rank: int) -> None:
    """Train from one step to another."""
    for step in range(first, last):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()
