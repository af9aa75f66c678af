"""A compressor around another."""

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

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        """Sum as what is active in this step does."""
        return self.active(group.step).reduce(group, comm)

    accumulate = _wrapped("accumulate")
    per_element = _wrapped("per_element")
    default_wire_dtype = _wrapped("default_wire_dtype")
    dense_variant = _wrapped("dense_variant")
    is_dense = _wrapped("is_dense")
    compresses = _wrapped("compresses")
    carry = _wrapped("carry")
