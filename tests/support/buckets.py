"""Buckets as DistributedDataParallel hands them over."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Bucket:
    """Takes the place of DDP's ``GradBucket``: gradients one after the other in ``buffer``, or made up."""

    def __init__(
        self, parameters: Sequence[Tensor], number: int = 0, buffer: Tensor | None = None, last: bool = True
    ) -> None:
        made_up = torch.arange(float(sum(p.numel() for p in parameters)))
        self.buffer = lambda: made_up if buffer is None else buffer
        self.parameters = lambda: list(parameters)
        self.index, self.is_last = lambda: number, lambda: last
