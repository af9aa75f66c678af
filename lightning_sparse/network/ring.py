"""Sums over a ring of ranks, segment by segment; rounding errors stay with the rank that rounded."""

from dataclasses import replace

import torch
from torch import Tensor

from lightning_sparse import kernels, selection
from lightning_sparse.network.comm import Comm, Rounds
from lightning_sparse.network.two_hops import SEGMENT_BYTES, two_hop_sum
from lightning_sparse.wire import BLOCK, Selection


def sum_values(values: Tensor, comm: Comm) -> Rounds[Tensor]:
    """The sum of ``values`` [n] over all ranks, [n] float32.  Rounding errors stay in ``values``."""
    if comm.wire_dtype.lossless:
        total = comm.buffer("total", values.numel(), torch.float32, values.device)
        comm.wire_dtype.take(values, total.view(torch.uint8))
        return (yield comm.all_reduce(total))
    return (yield from two_hop_sum(values, comm))


def sum_at(index: Tensor, values: Tensor, capacity: int, comm: Comm) -> Rounds[Tensor]:
    """The sum over all ranks of ``values`` [n] at ``index`` [m], the same on every rank: [m] float32.

    As many values travel as ``capacity`` says, so that the message's size does not depend on data.  What was sent is
    taken out of ``values``; rounding errors stay.
    """
    m = index.numel()
    chosen = comm.buffer("chosen", capacity, torch.float32, values.device)
    torch.index_select(values, 0, index, out=chosen[:m])
    chosen[m:] = 0
    if comm.wire_dtype.lossless:  # nothing will be left, so zeros are put there while they are in the cache
        values.index_fill_(0, index, 0)
        return (yield comm.all_reduce(chosen))[:m]
    total = yield from two_hop_sum(chosen, comm)
    values.index_copy_(0, index, chosen[:m])
    return total[:m]


def sum_selected(chosen: Selection, values: Tensor, room: int, comm: Comm) -> Rounds:
    """The sum over all ranks of ``values`` [n] at the elements of ``chosen``: a total for ``reduce``.

    On the host at least ``room`` values travel; on a device as many as the selection is filled up to.  What was sent is
    taken out of ``values``; rounding errors stay.
    """
    index, on = chosen.index, selection.on(values)
    if kernels.used_for(values):
        chosen = on.with_values(chosen, values)
        sums = yield from sum_values(chosen.values, comm)
        on.put(chosen, values)
    else:
        sums = yield from sum_at(index, values, max(room, index.numel()), comm)
    return on.total(replace(chosen, values=sums), values.numel())


def ring_sum(values: Tensor, comm: Comm, skip: int = 0, rotation: int = 0) -> Rounds[Tensor]:
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
    segments = range(slices.segments)
    label = (comm.rank + rotation) % size
    # The slices that arrive here, in order, and what is done with each segment of them.
    arrivals = [((label - j) % size, slices.add) for j in range(skip + 2, size + 1)]
    arrivals += [((label - j) % size, slices.keep) for j in range(1, size)]
    leaving = (label - 1 - skip) % size

    flights = []
    for i in segments:
        slices.start(leaving, i)
        flights.append(comm.shift(slices.wire[leaving][i], out=slices.wire[arrivals[0][0]][i]))
    for (c, receive), following in zip(arrivals, [*arrivals[1:], None], strict=True):
        for i in segments:
            yield flights[i]
            receive(c, i)
            if following is not None:
                flights[i] = comm.shift(slices.wire[c][i], out=slices.wire[following[0]][i])
    for i in segments:
        slices.keep(label, i)
    return slices.total


class _Slices:
    """A vector cut into P slices of equal width, those into segments, and these on their way around the ring as bytes.

    Each segment is encoded by itself.  Where the last slices reach beyond the vector, they are padded with zero bytes.
    """

    def __init__(self, values: Tensor, comm: Comm) -> None:
        n = values.numel()
        self.values = values  # [n], this rank's own; gets back the rounding errors
        self.format = comm.wire_dtype
        self.width = -(-n // comm.size)  # elements of a slice
        # Elements of a segment, but for the last: whole blocks, so that none straddles two segments.
        self.step = BLOCK * max(1, SEGMENT_BYTES // self.format.nbytes(BLOCK))
        self.segments = -(-self.width // self.step)  # of a slice
        size = self.format.nbytes(self.width)
        row = -(-size // 4)  # in units of 4 bytes, so that each slice is aligned
        flat = comm.buffer("slices", comm.size * row, torch.float32, values.device)
        rows = flat.view(comm.size, row).view(torch.uint8)[:, :size]  # [P, bytes]
        self.wire = [each.split(self.format.nbytes(self.step)) for each in rows]  # [P][segments] of [bytes]
        self.total = flat[:n] if self.format.lossless else comm.buffer("total", n, torch.float32, values.device)  # [n]

    def start(self, c: int, i: int) -> None:
        """Put this rank's own into segment ``i`` of slice ``c``."""
        own = self._place(self.values, c, i)
        payload = self._payload(c, i, own)
        self.format.take(own, payload)
        self.wire[c][i][payload.numel() :] = 0

    def add(self, c: int, i: int) -> None:
        """Add this rank's own to segment ``i`` of slice ``c``, which has arrived."""
        own = self._place(self.values, c, i)
        payload = self._payload(c, i, own)
        self.format.add(payload, own)
        self.format.take(own, payload)

    def keep(self, c: int, i: int) -> None:
        """Segment ``i`` of slice ``c`` is complete."""
        if not self.format.lossless:
            place = self._place(self.total, c, i)
            self.format.read(self._payload(c, i, place), place)

    def _place(self, flat: Tensor, c: int, i: int) -> Tensor:
        """The elements of a segment, fewer than its width where ``flat`` [n] ends."""
        start = c * self.width + i * self.step
        return flat[start : min(start + self.step, (c + 1) * self.width)]

    def _payload(self, c: int, i: int, place: Tensor) -> Tensor:
        """The bytes of a segment that carry the elements of ``place``: all but the padding."""
        segment: Tensor = self.wire[c][i]
        return segment[: self.format.nbytes(place.numel())]
