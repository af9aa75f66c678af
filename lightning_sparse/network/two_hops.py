"""Sums in two hops: ranks send each owner its slice; owners add, round once, and send what they have to everybody."""

import torch
from torch import Tensor

from lightning_sparse.network.comm import Comm, Pending, Rounds
from lightning_sparse.wire import BLOCK
from lightning_sparse.wire.messages import whole_words

SEGMENT_BYTES = 512 * 1024  # a slice travels in segments, so that one is on the wire while another is being added


def two_hop_sum(values: Tensor, comm: Comm) -> Rounds[Tensor]:
    """The sum of ``values`` [n] over all ranks, [n] float32, the same on every rank.

    The vector is cut into P slices, and rank p owns slice p.  First each rank sends every owner its slice; the owner
    adds them in float32 and rounds the sum once; then finished slices go to everybody.  So two messages follow each
    other in place of the ring's 2(P-1), and a value is rounded twice in place of P times.  What a rank has sent is
    taken out of its ``values``; rounding errors stay with the rank that rounded, the owner's too.
    """
    if comm.size == 1:
        total = values.clone()
        values.zero_()
        return total
    slices = _Slices(values, comm)
    arriving = [slices.send(start) for start in slices.starts]
    finished = []
    for start, pending in zip(slices.starts, arriving, strict=True):
        finished.append(slices.finish(start, (yield pending)))
    total = comm.buffer("total", values.numel(), torch.float32, values.device)
    for start, pending in zip(slices.starts, finished, strict=True):
        slices.read(start, (yield pending), total)
    return total


class _Slices:
    """A vector [n] cut into P slices of equal width, those into segments; each segment is encoded by itself."""

    def __init__(self, values: Tensor, comm: Comm) -> None:
        self._values, self._comm, self._format = values, comm, comm.wire_dtype
        self._width = -(-values.numel() // comm.size)  # elements of a slice
        self._step = BLOCK * max(1, SEGMENT_BYTES // self._format.nbytes(BLOCK))  # of a segment: whole blocks
        self.starts = range(0, self._width, self._step)  # of the segments of a slice

    def send(self, start: int) -> Pending:
        """Send every owner its segment."""
        leaving = self._rows("leaving", start, self._comm.size)
        for owner, payload in enumerate(leaving):
            if owner != self._comm.rank:
                self._take(self._segment(self._values, owner, start), payload)
        return self._comm.all_to_all(leaving, out=self._rows("arriving", start, self._comm.size))

    def finish(self, start: int, payloads: Tensor) -> Pending:
        """Add what arrived, [P, bytes], to this rank's own segment, and send the sum to everybody."""
        own = self._segment(self._values, self._comm.rank, start)
        for other, payload in enumerate(payloads):
            if other != self._comm.rank:
                self._format.add(payload[: self._format.nbytes(own.numel())], own)
        leaving = self._rows("finished", start, 1)
        self._take(own, leaving[0])
        gathered = self._rows("gathered", start, self._comm.size)
        return self._comm.all_to_all(leaving.expand(self._comm.size, -1), out=gathered)

    def read(self, start: int, payloads: Tensor, total: Tensor) -> None:
        """Set a segment of each slice of ``total`` [n] to what its owner sent, [P, bytes]."""
        for owner, payload in enumerate(payloads):
            place = self._segment(total, owner, start)
            self._format.read(payload[: self._format.nbytes(place.numel())], place)

    def _segment(self, flat: Tensor, owner: int, start: int) -> Tensor:
        """A segment of a slice of ``flat`` [n]; shorter, or empty, where ``flat`` ends."""
        first, end = owner * self._width + start, (owner + 1) * self._width
        return flat[min(first, flat.numel()) : min(first + self._step, end, flat.numel())]

    def _rows(self, name: str, start: int, count: int) -> Tensor:
        """Room for a segment from or for each of ``count`` ranks, [count, bytes]."""
        nbytes = whole_words(self._format.nbytes(min(self._step, self._width - start)))
        return self._comm.buffer(name, count * nbytes, torch.uint8, self._values.device).view(count, nbytes)

    def _take(self, values: Tensor, payload: Tensor) -> None:
        """Move ``values`` [m] into the first bytes of ``payload``, and zeros into the others."""
        used = self._format.nbytes(values.numel())
        self._format.take(values, payload[:used])
        payload[used:] = 0
