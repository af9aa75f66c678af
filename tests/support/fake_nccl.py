"""NCCL as ranks see it, among which nobody else is: messages on a stream of their communicator, of a fake device."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch import Tensor

from lightning_sparse.network import torch_comm
from lightning_sparse.network.torch_comm import TorchComm
from lightning_sparse.wire import FLOAT32, ValueFormat
from tests.support.fake_cuda import DEVICE, FakeCuda, Future, Stream


class FakeNccl:
    """Takes the place of ``torch.distributed`` for one rank; as with NCCL, messages on a group follow each other.

    Args:
        rank: of the one there is.
        size: of all ranks.

    Attributes:
        messages: launched on all groups.
    """

    def __init__(self, rank: int = 1, size: int = 4) -> None:
        self.rank, self.size = rank, size
        self.messages = 0
        self._streams: dict[int, Stream] = {}  # of each group
        self.isend, self.irecv = "isend", "irecv"

    def comm(self, wire_dtype: ValueFormat = FLOAT32) -> TorchComm:
        """All ranks, as an exchange sees them, on a group of their own."""
        return self.comms(1, wire_dtype)[0]

    def comms(self, lanes: int, wire_dtype: ValueFormat = FLOAT32) -> list[TorchComm]:
        """All ranks once for each lane, on one group."""
        group: Any = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(name=lambda: "nccl"))
        comms = [TorchComm(group).in_format(wire_dtype) for _ in range(lanes)]
        for comm in comms:
            comm.costs.by_backend = True
        return comms

    def in_place(self) -> Any:
        """Put this in the place of ``torch.distributed``."""
        return mock.patch.object(torch_comm, "dist", self)

    def get_rank(self, group: Any) -> int:
        return self.rank

    def get_world_size(self, group: Any) -> int:
        return self.size

    def get_process_group_ranks(self, group: Any) -> list[int]:
        return list(range(self.size))

    # - messages

    def all_reduce(self, x: Tensor, group: Any, async_op: bool = True) -> "Work":
        return self._launch("all_reduce", group, [x], [x])

    def all_gather_single(self, out: Tensor, x: Tensor, group: Any, async_op: bool = True) -> "Work":
        assert out.is_contiguous()
        assert out.numel() == self.size * x.numel()
        return self._launch("all_gather", group, [x], [out])

    def all_to_all_single(self, out: Tensor, x: Tensor, group: Any, async_op: bool = True) -> "Work":
        assert out.is_contiguous()
        assert x.is_contiguous()
        assert x.shape == out.shape
        assert len(x) == self.size
        return self._launch("all_to_all", group, [x], [out])

    def broadcast(self, x: Tensor, source: int, group: Any, async_op: bool = True) -> "Work":
        return self._launch("broadcast", group, [x] if source == self.rank else [], [x])

    def gather(self, x: Tensor, out: Sequence[Tensor] | None, to: int, group: Any) -> None:
        self._launch("gather", group, [x], list(out or [])).wait()

    def reduce(self, x: Tensor, to: int, group: Any) -> None:
        self._launch("reduce", group, [x], [x]).wait()

    def P2POp(self, call: str, x: Tensor, other: int, group: Any) -> Any:
        return SimpleNamespace(call=call, x=x, group=group)

    def batch_isend_irecv(self, each: Sequence[Any]) -> "list[Work]":
        leaving = [op.x for op in each if op.call == "isend"]
        return [self._launch("send and receive", each[0].group, leaving, [op.x for op in each if op.call == "irecv"])]

    def _launch(self, name: str, group: Any, read: list[Tensor], written: list[Tensor]) -> "Work":
        cuda = FakeCuda.now()
        self.messages += 1
        if id(group) not in self._streams:
            self._streams[id(group)] = Stream(DEVICE)
        own = self._streams[id(group)]
        own.wait_stream(cuda.stream)
        with cuda.on(own):
            cuda.launch(f"message {name}")
            cuda.touch(name, read, written)
        return Work(cuda, own, read, written)


class Work:
    """A message under way; as PyTorch's, it refers to its tensors until it is waited for."""

    def __init__(self, cuda: FakeCuda, stream: Stream, read: list[Tensor], written: list[Tensor]) -> None:
        self._cuda, self._moment, self._read, self._written = cuda, cuda.moment(stream), read, written

    def wait(self) -> None:
        """Have the current stream wait, not the host."""
        self._cuda.wait(self._cuda.stream, self._moment)
        self._read = self._written = []

    def get_future(self) -> Future:
        future = Future()
        future.result, future.moment = list(self._written), self._moment
        return future
