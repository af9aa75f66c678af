"""Values on the wire: what is rounded away stays, as every dtype, and sums over a ring are made of such bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sparse.network.comm import WIRE_DTYPES
from lightning_sparse.network.ring import ring_sum
from lightning_sparse.network.simulated import SimNetwork
from lightning_sparse.wire.values import BLOCK, RUN, add, nbytes, read, take

LARGEST, TINY = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
SIZES = [0, 1, 255, 256, 257, 1000, RUN, RUN + 1, 2 * RUN + 300]
every_dtype = pytest.mark.parametrize("dtype", list(WIRE_DTYPES.values()), ids=list(WIRE_DTYPES))
every_size = pytest.mark.parametrize("count", SIZES)


def draw(count: int, seed: int = 0, exponent: float = 0.0) -> torch.Tensor:
    """[count] float32 of about 10**exponent, blocks of very different size."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(-(-count // 64), generator=generator).mul(4).sub(2).repeat_interleave(64)[:count]
    return torch.randn(count, generator=generator) * 10.0 ** (spread + exponent)


def travel(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What arrives and what stays, [n] float32 each."""
    kept, payload, arrived = values.clone(), torch.full((nbytes(values.numel(), dtype),), 255).byte(), values + 1
    take(kept, payload, dtype)
    read(payload, arrived, dtype)
    return arrived, kept


def assert_nothing_lost(values: torch.Tensor, dtype: torch.dtype) -> None:
    arrived, kept = travel(values, dtype)
    assert torch.isfinite(arrived).all()
    error = (arrived.double() + kept.double() - values.double()).abs()
    beyond = (values.abs() > 65504) & (dtype == torch.float16)  # there the rest is rounded once, to float32
    assert (error <= beyond * values.double().abs() * 2.0**-24).all()  # elsewhere exactly


@every_dtype
@every_size
def test_what_does_not_arrive_stays(dtype: torch.dtype, count: int) -> None:
    assert_nothing_lost(draw(count), dtype)


@every_dtype
@settings(max_examples=60, deadline=None)
@given(count=st.integers(0, 1100), seed=st.integers(0, 2**31), exponent=st.integers(-42, 35), zeros=st.booleans())
def test_what_does_not_arrive_stays_whatever_the_values(
    dtype: torch.dtype, count: int, seed: int, exponent: int, zeros: bool
) -> None:
    values = draw(count, seed, exponent)
    if zeros:
        values[::2] = 0
    assert_nothing_lost(values, dtype)


@every_dtype
@pytest.mark.parametrize("edge", [0.0, -0.0, 1.4e-45, 1e-42, TINY, 100 * TINY, 130 * TINY, 7e4, 1e38, LARGEST])
def test_edges_of_float32_stay_or_arrive(dtype: torch.dtype, edge: float) -> None:
    if dtype == torch.bfloat16 and edge == LARGEST:
        pytest.skip("the largest float32 rounds to infinity in bfloat16")
    values = torch.tensor([edge, -edge, edge / 3, 0.0]).repeat(100)
    assert_nothing_lost(values, dtype)
    if edge == 0:
        assert not travel(values, dtype)[0].any()


def test_beyond_float16_the_largest_is_sent() -> None:
    arrived, kept = travel(torch.tensor([1e6, -1e6]), torch.float16)
    assert arrived.tolist() == [65504, -65504]
    assert kept.tolist() == [1e6 - 65504, 65504 - 1e6]


@every_dtype
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 255, 299])
def test_what_is_not_a_number_is_seen(dtype: torch.dtype, broken: float, place: int) -> None:
    values = draw(300)
    values[place] = broken
    arrived, kept = travel(values, dtype)
    if dtype == torch.float16 and broken == broken:  # infinity is beyond the range: the largest is sent, the rest stays
        assert abs(arrived[place]) == 65504
        assert kept[place] == broken
    else:
        assert not torch.isfinite(arrived[place])
    other = slice(256, 300) if place < 256 else slice(0, 256)
    assert torch.isfinite(arrived[other]).all()
    assert torch.isfinite(kept[other]).all()


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 1100), seed=st.integers(0, 2**31), exponent=st.integers(-30, 35))
def test_int8_is_off_by_half_a_step_at_most(count: int, seed: int, exponent: int) -> None:
    values = draw(count, seed, exponent)
    arrived, _ = travel(values, torch.int8)
    for block, there in zip(values.double().split(BLOCK), arrived.double().split(BLOCK), strict=True):
        assert (block - there).abs().max() <= block.abs().max() / 254


def test_int8_sends_the_rest_in_later_steps() -> None:
    """The remainders shrink by 254 a step, so there is nothing left for rounding at random to put right."""
    kept, total = draw(1000), torch.zeros(1000)
    wanted = kept.clone()
    payload = torch.empty(nbytes(1000, torch.int8), dtype=torch.uint8)
    for _ in range(4):
        take(kept, payload, torch.int8)
        add(payload, total, torch.int8)
    assert torch.allclose(total, wanted, rtol=1e-6, atol=1e-7 * float(wanted.abs().max()))


@every_size
def test_bytes_of_values(count: int) -> None:
    assert [nbytes(count, WIRE_DTYPES[name]) for name in ("float32", "bfloat16", "float16")] == [
        4 * count, 2 * count, 2 * count,
    ]  # fmt: skip
    assert nbytes(count, torch.int8) == count + 4 * -(-count // 256)


@every_dtype
@pytest.mark.parametrize(("offset", "count"), [(1, 0), (2, 1), (0, 600), (1, 600), (2, 600), (3, 600), (4, 600)])
def test_a_payload_may_lie_anywhere(dtype: torch.dtype, offset: int, count: int) -> None:
    values = draw(count)
    expected, left = travel(values, dtype)
    size = nbytes(count, dtype)
    around = torch.full((offset + size + 1,), 77, dtype=torch.uint8)
    payload = around[offset : offset + size]
    kept, out, onto = values.clone(), torch.empty(count), torch.ones(count)
    take(kept, payload, dtype)
    read(payload, out, dtype)
    add(payload, onto, dtype)
    assert torch.equal(out, expected)
    assert torch.equal(kept, left)
    assert torch.equal(onto, 1 + expected)
    assert (around[:offset] == 77).all()
    assert around[-1] == 77


def sum_over_ring(
    given: torch.Tensor, dtype: torch.dtype, skip: int, rotation: int = 0
) -> tuple[list[torch.Tensor], torch.Tensor, set[int]]:
    """Each rank's total [n], what they keep [P, n], and the bytes they sent, of ``given`` [P, n]."""
    network, kept = SimNetwork(len(given), dtype), given.clone()
    totals = network.run([ring_sum(own, comm, skip, rotation) for own, comm in zip(kept, network.comms, strict=True)])
    return [torch.as_tensor(total) for total in totals], kept, {comm.sent_bytes for comm in network.comms}


@every_dtype
@pytest.mark.parametrize(("size", "skip"), [(p, s) for p in (1, 2, 3, 5) for s in range(p)])
def test_a_ring_loses_nothing(dtype: torch.dtype, size: int, skip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for n, segment_bytes in ((1, 2**19), (7, 2**19), (4099, 2**19), (4099, 300), (2600, 1)):
        monkeypatch.setattr("lightning_sparse.network.ring.SEGMENT_BYTES", segment_bytes)
        check_ring(dtype, size, skip, n)


def check_ring(dtype: torch.dtype, size: int, skip: int, n: int) -> None:
    given = draw(size * n).view(size, n)
    totals, kept, sent = sum_over_ring(given, dtype, skip, rotation=size - 1)
    for total in totals:
        assert torch.equal(total, totals[0])
    error = totals[0].double() + kept.double().sum(0) - given.double().sum(0)
    assert error.abs().max() <= 1e-5 * given.abs().max()
    assert sent == {(2 * (size - 1) - skip) * nbytes(-(-n // size), dtype)}
    if n > 1000 and size > 1 and dtype == torch.int8:
        (full,) = sum_over_ring(given, torch.float32, skip)[2]
        assert sent.pop() / full == pytest.approx(0.25, rel=0.04)


@every_dtype
def test_padding_is_zero_bytes(dtype: torch.dtype) -> None:
    """Five elements in four slices of two: the third is padded by one, the last is nothing else."""
    network, padding = SimNetwork(4, dtype), []
    for rank, used in ((3, 1), (0, 0)):  # a rank starts the slice before its own

        def shift(x, *args, comm=network.comms[rank], used=used, send=network.comms[rank].shift, **kwargs):  # type: ignore[no-untyped-def]
            if not comm.messages:
                padding.append(x[nbytes(used, dtype) :].clone())
            return send(x, *args, **kwargs)

        network.comms[rank].shift = shift  # type: ignore[method-assign]
    network.run([ring_sum(torch.ones(5), comm) for comm in network.comms])
    assert [len(p) for p in padding] == [nbytes(2, dtype), nbytes(2, dtype) - nbytes(1, dtype)]
    assert not torch.cat(padding).any()
