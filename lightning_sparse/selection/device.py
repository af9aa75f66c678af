"""Selecting on a device, which nobody waits for: the functions of :mod:`~lightning_sparse.selection.host`, padded.

Indices have as many elements as there is room for: those that were selected, and n in place of the others, whose values
are zero.  So but for values with scales, which come first, messages have the bytes of :meth:`MessageLayout.pack` with
block16 indices, which a device codes by itself.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from lightning_sparse import kernels
from lightning_sparse.selection.threshold import NEAR, not_nan, room, sampled_threshold
from lightning_sparse.wire import MessageLayout, Selection, ValueFormat, index_format
from lightning_sparse.wire.messages import MOST

AMONG = 4096  # found elements at least among which the largest are sought
SOUGHT = 1.25  # times k elements are meant to reach the threshold of `select_k`, of which the k largest go


def layout(n: int, capacity: int, indices: str, values: ValueFormat | None = None) -> MessageLayout:
    """Messages of at most ``capacity`` of ``n`` elements, whatever ``indices`` says."""
    return MessageLayout(n, capacity, index_format("block16", n, capacity), values)


def select(x: Tensor, threshold: float | Tensor, capacity: int) -> Selection:
    """The elements of ``x`` [n] that reach ``threshold``, or the ``capacity`` largest where there are more.

    They are the largest of all, unless more than twice ``capacity`` (and more than ``AMONG``) were found.  Of a tensor
    with NaN only what is not finite.
    """
    n = x.numel()
    limit = not_nan(threshold) if isinstance(threshold, Tensor) else x.new_full((), threshold)
    found = kernels.select(x, limit, min(n, max(2 * capacity, AMONG)), NEAR)
    if n <= capacity:
        index = torch.cat([found.index, found.index.new_full((capacity - n,), n)])
    else:
        meant = torch.arange(found.index.numel(), device=x.device) < found.count
        magnitudes = x.index_select(0, found.index.clamp(max=n - 1)).abs()
        kept = torch.where(meant, magnitudes, -1.0).topk(capacity, sorted=False).indices.sort().values
        index = found.index.index_select(0, kept)
    return Selection(index, seen=found.seen, near=found.near, count=found.seen.clamp(max=capacity))


def select_k(x: Tensor, k: int) -> Selection:
    """The ``k`` largest elements of ``x`` [n], or fewer, of those that reach a sampled threshold; with their values."""
    return with_values(select(x, sampled_threshold(x, min(x.numel(), room(k, SOUGHT))), k), x)


def with_values(selection: Selection, x: Tensor) -> Selection:
    """``selection`` of ``x`` [n], with the values there."""
    index, n = selection.index, x.numel()
    return replace(selection, values=torch.where(index < n, x.index_select(0, index.clamp(max=n - 1)), 0.0))


def select_from(total: Tensor, threshold: float | Tensor, capacity: int) -> Selection:
    """The elements of a sum that reach ``threshold``, as :func:`select` says, with their values."""
    return with_values(select(total, threshold, capacity), total)


def put(selection: Selection, into: Tensor) -> None:
    """Set the selected elements of ``into`` [n] to the values of ``selection``.

    Every index is written to: those of no element write once more what one of the others gets, or what was there.
    """
    index, values = selection.index, selection.values
    meant = index < into.numel()
    other = meant.int().argmax(keepdim=True)  # [1], an element, if there is any
    place = torch.where(meant.any(), index.index_select(0, other), 0)
    value = torch.where(meant.any(), values.index_select(0, other), into[:1])
    into.index_copy_(0, torch.where(meant, index, place), torch.where(meant, values, value))


def add(selection: Selection, into: Tensor) -> None:
    """Add the values of ``selection`` to the selected elements of ``into`` [n]."""
    put(replace(selection, values=with_values(selection, into).values + selection.values), into)


def pack(layout: MessageLayout, selection: Selection, out: Tensor) -> Tensor:
    """Write a message to ``out`` [nbytes] uint8, which is returned; the selection's values keep the rounding errors."""
    header, value_part, index_part = layout.parts(out)
    load = selection.load + torch.zeros_like(selection.count)  # which may be a number
    counts = torch.stack([selection.count, selection.seen, selection.near, load])
    header.view(torch.int32).copy_(counts.clamp(max=MOST))
    if layout.values is not None:
        used = layout.values.nbytes(layout.capacity)
        layout.values.take(selection.values, value_part[:used])
        value_part[used:] = 0
    kernels.encode_indices(selection.index, selection.count, layout.n, index_part[: layout.index_bytes])
    index_part[layout.index_bytes :] = 0
    return out


def unpack(layout: MessageLayout, payloads: Tensor, widths: Sequence[int] = ()) -> list[Selection]:
    """Read messages of vectors of ``widths`` [P] elements, or layout.n, with which their indices are padded.

    ``intact`` says where one is damaged, whose indices are in this range all the same.
    """
    headers, value_part, index_part = layout.parts(payloads)
    selections = []
    for p, (count, seen, near, load) in enumerate(headers.contiguous().view(torch.int32)):
        index, intact = kernels.decode_indices(index_part[p, : layout.index_bytes], layout.n, layout.capacity, count)
        width = widths[p] if widths else layout.n
        intact = intact & ~((index >= width) & (index < layout.n)).any() & (seen >= 0) & (near >= 0) & (load >= 0)
        index = index.clamp(max=width)
        values = torch.empty(layout.capacity if layout.values else 0, dtype=torch.float32, device=index.device)
        if layout.values is not None:
            layout.values.read(value_part[p, : layout.values.nbytes(layout.capacity)], values)
            values = torch.where(index < width, values, 0.0)
        selections.append(Selection(index, values, seen, near, load, count, intact.to(torch.int32)))
    return selections


def moved(selection: Selection, start: int, stop: int, n: int) -> Selection:
    """``selection`` of the part [``start``, ``stop``) of [0, n) as one of the whole."""
    return replace(selection, index=torch.where(selection.index < stop - start, selection.index + start, n))


def join(parts: Sequence[Selection], edges: Sequence[int]) -> Selection:
    """One selection of selections of consecutive parts; padding lies in between."""
    spans = zip(parts, pairwise(edges), strict=True)
    index = torch.cat([moved(part, start, stop, edges[-1]).index for part, (start, stop) in spans])
    values, seen = torch.cat([part.values for part in parts]), torch.stack([part.seen for part in parts]).sum()
    return replace(_counted(index, edges[-1]), values=values, seen=seen)


def compact(selection: Selection, most: int) -> Selection:
    """The first ``most`` elements of ``selection``, without values, and then padding."""
    return replace(selection, index=selection.index.sort().values[:most], count=selection.count.clamp(max=most))


def among(selection: Selection, index: Tensor, n: int) -> Selection:
    """The part of ``selection`` of [0, n) that is in ``index`` too."""
    reached = torch.zeros(n + 1, dtype=torch.bool, device=index.device).index_fill_(0, index, True)
    both = reached.index_select(0, selection.index) & (selection.index < n)
    return replace(selection, index=torch.where(both, selection.index, n))


def unite(selections: Sequence[Selection], n: int) -> Selection:
    """The elements of [0, n) that are in any of ``selections``, without values."""
    index = selections[0].index
    if len(selections) > 1:
        ordered = torch.cat([selection.index for selection in selections]).sort().values
        again = ordered.diff(prepend=ordered.new_full((1,), -1)) == 0
        index = ordered.masked_fill(again, n)
    return _counted(index, n)


def total(selection: Selection, n: int) -> Tensor:
    """The vector [n] that is zero but for what is selected, in full."""
    return selection.values.new_zeros(n + 1).index_copy_(0, selection.index, selection.values)[:n]


def add_up(selections: Sequence[Selection], n: int) -> tuple[Tensor, Tensor]:
    """The sum of ``selections``, in full, added in their order, and how many elements are in any of them, []."""
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
