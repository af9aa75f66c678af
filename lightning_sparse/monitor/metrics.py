"""Compression ratio and threshold error, as torchmetrics."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class CompressionRatio(Metric):
    """Bytes a float32 ring all-reduce would have sent over bytes sent, over all updates and ranks.

    >>> metric = CompressionRatio()
    >>> metric.update(dense_bytes=400, sent_bytes=100)
    >>> metric.compute()
    tensor(4., dtype=torch.float64)
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    dense_bytes: Tensor
    sent_bytes: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("dense_bytes", torch.tensor(0.0, dtype=torch.float64, device="cpu"), dist_reduce_fx="sum")
        self.add_state("sent_bytes", torch.tensor(0.0, dtype=torch.float64, device="cpu"), dist_reduce_fx="sum")

    def update(self, dense_bytes: float, sent_bytes: float) -> None:
        self.dense_bytes += dense_bytes
        self.sent_bytes += sent_bytes

    def compute(self) -> Tensor:
        """The ratio; 1 where a single rank sends nothing either way."""
        return compression_ratio(self.dense_bytes, self.sent_bytes)


class ThresholdError(Metric):
    """Mean over updates of |picked - k| / k: how far a step's number of picked elements is from the number meant.

    >>> metric = ThresholdError()
    >>> metric.update(picked=90, target=100)
    >>> metric.compute()
    tensor(0.1000, dtype=torch.float64)
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64, device="cpu"), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0, dtype=torch.int64, device="cpu"), dist_reduce_fx="sum")

    def update(self, picked: float | Tensor, target: float) -> None:
        """Add a step that picked ``picked`` elements where ``target`` = k were meant."""
        self.total += threshold_error(picked, target)
        self.count += 1

    def compute(self) -> Tensor:
        """The mean error; 0 before the first update."""
        return self.total / self.count.clamp(min=1)


def compression_ratio(dense_bytes: float | Tensor, sent_bytes: float | Tensor) -> Tensor:
    """``dense_bytes / sent_bytes`` as a 0-d float64 tensor; 1 where both are zero."""
    dense, sent = _float64(dense_bytes), _float64(sent_bytes)
    return torch.where((dense == 0) & (sent == 0), torch.ones_like(dense), dense / sent)


def threshold_error(picked: float | Tensor, target: float) -> Tensor:
    """``|picked - target| / target`` as a 0-d float64 tensor; 0 where nothing was meant and nothing was picked."""
    difference = (_float64(picked) - target).abs()
    return difference / max(target, 1)


def _float64(x: float | Tensor) -> Tensor:
    """``x`` as it is, where it is: a number on the CPU."""
    return torch.as_tensor(x, dtype=torch.float64, device=x.device if isinstance(x, Tensor) else "cpu")
