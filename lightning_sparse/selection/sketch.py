"""A count-sketch: a table of signed sums from which large elements can be found, and which can be added up.

Charikar, Chen and Farach-Colton, "Finding frequent items in data streams" (2002).  With table T [R, c], row j adds
element i, times a sign, to bucket h_j(i).  Here the vector is cut into blocks of c elements, and in row j block b is
turned by a random offset and given a random sign:

    h_j(i) = (i + offset[j, i // c]) mod c        sign_j(i) = sign[j, i // c]

Two elements of different blocks meet with probability 1 / c and with independent signs, those of one block never; so
an estimate has at most the variance of the textbook's hashes, ||x||^2 / c a row.  Offsets and signs are drawn from
(seed, j, b) when they are needed: nothing is stored, all ranks agree, and encoding a row is adding up slices.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse import kernels
from lightning_sparse.kernels.reference import median
from lightning_sparse.selection.streams import draw

# Elements looked at together, for all rows, so that they stay in a core's cache:
SPAN = 2**15  # estimated
ENCODED = 2**17


@dataclass(frozen=True)
class CountSketch:
    """The hashes of a table of ``rows`` x ``columns`` for vectors of any length."""

    rows: int
    columns: int
    seed: int = 0

    def encode(self, x: Tensor, out: Tensor) -> Tensor:
        """The table of ``x`` [n], in ``out`` [R, c] float32.  Linear: tables of vectors add up to that of their sum."""
        out.zero_()
        n = x.numel()
        for start in range(0, n, ENCODED):
            for row in range(self.rows):
                for elements, buckets, sign in self._runs(row, start, min(start + ENCODED, n)):
                    out[row, buckets].add_(x[elements], alpha=sign)
        return out

    def estimate(self, table: Tensor, out: Tensor) -> Tensor:
        """Set ``out`` [n] float32 to each element's estimate, the median over the rows of ``table`` [R, c]; return it.

        Signs are flipped and values compared but nothing is rounded: the same table gives the same bits everywhere.
        """
        n = out.numel()
        estimates = out.new_empty((self.rows, min(SPAN, n)))
        for start in range(0, n, SPAN):
            stop = min(start + SPAN, n)
            for row in range(self.rows):
                for elements, buckets, sign in self._runs(row, start, stop):
                    part = estimates[row, elements.start - start : elements.stop - start]
                    torch.mul(table[row, buckets], sign, out=part)
            out[start:stop] = median(estimates[:, : stop - start])
        return out

    def _runs(self, row: int, start: int, stop: int) -> Iterator[tuple[slice, slice, int]]:
        """Elements [start, stop) in runs that lie in consecutive buckets: elements, buckets, sign."""
        while start < stop:
            block, place = divmod(start, self.columns)
            number = draw(self.seed, row, block)
            bucket = ((number >> 1) + place) % self.columns
            length = min(stop - start, self.columns - place, self.columns - bucket)  # to the end, of block or of table
            yield slice(start, start + length), slice(bucket, bucket + length), 1 - 2 * (number & 1)
            start += length


def coder(sketch: CountSketch, x: Tensor) -> CountSketch | kernels.Hashes:
    """What encodes vectors like ``x`` [n] with the hashes of ``sketch``."""
    return hashes(sketch, x.numel(), x.device) if kernels.used_for(x) else sketch


def hashes(sketch: CountSketch, n: int, device: torch.device | None = None) -> kernels.Hashes:
    """The hashes of ``sketch`` for vectors of ``n`` elements, drawn on the host: R * n / c draws of about 1 µs."""
    blocks = -(-n // sketch.columns)
    drawn = [[draw(sketch.seed, row, block) for block in range(blocks)] for row in range(sketch.rows)]
    places, turns = [[(x >> 1) % sketch.columns for x in row] for row in drawn], [[x & 1 for x in row] for row in drawn]
    offsets = torch.tensor(places, dtype=torch.int64, device="cpu")
    signs = 1 - 2 * torch.tensor(turns, dtype=torch.float32, device="cpu")
    return kernels.Hashes(offsets.to(device, non_blocking=True), signs.to(device, non_blocking=True))
