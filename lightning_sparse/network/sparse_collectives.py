"""Sums and exchanges of selected elements between ranks, in messages whose size data cannot change."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_sparse import selection
from lightning_sparse.network.comm import Comm, Rounds
from lightning_sparse.selection.sparse import Sparse
from lightning_sparse.wire import MessageLayout, Selection


def gather(own: Selection, layout: MessageLayout, comm: Comm, widths: Sequence[int] = ()) -> Rounds[list[Selection]]:
    """What each rank selected, in their order.  Values in ``own`` keep the rounding errors.

    Each selected from a vector of ``widths`` [P] elements, or of layout.n.
    """
    on = selection.on(own.index)
    message = comm.buffer("message", layout.nbytes, torch.uint8, own.index.device)
    return on.unpack(layout, (yield comm.all_gather(on.pack(layout, own, message))), widths)


def broadcast(
    own: Selection | None, sources: Sequence[int], layout: MessageLayout, comm: Comm, device: torch.device
) -> Rounds[list[Selection]]:
    """What each of the ranks ``sources`` selected, in their order; ``own``, without values, where this is one of them.

    All are sent at once.
    """
    flights, arrived = [], []
    on = selection.on(torch.empty(0, device=device))
    for source in sources:
        message = comm.buffer("mask", layout.nbytes, torch.uint8, device)
        if own is not None and source == comm.rank:
            on.pack(layout, own, message)
        flights.append(comm.broadcast(message, source))
    for flight in flights:
        arrived.append((yield flight))
    return on.unpack(layout, torch.stack(arrived))


def reduce_scatter(
    parts: Sequence[Selection], layout: MessageLayout, width: int, comm: Comm
) -> Rounds[tuple[Tensor | Sparse, list[Selection]]]:
    """The sum over all ranks of their ``parts[r]``, on rank r, and what the others sent for it.

    ``parts`` [P] are what this rank contributes to each region; indices count from its start, values keep the rounding
    errors.  This rank's region has ``width`` elements, the widest layout.n.
    """
    own, on = parts[comm.rank], selection.on(parts[0].index)
    rows = [
        comm.buffer(name, comm.size * layout.nbytes, torch.uint8, own.values.device).view(comm.size, -1)
        for name in ("leaving", "arriving")
    ]
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    for rank in others:
        on.pack(layout, parts[rank], rows[0][rank])
    arriving = yield comm.all_to_all(rows[0], out=rows[1])
    arrived = [on.unpack(layout, arriving[rank : rank + 1], [width])[0] for rank in others]
    kept = replace(own, values=own.values.clone())
    own.values.zero_()
    return on.add_up([kept, *arrived], max(1, width))[0], arrived  # of an empty region an element that is zero
