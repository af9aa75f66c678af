"""One of DDP's buckets: where its gradients lie, and the future that gives it back."""

import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # exported at run time only
from torch.futures import Future

from lightning_sparse.network.comm import Pending


class PendingBucket:
    """A bucket handed over, until it is given back averaged."""

    def __init__(self, bucket: GradBucket) -> None:
        self.buffer: Tensor = bucket.buffer()
        self.parameters: list[Tensor] = bucket.parameters()
        self.summed: Pending | None = None  # its sum over this rank's node, under way
        self._waiting = threading.Lock()
        self.missing = len(self.parameters)  # parameters whose mean is not in the buffer yet
        device = self.buffer.device
        self.future: Future[Tensor] = Future(devices=None if device.type == "cpu" else [device])

    def gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter and its gradient, a view of the buffer."""
        return gradients_of(self.buffer, self.parameters)

    def wait(self) -> None:
        """Wait until its gradients may be read."""
        with self._waiting:  # lanes may have a group each in it
            if self.summed is not None:
                self.summed.wait()
                self.summed = None  # a message is waited for once: over Gloo the second time would not end

    def give_back(self) -> None:
        """Let backward go on."""
        self.future.set_result(self.buffer)


def gradients_of(buffer: Tensor, parameters: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter and its gradient's place in a bucket, as a view of the parameter's shape and memory order."""
    offset = buffer.storage_offset()
    for parameter in parameters:
        dense = parameter.numel() == 1 + sum(
            (s - 1) * st for s, st in zip(parameter.shape, parameter.stride(), strict=True)
        )
        stride = parameter.stride() if dense else torch.empty(parameter.shape, device="meta").stride()
        yield parameter, buffer.as_strided(parameter.shape, stride, offset)
        offset += parameter.numel()
