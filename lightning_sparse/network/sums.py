"""Sums over all ranks, in as few hops as pay, and exchanges of selected elements: the sizes of messages are not data's.

Rounding errors stay with the rank that rounded.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_sparse import kernels, selection
from lightning_sparse.kernels.blocks import SliceSegment
from lightning_sparse.network.comm import Comm, Pending, Rounds
from lightning_sparse.network.costs import DEVICE_SEGMENT_BYTES, SEGMENT_BYTES
from lightning_sparse.selection.sparse import Sparse
from lightning_sparse.wire import BLOCK, MessageLayout, Selection


def sum_values(values: Tensor, comm: Comm) -> Rounds[Tensor]:
    """The sum of ``values`` [n] over all ranks, [n] float32, the same bits on every rank.

    What was sent is taken out of ``values``; rounding errors stay.  Of three ways the soonest is taken
    (``Costs.way_of``): all to all in one hop, in two hops, or float32 as the backend does it.
    """
    if comm.size == 1:
        return _alone(values)
    lossless = comm.wire_dtype.lossless
    way = comm.costs.way_of(comm.wire_dtype.nbytes(values.numel()), lossless)
    if way == "two_hops":
        return (yield from two_hop_sum(values, comm))
    if not lossless:
        return (yield from one_hop_sum(values, comm))
    total = comm.buffer("total", values.numel(), torch.float32, values.device)
    comm.wire_dtype.take(values, total.view(torch.uint8))
    return (yield comm.all_reduce(total))


def sum_at(index: Tensor, values: Tensor, capacity: int, comm: Comm) -> Rounds[Tensor]:
    """The sum over all ranks of ``values`` [n] at ``index`` [m], the same on every rank: [m] float32.

    As many values are sent as ``capacity`` says, so that the message's size does not depend on data.  What was sent is
    taken out of ``values``; rounding errors stay.
    """
    m = index.numel()
    chosen = comm.buffer("chosen", capacity, torch.float32, values.device)
    torch.index_select(values, 0, index, out=chosen[:m])
    chosen[m:] = 0
    total = yield from sum_values(chosen, comm)
    values.index_copy_(0, index, chosen[:m])
    return total[:m]


def sum_selected(chosen: Selection, values: Tensor, room: int, comm: Comm) -> Rounds:
    """The sum over all ranks of ``values`` [n] at the elements of ``chosen``: a total for ``reduce``.

    On the host at least ``room`` values are sent; on a device as many as the selection is filled up to.  What was sent
    is taken out of ``values``; rounding errors stay.
    """
    index, on = chosen.index, selection.on(values)
    if kernels.used_for(values):
        chosen = on.with_values(chosen, values)
        sums = yield from sum_values(chosen.values, comm)
        on.put(chosen, values)
    else:
        sums = yield from sum_at(index, values, max(room, index.numel()), comm)
    return on.total(replace(chosen, values=sums), values.numel())


def one_hop_sum(values: Tensor, comm: Comm) -> Rounds[Tensor]:
    """The sum of ``values`` [n] over all ranks, [n] float32: each rank sends everybody all, and adds what it gets."""
    used = comm.wire_dtype.nbytes(values.numel())
    spare = -used % 4 if kernels.used_for(values) else 0  # a device reads the scales of all rows where they lie
    payload = comm.buffer("leaving", used + spare, torch.uint8, values.device)
    comm.wire_dtype.take(values, payload[:used])
    if spare:
        payload[used:] = 0
    total = comm.buffer("total", values.numel(), torch.float32, values.device)
    rows = comm.buffer("arriving", comm.size * payload.numel(), torch.uint8, values.device).view(comm.size, -1)
    payloads = yield comm.all_gather(payload, out=rows)
    comm.wire_dtype.add_rows(payloads, total, 0, 1, comm.size, onto=False)
    return total


def two_hop_sum(values: Tensor, comm: Comm, skip: int = 0, rotation: int = 0) -> Rounds[Tensor]:
    """The sum of ``values`` [n] in two hops, of which the first leaves ``skip`` ranks out of every slice, [n] float32.

    The vector is cut into P slices.  With labels L = (rank + rotation) mod P, the rank with label c owns slice c.
    First each rank sends the owners its own of their slices, but for the ``skip`` labels before its own; the owner adds
    what arrives in float32 and rounds the sum once; then finished slices go to everybody.  So a rank sends
    2(P-1) - skip slices, as in a ring whose first ``skip`` steps are left out, but two messages follow each other in
    place of 2(P-1) - skip, and a value is rounded twice in place of P times.  What a rank has contributed is taken out
    of its ``values``; rounding errors stay with the rank that rounded, the owner's too.
    """
    if comm.size == 1:
        return _alone(values)
    slices = _Slices(values, comm, skip, rotation)
    arriving = [slices.send(start) for start in slices.starts if slices.by]
    finished = []
    for i, start in enumerate(slices.starts):
        if slices.by:
            slices.add(start, (yield arriving[i]))
        finished.append(slices.finish(start))
    total = comm.buffer("total", values.numel(), torch.float32, values.device)
    for start, pending in zip(slices.starts, finished, strict=True):
        slices.read(start, (yield pending), total)
    return total


def _alone(values: Tensor) -> Tensor:
    total = values.clone()
    values.zero_()
    return total


class _Slices:
    """A vector [n] cut into P slices of equal width, those into segments; each segment is encoded by itself."""

    def __init__(self, values: Tensor, comm: Comm, skip: int, rotation: int) -> None:
        self._values, self._comm, self._format, self._rotation = values, comm, comm.wire_dtype, rotation
        self._width = -(-values.numel() // comm.size)  # elements of a slice
        segment_bytes = SEGMENT_BYTES if values.device.type == "cpu" else DEVICE_SEGMENT_BYTES
        self._step = BLOCK * max(1, segment_bytes // self._format.nbytes(BLOCK))  # of a segment: whole blocks
        self.starts = range(0, self._width, self._step)  # of the segments of a slice
        self.by = range(1, comm.size - skip)  # how far on the owners are to whom this rank contributes

    def send(self, start: int) -> Pending:
        """Send the owners their segment."""
        comm, leaving = self._comm, self._rows("leaving", start, self._comm.size)
        self._format.take_rows(self._values, leaving, self._cut(start), (comm.rank + 1) % comm.size, len(self.by))
        return comm.all_to_all(leaving, out=self._rows("arriving", start, comm.size), by=self.by)

    def add(self, start: int, payloads: Tensor) -> None:
        """Add what arrived, [P, bytes], to this rank's own segment."""
        own = self._cut(start).of(self._values, self._comm.rank)
        self._format.add_rows(payloads, own, self._comm.rank - 1, -1, len(self.by))

    def finish(self, start: int) -> Pending:
        leaving, own = self._rows("finished", start, 1)[0], self._cut(start).of(self._values, self._comm.rank)
        used = self._format.nbytes(own.numel())
        self._format.take(own, leaving[:used])
        if used < leaving.numel():
            leaving[used:] = 0
        return self._comm.all_gather(leaving, out=self._rows("gathered", start, self._comm.size))

    def read(self, start: int, payloads: Tensor, total: Tensor) -> None:
        """Set a segment of each slice of ``total`` [n] to what its owner sent, [P, bytes]."""
        self._format.read_rows(payloads, total, self._cut(start))

    def _cut(self, start: int) -> SliceSegment:
        """The segment of each slice that begins at ``start``."""
        return SliceSegment(self._comm.size, self._width, start, min(self._step, self._width - start), self._rotation)

    def _rows(self, name: str, start: int, count: int) -> Tensor:
        """Room for a segment from or for each of ``count`` ranks, [count, bytes]."""
        words = -(-self._format.nbytes(min(self._step, self._width - start)) // 4)  # of 4 bytes, as scales are read
        return self._comm.buffer(name, count * 4 * words, torch.uint8, self._values.device).view(count, -1)


# - exchanges of selected elements


def gather(
    own: Selection, layout: MessageLayout, comm: Comm, n: int, edges: Tensor | None = None, first: int = 0
) -> Rounds[Selection]:
    """What each rank selected, in their order from rank ``first`` on.  Values in ``own`` keep the rounding errors.

    Each selected from a vector of ``n`` elements, or from one of its parts, which lie between ``edges`` [P + 1]: then
    indices in ``own`` count from where the part begins, and in the result from where the vector does.
    """
    on = selection.on(own.index)
    message = comm.buffer("message", layout.nbytes, torch.uint8, own.index.device)
    payloads = yield comm.all_gather(on.pack(layout, own, message))
    return on.unpack(layout, payloads.roll(-first, 0) if first else payloads, n, edges)


def broadcast(
    own: Selection | None, sources: Sequence[int], layout: MessageLayout, comm: Comm, device: torch.device
) -> Rounds[Selection]:
    """What each of the ranks ``sources`` selected, in their order; ``own``, without values, where this is one of them.

    All are sent at once.
    """
    flights, arrived = [], []
    on = selection.on(torch.empty(0, dtype=torch.float32, device=device))
    for source in sources:
        message = comm.buffer("mask", layout.nbytes, torch.uint8, device)
        if own is not None and source == comm.rank:
            on.pack(layout, own, message)
        flights.append(comm.broadcast(message, source))
    for flight in flights:
        arrived.append((yield flight))
    return on.unpack(layout, torch.stack(arrived), layout.n)


def reduce_scatter(
    parts: Selection, layout: MessageLayout, edges: Tensor, start: int, width: int, comm: Comm
) -> Rounds[tuple[Tensor | Sparse, Selection]]:
    """The sum over all ranks of what ``parts`` has in each region, on its rank, and what the others sent for it.

    ``parts`` are what this rank contributes to the P regions between ``edges`` [P + 1]; values keep rounding errors.
    This rank's region begins at ``start`` and has ``width`` elements; the widest has layout.n.
    """
    on, rank = selection.on(parts.index), comm.rank
    leaving, arriving = (
        comm.buffer(name, comm.size * layout.nbytes, torch.uint8, parts.values.device).view(comm.size, -1)
        for name in ("leaving", "arriving")
    )
    on.pack(layout, parts, leaving, edges, but=rank)
    arriving = yield comm.all_to_all(leaving, out=arriving)
    arrived = on.unpack(layout, torch.cat([arriving[:rank], arriving[rank + 1 :]]), width)
    own = on.part(parts, rank)
    total, _ = on.add_up(on.led_by(own, start, arrived), max(1, width))  # of an empty region an element that is zero
    own.values.zero_()
    return total, arrived
