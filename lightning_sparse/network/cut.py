"""Slices of tensors, of which every rank of a member owns one."""

from dataclasses import dataclass

from torch import Tensor


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


WHOLE = Cut()  # of a rank that is alone in its member
