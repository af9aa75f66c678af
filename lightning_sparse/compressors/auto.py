"""No compressor yet: the first steps show which makes the shortest step."""

from dataclasses import dataclass

from lightning_sparse.checks import is_list
from lightning_sparse.compressors.base import Compressor, check_settings
from lightning_sparse.compressors.dense import Dense
from lightning_sparse.compressors.group import Group
from lightning_sparse.compressors.importance import ImportancePruning
from lightning_sparse.compressors.micro import MiCRO
from lightning_sparse.compressors.ok_topk import OkTopk
from lightning_sparse.compressors.sketch_fusion import SketchFusion
from lightning_sparse.compressors.skip_reduce import SkipReduce
from lightning_sparse.compressors.wrapper import Wrapper
from lightning_sparse.network.comm import Comm, Rounds

# Those first that send most; of those that send as much, the one that selects with least work: its time is surest.
CANDIDATES = (Dense(), SkipReduce(), SketchFusion(), MiCRO(), OkTopk(), ImportancePruning())


@dataclass(frozen=True)
class Auto(Wrapper):
    """Measures the first steps, then trains on with the compressor of which it expects the shortest step.

    Until then gradients are summed by ``start``.  Of candidates whose steps are expected within 5 % of the shortest the
    first is taken, so name first what sends most: with the default, dense sums stay unless compressing gains more.
    Choosing needs ``fusion="layer"``, more than one rank and a gradient worth planning; else ``start`` stays.

    Args:
        candidates: the compressors to choose from.
        start: the compressor that sums until one is chosen.
    """

    candidates: tuple[Compressor, ...] = CANDIDATES
    start: Compressor = CANDIDATES[0]

    def __post_init__(self) -> None:
        if not is_list(self.candidates) or not self.candidates:
            raise ValueError(f"Auto: candidates must be a list of one compressor or more; got {self.candidates!r}.")
        object.__setattr__(self, "candidates", tuple(self.candidates))  # a config file gives a list
        for name, given in (*(("candidates", each) for each in self.candidates), ("start", self.start)):
            if not isinstance(given, Compressor) or given.candidates:
                raise ValueError(f"Auto: {name}: {given!r} is not a compressor to choose; give one such as MiCRO().")
            check_settings(given)

    @property
    def wrapped(self) -> Compressor:
        """The compressor that sums until one is chosen."""
        return self.start

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        """Sum as ``start`` does."""
        return self.start.reduce(group, comm)
