"""Values of few bits, in blocks that share a scale: int8, int4 and sign."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_sparse.wire.values import BLOCK, RUN, ValueFormat, scratch_for, viewed

TINY = torch.finfo(torch.float32).tiny
# Scales have 17 bits of mantissa, so that a step of up to 7 bits times its scale is exact in float32.
SCALE_BITS = ~0x7F
# A little less than one: the nearest step is then never further from zero than the value allows, see Steps.
BELOW_ONE = 1 - 2.0**-21


class Blocks(ValueFormat):
    """Values that are multiples of a scale that each block of ``BLOCK`` shares.

    On the wire lie the scales, then the multiples.  What is not finite arrives as NaN or infinity in all of its block.
    A block whose scale would be below the smallest normal float32 waits.
    """

    bits: int

    def nbytes(self, count: int) -> int:
        """Bytes of ``count`` values, those of their scales included."""
        return 4 * -(-count // BLOCK) + -(-count * self.bits // 8)

    def take(self, values: Tensor, out: Tensor) -> None:
        """Move ``values`` onto the wire; see :meth:`ValueFormat.take`."""
        scales = values.new_empty(-(-values.numel() // BLOCK))
        head, codes = out.split([4 * scales.numel(), out.numel() - 4 * scales.numel()])
        scratch = scratch_for(values)
        for part, scale, _ in self._runs(values, scales, codes):
            self._measure(torch.abs(part, out=_like(scratch, part)), scale)
        set_scales(scales)
        head.copy_(scales.view(torch.uint8))
        inverses = torch.where(scales > 0, BELOW_ONE / scales, scales)[:, None]  # 0 of 0, NaN of NaN
        broken = values.device.type != "cpu" or not bool(scales.isfinite().all())
        start = 0
        for part, scale, code in self._runs(values, scales, codes):
            inverse = inverses[start : (start := start + len(part))]
            multiples = self._encode(part, inverse, code, _like(scratch, part), broken)
            part.addcmul_(multiples, scale, value=-1)

    def read(self, payload: Tensor, out: Tensor) -> None:
        """Set ``out`` to the values in ``payload``."""
        for part, scale, code in self._runs(out, *self._split(payload, out.numel())):
            self._multiples(code, part)
            part.mul_(scale)

    def add(self, payload: Tensor, out: Tensor) -> None:
        """Add the values in ``payload`` to ``out``."""
        scratch = scratch_for(out)
        for part, scale, code in self._runs(out, *self._split(payload, out.numel())):
            multiples = _like(scratch, part)
            self._multiples(code, multiples)
            part.addcmul_(multiples, scale)  # the products are exact, so it rounds once whether fused or not

    @abstractmethod
    def _measure(self, magnitudes: Tensor, scale: Tensor) -> None:
        """Set ``scale`` [b, 1] to that of ``magnitudes`` [b, width], before it is rounded."""

    @abstractmethod
    def _encode(self, part: Tensor, inverse: Tensor, code: Tensor, out: Tensor, broken: bool) -> Tensor:
        """Write ``part`` [b, width] to ``code`` [bytes] uint8; the multiples of its scales, [b, width] in ``out``."""

    @abstractmethod
    def _multiples(self, code: Tensor, out: Tensor) -> None:
        """Set ``out`` [b, width] float32 to the multiples in ``code`` [bytes] uint8."""

    def _split(self, payload: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The scales [blocks] float32 and the codes [bytes] uint8 of ``count`` values."""
        head = 4 * -(-count // BLOCK)
        return viewed(payload[:head], torch.float32), payload[head:]

    def _runs(self, values: Tensor, scales: Tensor, codes: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """``values`` [n], ``scales`` [blocks], ``codes`` [bytes] in runs of whole blocks: [b, width], [b, 1], [bytes].

        The last block, if shorter, is a run of its own.
        """
        count = values.numel()
        whole = count - count % BLOCK
        length = RUN if values.device.type == "cpu" else max(whole, 1)
        for start in [*range(0, whole, length), *range(whole, count, BLOCK)]:
            stop = min(start + length, whole) if start < whole else count
            part = values[start:stop].view(-1, min(BLOCK, stop - start))
            code = codes[start * self.bits // 8 : -(-stop * self.bits // 8)]
            yield part, scales[start // BLOCK : -(-stop // BLOCK), None], code


@dataclass(frozen=True)
class Steps(Blocks):
    """Values as the nearest whole number of steps of their block's scale, ``most`` steps either way.

    Rounding at random would be less biased, but what is not sent is sent later, so there is no bias to remove.
    Rounding errors are exact: the nearest step to a value is 0 or within a factor of 2 of it, so that float32 holds
    the difference.

    Args:
        name: of the format.
        bits: of a value, 8 or 4.
    """

    name: str
    bits: int

    @property
    def most(self) -> int:
        """Steps to the largest magnitude of a block."""
        return (1 << self.bits - 1) - 1

    def _measure(self, magnitudes: Tensor, scale: Tensor) -> None:
        torch.amax(magnitudes, 1, keepdim=True, out=scale)
        scale.mul_(1 / self.most)

    def _encode(self, part: Tensor, inverse: Tensor, code: Tensor, out: Tensor, broken: bool) -> Tensor:
        steps = torch.mul(part, inverse, out=out).round_()
        if broken:
            steps.nan_to_num_(0.0, 0.0, 0.0)  # of a block that arrives as NaN, for its neighbours in the same bytes
        if self.bits == 8:
            code.view(torch.int8).view(part.shape).copy_(steps)
        else:
            low, high = steps.view(-1).tensor_split([code.numel()])  # halves of the run, the second as long or one less
            nibbles = code.view(torch.int8)
            nibbles.copy_(low).add_(8)
            nibbles[: high.numel()].add_(torch.empty_like(nibbles[: high.numel()]).copy_(high), alpha=16)
        return steps

    def _multiples(self, code: Tensor, out: Tensor) -> None:
        if self.bits == 8:
            out.copy_(code.view(torch.int8).view(out.shape))
            return
        low, high = out.view(-1).tensor_split([code.numel()])
        low.copy_(code & 15).sub_(8)
        high.copy_(code.view(torch.int8)[: high.numel()] >> 4)


@dataclass(frozen=True)
class Sign(Blocks):
    """Values as their sign: each arrives as plus or minus the mean magnitude of its block.

    Rounding errors are rounded to float32 once, so that a value much smaller than the mean keeps what float32 can hold
    beside it.
    """

    name: str = "sign"
    bits: int = 1

    def _measure(self, magnitudes: Tensor, scale: Tensor) -> None:
        torch.sum(magnitudes.div_(magnitudes.shape[1]), 1, keepdim=True, out=scale)  # a sum might not be finite

    def _encode(self, part: Tensor, inverse: Tensor, code: Tensor, out: Tensor, broken: bool) -> Tensor:
        del inverse, broken
        negative = torch.lt(part, 0, out=torch.empty_like(part, dtype=torch.bool)).view(torch.uint8)
        code.copy_(_packed(negative.view(-1)))
        return _plus_or_minus(negative, out)

    def _multiples(self, code: Tensor, out: Tensor) -> None:
        _plus_or_minus(_unpacked(code, out.numel()).view(out.shape), out)


def set_scales(scales: Tensor) -> None:
    """Round ``scales`` [blocks] towards zero to what may be sent; 0 where that is not normal, NaN stays."""
    scales.view(torch.int32).bitwise_and_(SCALE_BITS)
    scales.masked_fill_(scales < TINY, 0)


def _like(scratch: Tensor, part: Tensor) -> Tensor:
    return scratch[: part.numel()].view(part.shape)


def _plus_or_minus(negative: Tensor, out: Tensor) -> Tensor:
    """1 or, where ``negative`` [*s], -1: in ``out`` [*s] float32."""
    return out.copy_(negative).mul_(-2).add_(1)


def _packed(bits: Tensor) -> Tensor:
    """``bits`` [n] uint8, 0 or 1, eight in a byte, the first highest: [n / 8 rounded up] uint8."""
    if bits.device.type == "cpu":
        return torch.from_numpy(np.packbits(bits.numpy()))
    padded = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    return (padded << torch.arange(7, -1, -1, device=bits.device)).sum(1, dtype=torch.uint8)


def _unpacked(code: Tensor, count: int) -> Tensor:
    """The ``count`` bits in ``code``, of :func:`_packed`: [count] uint8."""
    if code.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(code.numpy(), count=count))
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=code.device)
    return ((code[:, None] >> shifts) & 1).view(-1)[:count]
