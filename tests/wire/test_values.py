"""Values on the wire: what is rounded away stays, in every format, and sums over a ring are made of such bytes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparse.network.simulated import SimNetwork
from lightning_sparse.network.sums import sum_values, two_hop_sum
from lightning_sparse.wire import (
    BFLOAT16,
    BLOCK,
    FLOAT16,
    FLOAT32,
    INT2,
    INT4,
    INT8,
    SIGN,
    WIRE_DTYPES,
    ValueFormat,
    wire_format,
)
from lightning_sparse.wire.values import RUN
from tests.support.wire import draw

LARGEST, TINY = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
SIZES = [0, 1, 256, 257, RUN, 2 * RUN + 300]
every_format = pytest.mark.parametrize("form", list(WIRE_DTYPES.values()), ids=list(WIRE_DTYPES))
every_size = pytest.mark.parametrize("count", SIZES)


def travel(values: torch.Tensor, form: ValueFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """What arrives and what stays, [n] float32 each."""
    kept, payload, arrived = values.clone(), torch.full((form.nbytes(values.numel()),), 255).byte(), values + 1
    form.take(kept, payload)
    form.read(payload, arrived)
    return arrived, kept


def assert_nothing_lost(values: torch.Tensor, form: ValueFormat) -> None:
    arrived, kept = travel(values, form)
    assert torch.isfinite(arrived).all()
    error = (arrived.double() + kept.double() - values.double()).abs()
    rounded_once = (values.abs() > 65504) & (form == FLOAT16) | (form in (SIGN, INT2))  # the rest, to float32
    largest = torch.maximum(values.abs(), arrived.abs()).double()
    assert (error <= rounded_once * largest * 2.0**-24).all()  # elsewhere exactly


@every_format
@given(
    count=st.one_of(st.integers(0, 1100), st.sampled_from(SIZES)),
    seed=st.integers(0, 2**31),
    exponent=st.integers(-42, 35),
    zeros=st.booleans(),
)
def test_what_does_not_arrive_stays_whatever_the_values(
    form: ValueFormat, count: int, seed: int, exponent: int, zeros: bool
) -> None:
    values = draw(count, seed, exponent)
    if zeros:
        values[::2] = 0
    assert_nothing_lost(values, form)


@every_format
@pytest.mark.parametrize("edge", [-0.0, 1e-42, TINY, 130 * TINY, 7e4, LARGEST])
def test_edges_of_float32_stay_or_arrive(form: ValueFormat, edge: float) -> None:
    if form == BFLOAT16 and edge == LARGEST:
        pytest.skip("the largest float32 rounds to infinity in bfloat16")
    values = torch.tensor([edge, -edge, edge / 3, 0.0]).repeat(100)
    assert_nothing_lost(values, form)
    if edge == 0:
        assert not travel(values, form)[0].any()


@every_format
@pytest.mark.parametrize(("broken", "place"), [(torch.nan, 255), (torch.inf, 0), (-torch.inf, 299)])
def test_what_is_not_finite_is_seen_and_leaves_nothing(form: ValueFormat, broken: float, place: int) -> None:
    values = draw(300)
    values[place] = broken
    arrived, kept = travel(values, form)
    assert not torch.isfinite(arrived[place])
    assert not kept[~arrived.isfinite()].any()
    other = slice(256, 300) if place < 256 else slice(0, 256)
    assert torch.isfinite(arrived[other]).all()
    assert torch.isfinite(kept).all()


@pytest.mark.parametrize(("form", "steps"), [(INT8, 127), (INT4, 7)], ids=str)
@given(count=st.integers(1, 1100), seed=st.integers(0, 2**31), exponent=st.integers(-30, 35))
def test_steps_are_off_by_half_of_one_at_most(
    form: ValueFormat, steps: int, count: int, seed: int, exponent: int
) -> None:
    values = draw(count, seed, exponent)
    arrived, _ = travel(values, form)
    for block, there in zip(values.double().split(BLOCK), arrived.double().split(BLOCK), strict=True):
        assert (block - there).abs().max() <= (1 + 2e-4) * block.abs().max() / (2 * steps)


def test_a_sign_arrives_as_the_mean_magnitude_of_its_block() -> None:
    values = draw(700)
    for block, there in zip(values.split(BLOCK), travel(values, SIGN)[0].split(BLOCK), strict=True):
        assert torch.allclose(there, block.abs().mean() * torch.where(block < 0, -1.0, 1.0), rtol=2e-5)


@pytest.mark.parametrize("form", [SIGN, INT2], ids=str)
@pytest.mark.parametrize("below", [0.0, 2.0**-20])
def test_a_mean_of_the_largest_float32_is_finite_in_a_block_of_any_width(form: ValueFormat, below: float) -> None:
    for count in range(1, BLOCK + 1):
        assert_nothing_lost(torch.full((count,), -LARGEST * (1 - below)), form)


@every_size
def test_bytes_of_values(count: int) -> None:
    scales = 4 * -(-count // 256)
    assert {name: form.nbytes(count) for name, form in WIRE_DTYPES.items()} == {
        "float32": 4 * count, "bfloat16": 2 * count, "float16": 2 * count,
        "int8": count + scales, "int4": -(-count // 2) + scales, "int2": -(-count // 4) + scales,
        "sign": -(-count // 8) + scales,
    }  # fmt: skip


@pytest.mark.parametrize("given", ["int3", None, torch.int64])
def test_what_is_not_a_format_is_refused(given: object) -> None:
    with pytest.raises(ValueError, match=r"wire_dtype must be one of float32, .*, int4, int2, sign; got"):
        wire_format(given)


@every_format
@pytest.mark.parametrize(("offset", "count"), [(2, 1), (1, 600), (4, 600)])
def test_a_payload_may_lie_anywhere(form: ValueFormat, offset: int, count: int) -> None:
    values = draw(count)
    expected, left = travel(values, form)
    size = form.nbytes(count)
    around = torch.full((offset + size + 1,), 77, dtype=torch.uint8)
    payload = around[offset : offset + size]
    kept, out, onto = values.clone(), torch.empty(count), torch.ones(count)
    form.take(kept, payload)
    form.read(payload, out)
    form.add(payload, onto)
    assert torch.equal(out, expected)
    assert torch.equal(kept, left)
    assert torch.equal(onto, 1 + expected)
    assert (around[:offset] == 77).all()
    assert around[-1] == 77


def sum_in_two_hops(
    given: torch.Tensor, form: ValueFormat, skip: int, rotation: int = 0
) -> tuple[list[torch.Tensor], torch.Tensor, set[int]]:
    """Each rank's total [n], what they keep [P, n], and the bytes they sent, of ``given`` [P, n]."""
    network, kept = SimNetwork(len(given), form), given.clone()
    steps = [two_hop_sum(own, comm, skip, rotation) for own, comm in zip(kept, network.comms, strict=True)]
    totals = network.run(steps)
    return [torch.as_tensor(total) for total in totals], kept, {comm.sent_bytes for comm in network.comms}


@every_format
@pytest.mark.parametrize(("size", "skip"), [(1, 0), (2, 1), (3, 0), (5, 2)])
def test_two_hops_lose_nothing_whoever_is_left_out(
    form: ValueFormat, size: int, skip: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n, segment_bytes in ((1, 2**19), (4099, 2**19), (4099, 300), (2600, 1)):
        monkeypatch.setattr("lightning_sparse.network.sums.SEGMENT_BYTES", segment_bytes)
        given = draw(size * n).view(size, n)
        totals, kept, sent = sum_in_two_hops(given, form, skip, rotation=size - 1)
        assert all(torch.equal(total, totals[0]) for total in totals)
        error = totals[0].double() + kept.double().sum(0) - given.double().sum(0)
        assert error.abs().max() <= 1e-5 * given.abs().max()
        width, step = -(-n // size), BLOCK * max(1, segment_bytes // form.nbytes(BLOCK))
        segments = [form.nbytes(min(step, width - start)) for start in range(0, width, step)]
        slice_bytes = sum(-(-nbytes // 4) * 4 for nbytes in segments)  # each in whole words
        assert sent == {(2 * (size - 1) - skip) * slice_bytes}


@every_format
@pytest.mark.parametrize(("size", "hop_bytes"), [(1, 0), (2, 2000), (3, 10**9), (5, 0)])
def test_a_sum_loses_nothing_whichever_way_it_goes(form: ValueFormat, size: int, hop_bytes: int) -> None:
    for n in (1, 4099):
        given = draw(size * n).view(size, n)
        network, kept = SimNetwork(size, form, hop_bytes), given.clone()
        totals = network.run([sum_values(own, comm) for own, comm in zip(kept, network.comms, strict=True)])
        for total in totals:
            assert torch.equal(torch.as_tensor(total), torch.as_tensor(totals[0]))
        error = torch.as_tensor(totals[0]).double() + kept.double().sum(0) - given.double().sum(0)
        assert error.abs().max() <= 1e-5 * given.abs().max()


@pytest.mark.parametrize(
    ("hop_bytes", "elements", "form", "messages", "hops", "sent"),
    [
        (100_000, 5_000, FLOAT32, 1, 1, 3 * 20_000),  # few bytes: all to all
        (100_000, 250_000, FLOAT32, 2, 2, 1_500_000),  # to who adds, and back
        (1_000, 250_000, FLOAT32, 1, 6, 1_500_000),  # many: the backend's
        (0, 5_000, FLOAT32, 1, 6, 30_000),  # without latency the backend copies least
        (100_000, 5_000, INT4, 1, 1, 3 * INT4.nbytes(5_000)),
        (0, 5_000, INT4, 2, 2, 6 * 4 * -(-INT4.nbytes(1250) // 4)),
        (2_500_000, 87_000, FLOAT32, 1, 1, 3 * 348_000),
        (1_250_000, 87_000, FLOAT32, 2, 2, 522_000),  # a queue would not hold what all send to one
    ],
)
def test_a_sum_goes_the_soonest_way(
    hop_bytes: int, elements: int, form: ValueFormat, messages: int, hops: int, sent: int
) -> None:
    network = SimNetwork(4, form, hop_bytes)
    network.run([sum_values(torch.ones(elements), comm) for comm in network.comms])
    assert {(comm.messages, comm.hops, comm.sent_bytes) for comm in network.comms} == {(messages, hops, sent)}
