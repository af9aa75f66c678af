"""Sums of gradients where DDP has them: as PyTorch's hooks make them, or by DDP alone."""

import threading
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.futures import Future

from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.group import Group
from lightning_sparse.compressors.wrappers import type_in_place
from lightning_sparse.engine.groups import later_message_bytes
from lightning_sparse.engine.scaled_steps import ScaledSteps
from lightning_sparse.engine.step import PendingBucket, Step
from lightning_sparse.network.torch_comm import TorchComm, explained


class SumsInPlace(ScaledSteps):
    """The part of :class:`GradientExchange` that sums DDP's buckets where they lie; its arguments are the same."""

    _lock: threading.Lock  # around what several threads change

    def lay_out(self, groups: Sequence[tuple[Group, Compressor]]) -> None:
        super().lay_out(groups)
        self._elements = sum(group.n for group in self._groups)
        self._in_float32 = all(p.dtype == torch.float32 for group in self._groups for p in group.parameters)
        types = {type_in_place(compressor) for compressor in self.compressors}
        self._type_in_place = types.pop() if len(types) == 1 else None
        self.nothing_unsent = False

    @property
    def sees_hidden_messages(self) -> bool:
        return super().sees_hidden_messages and self._next_in_place[0] is None

    def sums_in_place(self, compressor: Compressor) -> bool:
        return self._sums_in_place_in(type_in_place(compressor))

    @property
    def can_sum_in_place(self) -> bool:
        comm = self._lanes[0].comm
        may = self.may_sum_in_place and self._in_float32 and not self._needs_groups
        return may and isinstance(comm, TorchComm) and not comm.stages(self.device)

    def _sums_in_place_in(self, dtype: torch.dtype | None) -> bool:
        costs = self._lanes[0].comm.costs
        return dtype is not None and self.can_sum_in_place and costs.in_place(dtype.itemsize * self._elements)

    @property
    def _next_in_place(self) -> tuple[torch.dtype | None, bool]:
        """The type in which the next step's gradients are summed where they lie, if they are, the same on every rank.

        And whether groups send all there is in float32: so they do once before sums in place, to leave nothing unsent.
        """
        dtype = self._type_in_place if self._sums_in_place_in(self._type_in_place) else None
        if self._deferred:  # groups are looked at
            return None, dtype == torch.float32
        return (dtype, False) if self.nothing_unsent else (None, dtype is not None)

    def _sum_in_place(self, step: Step, bucket: PendingBucket) -> Future[Tensor]:
        comm = self._lanes[0].comm
        assert isinstance(comm, TorchComm)
        assert step.in_place is not None
        step.unsummed.append(bucket)
        payload_bytes = step.in_place.itemsize * sum(each.buffer.numel() for each in step.unsummed)
        if step.has_arrived or payload_bytes >= step.least_bytes:
            buckets, step.unsummed = step.unsummed, []
            step.least_bytes = later_message_bytes(step.in_place.itemsize * self._elements, comm.costs.message_bytes)
            sums = comm.mean_in_place([each.buffer for each in buckets], step.in_place)
            sums.then(partial(self._end_in_place, step, buckets))
        return bucket.future

    def _end_in_place(self, step: Step, buckets: Sequence[PendingBucket], sums: Future[list[Tensor]]) -> None:
        try:
            with explained():
                means = sums.value()
        except RuntimeError as error:
            self._fail(step, error)
            return
        with self._lock:
            for each, mean in zip(buckets, means, strict=True):
                each.buffer, each.missing = mean, 0
            if step.has_arrived and not any(each.missing for each in step.buckets):
                self._finish_dense(step)
            step.give_back()

    def _finish_dense(self, step: Step) -> None:
        for group in self._groups:
            group.end_dense_step()
        self._finish(step)

    @property
    @abstractmethod
    def _needs_groups(self) -> bool:
        """Whether there is more to do than to sum."""

    @abstractmethod
    def _finish(self, step: Step) -> None:
        """End a step, of which every mean has arrived."""

    @abstractmethod
    def _fail(self, step: Step, error: BaseException) -> None:
        """Have backward raise ``error``."""
