"""Parts of a group, one a rank: they tile it, and move towards equal loads."""

import itertools

import pytest
from hypothesis import strategies as st

from lightning_sparse.selection import partition
from tests.support.fuzz import fuzzed


def test_partitions_tile_and_move_towards_balance() -> None:
    edges = partition.even(1003, 4)
    assert sorted(partition.widths(edges.tolist())) == [250, 251, 251, 251]
    for _ in range(50):
        inside = [max(0, min(stop, 200) - start) for start, stop in itertools.pairwise(edges.tolist())]
        edges = partition.balanced(edges, inside)  # all the load lies in the first 200 elements
        assert edges[0] == 0
        assert edges[-1] == 1003
        assert min(partition.widths(edges.tolist())) >= int(partition.NARROWEST * 1003 / 4)
    assert inside[:3] == pytest.approx([50] * 3, abs=5)
    assert partition.balanced(edges, [0, 0, 0, 0]).equal(edges)


def test_boundaries_of_huge_groups_do_not_overflow() -> None:
    """It summed positions as int32, which wraps once n * P reaches 2**31."""
    edges = partition.even(2**31, 8)
    assert (partition.balanced(edges, [2**31 - 1] * 8) - edges).abs().max() <= 8
    assert edges[-1] == 2**31


@fuzzed(
    60,
    n=st.integers(0, 2**40),
    parts=st.integers(1, 64),
    loads=st.lists(st.integers(0, 2**40), min_size=64, max_size=64),
)
def test_parts_of_any_size_cover_it_in_order(n: int, parts: int, loads: list[int]) -> None:
    edges = partition.even(n, parts)
    assert max(partition.widths(edges.tolist())) - min(partition.widths(edges.tolist())) <= 1
    for _ in range(3):
        assert (edges[0], edges[-1], len(edges)) == (0, n, parts + 1)
        assert min(partition.widths(edges.tolist())) >= 0
        edges = partition.balanced(edges, loads[:parts])
