"""Cutting [0, n) into consecutive parts, one a rank.  Pure functions, the same on every rank."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

PACE = 0.3  # of the way to balance that edges move in a step
NARROWEST = 1 / 64  # of n / P


def even(n: int, parts: int) -> Tensor:
    """Edges [parts + 1] int64 of parts that differ by at most one element."""
    return torch.arange(parts + 1, device="cpu") * n // parts


def widths(edges: Sequence[int]) -> list[int]:
    """Elements of each part."""
    return [stop - start for start, stop in itertools.pairwise(edges)]


def balanced(before: Tensor, loads: Sequence[int]) -> Tensor:
    """Edges [parts + 1] int64 that are a part of the way from those before to where each part would have the same load.

    Within a part the load is taken to be spread evenly.  Each edge goes ``PACE`` of the way, and no part gets narrower
    than ``NARROWEST`` of an even one.  (ExDyna, Yoon and Oh, CCGrid 2024, moves blocks between neighbours whose loads
    differ by more than 5 %, to the same end.)
    """
    edges, parts = before.tolist(), len(loads)
    n = edges[-1]
    if sum(loads) == 0:
        return before
    narrowest = int(NARROWEST * n / parts)
    moved = [
        0,
        *(edge + PACE * (goal - edge) for edge, goal in zip(edges[1:], _quantiles(edges, loads), strict=False)),
        n,
    ]
    for i in range(1, parts):
        moved[i] = max(int(moved[i]), int(moved[i - 1]) + narrowest)
    for i in range(parts - 1, 0, -1):
        moved[i] = min(int(moved[i]), int(moved[i + 1]) - narrowest)
    return torch.tensor([int(edge) for edge in moved], dtype=torch.int64, device="cpu")


def _quantiles(edges: Sequence[int], loads: Sequence[int]) -> list[float]:
    """Where the inner edges [parts - 1] would cut the load evenly."""
    parts, total = len(loads), sum(loads)
    goals, part, before = [], 0, 0
    for i in range(1, parts):
        wanted = total * i / parts
        while before + loads[part] < wanted:
            before += loads[part]
            part += 1
        start, stop = edges[part], edges[part + 1]
        goals.append(start + (stop - start) * (wanted - before) / loads[part])
    return goals
