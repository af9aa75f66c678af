"""Messages of selected elements: what is packed comes back, whatever the formats, and nothing else does."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sparse.selection.sparse import nonzero
from lightning_sparse.wire import (
    BFLOAT16,
    FLOAT32,
    INDEX_FORMATS,
    WIRE_DTYPES,
    CorruptMessage,
    MessageLayout,
    Selection,
    index_format,
)

formats = pytest.mark.parametrize("name", INDEX_FORMATS)


def packed(layout: MessageLayout, selection: Selection) -> torch.Tensor:
    return layout.pack(selection, torch.full((layout.nbytes,), 171, dtype=torch.uint8))  # memory that was used before


@formats
@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 3000),
    share=st.floats(0, 1),
    filled=st.floats(0, 1),
    dtype=st.sampled_from([None, *WIRE_DTYPES.values()]),
    seed=st.integers(0, 2**31),
)
def test_round_trip(name: str, n: int, share: float, filled: float, dtype: torch.dtype | None, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    capacity = max(1, round(share * n))
    m = round(filled * capacity)
    index = torch.randperm(n, generator=generator)[:m].sort().values
    values = torch.randn(m, generator=generator)
    before = values.clone()
    layout = MessageLayout(n, capacity, INDEX_FORMATS[name], dtype)
    back = layout.unpack(packed(layout, Selection(index, values, seen=m + 5, near=m + 9)))
    assert torch.equal(back.index, index)
    assert (back.seen, back.near) == (m + 5, m + 9)
    if dtype is None:
        assert back.values.numel() == 0
        assert torch.equal(values, before)
    else:
        assert torch.allclose(back.values + values, before, rtol=1e-6, atol=1e-7)


@formats
@settings(max_examples=100, deadline=None)
@given(payload=st.binary(min_size=400, max_size=400), header=st.integers(-(2**31), 2**31 - 1))
def test_a_corrupt_message_is_an_error_or_a_valid_selection(name: str, payload: bytes, header: int) -> None:
    layout = MessageLayout(500, 20, INDEX_FORMATS[name], BFLOAT16)
    message = torch.tensor(list(payload), dtype=torch.uint8).repeat(1 + layout.nbytes // 400)[: layout.nbytes].clone()
    message[:4].view(torch.int32).fill_(header % 21 if header % 2 else header)
    try:
        index = layout.unpack(message).index
    except CorruptMessage:
        pass
    else:
        assert (index.diff() > 0).all()
        assert index.numel() <= 20
        assert not index.numel() or (index[0] >= 0 and index[-1] < 500)


@formats
def test_an_empty_selection_by_way_of_numpy(name: str) -> None:
    layout = MessageLayout(70_000, 20, INDEX_FORMATS[name])
    empty = nonzero(torch.zeros(10, dtype=torch.bool))
    assert layout.unpack(packed(layout, Selection(empty, torch.empty(0)))).index.tolist() == []


def test_a_message_of_another_layout_is_refused() -> None:
    layout = MessageLayout(1000, 20, INDEX_FORMATS["int32"], FLOAT32)
    message = packed(layout, Selection(torch.arange(20), torch.ones(20)))
    with pytest.raises(CorruptMessage, match=f"{layout.nbytes} bytes arrived where"):
        replace(layout, capacity=30).unpack(message)


def test_more_elements_than_room_are_refused() -> None:
    layout = MessageLayout(1000, 3, INDEX_FORMATS["int32"])
    with pytest.raises(ValueError, match="4"):
        packed(layout, Selection(torch.arange(4), torch.ones(4)))


def test_auto_is_the_cheapest_and_the_same_everywhere() -> None:
    assert index_format("auto", 1000, 900).name == "bitmap"
    assert index_format("auto", 1_000_000, 10_000).name == "elias_fano"
    assert index_format("int32", 1000, 900).name == "int32"


def test_groups_beyond_32_bits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"at most 2\*\*31 elements.*; got 2147483649"):
        MessageLayout(2**31 + 1, 5, INDEX_FORMATS["int32"])
