"""Which parameters travel together."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lightning_sparse as ls
from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.groups import FUSIONS, Piece, carry_over, fuse, lay_out, make_groups
from lightning_sparse.engine.lanes import spread
from lightning_sparse.selection.threshold import ThresholdController
from tests.support.fuzz import LARGE, fuzzed

pieces = st.lists(st.tuples(st.integers(0, 100), st.booleans()), max_size=30).map(
    lambda drawn: [Piece(f"layer{i // 2}.p{i % 2}", n, dense) for i, (n, dense) in enumerate(drawn)]
)


@given(pieces=pieces, fusion=st.sampled_from(FUSIONS), bucket_bytes=st.integers(1, 1000))
def test_every_parameter_is_in_one_group_and_dense_ones_keep_apart(
    pieces: list[Piece], fusion: str, bucket_bytes: int
) -> None:
    groups = fuse(pieces, fusion, bucket_bytes)
    assert sorted(p.name for g in groups for p in g) == sorted(p.name for p in pieces)
    assert all(len({p.dense for p in group}) == 1 for group in groups)


@fuzzed(100, elements=st.lists(st.integers(0, LARGE), min_size=1, max_size=12), bucket_bytes=st.integers(1, 2**40))
def test_groups_of_any_size_hold_every_parameter(elements: list[int], bucket_bytes: int) -> None:
    pieces = [Piece(f"layer{i // 2}.p{i}", n) for i, n in enumerate(elements)]
    for fusion in (*FUSIONS, ["layer0*", "*"]):
        fused = fuse(pieces, fusion, bucket_bytes)
        assert sorted(piece.name for group in fused for piece in group) == sorted(piece.name for piece in pieces)
    assert len(spread(elements, 2)) == len(elements)


@given(pieces=pieces, fusion=st.sampled_from(FUSIONS))
def test_groups_come_in_the_order_in_which_backward_completes_them(pieces: list[Piece], fusion: str) -> None:
    place = {piece.name: i for i, piece in enumerate(pieces)}
    last = [place[group[-1].name] for group in fuse(pieces, fusion, 100)]
    assert last == sorted(last)


# - patterns


def test_a_list_of_patterns_makes_a_group_each() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    groups = lay_out(dict(model.named_parameters()), ls.TopK(), ["1.*", "*.weight", "*"])
    assert [group.names for group, _ in groups] == [
        ("1.bias", "1.weight"),
        ("2.bias", "0.bias"),
        ("2.weight", "0.weight"),
    ]  # in the order in which backward completes them


def test_a_parameter_without_a_pattern_is_named() -> None:
    with pytest.raises(ValueError, match=r"parameter 'b\.x' matches none of the patterns"):
        fuse([Piece("a.x", 1), Piece("b.x", 1)], ["a.*"])


# - from one set of groups to another


def laid_out(sizes: list[int], cuts: list[int], compressor: ls.Compressor) -> list[tuple[Group, ls.Compressor]]:
    parts = [Piece(f"p{i}", n) for i, n in enumerate(sizes)]
    edges = [0, *sorted(cuts), len(parts)]
    parameters = {piece.name: torch.zeros(piece.elements) for piece in parts}
    return make_groups(parameters, compressor, [parts[a:b] for a, b in pairwise(edges) if b > a])


@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=12),
    before=st.sets(st.integers(0, 12)),
    after=st.sets(st.integers(0, 12)),
)
def test_what_is_unsent_moves_by_name(sizes: list[int], before: set[int], after: set[int]) -> None:
    compressor = ls.MomentumCorrection(0.9, ls.MiCRO())
    old, new = (laid_out(sizes, [c for c in cuts if c < len(sizes)], compressor) for cuts in (before, after))

    def by_name(groups: list[tuple[Group, ls.Compressor]]) -> dict[str, torch.Tensor]:
        return {n: s.clone() for g, _ in groups for n, s in zip(g.names, g.slots(g.unsent), strict=True)}

    for group, _ in old:
        group.unsent.normal_()
        group.step = 7
        group.memory["velocity"] = 2 * group.unsent
    expected = by_name(old)
    carry_over([group for group, _ in old], new)
    moved = by_name(new)
    assert moved.keys() == expected.keys()
    assert all(torch.equal(moved[name], expected[name]) for name in moved)
    for group, _ in new:
        assert group.step == 7
        assert torch.equal(group.memory["velocity"], 2 * group.unsent)


def test_thresholds_are_carried_and_partitions_start_anew() -> None:
    old = laid_out([100, 100, 300], [1], ls.MiCRO())
    for (group, _), threshold in zip(old, (1.0, 4.0), strict=True):
        group.memory = {"held": ThresholdController(threshold, 0.5).state(), "edges": torch.tensor([0, group.n])}
    new = laid_out([100, 100, 300], [2], ls.MiCRO())
    same = old[0][0].memory
    carry_over([group for group, _ in old], new)
    joined, rest = (group.memory for group, _ in new)
    assert ThresholdController.of(joined["held"]).threshold == pytest.approx(2.0)  # the geometric mean, by elements
    assert ThresholdController.of(rest["held"]) == ThresholdController(pytest.approx(4.0), pytest.approx(0.5))
    assert "edges" not in joined | rest
    assert "edges" in same
