"""Slices of tensors, of which every rank of a member owns one."""

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Cut:
    """Which slice of every tensor a rank owns: rows, as ``fully_shard`` of FSDP2 cuts them among ``count`` ranks.

    The first ranks have ceil(rows / count) rows each, the last ones what is left, which may be none.
    """

    index: int = 0
    count: int = 1

    def slices(self, x: Tensor) -> list[Tensor]:
        """The slice of each rank, views of ``x`` [rows, ...]; a number is one row."""
        if self.count == 1:
            return [x]
        rows = x if x.dim() else x.reshape(1)
        each = -(-len(rows) // self.count)
        return [rows[i * each : (i + 1) * each] for i in range(self.count)]

    def own(self, x: Tensor) -> Tensor:
        """The slice of this rank, a view of ``x``."""
        return self.slices(x)[self.index]


WHOLE = Cut()  # of a rank that is alone in its member, or whose tensors FSDP2 has cut already


# - tensors that FSDP2 has cut, of which a rank has a shard and no more


def shard_of(x: Tensor) -> Tensor:
    """What this rank has of ``x``: its shard, which FSDP may replace by another tensor; of other tensors all."""
    return x._local_tensor if isinstance(x, DTensor) else x


def as_shard_of(x: Tensor, shard: Tensor) -> Tensor:
    """This rank's ``shard`` as a part of a tensor that is cut as ``x`` is; for ``x`` that is not, ``shard`` itself."""
    if not isinstance(x, DTensor):
        return shard
    mesh, placements = x.device_mesh, x.placements
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=x.shape, stride=x.stride())


def version_of(x: Tensor) -> int:
    """A number that changes with the values of ``x``: optimizers set a sharded tensor, others its shard too."""
    return x._version + x._local_tensor._version if isinstance(x, DTensor) else x._version
