"""Messages of selected elements: what is packed comes back, whatever the formats, and nothing else does."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparse.selection.sparse import nonzero
from lightning_sparse.wire import (
    FLOAT32,
    INDEX_FORMATS,
    WIRE_DTYPES,
    CorruptMessage,
    MessageLayout,
    Selection,
    cheapest,
)
from tests.support.fuzz import fuzzed

formats = pytest.mark.parametrize("name", INDEX_FORMATS)


def packed(layout: MessageLayout, selection: Selection) -> torch.Tensor:
    return layout.pack(selection, torch.full((layout.nbytes,), 171, dtype=torch.uint8))  # memory that was used before


@formats
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
def test_an_empty_selection_by_way_of_numpy(name: str) -> None:
    layout = MessageLayout(70_000, 20, INDEX_FORMATS[name])
    empty = nonzero(torch.zeros(10, dtype=torch.bool))
    assert layout.unpack(packed(layout, Selection(empty, torch.empty(0)))).index.tolist() == []


def test_a_message_of_another_layout_is_refused() -> None:
    layout = MessageLayout(1000, 20, INDEX_FORMATS["int32"], FLOAT32)
    message = packed(layout, Selection(torch.arange(20), torch.ones(20)))
    with pytest.raises(CorruptMessage, match=f"{layout.nbytes} bytes arrived where"):
        replace(layout, capacity=30).unpack(message)


@fuzzed(30, capacity=st.integers(1, 2**31), less=st.integers(0, 3), name=st.sampled_from(list(INDEX_FORMATS)))
def test_messages_about_two_to_the_31_elements_have_a_size(capacity: int, less: int, name: str) -> None:
    n = 2**31 - less
    layout = MessageLayout(n, min(capacity, n), INDEX_FORMATS[name], FLOAT32)
    assert layout.nbytes % 8 == 0
    assert layout.nbytes >= 4 * layout.capacity + INDEX_FORMATS[name].nbytes(n, layout.capacity)
    assert 0 < cheapest(n, layout.capacity).cost(n, layout.capacity) < 1e12
    with pytest.raises(ValueError, match="must have at most 2\\*\\*31 elements"):
        MessageLayout(2**31 + 1 + less, 1, INDEX_FORMATS[name])


@fuzzed(
    25,
    name=st.sampled_from(["int32", "block16", "elias_fano"]),
    places=st.sets(st.one_of(st.integers(0, 2**31 - 1), st.integers(2**31 - 70_000, 2**31 - 1)), max_size=40),
    spare=st.integers(0, 30),
    seen=st.integers(0, 2**31 - 1),
)
def test_picks_among_two_to_the_31_elements_survive(name: str, places: set[int], spare: int, seen: int) -> None:
    index = torch.tensor(sorted(places), dtype=torch.int64)
    layout = MessageLayout(2**31, max(1, len(places)) + spare, INDEX_FORMATS[name], FLOAT32)
    message = torch.full((layout.nbytes,), 0xA5, dtype=torch.uint8)
    values = torch.arange(len(places), dtype=torch.float32)
    back = layout.unpack(layout.pack(Selection(index, values.clone(), seen, seen), message))
    assert torch.equal(back.index, index)
    assert torch.equal(back.values, values)
    assert (back.seen, back.near) == (seen, seen)
