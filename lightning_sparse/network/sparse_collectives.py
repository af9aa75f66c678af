"""Sums and exchanges of selected elements between ranks, in messages whose size data cannot change."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_sparse import selection
from lightning_sparse.network.comm import Comm, Pending, Rounds
from lightning_sparse.selection import partition
from lightning_sparse.selection.sparse import Sparse
from lightning_sparse.wire import CAUSE, CorruptMessage, MessageLayout, Selection


def reduce_scatter(
    parts: Sequence[Selection], layout: MessageLayout, width: int, comm: Comm
) -> Rounds[tuple[Tensor | Sparse, list[Selection]]]:
    """The sum over all ranks of their ``parts[r]``, on rank r, and the messages it came from.

    Destinations rotate, so that no rank is sent to by all others at once: in round j this rank sends to the rank j
    further on and receives from as far back.

    Args:
        parts: [P], what this rank contributes to each region; indices count from its start.  Values keep the rounding
            errors.
        layout: of the messages; n is the widest region.
        width: elements of this rank's region.
        comm: the ranks.
    """
    own, on = parts[comm.rank], selection.on(parts[0].values)
    flights = [_send(parts[(comm.rank + j) % comm.size], layout, comm, j) for j in range(1, comm.size)]
    arrived = [replace(own, values=own.values.clone())]
    own.values.zero_()
    for flight in flights:
        arrived += on.unpack(layout, (yield flight).unsqueeze(0), [width])
    return on.add_up(arrived, layout.n)[0], arrived[1:]


def even_out(own: Sparse, counts: Sequence[int], layout: MessageLayout, comm: Comm) -> Rounds[Sparse]:
    """Hand elements on until all ranks hold as many, differing by at most one; their order over the ranks is kept.

    Args:
        own: what this rank holds.  Values handed on keep the rounding errors; the others become zero.
        counts: [P], elements each rank holds.
        layout: of a message but for its capacity, which is what the fullest one needs: all ranks know the counts.
        comm: the ranks.
    """
    rank, size = comm.rank, comm.size
    starts = [sum(counts[:r]) for r in range(size + 1)]
    blocks = partition.even(starts[-1], size).tolist()

    def share(source: int, to: int) -> range:  # of what rank `source` holds, what belongs to rank `to`
        start = max(starts[source], blocks[to]) - starts[source]
        return range(start, max(start, min(starts[source + 1], blocks[to + 1]) - starts[source]))

    parts = [own[share(rank, to).start : share(rank, to).stop] for to in range(size)]
    pieces, flights = {rank: parts[rank].moved_out()}, {}
    for j in range(1, size):
        most = max(len(share(r, (r + j) % size)) for r in range(size))
        if most:
            part, message = parts[(rank + j) % size], layout.with_capacity(most)
            flights[(rank - j) % size] = message, _send(Selection(part.index, part.values), message, comm, j)
    for source, (message, flight) in flights.items():
        piece, expected = message.unpack((yield flight)), len(share(source, rank))
        if piece.count != expected:
            raise CorruptMessage(f"{piece.count} elements of rank {source} arrived, {expected} expected: {CAUSE}")
        pieces[source] = Sparse(piece.index, piece.values)
    ordered = [pieces[source] for source in sorted(pieces)]
    return Sparse(torch.cat([p.index for p in ordered]), torch.cat([p.values for p in ordered]))


def _send(part: Selection, layout: MessageLayout, comm: Comm, by: int) -> Pending:
    """Send ``part`` to the rank ``by`` further on, and receive from as far back."""
    leaving, arriving = (
        comm.buffer(name, layout.nbytes, torch.uint8, part.values.device) for name in ("leaving", "arriving")
    )
    return comm.shift(selection.on(part.values).pack(layout, part, leaving), out=arriving, by=by)
