"""The format in which a compressor's values travel: whatever carries it on its way to the messages is this wrapper."""

from dataclasses import dataclass

import torch

from lightning_sparse.compressors.base import Compressor, Dense, Exact
from lightning_sparse.compressors.group import Group
from lightning_sparse.compressors.wrapper import Wrapper
from lightning_sparse.network.comm import Comm, Rounds
from lightning_sparse.settings import as_text
from lightning_sparse.wire import wire_format


@dataclass(frozen=True)
class Rounded(Wrapper):
    """``compressor``, with values on the wire in ``wire_dtype``; rounding errors stay unsent.

    Of several around one another the innermost decides.
    """

    compressor: Compressor | str
    wire_dtype: str

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "wire_dtype", wire_format(self.wire_dtype).name)

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        return self.wrapped.reduce(group, comm.in_format(wire_format(self.wire_dtype)))

    @property
    def default_wire_dtype(self) -> str:
        return self.wire_dtype

    def dense_variant(self) -> Compressor:
        return Rounded(self.wrapped.dense_variant(), self.wire_dtype)


def rounded(compressor: Compressor, wire_dtype: str) -> Compressor:
    """``compressor`` with values in ``wire_dtype``; itself for float32, in which they travel anyway."""
    return compressor if wire_dtype == "float32" else Rounded(compressor, wire_dtype)


def without_format(compressor: Compressor) -> Compressor:
    """What :func:`rounded` was given, where its format is to be left out of a text."""
    return compressor.wrapped if isinstance(compressor, Rounded) else compressor


_TYPES_IN_PLACE = {as_text(each): torch.float32 for each in (Dense(), Exact())}
_TYPES_IN_PLACE[as_text(Rounded(Dense(), "bfloat16"))] = torch.bfloat16


def type_in_place(compressor: Compressor) -> torch.dtype | None:
    """The type in which the backend could sum what ``compressor`` does where DDP has it: float32, bfloat16 or none."""
    return _TYPES_IN_PLACE.get(as_text(compressor))
