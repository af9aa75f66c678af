"""Buffers on their way from rank 0 to all others, and means of batch norm's statistics."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_sparse.engine.lane import Lane


@dataclass(frozen=True)
class Statistic:
    """A running mean or variance of a batch norm, and what it was when it was taken up."""

    norm: _BatchNorm
    is_variance: bool
    tensor: Tensor
    value: Tensor
    count: Tensor | None  # of batches that the norm had seen []

    @classmethod
    def of(cls, norm: _BatchNorm, is_variance: bool, tensor: Tensor) -> "Statistic":
        count = norm.num_batches_tracked
        return cls(norm, is_variance, tensor, tensor.detach().clone(), None if count is None else count.clone())

    def since(self, mean: Tensor) -> Tensor:
        """What the statistic is if it was ``mean`` when it was taken up: what the norm has seen since is kept.

        A batch replaces the part ``momentum`` of it; without a momentum it is the mean over all batches.  A count that
        was set back leaves it as it is.
        """
        count, now = self.count, self.norm.num_batches_tracked
        if count is None or now is None:
            return mean
        momentum, since = self.norm.momentum, (now - count).double()
        left = count.double() / now.double() if momentum is None else (1 - momentum) ** since
        left = torch.where(since == 0, 1.0, left)
        moved = self.tensor.double() + left * (mean.double() - self.value.double())
        moved = torch.where(moved.isfinite(), moved.clamp(min=0) if self.is_variance else moved, mean.double())
        return torch.where(since < 0, self.tensor.double(), moved).to(mean.dtype)


class BufferMessage:
    """What is sent of buffers that differ between ranks: their bytes on rank 0, and sums of statistics.

    A rank whose statistic is not finite has no part in the mean.  Taking up, sending and reading wait for nothing.

    Args:
        buffers: by name, the same names and shapes on every rank.
        norms: by name, the batch norm that a statistic is of, where a buffer is one.
        device: of messages.
    """

    def __init__(self, buffers: Mapping[str, Tensor], norms: Mapping[str, _BatchNorm], device: torch.device) -> None:
        self._statistics = {
            name: Statistic.of(norms[name], name.endswith("running_var"), x)
            for name, x in buffers.items()
            if name in norms and x.is_floating_point()
        }
        copied = {name: x for name, x in buffers.items() if name not in self._statistics and x.numel()}
        self._copied = {name: (x.shape, x.dtype) for name, x in copied.items()}  # as they are now
        wide = any(x.value.dtype == torch.float64 for x in self._statistics.values())
        dtype = torch.float64 if wide else torch.float32
        sums = [_summand(x.value.to(device, dtype)) for x in self._statistics.values()]
        self._sums = torch.cat(sums) if sums else None
        self._bytes = torch.cat([bytes_of(x).to(device) for x in copied.values()]) if copied else None
        self._is_first = False  # this rank is 0
        self._forgotten: set[str] = set()

    def send(self, lane: Lane) -> None:
        """Send it; to be called on every rank."""
        self._is_first = lane.comm.rank == 0
        pending = [] if self._sums is None else [lane.comm.all_reduce(self._sums)]
        pending += [] if self._bytes is None else [lane.comm.broadcast(self._bytes, 0)]
        for each in pending:
            each.wait()

    def forget(self, name: str) -> None:
        """Leave a buffer as it is, which somebody has set."""
        self._forgotten.add(name)

    def values(self) -> dict[str, Tensor]:
        """What all ranks take, by name."""
        found = {}
        if self._sums is not None:
            sums = self._sums.split([x.value.numel() + 1 for x in self._statistics.values()])
            for (name, statistic), total in zip(self._statistics.items(), sums, strict=True):
                value = statistic.value
                mean = (total[:-1] / total[-1]).view(value.shape).to(value)
                found[name] = torch.where(total[-1].to(value.device) > 0, mean, value)
        if self._bytes is not None:
            parts = self._bytes.split([shape.numel() * dtype.itemsize for shape, dtype in self._copied.values()])
            for (name, kind), raw in zip(self._copied.items(), parts, strict=True):
                found[name] = from_bytes(raw, *kind)
        return found

    def apply_late(self, now: Mapping[str, Tensor]) -> None:
        """Set the buffers that the module has ``now``, where training has gone on since they were taken up."""
        for name, value in self.values().items():
            x, statistic = now.get(name), self._statistics.get(name)
            if x is None or (x.shape, x.dtype) != (value.shape, value.dtype) or name in self._forgotten:
                continue
            if statistic is None:
                if not self._is_first:
                    set_to(x, value)
            elif x is statistic.tensor:
                set_to(x, statistic.since(value))


def _summand(x: Tensor) -> Tensor:
    """``x`` [*s] as one row, and 1 after it; zeros if it is not finite."""
    row = torch.cat([x.reshape(-1), x.new_ones(1)])
    return torch.where(row.isfinite().all(), row, 0.0)


def bytes_of(x: Tensor) -> Tensor:
    """The bytes of ``x`` in its order [b] uint8; of any type."""
    return x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def from_bytes(raw: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The tensor of this shape and type whose bytes are ``raw``."""
    return raw.clone().view(dtype).view(shape)  # at an address that fits the type


def set_to(x: Tensor, value: Tensor) -> None:
    """Set ``x``, also one that was made in inference mode."""
    with torch.inference_mode(x.is_inference()), torch.no_grad():
        x.copy_(value)
