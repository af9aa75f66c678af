"""Dense steps first."""

from dataclasses import dataclass
from functools import cached_property

from lightning_sparse.checks import check_whole
from lightning_sparse.compressors.base import Compressor
from lightning_sparse.compressors.group import Group
from lightning_sparse.compressors.wrapper import Wrapper
from lightning_sparse.network.comm import Comm, Rounds


@dataclass(frozen=True)
class Warmup(Wrapper):
    """Dense sums for the first ``steps`` steps, then ``compressor``, which sends what they left unsent."""

    steps: int
    compressor: Compressor | str

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("Warmup: steps", self.steps, 0, "Give 0 for none.")

    @cached_property
    def _dense(self) -> Compressor:
        return self.wrapped.dense_variant()

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        return self.active(group.step).reduce(group, comm)

    def active(self, step: int) -> Compressor:
        """Return what sums densely, or what is active in the wrapped compressor."""
        return self._dense if step < self.steps else self.wrapped.active(step)

    def compresses(self, step: int) -> bool:
        return step >= self.steps and super().compresses(step)
