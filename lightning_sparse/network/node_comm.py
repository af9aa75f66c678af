"""Nodes that talk to each other as one rank each."""

from collections.abc import Sequence

from torch import Tensor

from lightning_sparse.network.comm import Comm, Pending
from lightning_sparse.network.torch_comm import TorchComm


class NodeComm(Comm):
    """Nodes that act as one rank each: what is launched crosses between their leaders, who pass it on inside.

    Every rank of a node runs the same compressor on the same data, so what it hands over is what its leader does; the
    ``rank`` and ``size`` a compressor sees are of nodes.  ``sent_bytes`` are the node's, on each of its ranks.

    ``between`` are the leaders, on a leader, and ``inside`` the ranks of this node, of which the first is the leader.
    """

    def __init__(self, node: int, nodes: int, between: TorchComm | None, inside: TorchComm) -> None:
        super().__init__(node, nodes)
        self._between, self._inside = between, inside

    def release(self) -> None:
        super().release()
        self._inside.release()
        if self._between:
            self._between.release()

    def _all_reduce(self, x: Tensor, direct: bool) -> Pending:
        return _PassedOn(self._between._all_reduce(x, direct) if self._between else None, x, self._inside)

    def _all_gather(self, x: Tensor, out: Tensor) -> Pending:
        return _PassedOn(self._between.all_gather(x, out) if self._between else None, out, self._inside)

    def _broadcast(self, x: Tensor, source: int) -> Pending:
        return _PassedOn(self._between.broadcast(x, source) if self._between else None, x, self._inside)

    def _shift(self, x: Tensor, out: Tensor, by: int) -> Pending:
        return _PassedOn(self._between.shift(x, out, by) if self._between else None, out, self._inside)

    def _all_to_all(self, x: Tensor, out: Tensor, by: Sequence[int]) -> Pending:
        return _PassedOn(self._between.all_to_all(x, out, by) if self._between else None, out, self._inside)


class _PassedOn(Pending):
    """A message between leaders, and then from each to its node."""

    def __init__(self, message: Pending | None, result: Tensor, inside: TorchComm) -> None:
        self._message, self._result, self._inside = message, result, inside

    def wait(self) -> Tensor:
        result = self._result if self._message is None else self._message.wait()
        return self._inside.broadcast(result, 0).wait()
