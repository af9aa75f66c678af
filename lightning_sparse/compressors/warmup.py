"""Dense steps first, or denser ones."""

from dataclasses import dataclass, replace
from functools import cached_property

from lightning_sparse.checks import check_whole, is_list
from lightning_sparse.compressors.base import Compressor
from lightning_sparse.compressors.wrapper import Wrapper


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

    def active(self, step: int) -> Compressor:
        """Return what sums densely, or what is active in the wrapped compressor."""
        return self._dense if step < self.steps else self.wrapped.active(step)

    def compresses(self, step: int) -> bool:
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
        check_whole("DensityLadder: steps", self.steps, 0)
        if "density" not in getattr(self.wrapped, "__dataclass_fields__", ()):
            raise ValueError(f"DensityLadder: {self.wrapped!r} has no density to change.")
        if not is_list(self.densities):
            raise ValueError(f"DensityLadder: densities must be a list, such as [0.25, 0.05]; got {self.densities!r}.")
        object.__setattr__(self, "densities", tuple(self.densities))  # a config file gives a list
        for density in self.densities:
            self._at(density)  # raises if it is out of range

    def _at(self, density: float) -> Compressor:
        return replace(self.wrapped, density=density)  # type: ignore[type-var]  # it is a dataclass

    @cached_property
    def _rungs(self) -> list[Compressor]:
        own: float = self.wrapped.density  # type: ignore[attr-defined]  # it has one
        return [self._at(density) for density in self.densities if density > own]

    def active(self, step: int) -> Compressor:
        rung = step // self.steps if self.steps else len(self._rungs)
        return self._rungs[rung] if rung < len(self._rungs) else self.wrapped

    def compresses(self, step: int) -> bool:
        """Whether the last rung is over and the wrapped compressor compresses."""
        return self.active(step) is self.wrapped and super().compresses(step)
