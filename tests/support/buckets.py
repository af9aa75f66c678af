"""Buckets as DistributedDataParallel hands them over."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Bucket:
    """Takes the place of DDP's ``GradBucket``: gradients one after the other in a part of ``memory``."""

    def __init__(self, parameters: Sequence[Tensor], before: int = 0) -> None:
        self._parameters = parameters
        elements = sum(p.numel() for p in parameters)
        self.memory = torch.arange(float(before + elements + 3))
        self._buffer = self.memory[before : before + elements]

    def buffer(self) -> Tensor:
        return self._buffer

    def parameters(self) -> list[Tensor]:
        return list(self._parameters)
