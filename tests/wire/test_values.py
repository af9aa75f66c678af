"""Values on the wire: what is rounded away stays, in every format, and sums over a ring are made of such bytes."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sparse.network.comm import Pending
from lightning_sparse.network.costs import Costs
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
SIZES = [0, 1, 255, 256, 257, 1000, RUN, RUN + 1, 2 * RUN + 300]
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
@every_size
def test_what_does_not_arrive_stays(form: ValueFormat, count: int) -> None:
    assert_nothing_lost(draw(count), form)


@every_format
@settings(max_examples=60, deadline=None)
@given(count=st.integers(0, 1100), seed=st.integers(0, 2**31), exponent=st.integers(-42, 35), zeros=st.booleans())
def test_what_does_not_arrive_stays_whatever_the_values(
    form: ValueFormat, count: int, seed: int, exponent: int, zeros: bool
) -> None:
    values = draw(count, seed, exponent)
    if zeros:
        values[::2] = 0
    assert_nothing_lost(values, form)


@every_format
@pytest.mark.parametrize("edge", [0.0, -0.0, 1.4e-45, 1e-42, TINY, 100 * TINY, 130 * TINY, 7e4, 1e38, LARGEST])
def test_edges_of_float32_stay_or_arrive(form: ValueFormat, edge: float) -> None:
    if form == BFLOAT16 and edge == LARGEST:
        pytest.skip("the largest float32 rounds to infinity in bfloat16")
    values = torch.tensor([edge, -edge, edge / 3, 0.0]).repeat(100)
    assert_nothing_lost(values, form)
    if edge == 0:
        assert not travel(values, form)[0].any()


def test_beyond_float16_the_largest_is_sent() -> None:
    arrived, kept = travel(torch.tensor([1e6, -1e6]), FLOAT16)
    assert arrived.tolist() == [65504, -65504]
    assert kept.tolist() == [1e6 - 65504, 65504 - 1e6]


@every_format
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 255, 299])
def test_what_is_not_a_number_is_seen(form: ValueFormat, broken: float, place: int) -> None:
    values = draw(300)
    values[place] = broken
    arrived, kept = travel(values, form)
    if form == FLOAT16 and broken == broken:  # infinity is beyond the range: the largest is sent, the rest stays
        assert abs(arrived[place]) == 65504
        assert kept[place] == broken
    else:
        assert not torch.isfinite(arrived[place])
    other = slice(256, 300) if place < 256 else slice(0, 256)
    assert torch.isfinite(arrived[other]).all()
    assert torch.isfinite(kept[other]).all()


@every_format
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_what_is_not_a_number_stays_in_its_block(form: ValueFormat, broken: float) -> None:
    """Also where values of other blocks share its bytes."""
    values = draw(2048)
    values[300] = broken
    arrived, kept = travel(values, form)
    for there in (arrived, kept):
        assert torch.isfinite(torch.cat([there[:256], there[512:]])).all()
    others = torch.cat([values[:256], values[512:]])
    assert torch.equal(torch.cat([arrived[:256], arrived[512:]]), travel(others, form)[0])


@pytest.mark.parametrize(("form", "steps"), [(INT8, 127), (INT4, 7)], ids=str)
@settings(max_examples=60, deadline=None)
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


def test_a_level_arrives_as_the_nearest_of_four_multiples_of_its_blocks_root_mean_square() -> None:
    values, levels = draw(700), torch.tensor([-1.5, -0.5, 0.5, 1.5])
    for block, there in zip(values.split(BLOCK), travel(values, INT2)[0].split(BLOCK), strict=True):
        near = levels * block.square().mean().sqrt()
        expected = near[(block[:, None] - near).abs().argmin(1)]
        boundary = (block[:, None] - near).abs().sort(1).values.diff(dim=1)[:, 0] < 1e-4 * near[-1]
        assert torch.allclose(there[~boundary], expected[~boundary], rtol=2e-5)


@pytest.mark.parametrize(("form", "times"), [(INT8, 4), (INT4, 8)], ids=str)
def test_steps_send_the_rest_later(form: ValueFormat, times: int) -> None:
    """The remainders shrink by 14 or 254 a step, so there is nothing left for rounding at random to put right."""
    kept, total = draw(1000), torch.zeros(1000)
    wanted = kept.clone()
    payload = torch.empty(form.nbytes(1000), dtype=torch.uint8)
    for _ in range(times):
        form.take(kept, payload)
        form.add(payload, total)
    assert torch.allclose(total, wanted, rtol=1e-6, atol=1e-7 * float(wanted.abs().max()))


@every_size
def test_bytes_of_values(count: int) -> None:
    scales = 4 * -(-count // 256)
    assert {name: form.nbytes(count) for name, form in WIRE_DTYPES.items()} == {
        "float32": 4 * count, "bfloat16": 2 * count, "float16": 2 * count,
        "int8": count + scales, "int4": -(-count // 2) + scales, "int2": -(-count // 4) + scales,
        "sign": -(-count // 8) + scales,
    }  # fmt: skip


@pytest.mark.parametrize("given", ["bf16", "bfloat16", torch.bfloat16])
def test_a_format_has_its_usual_names(given: object) -> None:
    assert wire_format(given) is BFLOAT16


@pytest.mark.parametrize("given", ["int3", "", None, 4, torch.int64, ["int8"]])
def test_what_is_not_a_format_is_refused(given: object) -> None:
    with pytest.raises(ValueError, match=r"wire_dtype must be one of float32, .*, int4, int2, sign; got"):
        wire_format(given)


@every_format
@pytest.mark.parametrize(("offset", "count"), [(1, 0), (2, 1), (0, 600), (1, 600), (2, 600), (3, 600), (4, 600)])
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
@pytest.mark.parametrize(("size", "skip"), [(p, s) for p in (1, 2, 3, 5) for s in range(p)])
def test_two_hops_lose_nothing_whoever_is_left_out(
    form: ValueFormat, size: int, skip: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n, segment_bytes in ((1, 2**19), (7, 2**19), (4099, 2**19), (4099, 300), (2600, 1)):
        monkeypatch.setattr("lightning_sparse.network.sums.SEGMENT_BYTES", segment_bytes)
        check_two_hops(form, size, skip, n)
        width, step = -(-n // size), BLOCK * max(1, segment_bytes // form.nbytes(BLOCK))
        segments = [form.nbytes(min(step, width - start)) for start in range(0, width, step)]
        slice_bytes = sum(-(-nbytes // 4) * 4 for nbytes in segments)  # each in whole words
        assert sum_in_two_hops(draw(size * n).view(size, n), form, skip)[2] == {(2 * (size - 1) - skip) * slice_bytes}


def check_two_hops(form: ValueFormat, size: int, skip: int, n: int) -> None:
    given = draw(size * n).view(size, n)
    totals, kept, sent = sum_in_two_hops(given, form, skip, rotation=size - 1)
    for total in totals:
        assert torch.equal(total, totals[0])
    error = totals[0].double() + kept.double().sum(0) - given.double().sum(0)
    assert error.abs().max() <= 1e-5 * given.abs().max()
    if n > 1000 and size > 1 and form in (INT8, INT4):
        (full,) = sum_in_two_hops(given, FLOAT32, skip)[2]
        assert sent.pop() / full == pytest.approx(0.25 if form == INT8 else 0.125, rel=0.08)


@every_format
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("hop_bytes", [0, 2000, 10**9])
def test_a_sum_loses_nothing_whichever_way_it_goes(form: ValueFormat, size: int, hop_bytes: int) -> None:
    for n in (1, 7, 4099):
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
    ],
)
def test_a_sum_goes_the_soonest_way(
    hop_bytes: int, elements: int, form: ValueFormat, messages: int, hops: int, sent: int
) -> None:
    network = SimNetwork(4, form, hop_bytes)
    network.run([sum_values(torch.ones(elements), comm) for comm in network.comms])
    assert {(comm.messages, comm.hops, comm.sent_bytes) for comm in network.comms} == {(messages, hops, sent)}


def test_longer_sums_go_in_two_hops_and_then_by_the_backend() -> None:
    costs = Costs(4, hop_bytes=100_000)
    assert [costs.way_of(size << 10, lossless=True) for size in (64, 128, 1024, 2048)] == [
        "one_hop",
        "two_hops",
        "two_hops",
        "backend",
    ]
    costs.by_backend = True
    assert costs.way_of(1, lossless=True) == "backend"
    assert costs.way_of(1, lossless=False) == "one_hop"


@every_format
def test_padding_is_zero_bytes(form: ValueFormat) -> None:
    """Five elements in four slices of two: the third is padded by one, the last is nothing else."""
    network, padding = SimNetwork(4, form), []
    for comm in network.comms:

        def send(x: torch.Tensor, launch: Any = comm.all_to_all, **arguments: Any) -> Pending:
            padding.extend([x[2, form.nbytes(1) :].clone(), x[3].clone()])
            pending: Pending = launch(x, **arguments)
            return pending

        comm.all_to_all = send  # type: ignore[method-assign]
    network.run([two_hop_sum(torch.ones(5), comm) for comm in network.comms])
    assert len(padding) == 8
    assert sum(not each.any() for each in padding) == 6  # a rank does not fill the row for itself
