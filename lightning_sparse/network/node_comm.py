"""Nodes that talk to each other as one rank each."""

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sparse.network.comm import Comm, Pending, TorchComm, Works


class NodeComm(Comm):
    """Nodes that act as one rank each: what is launched crosses between their leaders, who pass it on inside.

    Every rank of a node runs the same compressor on the same data, so what it hands over is what its leader does; the
    ``rank`` and ``size`` a compressor sees are of nodes.  ``sent_bytes`` are the node's, on each of its ranks.

    Args:
        node: which of ``nodes`` this is.
        nodes: P.
        between: the leaders, on a leader; None on the other ranks.
        inside: the ranks of this node.
        leader: the global rank of its leader.
        wire_dtype: of values on the wire.
    """

    def __init__(
        self,
        node: int,
        nodes: int,
        between: TorchComm | None,
        inside: dist.ProcessGroup,
        leader: int,
        wire_dtype: torch.dtype,
    ) -> None:
        super().__init__(node, nodes, wire_dtype)
        self._between, self._inside, self._leader = between, inside, leader

    def release(self) -> None:
        """Forget both process groups too."""
        super().release()
        if self._between:
            self._between.release()
        vars(self).pop("_inside", None)

    def _all_reduce(self, x: Tensor) -> Pending:
        return self._pass_on(self._between._all_reduce(x) if self._between else None, x)

    def _all_gather(self, x: Tensor) -> Pending:
        return self._pass_on(
            self._between._all_gather(x) if self._between else None, x.new_empty((self.size, *x.shape))
        )

    def _broadcast(self, x: Tensor, source: int) -> Pending:
        return self._pass_on(self._between._broadcast(x, source) if self._between else None, x)

    def _shift(self, x: Tensor, out: Tensor, by: int) -> Pending:
        return self._pass_on(self._between._shift(x, out, by) if self._between else None, out)

    def _pass_on(self, message: Pending | None, result: Tensor) -> Pending:
        return _PassedOn(message, result, self._inside, self._leader)


class _PassedOn(Pending):
    """A message between leaders, and then from each to its node."""

    def __init__(self, message: Pending | None, result: Tensor, inside: dist.ProcessGroup, leader: int) -> None:
        self._message, self._result, self._inside, self._leader = message, result, inside, leader

    def wait(self) -> Tensor:
        result = self._result if self._message is None else self._message.wait()
        return Works([dist.broadcast(result, self._leader, group=self._inside, async_op=True)], result).wait()
