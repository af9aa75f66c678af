"""Selecting on the host, where counts are known, with numpy; :mod:`~lightning_sparse.selection.device` does the same.

A selection is made, packed, read and used by the same one of them; :func:`lightning_sparse.selection.on` says which.
Selections of several parts or ranks are one, of which those of one follow those of another, and counts are [R] int64.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparse.selection.sparse import Sparse, add_up_sparse, contained, nonzero
from lightning_sparse.selection.threshold import NEAR, least_of_largest, sampled_threshold
from lightning_sparse.wire import MessageLayout, Selection, ValueFormat, index_format

Magnitudes = NDArray[np.float32]

SCAN = 2**16  # elements looked at together, so that they stay in a core's cache
NEAR_SAMPLE = 2**18  # elements at least that are counted, where there are so many, to see how steep a distribution is
NEAR_PART = 16  # of each scan at least such a part
SMALLEST = 2.0**-149  # the smallest positive float32: a threshold that every element but zero reaches


def layout(n: int, capacity: int, indices: str, values: ValueFormat | None = None) -> MessageLayout:
    """Messages of at most ``capacity`` of ``n`` elements, whose indices are written as ``indices`` says."""
    return MessageLayout(n, capacity, index_format(indices, n, capacity), values)


def placed(edges: Tensor, x: Tensor) -> Tensor:
    """``edges`` [R + 1], which the host has already."""
    return edges


def select(x: Tensor, threshold: float | Tensor, capacity: int, edges: Tensor | None = None) -> Selection:
    """The elements of ``x`` [n] that reach ``threshold``, the ``capacity`` largest if there are more; without values.

    Zeros never reach one, NaN does; a threshold of NaN is reached by all others.  ``edges`` [R + 1]: so many of each
    part.
    """
    if edges is not None:
        parts = pairwise(edges.tolist())
        return _together([_moved(select(x[start:stop], threshold, capacity), start) for start, stop in parts])
    steepness = _Steepness(x.numel(), float(threshold))
    found = above(x, float(threshold), steepness.look)
    near = steepness.near(found.numel()) if found.numel() else above(x, NEAR * float(threshold)).numel()
    return Selection(at_most(capacity, found, x), x.new_empty(0), found.numel(), near)


def select_k(x: Tensor, k: int) -> Selection:
    """The ``k`` elements of ``x`` [n] with the largest magnitudes, with their values."""
    return with_values(Selection(largest(x, k)), x)


def with_values(selection: Selection, x: Tensor) -> Selection:
    """``selection`` of ``x`` [n], with the values there."""
    return replace(selection, values=x.index_select(0, selection.index))


def select_from(total: Sparse, threshold: float | Tensor, capacity: int) -> Selection:
    """The elements of a sum that reach ``threshold``, as :func:`select` says, with their values."""
    found = select(total.values, threshold, capacity)
    some = total[found.index]
    return replace(found, index=some.index, values=some.values)


def put(selection: Selection, into: Tensor) -> None:
    """Set the selected elements of ``into`` [n] to the values of ``selection``."""
    into.index_copy_(0, selection.index, selection.values)


def add(selection: Selection, into: Tensor) -> None:
    """Add the values of ``selection`` to the selected elements of ``into`` [n]."""
    into.index_add_(0, selection.index, selection.values)


def part(selection: Selection, row: int) -> Selection:
    """Of selections of several parts or ranks one, whose tensors are views of theirs."""
    return _each(selection)[row]


def pack(
    layout: MessageLayout, selection: Selection, out: Tensor, edges: Tensor | None = None, but: int | None = None
) -> Tensor:
    """Write a message, or one of each of R parts, to ``out`` [R * nbytes] uint8, which is returned.

    The selection's values keep the rounding errors.  ``edges`` [R + 1] lie between the parts, whose indices are written
    as they count from where a part begins.  There is none for the part ``but``.
    """
    if edges is None:
        return layout.pack(selection, out)
    for row, (each, start) in enumerate(zip(_each(selection), edges.tolist(), strict=False)):
        if row != but:
            layout.pack(_moved(each, -start), out.view(-1, layout.nbytes)[row])
    return out


def unpack(layout: MessageLayout, payloads: Tensor, n: int, edges: Tensor | None = None) -> Selection:
    """Read messages [R, nbytes] uint8 of vectors of ``n`` elements, or of parts of one, between ``edges`` [R + 1]."""
    limits = [(0, n)] * len(payloads) if edges is None else list(pairwise(edges.tolist()))
    return _together(
        [_moved(layout.unpack(each, stop - start), start) for each, (start, stop) in zip(payloads, limits, strict=True)]
    )


def led_by(own: Selection, start: int, others: Selection) -> Selection:
    """``own``, of a part that begins at ``start``, before ``others`` of that part; for :func:`add_up`."""
    return _together([_moved(own, -start), *_each(others)])


def as_one(selection: Selection) -> Selection:
    """One selection of those of consecutive parts."""
    return Selection(selection.index, selection.values)


def join(parts: Sequence[Selection], edges: Sequence[int]) -> Selection:
    """One selection of selections of consecutive vectors; ``near`` is 0."""
    index = [each.index + start for each, start in zip(parts, edges, strict=False)]
    return Selection(torch.cat(index), seen=sum(each.seen for each in parts))


def compact(selection: Selection, most: int) -> Selection:
    """``selection``: here nothing is padded, and all of it is sent."""
    return selection


def among(selection: Selection, others: Selection, n: int) -> Selection:
    """The part of ``selection`` of [0, n) that is in ``others`` too; both are of the same parts."""
    both = Sparse(selection.index, selection.values)[nonzero(contained(selection.index, others.index))]
    return Selection(both.index, both.values)


def unite(selections: Selection, n: int) -> Selection:
    """The elements that are in any of several selections, without values."""
    return Selection(selections.index.unique() if selections.count.numel() > 1 else selections.index)


def total(selection: Selection, n: int) -> Sparse:
    """The vector [n] that is zero but for what is selected."""
    return Sparse(selection.index, selection.values)


def add_up(selections: Selection, n: int) -> tuple[Sparse, int]:
    """The sum of several selections of [0, n), added in their order, and how many elements are in any of them."""
    summed = add_up_sparse([total(each, n) for each in _each(selections)], n)
    return summed, summed.index.numel()


def _together(each: Sequence[Selection]) -> Selection:
    """Selections of several parts or ranks as one."""
    counts = [[s.seen, s.near, s.load, s.count, s.intact] for s in each]
    index = torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *(s.index for s in each)])
    values = torch.cat([torch.empty(0, dtype=torch.float32, device="cpu"), *(s.values for s in each)])
    return Selection(index, values, *torch.tensor(counts, dtype=torch.int64, device="cpu").view(-1, 5).unbind(1))


def _each(selection: Selection) -> list[Selection]:
    """The selections that :func:`_together` made one of."""
    rows = torch.stack([selection.seen, selection.near, selection.load, selection.count, selection.intact], 1).tolist()
    sizes = [count for *_, count, _ in rows]
    values = selection.values.split(sizes) if selection.values.numel() else [selection.values] * len(rows)
    return [Selection(*x) for x in zip(selection.index.split(sizes), values, *zip(*rows, strict=True), strict=True)]


def _moved(selection: Selection, start: int) -> Selection:
    """``selection`` of a part of a vector that begins at ``start``, counted from its start, as one of the whole."""
    return replace(selection, index=selection.index + start) if start else selection


def at_most(capacity: int, index: Tensor, x: Tensor) -> Tensor:
    """``index`` [m], rising, or those ``capacity`` of it where ``x`` [n] has the largest magnitudes."""
    if index.numel() <= capacity:
        return index
    return index.index_select(0, largest(x.index_select(0, index), capacity))


class _Steepness:
    """How many of ``n`` elements reach ``NEAR * threshold`` for each that reaches ``threshold``; from a part."""

    def __init__(self, n: int, threshold: float) -> None:
        self._n = n
        self._counted = SCAN // min(max(1, n // NEAR_SAMPLE), NEAR_PART)  # elements of each scan
        self._threshold, self._nearly = np.float32(threshold), np.float32(NEAR * threshold)
        self._reached = self._near = 0  # elements counted that reach them

    def look(self, magnitudes: Magnitudes) -> None:
        """Count in what is being scanned, while it is in the core's cache."""
        some = magnitudes[: self._counted]
        self._reached += int(np.count_nonzero(some >= self._threshold))
        self._near += int(np.count_nonzero(some >= self._nearly))

    def near(self, seen: int) -> int:
        """Where ``seen`` elements reach the threshold, how many are near it or above."""
        return min(self._n, round(seen * (self._near / self._reached if self._reached else 1 / NEAR)))


def above(x: Tensor, threshold: float, look: Callable[[Magnitudes], None] | None = None) -> Tensor:
    """Indices, rising, of the elements of ``x`` [n] whose magnitude is at least ``threshold``: [m] int64.

    Never zeros, whatever the threshold; always NaN, so that it is seen and not kept.  ``look`` is called with the
    magnitudes, ``SCAN`` at a time.
    """
    threshold = max(SMALLEST, threshold)  # of NaN the first: all but zeros
    flat = x.numpy()
    magnitude = np.empty(SCAN, dtype=np.float32)
    found = []
    for start in range(0, flat.size, SCAN):
        part = flat[start : start + SCAN]
        magnitudes = np.abs(part, out=magnitude[: part.size])
        found.append(np.flatnonzero(~(magnitudes < np.float32(threshold))) + start)
        if look is not None:
            look(magnitudes)
    return torch.from_numpy(np.concatenate(found)) if found else torch.empty(0, dtype=torch.int64, device="cpu")


def largest(x: Tensor, k: int) -> Tensor:
    """Indices, rising, of the ``k`` elements of ``x`` [n] with the largest magnitudes, of equals the first: [k] int64.

    NaN counts as infinite.
    """
    candidates = _candidates(x, k)
    magnitudes = x.index_select(0, candidates).abs().nan_to_num_(torch.inf, torch.inf)
    least = least_of_largest(magnitudes, k)
    larger, tied = magnitudes > least, magnitudes == least
    return candidates.index_select(0, nonzero(larger | (tied & (tied.cumsum(0) <= k - larger.sum()))))


def _candidates(x: Tensor, k: int) -> Tensor:
    """Indices, rising, of elements among which the k largest are: one scan in place of a selection over all n."""
    if 0 < k < x.numel() // 4:
        found = above(x, sampled_threshold(x, 2 * k).item())
        if found.numel() >= k:
            return found
    return torch.arange(x.numel(), device=x.device)
