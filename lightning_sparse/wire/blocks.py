"""Values of few bits, in blocks that share a scale: int8, int4 and sign.

On a CPU in runs that stay in a core's cache: nearly all of the time then goes to reading the values once and writing
them back.  On other devices in the operators of :mod:`lightning_sparse.kernels`, to the same layout.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_sparse.wire.values import BLOCK, RUN, ValueFormat, viewed

TINY = torch.finfo(torch.float32).tiny
# Scales have 17 bits of mantissa, so that a step of up to 7 bits times its scale is exact in float32.
SCALE_BITS = ~0x7F
# A little less than one: the nearest step is then never further from zero than the value allows, see Steps.
BELOW_ONE = 1 - 2.0**-21
# The eight signs in a byte, the first value's in its highest bit: [256, 8] float32, 1 or -1.
SIGNS = 1 - 2 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.float32)


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
        if values.device.type != "cpu":
            torch.ops.lightning_sparse.take_blocks(values, out, self.bits)
            return
        scales = values.new_empty(-(-values.numel() // BLOCK))
        head, codes = out.split([4 * scales.numel(), out.numel() - 4 * scales.numel()])
        for part, scale, code, scratch in self._runs(values, scales, codes):
            self._measure(part, scale, scratch)
            set_scales(scale)
            self._encode(part, scale, code, scratch)
        head.copy_(scales.view(torch.uint8))

    def read(self, payload: Tensor, out: Tensor) -> None:
        """Set ``out`` to the values in ``payload``."""
        if out.device.type != "cpu":
            torch.ops.lightning_sparse.read_blocks(payload, out, self.bits)
            return
        for part, scale, code, scratch in self._runs(out, *self._split(payload, out.numel())):
            torch.mul(self._multiples(code, scratch), scale, out=part)

    def add(self, payload: Tensor, out: Tensor) -> None:
        """Add the values in ``payload`` to ``out``."""
        if out.device.type != "cpu":
            torch.ops.lightning_sparse.add_blocks(payload, out, self.bits)
            return
        for part, scale, code, scratch in self._runs(out, *self._split(payload, out.numel())):
            part.addcmul_(self._multiples(code, scratch), scale)  # exact products: it rounds once, fused or not

    @abstractmethod
    def _measure(self, part: Tensor, scale: Tensor, scratch: Tensor) -> None:
        """Set ``scale`` [b, 1] to that of ``part`` [b, width], before it is rounded; ``scratch`` is as large."""

    @abstractmethod
    def _encode(self, part: Tensor, scale: Tensor, code: Tensor, scratch: Tensor) -> None:
        """Write ``part`` [b, width] to ``code`` [b, bytes] uint8 as multiples of ``scale``, and take those out of it."""

    @abstractmethod
    def _multiples(self, code: Tensor, scratch: Tensor) -> Tensor:
        """The multiples in ``code`` [b, bytes] uint8, in ``scratch`` [b, width]."""

    def _split(self, payload: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The scales [blocks] float32 and the codes [bytes] uint8 of ``count`` values."""
        head = 4 * -(-count // BLOCK)
        return viewed(payload[:head], torch.float32), payload[head:]

    def _runs(self, values: Tensor, scales: Tensor, codes: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """``values`` [n], ``scales`` [blocks], ``codes`` [bytes] in runs of whole blocks: [b, width], [b, 1], [b, bytes].

        Beside each run room for as many values.  The last block, if shorter, is a run of its own.
        """
        blocks, rest = divmod(values.numel(), BLOCK)
        whole, width, rows = blocks * BLOCK, BLOCK * self.bits // 8, RUN // BLOCK
        scratch = values.new_empty(max(1, min(blocks, rows)), BLOCK)
        parts = values[:whole].view(blocks, BLOCK).split(rows)
        encoded = codes[: blocks * width].view(blocks, width).split(rows)
        for part, scale, code in zip(parts, scales[:blocks, None].split(rows), encoded, strict=True):
            yield part, scale, code, scratch[: len(part)]
        if rest:
            yield values[None, whole:], scales[blocks:, None], codes[None, blocks * width :], scratch[:1, :rest]


@dataclass(frozen=True)
class Steps(Blocks):
    """Values as the nearest whole number of steps of their block's scale, ``most`` steps either way.

    Rounding at random would be less biased, but what is not sent is sent later, so there is no bias to remove.
    Rounding errors are exact: the nearest step to a value is 0 or within a factor of 2 of it, so that float32 holds
    the difference.  Of 4 bits, a byte holds a value of a block's first half, plus 8, and above it one of the second.

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

    def _measure(self, part: Tensor, scale: Tensor, scratch: Tensor) -> None:
        torch.amax(torch.abs(part, out=scratch), 1, keepdim=True, out=scale)
        scale.mul_(1 / self.most)

    def _encode(self, part: Tensor, scale: Tensor, code: Tensor, scratch: Tensor) -> None:
        inverse = scale.reciprocal().mul_(BELOW_ONE).nan_to_num_(nan=torch.nan, posinf=0.0)  # 0 of 0
        steps = torch.mul(part, inverse, out=scratch).round_()
        part.addcmul_(steps, scale, value=-1)
        low, high = halves(steps, code)
        if self.bits == 4:
            low[:, : high.shape[1]].add_(high, alpha=16)
        code = code.view(torch.int8).copy_(low)
        if self.bits == 4:
            code.add_(8)

    def _multiples(self, code: Tensor, scratch: Tensor) -> Tensor:
        if self.bits == 8:
            return scratch.copy_(code.view(torch.int8))
        low, high = halves(scratch, code)
        code = code.view(torch.int8)
        low.copy_((code & 15).sub_(8))
        high.copy_(code[:, : high.shape[1]] >> 4)
        return scratch


@dataclass(frozen=True)
class Sign(Blocks):
    """Values as their sign: each arrives as plus or minus the mean magnitude of its block.

    Rounding errors are rounded to float32 once, so that a value much smaller than the mean keeps what float32 can hold
    beside it.
    """

    name: str = "sign"
    bits: int = 1

    def _measure(self, part: Tensor, scale: Tensor, scratch: Tensor) -> None:
        shares = torch.mul(part, 1 / part.shape[1], out=scratch).abs_()  # a sum of magnitudes might not be finite
        torch.sum(shares, 1, keepdim=True, out=scale)

    def _encode(self, part: Tensor, scale: Tensor, code: Tensor, scratch: Tensor) -> None:
        code.view(-1).copy_(torch.from_numpy(np.packbits(np.signbit(part.numpy()))))
        part.addcmul_(self._multiples(code, scratch), scale, value=-1)

    def _multiples(self, code: Tensor, scratch: Tensor) -> Tensor:
        if scratch.shape[1] % 8:
            return torch.from_numpy(SIGNS[code.numpy()]).view(1, -1)[:, : scratch.shape[1]]
        room = scratch.numpy().reshape(*code.shape, 8)
        np.take(SIGNS, code.numpy(), axis=0, out=room, mode="clip")  # not "raise", which copies
        return scratch


def set_scales(scales: Tensor) -> None:
    """Round ``scales`` towards zero to what may be sent; 0 where that is not normal, NaN stays."""
    scales.view(torch.int32).bitwise_and_(SCALE_BITS)
    scales.masked_fill_(scales < TINY, 0)


def halves(values: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
    """The columns of ``values`` [b, width] that ``code`` [b, bytes] holds in its low bits, and those above."""
    return values[:, : code.shape[1]], values[:, code.shape[1] :]
