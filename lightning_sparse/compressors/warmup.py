"""Dense steps first, or denser ones."""

from dataclasses import dataclass, replace

from lightning_sparse.checks import is_list, is_whole
from lightning_sparse.compressors.base import Compressor
from lightning_sparse.compressors.group import Group
from lightning_sparse.compressors.wrapper import Wrapper
from lightning_sparse.network.comm import Comm, Rounds


@dataclass(frozen=True)
class Warmup(Wrapper):
    """Dense sums for the first ``steps`` steps, then ``compressor``."""

    steps: int
    compressor: Compressor | str

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_whole(self.steps, least=0):
            raise ValueError(f"Warmup(steps={self.steps!r}): a whole number of dense steps, 0 or more; 0 is none.")

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        """Whichever's turn it is; what one leaves unsent the other sends."""
        return self.active(group.step).reduce(group, comm)

    def active(self, step: int) -> Compressor:
        """Dense sums, or what the wrapped compressor says."""
        return self.dense_variant() if step < self.steps else self.wrapped.active(step)

    def compresses(self, step: int) -> bool:
        """After the dense steps, as the wrapped compressor says."""
        return step >= self.steps and super().compresses(step)


@dataclass(frozen=True)
class DensityLadder(Wrapper):
    """``compressor`` at each of ``densities`` for ``steps`` steps, then at its own.

    The warm-up of "Deep Gradient Compression" (Lin et al., ICLR 2018, section 3.3), whose densities are the default; a
    rung below the compressor's own density is left out.
    """

    steps: int
    compressor: Compressor | str
    densities: tuple[float, ...] = (0.25, 0.0625, 0.015625, 0.004)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_whole(self.steps, least=0):
            raise ValueError(f"DensityLadder(steps={self.steps!r}): steps on a rung, so a whole number, 0 or more.")
        if "density" not in getattr(self.wrapped, "__dataclass_fields__", ()):
            raise ValueError(f"DensityLadder: {self.wrapped!r} has no density to change.")
        if not is_list(self.densities):
            raise ValueError(f"DensityLadder(densities={self.densities!r}): densities is a list, such as [0.25, 0.05].")
        object.__setattr__(self, "densities", tuple(self.densities))  # a config file gives a list
        for density in self.densities:
            replace(self.wrapped, density=density)  # type: ignore[type-var]  # which says if it is out of range

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        """As the compressor does at the density whose turn it is."""
        return self.active(group.step).reduce(group, comm)

    def active(self, step: int) -> Compressor:
        """The compressor with the density of ``step``."""
        last: float = self.wrapped.density  # type: ignore[attr-defined]
        rungs = [density for density in self.densities if density > last]
        rung = step // self.steps if self.steps else len(rungs)
        if rung >= len(rungs):
            return self.wrapped
        return replace(self.wrapped, density=rungs[rung])  # type: ignore[type-var]

    def compresses(self, step: int) -> bool:
        """After the last rung, as the wrapped compressor says."""
        return self.active(step) is self.wrapped and super().compresses(step)
