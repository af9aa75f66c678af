"""Batches, held-out text and learning rates of ``lightning-sparse simulate``, for trainings to be compared with it.

What is simulated imports its model from the workloads, so it is imported late here.
"""

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

WARM_UP_STEPS = 60  # where nobody knows how many steps there will be; the simulation's for 600


class _Batches(IterableDataset[list[Tensor]]):
    """This rank's batches with a seed, without end."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __iter__(self) -> Iterator[list[Tensor]]:
        from lightning_sparse.bench.simulate.task import byte_lm

        task, rank = byte_lm(self._seed), dist.get_rank() if dist.is_initialized() else 0
        return (list(task.batch(self._seed, step, rank)) for step in count())


def batches() -> dict[str, Any]:
    """Make each rank's batches of windows [B, CONTEXT + 1] of bytes, by the seed that torch was given."""
    return {"train_dataloaders": DataLoader(_Batches(torch.initial_seed()), batch_size=None)}


def held_out() -> Tensor:
    """Every other of the windows [N, CONTEXT + 1] that the simulation validates with, the same with any seed."""
    from lightning_sparse.bench.simulate.task import byte_lm

    return byte_lm(torch.initial_seed()).validation[0][::2]  # whose loss is within 0.3 % of that of all


def schedule(step: int, steps: int) -> float:
    """The learning rate of a step over the largest: a warm-up, then a cosine to 0 at the last of ``steps``.

    It depends on numbers of steps only, so that it is the same for strategies of any speed: where training ends by
    the clock, and ``steps`` is -1, the rate stays at its largest.
    """
    from lightning_sparse.bench.simulate.optimizers import learning_rate

    return learning_rate(1.0, step, steps) if steps > 0 else min(1.0, (step + 1) / WARM_UP_STEPS)
