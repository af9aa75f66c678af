"""How values are written: formats that round float32 for the wire and keep their rounding errors.  Pure functions."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.kernels.blocks import can_be_viewed, viewed
from lightning_sparse.kernels.cut import Cut

RUN = 2**17  # values worked on together on a CPU, so that they stay in a core's cache


class ValueFormat(ABC):
    """How float32 values are written.

    Attributes:
        name: as the user gives it, ``wire_dtype=name``.
    """

    name: str

    @abstractmethod
    def nbytes(self, count: int) -> int:
        """Bytes of ``count`` values."""

    @abstractmethod
    def take(self, values: Tensor, out: Tensor) -> None:
        """Move ``values`` [n] float32, contiguous, onto the wire: rounded into ``out`` [nbytes(n)] uint8.

        ``values`` keep the rounding errors, to be sent in a later step: ``values before == read + values after``.
        Where what is read is not finite they are zero.
        """

    @abstractmethod
    def read(self, payload: Tensor, out: Tensor) -> None:
        """Set ``out`` [n] float32 to the values in ``payload`` [nbytes(n)] uint8."""

    @abstractmethod
    def add(self, payload: Tensor, out: Tensor) -> None:
        """Add to ``out`` [n] float32 the values in ``payload`` [nbytes(n)] uint8, as :meth:`read` gives them."""

    def take_rows(self, values: Tensor, out: Tensor, cut: Cut, first: int, count: int) -> None:
        """Move the segments of ``values`` [n] that ``count`` ranks own, from ``first`` on, into their rows of ``out``.

        Args:
            values: as :meth:`take` has them.
            out: [P, bytes] uint8, each row as long as a whole segment takes, or up to 3 bytes longer.  What a rank's
                segment does not fill becomes zeros.
            cut: says which segments.
            first: a rank.
            count: of ranks, at most P.
        """
        for i in range(count):
            owner = (first + i) % cut.size
            own = cut.of(values, owner)
            self.take(own, out[owner, : self.nbytes(own.numel())])
            if self.nbytes(own.numel()) < out.shape[1]:
                out[owner, self.nbytes(own.numel()) :] = 0

    def read_rows(self, payloads: Tensor, out: Tensor, cut: Cut) -> None:
        """Set the segment of ``out`` [n] that each rank owns to what its row of ``payloads`` [P, bytes] says."""
        for owner, payload in enumerate(payloads):
            own = cut.of(out, owner)
            self.read(payload[: self.nbytes(own.numel())], own)

    def add_rows(self, payloads: Tensor, out: Tensor, first: int, step: int, count: int, onto: bool = True) -> None:
        """Add ``count`` rows of ``payloads`` [P, bytes] to ``out`` [m], every ``step``-th from ``first`` on, modulo P.

        They are added in this order; ``onto=False`` sets ``out`` to their sum.
        """
        for i in range(count):
            payload = payloads[(first + i * step) % len(payloads), : self.nbytes(out.numel())]
            (self.add if onto or i else self.read)(payload, out)

    @property
    def lossless(self) -> bool:
        """Whether no value is rounded."""
        return False

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Float(ValueFormat):
    """Floating-point values of another type: float32, bfloat16 or float16.

    A value beyond the range of float16 is sent as the largest it can carry; the rest, rounded to float32, stays.  What
    is not finite, or becomes so by rounding, arrives so, and nothing is left of it.
    """

    name: str
    dtype: torch.dtype

    @property
    def lossless(self) -> bool:
        return self.dtype == torch.float32

    def nbytes(self, count: int) -> int:
        return count * self.dtype.itemsize

    def take(self, values: Tensor, out: Tensor) -> None:
        rounded = viewed(out, self.dtype)
        if self.lossless:
            rounded.copy_(values)
            values.zero_()
        else:
            scratch = scratch_for(values)
            for part, written in runs(values, rounded):
                self._take(part, written, scratch[: part.numel()])
        if not can_be_viewed(out, self.dtype):
            out.copy_(rounded.view(torch.uint8))

    def _take(self, values: Tensor, written: Tensor, scratch: Tensor) -> None:
        if self.dtype == torch.float16:
            limit = torch.finfo(torch.float16).max
            written.copy_(torch.where(values.isinf(), values, values.clamp(-limit, limit)))
        else:
            written.copy_(values)
        values.sub_(in_float32(written, scratch))
        values.nan_to_num_(0.0, 0.0, 0.0)

    def read(self, payload: Tensor, out: Tensor) -> None:
        out.copy_(viewed(payload, self.dtype))

    def add(self, payload: Tensor, out: Tensor) -> None:
        written = viewed(payload, self.dtype)
        if self.lossless:
            out.add_(written)
            return
        scratch = scratch_for(out)
        for part, values in runs(out, written):
            part.add_(in_float32(values, scratch[: part.numel()]))


def runs(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of equal length in runs of ``RUN`` elements; whole where a device works on them."""
    length = RUN if tensors[0].device.type == "cpu" else max(1, tensors[0].numel())
    return zip(*(x.split(length) for x in tensors), strict=True)


def scratch_for(values: Tensor) -> Tensor:
    """Room for the longest run of ``values``, [m] float32; none where a device works on them."""
    return values.new_empty(min(values.numel(), RUN) if values.device.type == "cpu" else 0)


def in_float32(values: Tensor, scratch: Tensor) -> Tensor:
    """``values`` [m] for arithmetic with float32: a copy in ``scratch`` on a CPU, 5 times as fast as another type.

    On a device they are read as they are, without the launch of a copy.
    """
    return scratch.copy_(values) if values.device.type == "cpu" else values
