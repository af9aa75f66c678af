"""A vector that is zero but at a few elements; the functions are for CPUs, on devices nobody waits for its indices."""

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SPAN = 2**19  # elements added up together


@dataclass(frozen=True)
class Sparse:
    """``values`` [m] float32 at ``index`` [m] int64, strictly rising; zero elsewhere.

    A compressor that updates few elements returns one: then nobody writes and reads the zeros between.
    """

    index: Tensor
    values: Tensor

    def __getitem__(self, which: "slice | Tensor") -> "Sparse":
        """Some of the elements: views for a slice, copies for positions [l] int64."""
        if isinstance(which, slice):
            return Sparse(self.index[which], self.values[which])
        return Sparse(self.index.index_select(0, which), self.values.index_select(0, which))

    def dense(self, n: int) -> Tensor:
        """The vector in full, [n] float32."""
        return self.values.new_zeros(n).index_copy_(0, self.index, self.values)

    def split(self, sizes: Sequence[int]) -> "list[Sparse]":
        """The vector cut into consecutive parts of ``sizes`` elements, each with indices of its own."""
        ends = list(itertools.accumulate(sizes))
        cuts = torch.searchsorted(self.index, torch.tensor(ends, dtype=torch.int64, device=self.index.device)).tolist()
        parts = [self[first:last] for first, last in itertools.pairwise([0, *cuts])]
        return [
            Sparse(p.index - start if start else p.index, p.values) for p, start in zip(parts, [0, *ends], strict=False)
        ]

    def write(self, out: Tensor, cleared: bool = False) -> None:
        """Set ``out``, of any shape, dtype and memory order, to this vector of as many elements.

        ``cleared``: it is zero already, if it is contiguous.
        """
        if out.is_contiguous():
            (out if cleared else clear(out)).view(-1).index_copy_(0, self.index, self.values.to(out.dtype))
        else:
            out.copy_(self.dense(out.numel()).view(out.shape))


def clear(x: Tensor) -> Tensor:
    """Set ``x``, which is contiguous and on a CPU, to zero; returns it."""
    # Writes without reading first: where four processes shared the memory, 1.5 ms for 100 MB, and torch's fill 7 ms.
    ctypes.memset(x.data_ptr(), 0, x.numel() * x.element_size())
    return x


def dense(vector: Tensor | Sparse, n: int) -> Tensor:
    """A vector of either kind in full, [n]."""
    return vector.dense(n) if isinstance(vector, Sparse) else vector


def add_up_sparse(vectors: Sequence[Sparse], n: int) -> Sparse:
    """The sum of sparse vectors of ``n`` elements, added in the order given: the same bits wherever it is computed.

    A span of elements after the other, so that the sums stay in a core's cache and take no memory.
    """
    span = min(n, SPAN)
    total = torch.empty(span, dtype=torch.float32, device="cpu")
    touched = torch.empty(span, dtype=torch.bool, device="cpu")
    starts = range(0, n, span)
    parts = [vector.split([min(span, n - start) for start in starts]) for vector in vectors]
    sums = []
    for place, start in enumerate(starts):
        total.zero_()
        touched.zero_()
        for part in (vector[place] for vector in parts):
            total.index_add_(0, part.index, part.values)
            touched.index_fill_(0, part.index, True)
        index = nonzero(touched)
        sums.append(Sparse(index + start, total.index_select(0, index)))
    return Sparse(torch.cat([part.index for part in sums]), torch.cat([part.values for part in sums]))


def contained(some: Tensor, among: Tensor) -> Tensor:
    """Which of ``some`` [m] int64, rising, are in ``among`` [l] int64, rising too: [m] bool."""
    if among.numel() == 0:
        return torch.zeros_like(some, dtype=torch.bool)
    place = torch.from_numpy(np.searchsorted(among.numpy(), some.numpy()))  # 3 times as fast as torch's
    return among.index_select(0, place.clamp(max=among.numel() - 1)) == some


def nonzero(mask: Tensor) -> Tensor:
    """Indices, rising, of the elements of ``mask`` [n] that are true: [m] int64."""
    return torch.from_numpy(np.flatnonzero(mask.numpy()))
