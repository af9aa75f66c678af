"""Sums over a ring of ranks, segment by segment, with what the wire's rounding left kept by the rank that rounded."""

import torch
from torch import Tensor

from lightning_sparse import wire
from lightning_sparse.comm import Comm, Rounds

SEGMENT_BYTES = 512 * 1024  # a slice travels in segments, so that one is on the wire while another is being added


def sum_values(values: Tensor, comm: Comm) -> Rounds:
    """The sum of ``values`` [n] over all ranks, [n] float32.  What rounding for the wire left stays in ``values``."""
    if comm.wire_dtype == torch.float32:
        total = comm.buffer(values.numel(), torch.float32, values.device)
        wire.take(values, out=total)
        return (yield comm.all_reduce(total))
    return (yield from ring_sum(values, comm))


def ring_sum(values: Tensor, comm: Comm, skip: int = 0, rotation: int = 0) -> Rounds:
    """The sum of ``values`` [n] over a ring whose first ``skip`` reduce-scatter steps are left out, [n] float32.

    The vector is cut into P slices.  With labels L = (rank + rotation) mod P, slice c starts at label c+1+skip, every
    rank it passes adds its own, and it ends at label c: it holds the sum of exactly P - skip ranks, and the ``skip``
    labels after c have not contributed.  Finished slices then go once around.  Each rank sends 2(P-1) - skip slices.
    What a rank has contributed is taken out of its ``values``; the rounding error of a partial sum stays with the
    rank that rounded it, so the sums on all ranks are the same bits and nothing is lost.
    """
    size = comm.size
    if size == 1:
        total = values.clone()
        values.zero_()
        return total
    slices = _Slices(values, comm)
    segments = slices.segments()
    label = (comm.rank + rotation) % size
    # The slices that arrive here, in order, and what is done with each segment of them.
    arrivals = [((label - j) % size, slices.add) for j in range(skip + 2, size + 1)]
    arrivals += [((label - j) % size, slices.keep) for j in range(1, size)]
    leaving = (label - 1 - skip) % size

    flights = []
    for segment in segments:
        slices.start(leaving, segment)
        flights.append(comm.shift(slices.wire[leaving, segment], out=slices.wire[arrivals[0][0], segment]))
    for (c, receive), following in zip(arrivals, [*arrivals[1:], None], strict=True):
        for i, segment in enumerate(segments):
            yield flights[i]
            receive(c, segment)
            if following is not None:
                flights[i] = comm.shift(slices.wire[c, segment], out=slices.wire[following[0], segment])
    for segment in segments:
        slices.keep(label, segment)
    return slices.total


class _Slices:
    """A vector cut into P slices of equal width, and those slices on their way around the ring."""

    def __init__(self, values: Tensor, comm: Comm) -> None:
        n = values.numel()
        self.values = values  # [n], this rank's own; gets back what rounding left
        self.width = -(-n // comm.size)  # elements of a slice; the last ones are padded with zeros
        flat = comm.buffer(comm.size * self.width, comm.wire_dtype, values.device)
        flat[n:] = 0
        self.wire = flat.view(comm.size, self.width)  # [P, width], as they travel
        self._exact = flat.dtype == torch.float32
        self.total = flat[:n] if self._exact else comm.buffer(n, torch.float32, values.device)  # [n]

    def segments(self) -> list[slice]:
        step = max(1, SEGMENT_BYTES // self.wire.element_size())
        return [slice(start, min(start + step, self.width)) for start in range(0, self.width, step)]

    def start(self, c: int, segment: slice) -> None:
        """Put this rank's own into slice ``c``."""
        own = self._place(self.values, c, segment)
        wire.take(own, out=self.wire[c, segment][: own.numel()])

    def add(self, c: int, segment: slice) -> None:
        """Add this rank's own to slice ``c``, which has arrived."""
        own = self._place(self.values, c, segment)
        own.add_(self.wire[c, segment][: own.numel()])
        wire.take(own, out=self.wire[c, segment][: own.numel()])

    def keep(self, c: int, segment: slice) -> None:
        """Slice ``c`` is complete."""
        if not self._exact:
            place = self._place(self.total, c, segment)
            place.copy_(self.wire[c, segment][: place.numel()])

    def _place(self, flat: Tensor, c: int, segment: slice) -> Tensor:
        start = c * self.width
        return flat[start + segment.start : min(start + segment.stop, flat.numel())]
