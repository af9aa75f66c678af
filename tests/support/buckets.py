"""Buckets as DistributedDataParallel hands them over."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Bucket:
    """Takes the place of DDP's ``GradBucket``: gradients one after the other in ``buffer``, or of zeros."""

    def __init__(
        self, parameters: Sequence[Tensor], buffer: Tensor | None = None, number: int = 0, last: bool = True
    ) -> None:
        zeros = torch.zeros(sum(p.numel() for p in parameters))
        self.buffer = lambda: zeros if buffer is None else buffer
        self.parameters = lambda: list(parameters)
        self.index, self.is_last = lambda: number, lambda: last
