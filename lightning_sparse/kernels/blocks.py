"""How values lie: those of few bits and indices in bytes, in blocks; and the segments of a vector that ranks send.

Blocks of values share a scale: first come all scales, then the multiples of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 256  # values that share a scale, where they do; messages are cut into segments at multiples of it
FILLER = 16  # bytes at most that fill up a row of values in blocks
TINY = torch.finfo(torch.float32).tiny
# Scales have 17 bits of mantissa, so that a step of up to 7 bits times its scale is exact in float32.
SCALE_BITS = ~0x7F
MOST_SCALE = 2.0**127  # of 2 bits, of which one and a half are still finite
# A little less than one: the nearest step is then never further from zero than the value allows, see wire.values.Steps.
BELOW_ONE = 1 - 2.0**-21
BLOCK_BITS = 16  # of an index that the block16 format writes out


def block_bytes(n: int, bits: int) -> int:
    """Bytes of ``n`` values in blocks, those of their scales included."""
    return 4 * -(-n // BLOCK) + -(-n * bits // 8)


def block16_bytes(n: int, capacity: int) -> int:
    """Bytes of at most ``capacity`` indices below ``n``."""
    return 4 * -(-n >> BLOCK_BITS) + 2 * capacity


def in_blocks(
    values: Tensor, scales: Tensor, codes: Tensor, bits: int, rows: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """``values`` [n], ``scales`` [blocks], ``codes`` [bytes] in runs: [b, width], [b, 1], [b, bytes].

    A run is of at most ``rows`` blocks; the last block, if shorter, is one of its own.
    """
    blocks, rest = divmod(values.numel(), BLOCK)
    whole, width = blocks * BLOCK, BLOCK * bits // 8
    parts = values[:whole].view(blocks, BLOCK).split(rows)
    encoded = codes[: blocks * width].view(blocks, width).split(rows)
    yield from zip(parts, scales[:blocks, None].split(rows), encoded, strict=True)
    if rest:
        yield values[None, whole:], scales[blocks:, None], codes[None, blocks * width :]


def scales_and_codes(payload: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The scales [blocks] float32 and the codes [bytes] uint8 of ``count`` values."""
    head = 4 * -(-count // BLOCK)
    return viewed(payload[:head], torch.float32), payload[head:]


def halves(values: Tensor) -> tuple[Tensor, Tensor]:
    """The columns of ``values`` [b, width] that lie in the low bits of bytes, and those above: as many or one less."""
    half = -(-values.shape[1] // 2)
    return values[:, :half], values[:, half:]


def viewed(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """``payload`` [n * itemsize] uint8 as [n] of ``dtype``: a view, or a copy where it does not start on a multiple."""
    return (payload if can_be_viewed(payload, dtype) else payload.clone()).view(dtype)


def can_be_viewed(payload: Tensor, dtype: torch.dtype) -> bool:
    """Whether ``payload`` uint8 starts where a value of ``dtype`` may."""
    return int(payload.storage_offset()) % dtype.itemsize == 0


@dataclass(frozen=True)
class SliceSegment:
    """The same segment of each of P slices of a vector [n].

    With labels L = (rank + rotation) mod P, the rank with label c owns slice c.
    """

    size: int  # P
    width: int  # elements of a slice; the last ones may be shorter, or empty, where the vector ends
    start: int  # of the segment in its slice
    length: int  # elements of the segment, at most ``width - start``
    rotation: int = 0

    def of(self, flat: Tensor, owner: int) -> Tensor:
        """The segment of ``flat`` [n] that rank ``owner`` owns; shorter, or empty, where ``flat`` ends."""
        first = (owner + self.rotation) % self.size * self.width + self.start
        return flat[min(first, flat.numel()) : min(first + self.length, flat.numel())]
