"""Selecting on a device, which nobody waits for: the functions of :mod:`~lightning_sparse.selection.host`, padded.

Indices have as many elements as there is room for: those that were selected, and n in place of the others.  Those of
several parts or ranks are rows of one tensor, on all of which one kernel works.  But for values with scales, which come
first, messages have the bytes of :meth:`MessageLayout.pack` with block16 indices, which a device codes by itself.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from lightning_sparse import kernels
from lightning_sparse.kernels.blocks import SliceSegment
from lightning_sparse.selection.threshold import NEAR, room, sampled_threshold
from lightning_sparse.wire import MessageLayout, Selection, ValueFormat, index_format

AMONG = 4096  # found elements at least among which the largest are sought
SOUGHT = 1.25  # times k elements are meant to reach the threshold of `select_k`, of which the k largest go


def layout(n: int, capacity: int, indices: str, values: ValueFormat | None = None) -> MessageLayout:
    """Messages of at most ``capacity`` of ``n`` elements, whatever ``indices`` says."""
    return MessageLayout(n, capacity, index_format("block16", n, capacity), values)


def placed(edges: Tensor, x: Tensor) -> Tensor:
    """``edges`` [R + 1] of the host, where ``x`` is."""
    pinned = x.new_empty(edges.shape, dtype=edges.dtype, device="cpu", pin_memory=x.device.type == "cuda")
    return pinned.copy_(edges).to(x.device, non_blocking=True)


def select(x: Tensor, threshold: float | Tensor, capacity: int, edges: Tensor | None = None) -> Selection:
    """The elements of ``x`` [n] that reach ``threshold``, or the ``capacity`` largest where there are more.

    They are the largest of all, unless more than twice ``capacity`` (and more than ``AMONG``) were found.  Of a tensor
    with NaN only what is not finite.  ``edges`` [R + 1]: so many of each part.
    """
    n = x.numel()
    limit = threshold if isinstance(threshold, Tensor) else x.new_full((), threshold)
    found = kernels.select(x, limit, max(capacity, min(n, max(2 * capacity, AMONG))), NEAR, capacity, edges)
    index = found.index
    if index.shape[1] > capacity:
        largest = kernels.pick(index, x, magnitudes=True).topk(capacity, sorted=False).indices
        index = index.gather(1, largest.sort().values)
    selection = Selection(index, seen=found.seen, near=found.near, count=found.count)
    return part(selection, 0) if edges is None else selection


def select_k(x: Tensor, k: int) -> Selection:
    """The ``k`` largest elements of ``x`` [n], or fewer, of those that reach a sampled threshold; with their values."""
    return with_values(select(x, sampled_threshold(x, min(x.numel(), room(k, SOUGHT))), k), x)


def with_values(selection: Selection, x: Tensor) -> Selection:
    """``selection`` of ``x`` [n], with the values there; zero beside them."""
    return replace(selection, values=kernels.pick(selection.index, x))


def select_from(total: Tensor, threshold: float | Tensor, capacity: int) -> Selection:
    """The elements of a sum that reach ``threshold``, as :func:`select` says, with their values."""
    return with_values(select(total, threshold, capacity), total)


def part(selection: Selection, row: int) -> Selection:
    """Of selections of several parts or ranks one, whose tensors are views of theirs."""
    values = selection.values[row] if selection.values.numel() else selection.values
    counts = {name: getattr(selection, name) for name in ("seen", "near", "load", "count", "intact")}
    return Selection(
        selection.index[row], values, **{k: x[row] if isinstance(x, Tensor) else x for k, x in counts.items()}
    )


def put(selection: Selection, into: Tensor) -> None:
    """Set the selected elements of ``into`` [n] to the values of ``selection``."""
    kernels.put(selection.index, selection.values, into)


def add(selection: Selection, into: Tensor) -> None:
    """Add the values of ``selection`` to the selected elements of ``into`` [n]."""
    kernels.put(selection.index, selection.values, into, onto=True)


def pack(
    layout: MessageLayout, selection: Selection, out: Tensor, edges: Tensor | None = None, but: int | None = None
) -> Tensor:
    """Write a message, or one of each of R parts, to ``out`` [R * nbytes] uint8, which is returned.

    The selection's values keep the rounding errors.  ``edges`` [R + 1] lie between the parts, whose indices are written
    as they count from where a part begins.  Of the part ``but`` values stay as they are, and none are written.
    """
    header, value_part, index_part = layout.parts(out.view(-1, layout.nbytes))
    index = selection.index.view(-1, layout.capacity)
    count, seen, near = (x.view(-1) for x in (selection.count, selection.seen, selection.near))
    load = selection.load.view(-1) if isinstance(selection.load, Tensor) else None
    kernels.encode_indices(index, count, seen, near, load, layout.n, header.view(torch.int32), index_part, edges)
    if layout.values is not None:
        rows = len(index)
        first, count = (0, rows) if but is None else (but + 1, rows - 1)
        cut = SliceSegment(rows, layout.capacity, 0, layout.capacity)
        layout.values.take_rows(selection.values.view(-1), value_part, cut, first, count)
    return out


def unpack(layout: MessageLayout, payloads: Tensor, n: int, edges: Tensor | None = None) -> Selection:
    """Read messages [R, nbytes] uint8 of vectors of ``n`` elements, or of the parts of one, between ``edges`` [R + 1].

    ``intact`` says where one is damaged, whose indices are in [0, n] all the same.  Values beside what was selected may
    be anything.
    """
    headers, value_part, index_part = layout.parts(payloads)
    counts = headers.view(torch.int32)
    index, intact = kernels.decode_indices(index_part, counts, layout.n, layout.capacity, n, edges)
    values = torch.empty(index.shape if layout.values else 0, dtype=torch.float32, device=index.device)
    if layout.values is not None:
        cut = SliceSegment(len(index), layout.capacity, 0, layout.capacity)
        layout.values.read_rows(value_part, values.view(-1), cut)
    count, seen, near, load = counts.unbind(1)
    return Selection(index, values, seen, near, load, count, intact)


def led_by(own: Selection, start: int, others: Selection) -> Selection:
    """``own``, of a part that begins at ``start``, before ``others`` of that part; for :func:`add_up`."""
    index = torch.cat([(own.index - start)[None], others.index])
    return Selection(index, torch.cat([own.values[None], others.values]))


def as_one(selection: Selection) -> Selection:
    """One selection of those of consecutive parts; padding lies in between."""
    return Selection(selection.index.view(-1), selection.values.view(-1), count=selection.count.sum())


def join(parts: Sequence[Selection], edges: Sequence[int]) -> Selection:
    """One selection of selections of consecutive vectors; padding lies in between."""
    n, index = edges[-1], []
    for each, (start, stop) in zip(parts, pairwise(edges), strict=True):
        index.append(torch.where(each.index < stop - start, each.index + start, n))
    seen, count = (torch.stack([getattr(each, key) for each in parts]).sum() for key in ("seen", "count"))
    return Selection(torch.cat(index), seen=seen, near=torch.zeros_like(seen), count=count)


def compact(selection: Selection, most: int) -> Selection:
    """The first ``most`` elements of ``selection``, without values, and then padding."""
    return replace(selection, index=selection.index.sort().values[:most], count=selection.count.clamp(max=most))


def among(selection: Selection, others: Selection, n: int) -> Selection:
    """The part of ``selection`` of [0, n) that is in ``others`` too; both are of the same parts."""
    return replace(selection, index=kernels.among(selection.index, others.index, n))


def unite(selections: Selection, n: int) -> Selection:
    """The elements of [0, n) that are in any of several selections, without values."""
    index = selections.index.view(-1)
    if len(selections.index) > 1:
        ordered = index.sort().values
        again = ordered.diff(prepend=ordered.new_full((1,), -1)) == 0
        index = ordered.masked_fill(again, n)
    return Selection(index, count=(index < n).sum())


def total(selection: Selection, n: int) -> Tensor:
    """The vector [n] that is zero but for what is selected, in full."""
    return selection.values.new_zeros(n + 1).index_copy_(0, selection.index, selection.values)[:n]


def add_up(selections: Selection, n: int) -> tuple[Tensor, Tensor]:
    """The sum of several selections, in full, added in their order, and how many elements are in any of them, []."""
    summed = selections.values.new_empty(n)
    return summed, kernels.add_up(selections.index, selections.values, summed)
