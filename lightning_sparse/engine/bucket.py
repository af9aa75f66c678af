"""DDP's buckets until they are given back averaged, and what the step cost in which they were."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.futures import Future

from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.lanes import Lanes
from lightning_sparse.network.costs import traffic
from lightning_sparse.network.torch_comm import future_on


class PendingBucket:
    """A bucket handed over, until it is given back averaged."""

    used: Sequence[Tensor] = ()  # of the parameters, where nobody else notes that

    def __init__(self, buffer: Tensor, parameters: Sequence[Tensor]) -> None:
        self.buffer, self.parameters = buffer, parameters
        self.missing = len(self.parameters)  # parameters whose mean is not in the buffer yet
        self.future: Future[Tensor] = future_on(buffer.device)

    def gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter and its gradient, a view of the buffer."""
        return gradients_of(self.buffer, self.parameters)

    def give_back(self) -> None:
        self.future.set_result(self.buffer)


def gradients_of(buffer: Tensor, parameters: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter and its gradient's place in a bucket, as a view of the parameter's shape and memory order."""
    offset = buffer.storage_offset()
    for parameter in parameters:
        n = parameter.numel()
        if parameter.is_contiguous() or n == 1 + sum(
            (s - 1) * st for s, st in zip(parameter.shape, parameter.stride(), strict=True)
        ):
            stride = parameter.stride()
        else:
            stride = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta").stride()
        yield parameter, buffer.as_strided(parameter.shape, stride, offset)
        offset += n


@dataclass(frozen=True)
class Report:
    """The cost and the effect of one step of one rank."""

    sent_bytes: int
    dense_bytes: int  # what a float32 ring all-reduce of the same gradient sends
    elements: int
    picked: int | Tensor  # distinct elements updated; a tensor is not read until it is logged
    target: int
    mask_bytes: int  # of the bytes sent, those that only said which elements travel
    overflow: int | Tensor  # elements this rank meant to send but kept, for want of room in a message; as ``picked``
    ms_compress: float  # in the compressor's own code
    ms_network: float  # of the issuing thread, waiting for messages
    ms_wait: float  # of training: from the last gradient handed over to the last mean handed back

    @classmethod
    def of(
        cls,
        every: Sequence[Group],
        averaged: Sequence[Group],
        lanes: Lanes,
        spent_before: Sequence[int],
        waited_ns: int,
    ) -> "Report":
        """Return what a step cost that ``averaged`` some of ``every`` group, and for which training waited.

        ``spent_before`` is what ``lanes.spent()`` was when the step began.
        """
        pairs = zip(lanes.spent(), spent_before or [0, 0, 0], strict=True)
        sent_bytes, compress_ns, network_ns = (now - before for now, before in pairs)
        elements = sum(group.n for group in every)
        return cls(
            sent_bytes=sent_bytes,
            dense_bytes=traffic("all_reduce", 4 * elements, lanes[0].comm.size),
            elements=elements,
            picked=sum(group.picked for group in averaged),
            target=sum(group.target for group in averaged),
            mask_bytes=sum(group.mask_bytes for group in averaged),
            overflow=sum(group.overflow for group in averaged),
            ms_compress=compress_ns / 1e6,
            ms_network=network_ns / 1e6,
            ms_wait=waited_ns / 1e6,
        )

    def saves_bytes(self) -> bool:
        """Whether fewer bytes were sent than dense DDP would have sent; also where there was nobody to send to."""
        return self.sent_bytes < self.dense_bytes or not self.dense_bytes
