"""How values are written: formats that round float32 for the wire and keep their rounding errors.  Pure functions.

Floating-point types first, then values of few bits in blocks that share a scale: int8, int4, int2 and sign.  What is
here is for CPUs: it works in runs that stay in a core's cache, and reads and writes values once.  On other devices the
operators of :mod:`lightning_sparse.kernels` read and write the same bytes, those of all ranks at once.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_sparse.kernels import ops
from lightning_sparse.kernels.blocks import (
    BELOW_ONE,
    BLOCK,
    FILLER,
    MOST_SCALE,
    SCALE_BITS,
    TINY,
    SliceSegment,
    block_bytes,
    can_be_viewed,
    halves,
    in_blocks,
    scales_and_codes,
    viewed,
)

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

    def take_rows(self, values: Tensor, out: Tensor, cut: SliceSegment, first: int, count: int) -> None:
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

    def read_rows(self, payloads: Tensor, out: Tensor, cut: SliceSegment) -> None:
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
        if values.device.type != "cpu":
            n = values.numel()
            ops.take_floats(values, rounded[None], n, 0, n, 0, 0, 1)
        elif self.lossless:
            rounded.copy_(values)
            values.zero_()
        else:
            scratch = values.new_empty(min(values.numel(), RUN))
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
        values.sub_(scratch.copy_(written))  # 5 times as fast as with another type
        values.nan_to_num_(0.0, 0.0, 0.0)

    def read(self, payload: Tensor, out: Tensor) -> None:
        out.copy_(viewed(payload, self.dtype))

    def add(self, payload: Tensor, out: Tensor) -> None:
        written = viewed(payload, self.dtype)
        if self.lossless:
            out.add_(written)
            return
        scratch = out.new_empty(min(out.numel(), RUN))
        for part, values in runs(out, written):
            part.add_(scratch[: part.numel()].copy_(values))

    def take_rows(self, values: Tensor, out: Tensor, cut: SliceSegment, first: int, count: int) -> None:
        if values.device.type == "cpu":
            super().take_rows(values, out, cut, first, count)
        else:
            rows = out.view(self.dtype)
            ops.take_floats(values, rows, cut.width, cut.start, cut.length, cut.rotation, first, count)

    def read_rows(self, payloads: Tensor, out: Tensor, cut: SliceSegment) -> None:
        if out.device.type == "cpu":
            super().read_rows(payloads, out, cut)
        else:
            ops.read_floats(payloads.view(self.dtype), out, cut.width, cut.start, cut.length, cut.rotation)

    def add_rows(self, payloads: Tensor, out: Tensor, first: int, step: int, count: int, onto: bool = True) -> None:
        if out.device.type == "cpu":
            super().add_rows(payloads, out, first, step, count, onto)
        else:
            ops.add_floats(payloads.view(self.dtype), out, first, step, count, onto)


def runs(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of equal length in runs of ``RUN`` elements."""
    return zip(*(x.split(RUN) for x in tensors), strict=True)


# The signs in a byte, the first in its highest bit: [256, 8] float32, 1 or -1.
SIGNS = 1 - 2 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.float32)
# The multiples in a byte, the first in its lowest bits: [256, 4] float32, from -1.5 to 1.5.
LEVELS = ((np.arange(256)[:, None] >> np.arange(0, 8, 2)) % 4 - 1.5).astype(np.float32)
# The shares whose sum is a mean are a little less, so that no mean is above the largest float32, however it is rounded.
SHARE = 1 - 2.0**-18


class Blocks(ValueFormat):
    """Values that are multiples of a scale that each block of ``BLOCK`` shares.

    On the wire lie the scales, then the multiples.  What is not finite arrives as NaN or infinity in all of its block,
    of which nothing is left to be sent.
    """

    bits: int

    def nbytes(self, count: int) -> int:
        return block_bytes(count, self.bits)

    def take(self, values: Tensor, out: Tensor) -> None:
        if values.device.type != "cpu":
            ops.take_blocks(values, out, self.bits)
            return
        scales = values.new_empty(-(-values.numel() // BLOCK))
        head, codes = out.split([4 * scales.numel(), out.numel() - 4 * scales.numel()])
        for part, scale, code, scratch in self._runs(values, scales, codes):
            self._take(part, scale, code, scratch)
            if not bool(scale.isfinite().all()):  # nothing is left of what arrives as NaN or infinity
                part.masked_fill_(~scale.isfinite(), 0.0)
        head.copy_(scales.view(torch.uint8))

    def read(self, payload: Tensor, out: Tensor) -> None:
        for part, scale, code, scratch in self._runs(out, *scales_and_codes(payload, out.numel())):
            torch.mul(self._multiples(code, scratch), scale, out=part)

    def add(self, payload: Tensor, out: Tensor) -> None:
        for part, scale, code, scratch in self._runs(out, *scales_and_codes(payload, out.numel())):
            part.addcmul_(self._multiples(code, scratch), scale)  # exact products: it rounds once, fused or not

    def take_rows(self, values: Tensor, out: Tensor, cut: SliceSegment, first: int, count: int) -> None:
        if values.device.type == "cpu":
            super().take_rows(values, out, cut, first, count)
            return
        if cut.size * cut.width > values.numel() or self.nbytes(cut.length) + FILLER < out.shape[1]:
            out.zero_()  # of which not all is written to
        ops.take_rows(values, out, self.bits, cut.width, cut.start, cut.length, cut.rotation, first, count)

    def read_rows(self, payloads: Tensor, out: Tensor, cut: SliceSegment) -> None:
        if out.device.type == "cpu":
            super().read_rows(payloads, out, cut)
        else:
            ops.read_rows(payloads, out, self.bits, cut.width, cut.start, cut.length, cut.rotation)

    def add_rows(self, payloads: Tensor, out: Tensor, first: int, step: int, count: int, onto: bool = True) -> None:
        if out.device.type == "cpu":
            super().add_rows(payloads, out, first, step, count, onto)
        else:
            ops.add_rows(payloads, out, self.bits, first, step, count, onto)

    @abstractmethod
    def _take(self, part: Tensor, scale: Tensor, code: Tensor, scratch: Tensor) -> None:
        """Set ``scale`` [b, 1] and ``code`` [b, bytes] to what is sent of ``part`` [b, width], and take that out."""

    @abstractmethod
    def _multiples(self, code: Tensor, scratch: Tensor) -> Tensor:
        """The multiples in ``code`` [b, bytes] uint8, in ``scratch`` [b, width]."""

    def _runs(self, values: Tensor, scales: Tensor, codes: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        scratch = values.new_empty(max(1, min(values.numel(), RUN) // BLOCK), BLOCK)
        for part, scale, code in in_blocks(values, scales, codes, self.bits, RUN // BLOCK):
            yield part, scale, code, scratch[: len(part), : part.shape[1]]


@dataclass(frozen=True)
class Steps(Blocks):
    """Values as the nearest whole number of steps of their block's scale, ``most`` steps either way.

    Rounding at random would be less biased, but what is not sent is sent later, so there is no bias to remove.
    Rounding errors are exact: the nearest step to a value is 0 or within a factor of 2 of it, so that float32 holds
    the difference; a step is at least the smallest normal float32.  Of 4 bits, each byte holds the steps of a value of
    the block's first half, plus 8, and above them those of one of its second half.
    """

    name: str
    bits: int  # of a value, 8 or 4

    @property
    def most(self) -> int:
        """Steps to the largest magnitude of a block."""
        return (1 << self.bits - 1) - 1

    def _take(self, part: Tensor, scale: Tensor, code: Tensor, scratch: Tensor) -> None:
        torch.amax(torch.abs(part, out=scratch), 1, keepdim=True, out=scale)
        scale.mul_(1 / self.most).clamp_(min=TINY).view(torch.int32).bitwise_and_(SCALE_BITS)
        steps = torch.mul(part, scale.reciprocal().mul_(BELOW_ONE), out=scratch).round_()
        part.addcmul_(steps, scale, value=-1)
        code = code.view(torch.int8)
        if self.bits == 8:
            code.copy_(steps)
        else:
            low, high = halves(steps)
            low[:, : high.shape[1]].add_(high, alpha=16)
            code.copy_(low).add_(8)

    def _multiples(self, code: Tensor, scratch: Tensor) -> Tensor:
        code = code.view(torch.int8)
        if self.bits == 8:
            return scratch.copy_(code)
        low, high = halves(scratch)
        low.copy_((code & 15).sub_(8))
        high.copy_(code[:, : high.shape[1]] >> 4)
        return scratch


@dataclass(frozen=True)
class Sign(Blocks):
    """Values as their sign: each arrives as plus or minus the mean magnitude of its block.

    Rounding errors are rounded to float32 once, so that a value much smaller than the mean keeps what float32 can hold
    beside it.  A block whose mean is not above the smallest normal float32 waits.
    """

    name: str = "sign"
    bits: int = 1

    def _take(self, part: Tensor, scale: Tensor, code: Tensor, scratch: Tensor) -> None:
        shares = torch.mul(part, SHARE / part.shape[1], out=scratch).abs_()  # a sum of magnitudes might not be finite
        torch.sum(shares, 1, keepdim=True, out=scale).view(torch.int32).bitwise_and_(SCALE_BITS)
        torch.threshold_(scale, TINY, 0.0)
        code.view(-1).numpy()[:] = np.packbits(np.signbit(part.numpy()))
        part.addcmul_(self._multiples(code, scratch), scale, value=-1)

    def _multiples(self, code: Tensor, scratch: Tensor) -> Tensor:
        return _looked_up(SIGNS, code, scratch)


@dataclass(frozen=True)
class Levels(Blocks):
    """Values as the nearest of four levels, -1.5, -0.5, 0.5 and 1.5 times the root mean square of their block.

    Of a normal distribution that is about the best that four evenly spaced levels can do.  Rounding errors are as
    :class:`Sign`'s.  A block whose root mean square is not above four times the smallest normal float32 waits.
    """

    name: str = "int2"
    bits: int = 2

    def _take(self, part: Tensor, scale: Tensor, code: Tensor, scratch: Tensor) -> None:
        norm = torch.linalg.vector_norm(part, dim=1, keepdim=True, dtype=torch.float64)
        scale.copy_(norm.mul_(1 / math.sqrt(part.shape[1])))
        scale.masked_fill_((scale > MOST_SCALE) & scale.isfinite(), MOST_SCALE)
        torch.threshold_(scale, 4 * TINY, 0.0).view(torch.int32).bitwise_and_(SCALE_BITS)
        steps = torch.mul(part, scale.reciprocal(), out=scratch).floor_().nan_to_num_(0.0).clamp_(-2, 1).add_(2)
        whole = torch.nn.functional.pad(steps.to(torch.int8), (0, -part.shape[1] % 4))  # 8 times as fast as to uint8
        fours = whole.view(torch.int32)  # in each of whose bytes there are two bits, the first value's in the lowest
        fours = fours | fours >> 6
        code.copy_(fours | fours >> 12)
        part.addcmul_(steps.sub_(1.5), scale, value=-1)

    def _multiples(self, code: Tensor, scratch: Tensor) -> Tensor:
        return _looked_up(LEVELS, code, scratch)


def _looked_up(table: np.ndarray, code: Tensor, out: Tensor) -> Tensor:
    """What ``table`` [256, values in a byte] has of each byte of ``code`` [b, bytes], in ``out`` [b, width]."""
    if out.shape[1] % table.shape[1]:  # the last byte is not full
        return out.copy_(torch.from_numpy(table[code.numpy()]).flatten(1)[:, : out.shape[1]])
    np.take(
        table, code.numpy(), axis=0, out=out.numpy().reshape(*code.shape, table.shape[1]), mode="clip"
    )  # "raise" would copy
    return out
