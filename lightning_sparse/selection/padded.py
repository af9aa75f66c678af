"""Indices of fixed number, of which some stand for no element: those that reach beyond the vector, as a rule n."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def take(x: Tensor, index: Tensor) -> Tensor:
    """The values of ``x`` [n] at ``index`` [m], zero where there is no element: [m]."""
    n = x.numel()
    return torch.where(index < n, x.index_select(0, index.clamp(max=n - 1)), 0.0)


def put(index: Tensor, values: Tensor, into: Tensor) -> None:
    """Set ``into`` [n] to ``values`` [m] at ``index`` [m], which names no element twice.

    Every place is written, those of no element with once more what one of the others gets, or with what was there.
    """
    meant = index < into.numel()
    other = meant.int().argmax(keepdim=True)  # [1], an element, if there is any
    place = torch.where(meant.any(), index.index_select(0, other), 0)
    value = torch.where(meant.any(), values.index_select(0, other), into[:1])
    into.index_copy_(0, torch.where(meant, index, place), torch.where(meant, values, value))


def joined(parts: Sequence[Tensor], edges: Sequence[int]) -> Tensor:
    """The indices of consecutive parts of [0, n), each counted from the start of its part: [m] int64.

    ``edges`` are those of the parts; n where there is no element of the part.
    """
    spans = zip(parts, pairwise(edges), strict=True)
    return torch.cat([moved(index, start, stop, edges[-1]) for index, (start, stop) in spans])


def moved(index: Tensor, start: int, stop: int, n: int) -> Tensor:
    """``index`` [m] in the part [``start``, ``stop``) of [0, n), counted from 0; n where there is no element of it."""
    return torch.where(index < stop - start, index + start, n)


def distinct(index: Tensor, n: int) -> Tensor:
    """``index`` [m] in order, each element of [0, n) once; n in place of the others."""
    ordered = index.sort().values
    again = ordered.diff(prepend=ordered.new_full((1,), -1)) == 0
    return ordered.masked_fill(again, n)
