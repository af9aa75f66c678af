"""What goes around a compressor: a wire format, dense steps first, momentum."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.checks import check_whole, is_number, matches
from lightning_sparse.compressors.base import Compressor, Dense, Exact
from lightning_sparse.compressors.group import Group
from lightning_sparse.compressors.named import by_name
from lightning_sparse.network.comm import Comm, Rounds
from lightning_sparse.selection.sparse import Sparse
from lightning_sparse.settings import as_text
from lightning_sparse.wire import wire_format


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

    @property
    def only_adds(self) -> bool:
        return type(self).accumulate is Wrapper.accumulate and self.wrapped.only_adds

    accumulate = _wrapped("accumulate")
    per_element = _wrapped("per_element")
    default_wire_dtype = _wrapped("default_wire_dtype")
    dense_variant = _wrapped("dense_variant")
    is_dense = _wrapped("is_dense")
    compresses = _wrapped("compresses")
    carry = _wrapped("carry")


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


@dataclass(frozen=True)
class ExactFor(Wrapper):
    """``compressor``, but parameters whose names match one of the ``patterns`` are summed in float32."""

    patterns: tuple[str, ...]
    compressor: Compressor | str

    def dense_variant(self) -> Compressor:
        return without_format(self.wrapped.dense_variant())

    def is_dense(self, name: str, elements: int) -> bool:
        return matches(name, self.patterns) or self.wrapped.is_dense(name, elements)


def exact_for(patterns: Sequence[str], compressor: Compressor) -> Compressor:
    """``compressor`` with float32 sums where names match ``patterns``; itself without any, or if all sums are such."""
    if not patterns or type_in_place(compressor) == torch.float32:
        return compressor
    return ExactFor(tuple(patterns), compressor)


def without_format(compressor: Compressor) -> Compressor:
    """What :func:`rounded` was given, where its format is to be left out of a text."""
    if isinstance(compressor, ExactFor):
        return replace(compressor, compressor=without_format(compressor.wrapped))
    return compressor.wrapped if isinstance(compressor, Rounded) else compressor


_TYPES_IN_PLACE = {as_text(each): torch.float32 for each in (Dense(), Exact())}
_TYPES_IN_PLACE[as_text(Rounded(Dense(), "bfloat16"))] = torch.bfloat16


def type_in_place(compressor: Compressor) -> torch.dtype | None:
    """The type in which the backend could sum what ``compressor`` does where DDP has it: float32, bfloat16 or none."""
    return _TYPES_IN_PLACE.get(as_text(compressor))


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

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        return self.active(group.step).reduce(group, comm)

    def active(self, step: int) -> Compressor:
        """Return what sums densely, or what is active in the wrapped compressor."""
        return self._dense if step < self.steps else self.wrapped.active(step)

    def compresses(self, step: int) -> bool:
        return step >= self.steps and super().compresses(step)


@dataclass(frozen=True)
class MomentumCorrection(Wrapper):
    """Adds velocities, v = momentum * v + gradient, to what is unsent, where others add gradients.

    Lin et al., "Deep Gradient Compression" (ICLR 2018), sections 3.2 and 3.3.  Give the optimizer no momentum of its
    own: SGD with the sum of velocities is SGD with momentum.  Where an element is delivered its velocity is set to
    zero on all ranks (momentum factor masking), so that what was sent does not go on moving it.  The law is then of
    velocities:

        ``P * mean + sum(unsent after) == sum(unsent before + velocity)``

    Costs a second float32 copy of the gradient.

    Args:
        momentum: in [0, 1).
        compressor: what selects and sends.
        clip_norm: before it is added, a rank's gradient of a group is scaled down to this Euclidean norm over sqrt(P)
            (local gradient clipping; the paper clips the whole gradient, which is not there yet when its first group
            is sent).  None: no clipping.
    """

    momentum: float
    compressor: Compressor | str
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (is_number(self.momentum) and 0 <= self.momentum < 1):
            raise ValueError(
                f"MomentumCorrection: momentum must be a number of at least 0 and below 1; got {self.momentum!r}."
            )
        if self.clip_norm is not None and not (is_number(self.clip_norm) and 0 < self.clip_norm <= sys.float_info.max):
            raise ValueError(
                f"MomentumCorrection: clip_norm must be a finite number above 0, or None for no clipping; got "
                f"{self.clip_norm!r}."
            )

    @property
    def per_element(self) -> tuple[str, ...]:
        return ("velocity", *self.wrapped.per_element)

    def accumulate(self, group: Group, gradients: Sequence[Tensor | None], size: int, scale: float = 1.0) -> None:
        """Add each gradient to its velocity, and the velocity to what is unsent."""
        if self.clip_norm is not None:
            scale *= _shrunk(group, gradients, scale, self.clip_norm / math.sqrt(size))
        velocities: list[Tensor | None] = []
        for velocity, gradient in zip(group.slots(_velocity(group)), gradients, strict=True):
            if gradient is None:
                velocities.append(None)
            else:
                velocities.append(velocity.view(gradient.shape).mul_(self.momentum).add_(gradient, alpha=scale))
        self.wrapped.accumulate(group, velocities, size)
        _velocity(group).nan_to_num_(0.0, 0.0, 0.0)  # what is not finite is unsent once

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        """Sum as the wrapped compressor does; then set the velocities of what was delivered to zero."""
        total = yield from self.wrapped.reduce(group, comm)
        if isinstance(total, Sparse):
            _velocity(group).index_fill_(0, total.index, 0)
        elif isinstance(group.picked, Tensor):  # on a device, where nobody waits to know which they were
            _velocity(group).masked_fill_(total != 0, 0)
        return total

    def dense_variant(self) -> Compressor:
        return replace(self, compressor=self.wrapped.dense_variant())


def _velocity(group: Group) -> Tensor:
    """The group's velocities [n], which are zero before its first step."""
    if "velocity" not in group.memory:
        group.memory["velocity"] = torch.zeros_like(group.unsent)
    return group.memory["velocity"]


def _shrunk(group: Group, gradients: Sequence[Tensor | None], scale: float, most: float) -> float:
    """The factor, at most 1, that takes the Euclidean norm of all ``gradients``, times ``scale``, down to ``most``."""
    # In float64: a norm that overflows would scale a finite gradient down to nothing.
    norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients if g is not None]
    square = torch.stack(norms).square().sum() if norms else group.unsent.new_zeros((), dtype=torch.float64)
    if group.inside is not None:
        square = group.inside.all_reduce(square.reshape(1)).wait()
    norm = scale * math.sqrt(float(square))
    return most / norm if norm > most else 1.0
