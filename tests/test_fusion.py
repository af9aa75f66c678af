"""Which parameters travel together."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lightning_sparse as ls
from lightning_sparse.fusion import FUSIONS, Piece, fuse, lay_out

pieces = st.lists(st.tuples(st.integers(0, 100), st.booleans()), max_size=30).map(
    lambda drawn: [Piece(f"layer{i // 2}.p{i % 2}", n, whole) for i, (n, whole) in enumerate(drawn)]
)


@given(pieces=pieces, fusion=st.sampled_from(FUSIONS), bucket_bytes=st.integers(1, 1000))
def test_every_parameter_is_in_one_group_and_dense_ones_keep_apart(
    pieces: list[Piece], fusion: str, bucket_bytes: int
) -> None:
    groups = fuse(pieces, fusion, bucket_bytes)
    assert sorted(p.name for g in groups for p in g) == sorted(p.name for p in pieces)
    assert all(len({p.whole for p in group}) == 1 for group in groups)


@given(pieces=pieces, fusion=st.sampled_from(FUSIONS))
def test_groups_come_in_the_order_in_which_backward_completes_them(pieces: list[Piece], fusion: str) -> None:
    place = {piece.name: i for i, piece in enumerate(pieces)}
    last = [place[group[-1].name] for group in fuse(pieces, fusion, 100)]
    assert last == sorted(last)


def test_one_group_a_layer() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    groups = lay_out(dict(model.named_parameters()), ls.TopK(), "none")
    assert [group.names for group, _ in groups] == [("1.bias", "1.weight"), ("0.bias", "0.weight")]


def test_a_bucket_closes_when_it_is_full() -> None:
    parts = [Piece(str(i), 10) for i in range(5)]  # 40 bytes each
    assert [len(group) for group in fuse(parts, "bucket", 80)] == [2, 2, 1]


def test_protected_parameters_get_dense_groups() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    skip = ls.SkipReduce(protect=["*.bias"])
    groups = {group.names: used for group, used in lay_out(dict(model.named_parameters()), skip, "bucket")}
    assert groups == {("1.weight", "0.weight"): skip, ("1.bias", "0.bias"): ls.Dense()}


def test_an_unknown_fusion_names_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="fusion='all' is not one of layer, bucket, none"):
        fuse([], "all")
