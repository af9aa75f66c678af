"""The text that byte models train on, and ``byte_lm``, as real and simulated ranks train it: Python's own library.

Nothing here depends on how fast a strategy is, so that trainings of both can be compared.
"""

import math
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_sparse.bench.compare.models import CONTEXT, ByteGPT
from lightning_sparse.selection.streams import draw

TEXT_BYTES = 2_000_000  # of source code that the larger byte models train on
HELD_OUT_WINDOWS = 64  # of source code after that, to judge them by
TASK_BYTES = 4_000_000  # of source code that byte_lm trains on
HELD_OUT = 20  # one file of the source code in so many is held out of byte_lm's
VALIDATION_WINDOWS = 640  # of these files, to validate byte_lm with
WARM_UP = 0.1  # of the steps; then the learning rate falls as a cosine, to 0
WARM_UP_STEPS = 60  # where nobody knows how many steps there will be; as for 600


def source_windows(most_bytes: int, wanted: Callable[[int], bool] = lambda number: True) -> Tensor:
    """Windows [N, CONTEXT + 1] of the bytes of the standard library's modules, of those whose number is ``wanted``."""
    text = bytearray()
    for number, file in enumerate(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))):
        text += file.read_bytes() if wanted(number) else b""
        if len(text) >= most_bytes:
            break
    return torch.frombuffer(text, dtype=torch.uint8)[:most_bytes].unfold(0, CONTEXT + 1, CONTEXT)


def other_source_code() -> Tensor:
    """Windows [HELD_OUT_WINDOWS, CONTEXT + 1] from all over the source code behind its first ``TEXT_BYTES``."""
    after = source_windows(2 * TEXT_BYTES)[TEXT_BYTES // CONTEXT + 1 :]
    return after[:: len(after) // HELD_OUT_WINDOWS][:HELD_OUT_WINDOWS]


def loss_of(model: LightningModule, batch: tuple[Tensor, ...]) -> Tensor:
    """The loss of a batch."""
    loss = model.training_step(batch)
    assert isinstance(loss, Tensor)
    return loss


@dataclass(frozen=True)
class Task:
    """What is trained: a model, and examples of each kind of data [N, ...]."""

    model: LightningModule  # whose ``training_step`` gives the loss of a batch
    training: tuple[Tensor, ...]
    validation: tuple[Tensor, ...]  # that nobody learns from
    batch_size: int  # examples that a rank learns from in a step

    def batch(self, seed: int, step: int, rank: int) -> tuple[Tensor, ...]:
        """The examples that a rank learns from in a step."""
        generator = torch.Generator().manual_seed(draw(seed, step, rank))
        chosen = torch.randint(len(self.training[0]), (self.batch_size,), generator=generator)
        return tuple(kind[chosen] for kind in self.training)

    @torch.no_grad()
    def validation_loss(self) -> float:
        """The loss of examples that nobody learns from."""
        parts = list(zip(*(kind.split(128) for kind in self.validation), strict=True))
        return sum(float(loss_of(self.model, part)) * len(part[0]) for part in parts) / len(self.validation[0])


def byte_lm(seed: int) -> Task:
    """A GPT of 279,168 parameters over the bytes of Python's standard library."""
    torch.manual_seed(seed)
    held_out = source_windows(TASK_BYTES, lambda number: number % HELD_OUT == 0)
    training = source_windows(TASK_BYTES, lambda number: number % HELD_OUT != 0)
    evenly = held_out[:: max(1, len(held_out) // VALIDATION_WINDOWS)]
    return Task(ByteGPT(width=96, layers=2, heads=4), (training,), (evenly[:VALIDATION_WINDOWS],), 8)


class _Batches(IterableDataset[list[Tensor]]):
    """This rank's batches with a seed, without end."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __iter__(self) -> Iterator[list[Tensor]]:
        task, rank = byte_lm(self._seed), dist.get_rank() if dist.is_initialized() else 0
        return (list(task.batch(self._seed, step, rank)) for step in count())


def batches() -> dict[str, Any]:
    """Make each rank's batches of windows [B, CONTEXT + 1] of bytes, by the seed that torch was given."""
    return {"train_dataloaders": DataLoader(_Batches(torch.initial_seed()), batch_size=None)}


def held_out() -> Tensor:
    """Every other of the windows [N, CONTEXT + 1] that simulations validate with, the same with any seed."""
    return byte_lm(torch.initial_seed()).validation[0][::2]  # whose loss is within 0.3 % of that of all


def learning_rate(peak: float, step: int, steps: int) -> float:
    """The learning rate of a step: a warm-up to ``peak``, then a cosine to 0."""
    warm_up = max(1, round(WARM_UP * steps))
    if step < warm_up:
        return peak * (step + 1) / warm_up
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def schedule(step: int, steps: int) -> float:
    """The learning rate of a step over the largest; where training ends by the clock, and ``steps`` is -1, it stays."""
    return learning_rate(1.0, step, steps) if steps > 0 else min(1.0, (step + 1) / WARM_UP_STEPS)
