"""Trainings with local steps: strategies, a model, and what a rank has after them."""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

import lightning_sparse as ls
from lightning_sparse.auto.between_steps import FIRST_CHOICE, GLIMPSE_OF_DEVICE
from lightning_sparse.fusion import layer_fusion
from lightning_sparse.local_steps.averager import LocalAverager
from tests.support.models import Small, flat

LOCAL = ls.Candidate(ls.Dense(), "int4", local_steps=3)
CHOSEN = FIRST_CHOICE + GLIMPSE_OF_DEVICE.settling + 2  # steps after which sparse_auto takes local steps


def auto(**options: Any) -> ls.SparseDDPStrategy:
    layer_fusion.WORTH_PLANNING = 1  # small models too
    return ls.SparseDDPStrategy(ls.Auto((LOCAL,)), **options)


def local(compressor: Any = "sparse_dense", steps: Any = 3, **options: Any) -> ls.SparseDDPStrategy:
    return ls.SparseDDPStrategy(compressor, local_steps=steps, **({"wire_dtype": "int4"} | options))


def exchange_of(run: L.Trainer) -> LocalAverager:
    averager = run.strategy.averager  # type: ignore[attr-defined]
    assert isinstance(averager, LocalAverager)
    return averager


def all_of(run: L.Trainer) -> Tensor:
    """The average, and this rank's own weights and statistics, after a training."""
    averager = exchange_of(run)
    return flat([*averager.averages.values(), *averager.own.values()])


class Causal(Small):
    """Attention with a mask of -inf in a buffer, and running statistics."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__("adam")
        self.query, self.norm = nn.Linear(1, 4), nn.BatchNorm1d(8)
        self.register_buffer("mask", torch.full((8, 8), -torch.inf).triu(1))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        q = self.query(self.norm(x)[:, :, None])
        mixed = (q @ q.transpose(1, 2) + self.mask).softmax(-1) @ x[:, :, None]
        return nn.functional.cross_entropy(self.net(mixed[:, :, 0]), y)


@torch.no_grad()
def follow(teacher: nn.Module, student: nn.Module) -> None:
    """Move a teacher a fifth of the way to its student, as BYOL and DINO do."""
    for theirs, own in zip(teacher.parameters(), student.parameters(), strict=True):
        theirs.data.mul_(0.8).add_(own.data, alpha=0.2)  # leaves no trace but its values
