"""No compressor yet: the one that makes the shortest step is to be found out."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_sparse.checks import is_list
from lightning_sparse.compressors.base import Compressor, check_settings
from lightning_sparse.compressors.dense import Dense
from lightning_sparse.compressors.group import Group
from lightning_sparse.compressors.importance import ImportancePruning
from lightning_sparse.compressors.micro import MiCRO
from lightning_sparse.compressors.ok_topk import OkTopk
from lightning_sparse.compressors.sketch_fusion import SketchFusion
from lightning_sparse.compressors.skip_reduce import SkipReduce
from lightning_sparse.network.comm import Comm, Rounds

# Those first that send most; of those that send as much, the one that selects with least work: its time is surest.
CANDIDATES = (Dense(), SkipReduce(), SketchFusion(), MiCRO(), OkTopk(), ImportancePruning())


@dataclass(frozen=True)
class Auto(Compressor):
    """Measures the first steps, then trains on with the compressor of which it expects the shortest step.

    Until then gradients are summed by ``start``.  Of candidates whose steps are expected within 5 % of the shortest the
    first is taken, so name first what sends most: with the default, dense sums stay unless compressing gains more.
    Choosing needs ``fusion="layer"``, more than one rank and a gradient worth planning; else ``start`` stays.

    Args:
        candidates: to choose from.
        start: what sums until it is chosen.
    """

    candidates: tuple[Compressor, ...] = CANDIDATES
    start: Compressor = CANDIDATES[0]

    def __post_init__(self) -> None:
        if not is_list(self.candidates):
            raise ValueError(f"Auto(candidates={self.candidates!r}): candidates is a list of compressors.")
        object.__setattr__(self, "candidates", tuple(self.candidates))  # a config file gives a list
        if not self.candidates:
            raise ValueError("Auto(candidates=()): there must be one to choose.")
        for name, given in (*(("candidates", each) for each in self.candidates), ("start", self.start)):
            if not isinstance(given, Compressor) or given.candidates:
                raise ValueError(f"Auto: {name}: {given!r} is not a compressor to choose; give one such as MiCRO().")
            check_settings(given)

    def accumulate(self, group: Group, gradients: Sequence[Tensor | None], size: int, scale: float = 1.0) -> None:
        """Add gradients as ``start`` does."""
        self.start.accumulate(group, gradients, size, scale)

    @property
    def per_element(self) -> tuple[str, ...]:
        """The keys that ``start`` names."""
        return self.start.per_element

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        """As ``start`` does."""
        return self.start.reduce(group, comm)

    def compresses(self, step: int) -> bool:
        """As ``start`` says."""
        return self.start.compresses(step)
