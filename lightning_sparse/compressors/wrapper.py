"""A compressor around another."""

# ruff: noqa: D102  # Compressor says what each method does

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_sparse.compressors.base import Compressor
from lightning_sparse.compressors.group import Group
from lightning_sparse.compressors.named import by_name
from lightning_sparse.network.comm import Comm, Rounds


class Wrapper(Compressor):
    """A compressor around another, which does and says all that the wrapper does not change.

    Attributes:
        compressor: the other; a name is taken for an instance with its defaults.
    """

    compressor: Compressor | str

    def __post_init__(self) -> None:
        object.__setattr__(self, "compressor", by_name(self.compressor))

    @property
    def wrapped(self) -> Compressor:
        """The other compressor."""
        assert isinstance(self.compressor, Compressor)
        return self.compressor

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        return self.active(group.step).reduce(group, comm)

    def accumulate(self, group: Group, gradients: Sequence[Tensor | None], size: int, scale: float = 1.0) -> None:
        self.wrapped.accumulate(group, gradients, size, scale)

    @property
    def per_element(self) -> tuple[str, ...]:
        return self.wrapped.per_element

    @property
    def default_wire_dtype(self) -> str:
        return self.wrapped.default_wire_dtype

    def dense_variant(self) -> Compressor:
        return self.wrapped.dense_variant()

    def is_dense(self, name: str, elements: int) -> bool:
        return self.wrapped.is_dense(name, elements)

    @property
    def candidates(self) -> tuple[Any, ...]:
        return self.wrapped.candidates

    def compresses(self, step: int) -> bool:
        return self.wrapped.compresses(step)

    def carry(self, parts: Sequence[tuple[Group, int]]) -> dict[str, Tensor]:
        return self.wrapped.carry(parts)
