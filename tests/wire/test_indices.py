"""Indices survive every code, in bytes that only (n, capacity) decide, and no payload decodes to nonsense."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_sparse.wire import INDEX_LIMIT
from lightning_sparse.wire.indices import INDEX_FORMATS, CorruptMessage, IndexFormat, cheapest
from tests.support.wire import encoded, sets

FORMATS = [pytest.param(f, id=name) for name, f in INDEX_FORMATS.items()]
INT32, BLOCK16, BITMAP, ELIAS_FANO = INDEX_FORMATS.values()


def payload_of(*data: int) -> Tensor:
    return torch.tensor(data, dtype=torch.uint8)


def assert_rising_below(index: Tensor, n: int, count: int) -> None:
    assert index.dtype == torch.int64
    listed = index.tolist()
    assert len(listed) == count
    assert listed == sorted(set(listed))
    assert all(0 <= i < n for i in listed)


@pytest.mark.parametrize("used", FORMATS)
@given(drawn=sets(), shift=st.integers(0, 8))
def test_indices_survive_in_an_unaligned_part_of_a_dirty_buffer(
    used: IndexFormat, drawn: tuple[int, int, Tensor], shift: int
) -> None:
    n, capacity, index = drawn
    end = shift + used.nbytes(n, capacity)
    buffer = torch.arange(end + 8).mul(37).to(torch.uint8)
    around = torch.cat([buffer[:shift], buffer[end:]])
    used.encode(index, n, capacity, buffer[shift:end])
    assert torch.equal(torch.cat([buffer[:shift], buffer[end:]]), around)
    assert torch.equal(buffer[shift:end], encoded(used, index, n, capacity))  # nothing left of what it held before

    before = buffer.clone()
    decoded = used.decode(buffer[shift:end], n, capacity, index.numel())
    assert decoded.dtype == torch.int64
    assert torch.equal(decoded, index)
    assert torch.equal(buffer, before)


@pytest.mark.parametrize("used", FORMATS)
@pytest.mark.parametrize(
    ("n", "index"),
    [
        (1, [0]), (1, []), (65536, list(range(65536))), (65537, [65536]), (131072, [65535, 65536, 131071]),
        (1000, [999]), (8, list(range(8))),
    ],
)  # fmt: skip
def test_sets_at_the_edges_survive(used: IndexFormat, n: int, index: list[int]) -> None:
    for capacity in {max(1, len(index)), n}:
        payload = encoded(used, torch.tensor(index, dtype=torch.int64), n, capacity)
        assert used.decode(payload, n, capacity, len(index)).tolist() == index


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        (INT32, [1, 0, 0, 0, 9, 0, 0, 0]),
        (BLOCK16, [2, 0, 0, 0, 1, 0, 9, 0]),
        (BITMAP, [0b10, 0b10]),
        (ELIAS_FANO, [0b0101, 0b1001]),
    ],
    ids=lambda x: x.name if isinstance(x, IndexFormat) else "",
)
def test_the_bytes_are_as_documented(used: IndexFormat, expected: list[int]) -> None:
    assert encoded(used, torch.tensor([1, 9]), 10, 2).tolist() == expected


@pytest.mark.parametrize("used", FORMATS)
def test_too_many_indices_are_refused(used: IndexFormat) -> None:
    with pytest.raises(ValueError, match=f"{used.name}: 3 indices, at most 2 fit"):
        used.encode(torch.arange(3), 10, 2, torch.empty(used.nbytes(10, 2), dtype=torch.uint8))


@pytest.mark.parametrize("used", FORMATS)
@settings(max_examples=80)
@given(drawn=sets(largest=2000), data=st.data())
def test_damaged_payloads_are_refused_or_decode_to_a_valid_set(
    used: IndexFormat, drawn: tuple[int, int, Tensor], data: st.DataObject
) -> None:
    n, capacity, index = drawn
    payload = encoded(used, index, n, capacity)
    if data.draw(st.booleans(), label="random bytes"):
        seed = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
        payload = torch.randint(0, 256, payload.shape, dtype=torch.uint8, generator=seed)
    for bit in data.draw(st.lists(st.integers(0, 8 * payload.numel() - 1), max_size=4), label="flipped bits"):
        payload[bit // 8] ^= 1 << bit % 8
    counts = st.one_of(st.just(index.numel()), st.integers(0, min(3, capacity)), st.integers(-1, capacity + 1))
    count = data.draw(counts, label="count")
    try:
        decoded = used.decode(payload, n, capacity, count)
    except CorruptMessage:
        return
    assert_rising_below(decoded, n, count)


@pytest.mark.parametrize("used", FORMATS)
def test_a_count_or_a_size_that_cannot_be_is_refused(used: IndexFormat) -> None:
    payload = encoded(used, torch.tensor([1, 9]), 10, 3)
    for count in (-1, 4):
        with pytest.raises(CorruptMessage, match=f"{used.name}: {count} indices announced, 0 to 3 expected"):
            used.decode(payload, 10, 3, count)
    size = payload.numel()
    with pytest.raises(CorruptMessage, match=f"{used.name}: {size - 1} bytes found, {size} expected"):
        used.decode(payload[1:], 10, 3, 2)


@pytest.mark.parametrize("used", [BLOCK16, BITMAP, ELIAS_FANO], ids=lambda used: used.name)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_count_that_disagrees_with_the_payload_is_refused(used: IndexFormat, count: int) -> None:
    payload = encoded(used, torch.tensor([1, 9]), 10, 3)
    with pytest.raises(CorruptMessage, match=f"{used.name}: {count} indices announced, 2 found: the message was corr"):
        used.decode(payload, 10, 3, count)


@pytest.mark.parametrize(
    ("used", "payload", "found"),
    [
        pytest.param(INT32, [4, 0, 0, 0, 4, 0, 0, 0], "1 of 2 indices found not above", id="int32-twice"),
        pytest.param(INT32, [4, 0, 0, 0, 10, 0, 0, 0], "indices 4 to 10 found, 0 to 9 exp", id="int32-above"),
        pytest.param(BLOCK16, [2, 0, 0, 0, 5, 0, 4, 0], "1 of 2 indices found not above", id="block16-falling"),
        pytest.param(BLOCK16, [255, 255, 255, 255, 1, 0, 2, 0], "a block of -1 indices found", id="block16-negative"),
        pytest.param(ELIAS_FANO, [0b1111, 0b1100], "1 of 2 indices found not above", id="elias_fano-twice"),
        pytest.param(ELIAS_FANO, [0b1110, 0b1100], "indices 10 to 11 found", id="elias_fano-above"),
    ],
)
def test_indices_that_do_not_rise_or_are_out_of_range_are_refused(
    used: IndexFormat, payload: list[int], found: str
) -> None:
    with pytest.raises(CorruptMessage, match=f"{used.name}: {found}"):
        used.decode(payload_of(*payload), 10, 2, 2)


@pytest.mark.parametrize("density", [0.0001, 0.01, 0.1])
def test_elias_fano_is_near_the_entropy(density: float) -> None:
    n, k = 1_000_000, round(density * 1_000_000)
    subsets = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)  # ln C(n, k)
    entropy = subsets / math.log(2) / k
    bits = 8 * ELIAS_FANO.nbytes(n, k) / k
    assert entropy < bits < entropy + 0.6


@given(n=st.integers(1, INDEX_LIMIT), density=st.floats(0, 1))
def test_no_format_is_cheaper_than_the_cheapest(n: int, density: float) -> None:
    capacity = max(1, int(density * n))
    assert all(cheapest(n, capacity).cost(n, capacity) <= used.cost(n, capacity) for used in INDEX_FORMATS.values())
