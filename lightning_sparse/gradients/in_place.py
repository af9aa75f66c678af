"""Sums of gradients where DDP has them: as PyTorch's hooks make them."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.futures import Future

from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.group import Group
from lightning_sparse.compressors.wrappers import type_in_place
from lightning_sparse.engine.bucket import PendingBucket
from lightning_sparse.engine.groups import later_message_bytes
from lightning_sparse.network.comm import Comm
from lightning_sparse.network.torch_comm import TorchComm


class SumsInPlace:
    """Sums DDP's buckets where they lie, as plain DDP or PyTorch's bfloat16 hook does it.

    That is sooner by the copies into groups, but from three ranks on the order of the sum changes with buckets, and
    nobody keeps rounding errors in bfloat16.

    Args:
        comm: the ranks, or a column of members.  Where these have several ranks, all ranks are summed over if the
            backend does it machine by machine, as NCCL does; over Gloo more would cross than of slices.
        may: it is allowed, and there is no more to do than to sum.
    """

    def __init__(self, comm: Comm, may: bool) -> None:
        self._comm, self.may = comm.everyone, may and (comm.inside is None or comm.costs.by_backend)
        self._unsummed: list[PendingBucket] = []  # of this step, what no message has yet
        self._least_bytes = 0  # of the next message; the first is as short as DDP's

    def lay_out(self, groups: Sequence[Group], compressors: Sequence[Compressor]) -> None:
        """Go on with these groups, between two steps."""
        self._elements = sum(group.elements for group in groups)  # of all slices, which buckets hold
        self._device = next((group.unsent.device for group in groups), torch.device("cpu"))
        self._in_float32 = all(p.dtype == torch.float32 for group in groups for p in group.parameters)
        types = {type_in_place(compressor) for compressor in compressors}
        self._type = types.pop() if len(types) == 1 else None

    @property
    def can(self) -> bool:
        """Whether buckets can be summed where they lie, if the link makes that the soonest."""
        return (
            self.may and self._in_float32 and isinstance(self._comm, TorchComm) and not self._comm.stages(self._device)
        )

    def sums(self, compressor: Compressor) -> bool:
        """Whether what ``compressor`` averages is summed where DDP has it, not in groups, once nothing is unsent."""
        return self._sums_in(type_in_place(compressor))

    def _sums_in(self, dtype: torch.dtype | None) -> bool:
        return dtype is not None and self.can and self._comm.costs.in_place(dtype.itemsize * self._elements)

    def next_step(self, nothing_unsent: bool, deferred: bool) -> tuple[torch.dtype | None, bool]:
        """The type in which the next step's gradients are summed where they lie, if they are, the same on every rank.

        The second value says whether groups send everything in float32.  One such step comes before sums in place, so
        that nothing is unsent after it.
        """
        dtype = self._type if self._sums_in(self._type) else None
        if deferred:  # groups are looked at
            return None, dtype == torch.float32
        return (dtype, False) if nothing_unsent else (None, dtype is not None)

    def begin_step(self) -> None:
        """Begin a step whose buckets are summed where they lie."""
        self._unsummed, self._least_bytes = [], 0
        self._comm.buffers.reuse()

    def sum(
        self,
        bucket: PendingBucket,
        is_last: bool,
        dtype: torch.dtype,
        done: Callable[[Sequence[PendingBucket], Future[list[Tensor]]], None],
    ) -> None:
        """Send ``bucket`` with those before it, or keep it for a longer message; ``done`` gets what arrives."""
        assert isinstance(self._comm, TorchComm)
        self._unsummed.append(bucket)
        payload_bytes = dtype.itemsize * sum(each.buffer.numel() for each in self._unsummed)
        if is_last or payload_bytes >= self._least_bytes:
            buckets, self._unsummed = self._unsummed, []
            self._least_bytes = later_message_bytes(dtype.itemsize * self._elements, self._comm.costs.message_bytes)
            self._comm.mean_in_place([each.buffer for each in buckets], dtype).then(partial(done, buckets))
