"""Selecting on a device, which nobody waits for: what has no fixed length is filled up; see :class:`selection.Backend`.

Values fill the room there is, zeros after those that were selected.  So but for int8, whose scales come first, messages
have the bytes of :meth:`MessageLayout.pack` with block16 indices, which a device codes by itself.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_sparse import kernels, wire
from lightning_sparse.selection import padded
from lightning_sparse.selection.estimate import not_nan, room, sampled_threshold
from lightning_sparse.wire import MessageLayout, Selection, index_format
from lightning_sparse.wire.messages import MOST

SOUGHT = 1.25  # times k elements are meant to reach the threshold of `select_k`, of which the k largest go


def layout(n: int, capacity: int, indices: str, dtype: torch.dtype | None = None) -> MessageLayout:
    """Messages of at most ``capacity`` of ``n`` elements, whose indices travel as block16."""
    del indices
    return MessageLayout(n, capacity, index_format("block16", n, capacity), dtype)


def select(x: Tensor, threshold: float | Tensor, capacity: int) -> Selection:
    """The elements of ``x`` [n] that reach ``threshold``, the ``capacity`` largest if there are more."""
    limit = not_nan(threshold) if isinstance(threshold, Tensor) else x.new_full((), threshold)
    return kernels.largest_first(x, limit, capacity)


def select_k(x: Tensor, k: int) -> Selection:
    """The ``k`` largest elements of ``x`` [n], or fewer, of those that reach a sampled threshold; with their values."""
    return with_values(select(x, sampled_threshold(x, min(x.numel(), room(k, SOUGHT))), k), x)


def with_values(selection: Selection, x: Tensor) -> Selection:
    """``selection`` of ``x`` [n], with the values there."""
    return replace(selection, values=padded.take(x, selection.index))


def put(selection: Selection, into: Tensor) -> None:
    """Set the selected elements of ``into`` [n] to the values of ``selection``."""
    padded.put(selection.index, selection.values, into)


def add(selection: Selection, into: Tensor) -> None:
    """Add the values of ``selection`` to the selected elements of ``into`` [n]."""
    padded.put(selection.index, padded.take(into, selection.index) + selection.values, into)


def pack(layout: MessageLayout, selection: Selection, out: Tensor) -> Tensor:
    """Write a message to ``out``, which is returned; the selection's values keep the rounding errors."""
    header, value_part, index_part = layout.parts(out)
    counts = torch.stack([selection.count, selection.seen, selection.near, torch.zeros_like(selection.count)])
    header.view(torch.int32).copy_(counts.clamp(max=MOST))
    if layout.dtype is not None:
        used = wire.nbytes(layout.capacity, layout.dtype)
        wire.take(selection.values, value_part[:used], layout.dtype)
        value_part[used:] = 0
    kernels.encode_indices(selection.index, selection.count, layout.n, index_part[: layout.index_bytes])
    index_part[layout.index_bytes :] = 0
    return out


def unpack(layout: MessageLayout, payloads: Tensor, widths: Sequence[int] = ()) -> list[Selection]:
    """Read messages; ``intact`` says where one is damaged, whose indices are in [0, n] all the same."""
    headers, value_part, index_part = layout.parts(payloads)
    selections = []
    for p, (count, seen, near, _) in enumerate(headers.contiguous().view(torch.int32)):
        index, intact = kernels.decode_indices(index_part[p, : layout.index_bytes], layout.n, layout.capacity, count)
        if widths:
            intact = intact & ~((index >= widths[p]) & (index < layout.n)).any()
        intact = intact & (seen >= 0) & (near >= 0)
        values = torch.empty(layout.capacity if layout.dtype else 0, dtype=torch.float32, device=index.device)
        if layout.dtype is not None:
            wire.read(value_part[p, : wire.nbytes(layout.capacity, layout.dtype)], values, layout.dtype)
            values = torch.where(index < layout.n, values, 0.0)
        selections.append(Selection(index, values, seen, near, count, intact.to(torch.int32)))
    return selections


def moved(selection: Selection, start: int, stop: int, n: int) -> Selection:
    """``selection`` of the part [``start``, ``stop``) as one of the whole."""
    return replace(selection, index=padded.moved(selection.index, start, stop, n))


def join(parts: Sequence[Selection], edges: Sequence[int]) -> Selection:
    """One selection of selections of consecutive parts, filled up in between."""
    index = padded.joined([part.index for part in parts], edges)
    values, seen = torch.cat([part.values for part in parts]), torch.stack([part.seen for part in parts]).sum()
    return replace(_counted(index, edges[-1]), values=values, seen=seen)


def compact(selection: Selection, most: int) -> Selection:
    """The first ``most`` elements of ``selection``, without values, and then what it is filled up with."""
    return replace(selection, index=selection.index.sort().values[:most], count=selection.count.clamp(max=most))


def among(selection: Selection, index: Tensor, n: int) -> Selection:
    """What of ``selection`` is in ``index`` too."""
    reached = torch.zeros(n + 1, dtype=torch.bool, device=index.device).index_fill_(0, index, True)
    both = reached.index_select(0, selection.index) & (selection.index < n)
    return replace(selection, index=torch.where(both, selection.index, n))


def unite(selections: Sequence[Selection], n: int) -> Selection:
    """The elements that are in any of ``selections``, without values."""
    first, *others = [selection.index for selection in selections]
    return _counted(padded.distinct(torch.cat([first, *others]), n) if others else first, n)


def total(selection: Selection, n: int) -> Tensor:
    """The vector that is zero but for what is selected, in full."""
    return selection.values.new_zeros(n + 1).index_copy_(0, selection.index, selection.values)[:n]


def add_up(selections: Sequence[Selection], n: int) -> tuple[Tensor, Tensor]:
    """The sum of what is selected, added in the order given, [n], and how many elements of it were selected, []."""
    summed = selections[0].values.new_zeros(n + 1)
    touched = torch.zeros_like(summed, dtype=torch.bool)
    for selection in selections:
        summed.index_add_(0, selection.index, selection.values)
        touched.index_fill_(0, selection.index, True)
    return summed[:n], touched[:n].sum()


def _counted(index: Tensor, n: int) -> Selection:
    """A selection of the elements of ``index`` below ``n``, without values."""
    found = (index < n).sum()
    return Selection(index, seen=found, near=torch.zeros_like(found), count=found)
