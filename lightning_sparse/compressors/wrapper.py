"""A compressor around another."""

from collections.abc import Sequence

from torch import Tensor

from lightning_sparse.compressors.base import Compressor
from lightning_sparse.compressors.group import Group
from lightning_sparse.compressors.named import by_name


class Wrapper(Compressor):
    """A compressor around another, which says what is sent whole and what sums densely.

    Attributes:
        compressor: the other; a name is taken for an instance with its defaults.
    """

    compressor: Compressor | str

    def __post_init__(self) -> None:
        object.__setattr__(self, "compressor", by_name(self.compressor))

    @property
    def wrapped(self) -> Compressor:
        """The other."""
        assert isinstance(self.compressor, Compressor)
        return self.compressor

    def accumulate(self, group: Group, gradients: Sequence[Tensor | None], size: int, scale: float = 1.0) -> None:
        """Add gradients as the wrapped compressor does."""
        self.wrapped.accumulate(group, gradients, size, scale)

    @property
    def per_element(self) -> tuple[str, ...]:
        """The keys that the wrapped compressor names."""
        return self.wrapped.per_element

    def dense_variant(self) -> Compressor:
        """As the wrapped compressor says."""
        return self.wrapped.dense_variant()

    def is_dense(self, name: str, elements: int) -> bool:
        """As the wrapped compressor says."""
        return self.wrapped.is_dense(name, elements)

    @property
    def candidates(self) -> tuple[Compressor, ...]:
        """Return what the wrapped compressor says."""
        return self.wrapped.candidates

    def compresses(self, step: int) -> bool:
        """As the wrapped compressor says."""
        return self.wrapped.compresses(step)

    def carry(self, parts: Sequence[tuple[Group, int]]) -> dict[str, Tensor]:
        """As the wrapped compressor says."""
        return self.wrapped.carry(parts)
