"""Sums and exchanges of sparse vectors between ranks, in messages whose size data cannot change."""

from collections.abc import Generator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from lightning_sparse.network.comm import Comm, Pending
from lightning_sparse.selection import partition
from lightning_sparse.selection.sparse import Sparse, add_up
from lightning_sparse.wire import PickLayout, Picks, joined

T = TypeVar("T")
Talk = Generator[Pending, Tensor, T]  # yields each message it waits for, returns a T


def reduce_scatter(parts: Sequence[Sparse], layout: PickLayout, width: int, comm: Comm) -> Talk[Sparse]:
    """The sum over all ranks of their ``parts[r]``, on rank r: indices count from the start of its region.

    Destinations rotate, so that no rank is sent to by all others at once: in round j this rank sends to the rank j
    further on and receives from as far back.

    Args:
        parts: [P], what this rank contributes to each region.  Values keep what rounding for the wire left.
        layout: of the messages; n is the widest region.
        width: elements of this rank's region.
        comm: the ranks.
    """
    device = parts[0].index.device
    flights = []
    for j in range(1, comm.size):
        part = parts[(comm.rank + j) % comm.size]
        leaving, arriving = (comm.buffer(layout.nbytes, torch.uint8, device) for _ in range(2))
        flights.append(comm.shift(layout.pack(Picks(part.index, part.values), leaving), out=arriving, by=j))
    own = parts[comm.rank]
    arrived = [own.moved_out()]
    for flight in flights:
        picks = layout.unpack((yield flight))
        arrived.append(Sparse(joined([picks], [0], width), picks.values))
    return add_up(arrived, layout.n)


def even_out(own: Sparse, counts: Sequence[int], layout: PickLayout, comm: Comm) -> Talk[Sparse]:
    """Hand elements on until all ranks hold as many, differing by at most one; their order over the ranks is kept.

    Args:
        own: what this rank holds.  Values handed on keep what rounding for the wire left; the others become zero.
        counts: [P], elements each rank holds.
        layout: of a message but for its capacity, which is what the fullest one needs: all ranks know the counts.
        comm: the ranks.
    """
    rank, size = comm.rank, comm.size
    starts = [sum(counts[:r]) for r in range(size + 1)]
    blocks = partition.even(starts[-1], size).tolist()

    def share(source: int, to: int) -> slice:  # of what rank `source` holds, what belongs to rank `to`
        start = max(starts[source], blocks[to])
        stop = min(starts[source + 1], blocks[to + 1])
        return slice(start - starts[source], max(start, stop) - starts[source])

    pieces = {rank: own[share(rank, rank)].moved_out()}
    flights = {}
    for j in range(1, size):
        most = max(_length(share(r, (r + j) % size)) for r in range(size))
        if most:
            message = layout.with_capacity(most)
            leaving, arriving = (comm.buffer(message.nbytes, torch.uint8, own.index.device) for _ in range(2))
            part = own[share(rank, (rank + j) % size)]
            message.pack(Picks(part.index, part.values), leaving)
            flights[(rank - j) % size] = message, comm.shift(leaving, out=arriving, by=j)
    for source, (message, flight) in flights.items():
        picks = message.unpack((yield flight))
        pieces[source] = Sparse(picks.index, picks.values)
    ordered = [pieces[source] for source in sorted(pieces)]
    return Sparse(torch.cat([p.index for p in ordered]), torch.cat([p.values for p in ordered]))


def _length(part: slice) -> int:
    return int(part.stop - part.start)
