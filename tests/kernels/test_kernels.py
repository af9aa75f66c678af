"""Kernels agree with plain PyTorch, and that with the rest of the library; Triton's interpreter stands in for a GPU.

``python -m tests.kernels.test_kernels`` makes all comparisons under the interpreter: a process of its own, as Triton
reads TRITON_INTERPRET when it is imported.
"""

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_sparse import kernels
from lightning_sparse.kernels import ops, reference
from lightning_sparse.kernels.blocks import SliceSegment
from lightning_sparse.selection.host import SMALLEST, above
from lightning_sparse.selection.sketch import CountSketch, hashes
from lightning_sparse.selection.threshold import NEAR
from lightning_sparse.wire import BFLOAT16, FLOAT16, FLOAT32, INDEX_FORMATS, INT2, INT4, INT8, SIGN, CorruptMessage
from tests.support.wire import draw, encoded, random_set, sets

BLOCK16 = INDEX_FORMATS["block16"]
SIZES = [0, 1, 7, 1000, 4097]  # 4,096 elements are a block of the kernels that select and scatter
TABLES = [(0, 4, 3), (1, 1, 1), (7, 3, 5), (1000, 96, 5), (1000, 1000, 3), (4097, 1500, 5), (500, 64, 7)]  # n, c, R
TIME_LIMIT_S = 100  # where the machine is busy; 13 s of one core


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vectors(n: int) -> Iterator[Tensor]:
    """[n] float32: random, with everything that is not a number or hardly one, all zeros, all equal."""
    x = torch.randn(n, generator=rng(n))
    yield x
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, -torch.nan, -0.0, 0.0, SMALLEST, -1e-40, 3e38])
    yield torch.cat([odd, x])[:n]
    yield torch.zeros(n)
    yield torch.full((n,), -1.5)


def same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0, equal_nan=True)


def padded(index: Tensor, n: int, capacity: int) -> Tensor:
    return torch.cat([index, torch.full((capacity - index.numel(),), n)])


def check_select(device: torch.device) -> None:
    for n in SIZES:
        for x in vectors(n):
            for threshold, capacity in ((1.5, n), (0.0, n + 3), (1.0, n // 5), (torch.inf, 2)):
                compare_select(device, x, threshold, capacity)
    for threshold in (torch.nan, -1.0, -0.0, 1e-300, 1e-40, float(np.float32(NEAR) * np.float32(0.1))):
        compare_select(device, next(vectors(1000)), threshold, 1000)
    shifted = torch.randn(2001, generator=rng())[1:]  # whose first element is not aligned to 16 bytes
    compare_select(device, shifted, 1.0, 2000)
    for edges in ([0, 0], [0, 7, 7, 1000], [0, 1, 2000, 6097, 10_000], [0, 0, 4096, 9000]):
        compare_select(device, torch.randn(edges[-1], generator=rng()), 1.0, 300, torch.tensor(edges))


def compare_select(
    device: torch.device, x: Tensor, threshold: float, capacity: int, edges: Tensor | None = None
) -> None:
    """With the reference, and that of several parts with that of each."""
    limit, cut = torch.tensor(threshold), None if edges is None else edges.to(device)
    index, totals = reference.select(x, limit, NEAR, capacity, capacity // 2, edges)
    found = kernels.select(x.to(device, copy=True), limit.to(device), capacity, NEAR, capacity // 2, cut)
    same(found.index, index)
    for ours, theirs in zip((found.seen, found.near, found.count), totals, strict=True):
        same(ours, theirs)
    for row, (start, stop) in enumerate([] if edges is None else itertools.pairwise(edges.tolist())):
        alone, counts = reference.select(x[start:stop], limit, NEAR, capacity, capacity // 2, None)
        same(index[row], torch.where(alone[0] < stop - start, alone[0] + start, x.numel()))
        same(totals[:, row], counts[:, 0])


def check_scatter(device: torch.device) -> None:
    for n in SIZES:
        for m, count in ((n, n), (n // 7, n // 7), (n // 7, n // 9), (n // 7, n + 5), (0, 0)):
            index = random_set(n, m, seed=m)
            values = torch.randn(m, generator=rng(m))
            values[:2] = torch.tensor([torch.nan, -torch.inf])[:m]
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                cut = dtype == torch.bfloat16 and ops.INTERPRETED  # the interpreter does not round to the nearest
                sums = 3 * values.round() if cut else values
                compare_scatter(device, index, sums, torch.tensor(count), torch.empty(n, dtype=dtype))
    astray = torch.tensor([-5, 3, 99, 100, 2**40])  # as decoded from a corrupt message: nothing is written elsewhere
    compare_scatter(device, astray, torch.ones(5), torch.tensor(5), torch.empty(100))


def compare_scatter(device: torch.device, index: Tensor, values: Tensor, count: Tensor, out: Tensor) -> None:
    expected = out.clone()
    reference.scatter(index, values, count, 3, expected)
    room = torch.full((out.numel() + 2,), 7.0, dtype=out.dtype, device=device)
    kernels.scatter(index.to(device), values.to(device), count.to(device), 3, room[1:-1])
    same(room[1:-1], expected)
    assert room[0] == 7.0
    assert room[-1] == 7.0


def check_sketch(device: torch.device) -> None:
    for n, columns, rows in TABLES:
        sketch = CountSketch(rows, columns, seed=n)
        hashed = hashes(sketch, n, device)
        for x in vectors(n):
            table = sketch.encode(x, torch.empty(rows, columns))
            same(kernels.sketch_encode(x.to(device), hashed, torch.full_like(table, 7.0, device=device)), table)
            estimates = sketch.estimate(table, torch.empty(n))
            same(kernels.sketch_estimate(table.to(device), hashed, torch.full((n,), 7.0, device=device)), estimates)


def check_sparse(device: torch.device) -> None:
    for n in SIZES:
        rows = [random_set(n, min(n, m), seed=m) for m in (5, 0, 700, 3)]
        index = torch.stack([padded(row, n, 701) for row in rows])
        values = torch.randn(index.shape, generator=rng())
        if n > 7:
            values[2, :2] = torch.tensor([torch.nan, -torch.inf])
        there, sent = index.to(device), values.to(device)
        expected, room = torch.full((n,), 7.0), torch.full((n + 2,), 7.0, device=device)
        reached = reference.add_up(index, values, expected)
        same(kernels.add_up(there, sent, room[1:-1]), reached)
        same(room[1:-1], expected)
        assert int(reached) == torch.cat(rows).unique().numel()
        for x in vectors(n):
            ours = x.to(device, copy=True)
            for magnitudes in (False, True):
                same(kernels.pick(there, ours, magnitudes), reference.pick(index, x, magnitudes))
            for onto in (False, True):
                put = x.index_copy(0, rows[2], (x[rows[2]] if onto else 0) + values[2, : rows[2].numel()])
                kernels.put(there[2], sent[2], ours.copy_(x), onto)
                same(ours, put)
                reference.put(index[2], values[2], x.clone(), onto)
        same(kernels.among(there, there.flip(0).contiguous(), n), reference.among(index, index.flip(0), n))
        assert room[[0, -1]].tolist() == [7, 7]


def check_indices(device: torch.device) -> None:
    for n in (*SIZES, 65_536, 65_537, 300_000):
        for m in {0, min(n, 1), min(n, 7), min(n, 1030)}:
            for capacity in (max(1, m), m + 600):
                compare_indices(device, [random_set(n, m, seed=n)], n, capacity)
    compare_indices(device, [torch.tensor([0, 65_535, 2**30 - 1, 2**31 - 2, 2**31 - 1])], 2**31, 6)
    several = [random_set(70_000, m, seed=m) for m in (3, 0, 40)]
    compare_indices(device, several, 70_000, 50)
    compare_indices(device, several, 70_000, 50, torch.arange(4) * 70_000)


def compare_indices(
    device: torch.device, rows: list[Tensor], n: int, capacity: int, edges: Tensor | None = None
) -> None:
    """With the format of the host, row by row."""
    width, cut = n if edges is None else int(edges[-1]), None if edges is None else edges.to(device)
    starts = [0] * len(rows) if edges is None else edges.tolist()
    index = torch.stack([padded(row + start, width, capacity) for row, start in zip(rows, starts, strict=False)])
    count = torch.tensor([row.numel() for row in rows], device=device)
    nbytes = BLOCK16.nbytes(n, capacity)
    payloads = torch.zeros(len(rows), nbytes + 3, dtype=torch.uint8)
    for row, payload in zip(rows, payloads, strict=True):
        BLOCK16.encode(row, n, capacity, payload[:nbytes])
    room = torch.full((len(rows), nbytes + 5), 0xA5, dtype=torch.uint8, device=device)
    counts = torch.full((len(rows), 5), -1, dtype=torch.int32, device=device)
    load = count + 2**31 if n > 7 else None
    there = index.to(device)
    kernels.encode_indices(
        there, count, count + 1, count + 2, load, n, counts[:, :4], room[:, 1:-1], cut
    )  # not aligned
    same(room[:, 1:-1], payloads)
    assert (room[:, [0, -1]] == 0xA5).all()
    assert counts.tolist() == [[m, m + 1, m + 2, 0 if load is None else 2**31 - 1, -1] for m in count.tolist()]
    decoded, intact = kernels.decode_indices(room[:, 1:-1], counts[:, :4], n, capacity, width, cut)
    same(decoded, index)
    assert intact.all()


def check_damaged_indices(device: torch.device) -> None:
    n, capacity, index = 150_000, 50, random_set(150_000, 40, seed=0)
    edges = torch.tensor([0, n, n + 140_000, n + 290_000, n + 440_000])
    for seed in range(8):
        payload = encoded(BLOCK16, index, n, capacity)
        at = torch.randint(0, payload.numel(), (1 + seed % 2,), generator=rng(seed))
        payload[at] = torch.randint(0, 256, at.shape, dtype=torch.uint8, generator=rng(seed))
        counts = torch.tensor([[40, 0], [39, 0], [-1, 0], [51, 0], [40, -1]], dtype=torch.int32)
        payloads = payload.repeat(5, 1)
        for cut, width in ((None, n), (torch.cat([edges, edges[-1:] + n]), 590_000)):
            expected = reference.decode_indices(payloads, counts, n, capacity, cut, width)
            where = None if cut is None else cut.to(device)
            ours = kernels.decode_indices(payloads.to(device), counts.to(device), n, capacity, width, where)
            same(ours[0], expected[0])
            same(ours[1], expected[1])


def check_blocks(device: torch.device) -> None:
    for form in (INT8, INT4, INT2, SIGN):
        for n in (0, 1, 2, 7, 256, 257, 1000, 4097):
            x = draw(n)
            for values in (x, *vectors(n), 1e-39 * x, 1e34 * x, torch.full((n,), 3e38)):
                compare_blocks(device, values, form.bits)


def compare_blocks(device: torch.device, values: Tensor, bits: int) -> None:
    """With the reference; and, where all is finite, that with the formats, whose means are summed in another order."""
    (form,) = (form for form in (INT8, INT4, INT2, SIGN) if form.bits == bits)
    n, nbytes = values.numel(), form.nbytes(values.numel())
    expected, kept = (values.clone() for _ in range(2))
    payload, written = (torch.full((nbytes + 1,), 7, dtype=torch.uint8)[1:] for _ in range(2))  # not aligned
    reference.take_blocks(expected, payload, bits)
    form.take(kept, written)
    tolerance = values.abs().nan_to_num(0, 0, 0).max() * 2.0**-15 if bits == 1 and n else 0.0
    torch.testing.assert_close(kept, expected, rtol=0, atol=float(tolerance), equal_nan=True)
    if bits > 1 and values.isfinite().all():
        same(written, payload)
    ours, room = values.to(device, copy=True), torch.full((nbytes + 2,), 7, dtype=torch.uint8, device=device)
    ops.take_blocks(ours, room[1:-1], bits)
    same(ours, expected)
    if values.isfinite().all():
        same(room[1:-1], payload)
    assert room[[0, -1]].tolist() == [7, 7]
    for reference_does, form_does in ((reference.read_blocks, form.read), (reference.add_blocks, form.add)):
        on_cpu, on_wire = torch.ones(n), torch.ones(n)
        reference_does(payload, on_cpu, bits)
        form_does(payload, on_wire)
        same(on_wire, on_cpu)


def check_rows(device: torch.device) -> None:
    for form in (INT8, INT4, INT2, SIGN):
        for n, size in ((0, 2), (1, 2), (5, 4), (257, 3), (1000, 4), (4097, 3), (8192, 2), (9000, 5)):
            width = -(-n // size)
            for start, length in {(0, width), (0, min(width, 512)), (512, min(width - 512, 1024))}:
                if length > 0:
                    compare_rows(device, draw(n), form, SliceSegment(size, width, start, length, rotation=n % size))


def compare_rows(device: torch.device, values: Tensor, form: Any, cut: SliceSegment) -> None:
    """With the formats on a CPU, which go from row to row."""
    n, row_bytes = values.numel(), 4 * -(-form.nbytes(cut.length) // 4)
    first, count = cut.size - 1, max(1, cut.size - 1)
    kept, rows = values.clone(), torch.zeros(cut.size, row_bytes, dtype=torch.uint8)
    reference.take_rows(kept, rows, form.bits, cut.width, cut.start, cut.length, cut.rotation, first, count)
    if form.bits > 1:  # means of a block are summed in another order
        for ours, theirs in zip(taken(values, form, cut, row_bytes, first, count), (kept, rows), strict=True):
            same(ours, theirs)
    ours, written = values.to(device, copy=True), torch.zeros_like(rows, device=device)
    ops.take_rows(ours, written, form.bits, cut.width, cut.start, cut.length, cut.rotation, first, count)
    same(ours, kept)
    same(written, rows)

    read, read_there = torch.ones(n), torch.ones(n + 2, device=device)
    form.read_rows(rows, read, cut)
    ops.read_rows(written, read_there[1:-1], form.bits, cut.width, cut.start, cut.length, cut.rotation)
    same(read_there[1:-1], read)
    assert read_there[[0, -1]].tolist() == [1, 1]

    whole = torch.stack([torch.zeros(row_bytes, dtype=torch.uint8) for _ in range(cut.size)])
    for row in whole:
        form.take(draw(cut.length), row[: form.nbytes(cut.length)])
    for onto in (True, False):
        for step in (1, -1):
            added, added_there = torch.ones(cut.length), torch.ones(cut.length, device=device)
            form.add_rows(whole, added, first, step, count, onto)
            ops.add_rows(whole.to(device), added_there, form.bits, first, step, count, onto)
            same(added_there, added)


def taken(values: Tensor, form: Any, cut: SliceSegment, row_bytes: int, first: int, count: int) -> Iterator[Tensor]:
    kept, rows = values.clone(), torch.full((cut.size, row_bytes), 7, dtype=torch.uint8)
    form.take_rows(kept, rows, cut, first, count)
    for i in set(range(cut.size)) - {(first + i) % cut.size for i in range(count)}:
        assert (rows[i] == 7).all()
        rows[i] = 0
    yield kept
    yield rows


def check_floats(device: torch.device) -> None:
    for form in (FLOAT32, BFLOAT16, FLOAT16):
        for n, size in ((0, 2), (5, 4), (4097, 3)):
            width = -(-n // size)
            for start, length in {(0, width), (512, min(width - 512, 800))}:
                for values in vectors(n) if length > 0 else ():
                    cut = SliceSegment(size, width, start, length, rotation=n % size)
                    is_tiny = values.abs() < 1e-37  # which the interpreter reads wrong in bfloat16
                    given = values.masked_fill(is_tiny, 0.0) if ops.INTERPRETED else values
                    compare_floats(device, 1e5 * given, form, cut)


def compare_floats(device: torch.device, values: Tensor, form: Any, cut: SliceSegment) -> None:
    """With the formats on a CPU, whose rows follow each other; the kernels' have something in between."""
    n, row_bytes = values.numel(), 4 * -(-form.nbytes(cut.length) // 4)
    segment = cut.width, cut.start, cut.length, cut.rotation
    first, count = cut.size - 1, max(1, cut.size - 1)
    kept, rows = taken(values, form, cut, row_bytes, first, count)
    ours, written = (torch.zeros(*shape, device=device) for shape in ((n + 2,), (cut.size, row_bytes // 4 + 3)))
    ours[1:-1] = values
    there = written.view(form.dtype)[:, : rows.view(form.dtype).shape[1]]
    ops.take_floats(ours[1:-1], there, *segment, first, count)
    same(ours[1:-1], kept)
    same(there, rows.view(form.dtype))
    assert not written[:, -3:].any()

    read, read_there = torch.ones(n), torch.ones(n + 2, device=device)
    form.read_rows(rows, read, cut)
    ops.read_floats(there, read_there[1:-1], *segment)
    same(read_there[1:-1], read)
    assert read_there[[0, -1]].tolist() == [1, 1]

    for onto in (True, False):
        for step in (1, -1):
            added, added_there = torch.ones(cut.length), torch.ones(cut.length, device=device)
            form.add_rows(rows, added, first, step, count, onto)
            ops.add_floats(there, added_there, first, step, count, onto)
            same(added_there, added)


CHECKS = [
    check_select,
    check_scatter,
    check_sketch,
    check_indices,
    check_damaged_indices,
    check_blocks,
    check_rows,
    check_floats,
]
every_check = pytest.mark.parametrize("check", CHECKS)


@every_check
def test_operators_without_triton_agree_with_the_reference(check: Any) -> None:
    check(torch.device("cpu"))


@pytest.mark.skipif(not ops.HAS_TRITON, reason="needs triton, which is optional: pip install triton")
def test_kernels_agree_with_the_reference_under_tritons_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.test_kernels"],
        cwd=Path(__file__).parents[2], env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=TIME_LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == [check.__name__ for check in CHECKS]


@pytest.mark.cuda
@every_check
def test_kernels_agree_with_the_reference_on_a_cuda_device(check: Any) -> None:
    check(torch.device("cuda"))


floats = st.floats(width=32)  # infinities, NaN, both zeros and the smallest included


@given(
    values=st.lists(floats, max_size=60),
    threshold=st.one_of(floats.filter(lambda x: not math.isnan(x)), st.sampled_from([0.0, SMALLEST, 1e-300])),
    capacity=st.integers(0, 70),
)
def test_the_reference_selects_what_above_does(values: list[float], threshold: float, capacity: int) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    found = kernels.select(x, torch.tensor(threshold, dtype=torch.float64), capacity, NEAR)
    expected = above(x, threshold)
    assert found.index[0].tolist() == padded(expected[:capacity], len(values), capacity).tolist()
    assert (int(found.seen), int(found.count)) == (expected.numel(), min(expected.numel(), capacity))
    assert int(found.near) == above(x, float(np.float32(NEAR) * np.float32(threshold))).numel()


@given(drawn=sets(largest=2000), data=st.data())
def test_the_reference_calls_intact_what_block16_decodes(drawn: tuple[int, int, Tensor], data: st.DataObject) -> None:
    n, capacity, index = drawn
    payload = encoded(BLOCK16, index, n, capacity)
    for bit in data.draw(st.lists(st.integers(0, 8 * payload.numel() - 1), max_size=3), label="flipped bits"):
        payload[bit // 8] ^= 1 << bit % 8
    count = data.draw(st.one_of(st.just(index.numel()), st.integers(-1, capacity + 1)), label="count")
    counts = torch.tensor([[count]], dtype=torch.int32)
    (decoded,), (intact,) = kernels.decode_indices(payload[None], counts, n, capacity, n)
    assert ((decoded >= 0) & (decoded <= n)).all()
    try:
        expected = BLOCK16.decode(payload, n, capacity, count)
    except CorruptMessage:
        assert not intact
    else:
        assert intact
        same(decoded, padded(expected, n, capacity))


def test_operators_keep_to_their_schemas() -> None:
    x, table, payloads = torch.randn(50), torch.zeros(3, 8), torch.zeros(1, BLOCK16.nbytes(50, 9), dtype=torch.uint8)
    hashed = hashes(CountSketch(3, 8), 50)
    counts = torch.full((1, 4), 9, dtype=torch.int32)
    index, count, coded = torch.arange(9), torch.tensor(9), torch.zeros(INT4.nbytes(50), dtype=torch.uint8)
    for operator, arguments in (
        (ops.select, (x, torch.tensor(1.0), NEAR, 9, 9, None)),
        (ops.scatter, (index, x[:9].clone(), count, 2, torch.zeros(50))),
        (ops.sketch_encode, (x, hashed.offsets, hashed.signs, table)),
        (ops.sketch_estimate, (table, hashed.offsets, hashed.signs, x)),
        (ops.encode_indices, (index[None], count[None], *[count[None]] * 3, 50, None, counts, payloads)),
        (ops.decode_indices, (payloads, counts, 50, 9, None, 50)),
        (ops.pick, (index, x, False)),
        (ops.put, (index, x[:9].clone(), torch.zeros(50), True)),
        (ops.add_up, (index[None], x[None, :9].clone(), torch.zeros(50))),
        (ops.among, (index[None], index[None].clone(), 50)),
        (ops.take_floats, (x.clone(), torch.zeros(2, 30).half(), 25, 0, 25, 0, 0, 2)),
        (ops.read_floats, (torch.zeros(2, 30).half(), x.clone(), 25, 0, 25, 0)),
        (ops.add_floats, (torch.zeros(2, 60).half(), x.clone(), 0, 1, 2, True)),
        (ops.take_blocks, (x.clone(), coded, 4)),
        (ops.take_rows, (x.clone(), torch.zeros(2, 20).byte(), 4, 25, 0, 25, 0, 0, 2)),
        (ops.read_rows, (torch.zeros(2, 20).byte(), x.clone(), 4, 25, 0, 25, 0)),
        (ops.add_rows, (torch.zeros(2, 32).byte(), x.clone(), 4, 0, 1, 2, True)),
    ):
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


hashed = hashes(CountSketch(3, 4), 10)


x, index, count = torch.zeros(10), torch.arange(3), torch.tensor(3)
payload = torch.zeros(10, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kernels.select(x.double(), x[0], 3), r"x must be .*; got torch.float64 \[10\]"),
        (lambda: kernels.scatter(index, x, count, 1, x), "3 indices and 10 values"),
        (lambda: kernels.sketch_encode(x, hashes(CountSketch(3, 4), 10), torch.zeros(5, 4)), "do not fit 10 elem"),
        (
            lambda: kernels.decode_indices(payload[None], count[None, None], 10, 4, 10),
            r"payloads must be rows of at least 12 bytes, which 4 indices below 10 take; got torch.uint8 \[1, 10\]",
        ),
        (lambda: kernels.add_up(index[None], x[None], x), "3 indices and 10 values; they must be as many"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


if __name__ == "__main__":
    assert ops.INTERPRETED
    own = {
        f"lightning_sparse.kernels.{module}_kernel"
        for module in ("select", "scatter", "sketch", "index", "block", "float", "sparse")
    }
    assert not own & set(sys.modules), "imported before they were needed"
    torch.set_num_threads(1)
    for each in CHECKS:
        each(torch.device("cpu"))
        print(each.__name__, flush=True)
    assert own <= set(sys.modules), "never used"
