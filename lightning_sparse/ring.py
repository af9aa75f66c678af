"""Sums over a ring of ranks, segment by segment, with what the wire's rounding left kept by the rank that rounded."""

import torch
from torch import Tensor

from lightning_sparse import wire
from lightning_sparse.comm import Comm, Rounds

SEGMENT_BYTES = 512 * 1024  # a slice travels in segments, so that one is on the wire while another is being added


def sum_values(values: Tensor, comm: Comm) -> Rounds:
    """The sum of ``values`` [n] over all ranks, [n] float32.  What rounding for the wire left stays in ``values``."""
    if comm.wire_dtype == torch.float32:
        total = torch.empty_like(values)
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
    size, n = comm.size, values.numel()
    if size == 1:
        total = values.clone()
        values.zero_()
        return total
    width = -(-n // size)  # elements of a slice; the last ones are padded with zeros
    slices = values.new_empty((size, width), dtype=comm.wire_dtype)  # [P, width], as they travel
    slices.view(-1)[n:] = 0
    label = (comm.rank + rotation) % size
    step = max(1, SEGMENT_BYTES // slices.element_size())
    segments = [slice(start, min(start + step, width)) for start in range(0, width, step)]

    def contribute(c: int, segment: slice, first: bool = False) -> None:
        own = values[c * width + segment.start : min(c * width + segment.stop, n)]
        travelling = slices[c, segment][: own.numel()]
        if not first:
            own.add_(travelling)
        wire.take(own, out=travelling)

    # Slices in the order in which they arrive here, and whether they still want this rank's own.
    arrivals = [((label - j) % size, True) for j in range(skip + 2, size + 1)]
    arrivals += [((label - j) % size, False) for j in range(1, size)]

    leaving = (label - 1 - skip) % size
    flights = []
    for segment in segments:
        contribute(leaving, segment, first=True)
        flights.append(comm.shift(slices[leaving, segment], out=slices[arrivals[0][0], segment]))
    for (c, adds), following in zip(arrivals, [*arrivals[1:], None], strict=True):
        for i, segment in enumerate(segments):
            yield flights[i]
            if adds:
                contribute(c, segment)
            if following is not None:
                flights[i] = comm.shift(slices[c, segment], out=slices[following[0], segment])
    return slices.view(-1)[:n].float()
