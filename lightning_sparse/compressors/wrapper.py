"""A compressor around another."""

from dataclasses import replace
from functools import cached_property
from typing import Any

from lightning_sparse.compressors.base import Compressor
from lightning_sparse.compressors.group import Group
from lightning_sparse.compressors.named import by_name
from lightning_sparse.network.comm import Comm, Rounds


def _wrapped(name: str) -> Any:
    """The attribute or method ``name`` of the other compressor."""
    return property(lambda self: getattr(self.wrapped, name))


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
        assert isinstance(self.compressor, Compressor)
        return self.compressor

    @property
    def unwrapped(self) -> Compressor:
        return self.wrapped.unwrapped

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        return self.wrapped.reduce(group, comm)

    @cached_property
    def _latest(self) -> list["Wrapper"]:
        return [self]  # the last that was active, so that the same one is returned until it changes

    def active(self, step: int) -> Compressor:
        """The wrapper around what is active in the wrapped compressor."""
        latest, wrapped = self._latest[0], self.wrapped.active(step)
        if latest.compressor is not wrapped:
            latest = self._latest[0] = replace(self, compressor=wrapped)  # type: ignore[type-var]  # a dataclass
        return latest

    accumulate = _wrapped("accumulate")
    per_element = _wrapped("per_element")
    default_wire_dtype = _wrapped("default_wire_dtype")
    dense_variant = _wrapped("dense_variant")
    is_dense = _wrapped("is_dense")
    compresses = _wrapped("compresses")
    carry = _wrapped("carry")
