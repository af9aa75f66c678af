"""Dense steps first, or denser ones."""

from dataclasses import dataclass, fields, replace

from lightning_sparse.comm import Comm, Rounds
from lightning_sparse.compressors.base import Compressor
from lightning_sparse.compressors.wrapper import Wrapper
from lightning_sparse.group import Group


@dataclass(frozen=True)
class Warmup(Wrapper):
    """Dense sums for the first ``steps`` steps, then ``compressor``."""

    steps: int
    compressor: Compressor | str

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 0:
            raise ValueError(f"Warmup(steps={self.steps}): the number of dense steps cannot be negative; 0 is none.")

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        """Whichever's turn it is; what one leaves unsent the other sends."""
        return self.at(group.step).reduce(group, comm)

    def at(self, step: int) -> Compressor:
        """Dense sums, or what the wrapped compressor says."""
        return self.densely() if step < self.steps else self.wrapped.at(step)


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
        if self.steps < 0:
            raise ValueError(f"DensityLadder(steps={self.steps}): steps on a rung, so 0 or more.")
        if "density" not in {field.name for field in fields(self.wrapped)}:  # type: ignore[arg-type]
            raise ValueError(f"DensityLadder: {self.wrapped!r} has no density to change.")
        object.__setattr__(self, "densities", tuple(self.densities))  # a config file gives a list
        for density in self.densities:
            replace(self.wrapped, density=density)  # type: ignore[type-var]  # which says if it is out of range

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        """As the compressor does at the density whose turn it is."""
        return self.at(group.step).reduce(group, comm)

    def at(self, step: int) -> Compressor:
        """The compressor with the density of ``step``."""
        last: float = self.wrapped.density  # type: ignore[attr-defined]
        rungs = [density for density in self.densities if density > last]
        rung = step // self.steps if self.steps else len(rungs)
        if rung >= len(rungs):
            return self.wrapped
        return replace(self.wrapped, density=rungs[rung])  # type: ignore[type-var]
