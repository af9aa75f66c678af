"""What compressors do on a device: the same, without waiting for it.  A CPU stands in, and the meta device, which is
nothing but shapes: whoever looked at data there would fail.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse import kernels
from lightning_sparse.compressors.base import take_step
from lightning_sparse.compressors.group import Group
from lightning_sparse.network.comm import Comm, Pending
from lightning_sparse.selection import device
from lightning_sparse.selection.sparse import Sparse
from lightning_sparse.selection.threshold import ThresholdController
from lightning_sparse.simulation import simulate
from lightning_sparse.wire import (
    FLOAT16,
    FLOAT32,
    INDEX_FORMATS,
    INT2,
    INT4,
    INT8,
    SIGN,
    WIRE_DTYPES,
    CorruptMessage,
    MessageLayout,
    Selection,
    ValueFormat,
)
from lightning_sparse.wire.blocks import Blocks
from tests.support.simulated import SimulatedRanks, assert_nothing_lost, layered, normal

COMPRESSORS = [
    pytest.param(ls.MiCRO(), id="micro"),
    pytest.param(ls.MiCRO(density=0.1, balance=False, slack=1.0), id="micro-even"),
    pytest.param(ls.SketchFusion(), id="sketch_fusion"),
    pytest.param(ls.SketchFusion(density=0.2, momentum=0.9), id="sketch_fusion-momentum"),
    pytest.param(ls.SketchFusion(exact=False), id="sketch_fusion-estimates"),
    pytest.param(ls.TopK(), id="top_k"),
    pytest.param(ls.TopK(density=0.2), id="top_k-0.2"),
    pytest.param(ls.ImportancePruning(), id="importance"),
    pytest.param(ls.ImportancePruning(density=0.2, givers=2), id="importance-givers"),
    pytest.param(ls.ImportancePruning(density=0.2, rule="adaptive"), id="importance-adaptive"),
    pytest.param(ls.ImportancePruning(density=0.2, rule="fixed", slack=1.0), id="importance-fixed"),
    pytest.param(ls.OkTopk(), id="ok_topk"),
    pytest.param(ls.OkTopk(density=0.2, evaluate_every=2, repartition_every=2), id="ok_topk-0.2"),
    pytest.param(ls.OkTopk(density=0.05, slack=1.0, repartition_every=1), id="ok_topk-full"),
]
every_compressor = pytest.mark.parametrize("compressor", COMPRESSORS)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "used_for", lambda x: True)


@every_compressor
@pytest.mark.parametrize(
    ("size", "wire_dtype"),
    [
        (1, "float32"), (1, "int8"), (2, "bfloat16"), (3, "float32"), (3, "float16"), (4, "int8"), (2, "int4"),
        (3, "int2"), (3, "sign"),
    ],
)  # fmt: skip
def test_nothing_is_lost(on_device: None, compressor: ls.Compressor, size: int, wire_dtype: str) -> None:
    if compressor == ls.SketchFusion(exact=False):
        pytest.skip("estimates lose what they miss by: its documented price")
    for n in (1, 5, 203):
        given = normal(5, size, n)
        result = simulate(compressor, given, wire_dtype=wire_dtype)
        assert_nothing_lost(given, result.mean, result.unsent)
        assert result.picked.sum() > 0
    again = simulate(compressor, given, wire_dtype=wire_dtype)
    for field in dataclasses.fields(result):
        assert torch.equal(getattr(result, field.name), getattr(again, field.name)), field.name


@every_compressor
@pytest.mark.parametrize("size", [1, 3])
def test_zeros_stay_zero_and_what_is_unsent_is_delivered(on_device: None, compressor: ls.Compressor, size: int) -> None:
    given = torch.zeros(60, size, 6)
    assert not simulate(compressor, given[:3]).mean.any()
    given[0] = normal(1, size, 6)[0]
    result = simulate(compressor, given)
    if compressor != ls.SketchFusion(exact=False):
        assert torch.allclose(result.mean.sum(0), given[0].mean(0), atol=1e-5)
    assert result.unsent.abs().max() < 1e-6


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    "compressor",
    [
        ls.MiCRO(density=0.02, slack=50.0, indices="block16"),
        ls.MomentumCorrection(0.9, ls.MiCRO(density=0.02, slack=50.0, indices="block16")),
        ls.TopK(density=0.02, indices="block16"),
        ls.ImportancePruning(density=0.02, indices="block16"),
        ls.ImportancePruning(density=0.02, givers=2, rule="adaptive", threshold=2.0, indices="block16"),
    ],
    ids=repr,
)
def test_what_is_sent_is_what_is_sent_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, compressor: ls.Compressor, size: int
) -> None:
    """Bit for bit; of MiCRO, while messages have room for all."""
    given = torch.stack(list(layered(3000, size, 36, jumps={12: 10.0, 24: 0.05})))
    weights = torch.randn(3000, generator=torch.Generator().manual_seed(1))
    expected = simulate(compressor, given, weights)
    monkeypatch.setattr(kernels, "used_for", lambda x: True)
    result = simulate(compressor, given, weights)
    for field in dataclasses.fields(result):
        assert torch.equal(getattr(result, field.name), getattr(expected, field.name)), field.name


@pytest.mark.parametrize("compressor", [ls.OkTopk(density=0.05), ls.OkTopk(slack=1.0)], ids=repr)
def test_ok_topk_finds_about_what_it_finds_on_a_cpu(monkeypatch: pytest.MonkeyPatch, compressor: ls.OkTopk) -> None:
    """Through a jump of the scale, which turns what was found before into noise."""
    n = 50_000
    given = torch.stack(list(layered(n, 4, 90, jumps={60: 10.0})))
    expected = simulate(compressor, given)
    monkeypatch.setattr(kernels, "used_for", lambda x: True)
    result = simulate(compressor, given)
    picked = result.picked / (compressor.density * n)
    assert 0.92 < picked.mean() < 1.05  # with room for k and no more, hardly ever more
    assert 0.97 < result.picked.sum() / expected.picked.sum() < 1.03
    assert (picked - 1).abs().mean() < 0.15
    for unsent, cpu in ((result.unsent, expected.unsent), (result.unsent.sum(0), expected.unsent.sum(0))):
        assert unsent.norm() < 1.05 * cpu.norm()


@pytest.mark.parametrize("edges", [[0, 0, 0, 400], [0, 400, 400, 400], [0, 0, 1, 400]])
def test_a_region_may_be_empty(on_device: None, edges: list[int]) -> None:
    run, given = SimulatedRanks(ls.OkTopk(density=0.05), 3, 400), normal(4, 3, 400)
    for group in run.groups:
        group.memory["regions"] = torch.tensor(edges)
    means = [run.mean(gradient) for gradient in given]
    assert_nothing_lost(given, torch.stack(means), run.unsent)
    assert all(mean.any() for mean in means)


@every_compressor
def test_a_resumed_run_goes_on_with_the_same_bits(on_device: None, compressor: ls.Compressor) -> None:
    given = normal(12, 3, 400)
    run = SimulatedRanks(compressor, 3, 400)
    for step, gradient in enumerate(given):
        resumed = SimulatedRanks(compressor, 3, 400)
        for group, old in zip(resumed.groups, run.groups, strict=True):
            group.restore(old.snapshot())
        assert len({tuple((key, x.shape) for key, x in sorted(g.memory.items())) for g in run.groups}) == 1
        assert torch.equal(run.mean(gradient), resumed.mean(gradient)), step
        assert torch.equal(run.unsent, resumed.unsent)


@pytest.mark.parametrize(
    "compressor", [ls.TopK(), ls.ImportancePruning(), ls.OkTopk(density=0.05), ls.MiCRO()], ids=repr
)
def test_a_device_s_run_goes_on_on_a_cpu_and_back(monkeypatch: pytest.MonkeyPatch, compressor: ls.Compressor) -> None:
    given = normal(18, 3, 400)
    run, means = SimulatedRanks(compressor, 3, 400), []
    for step, gradient in enumerate(given):
        monkeypatch.setattr(kernels, "used_for", lambda x, step=step: step // 3 % 2 == 0)
        means.append(run.mean(gradient))
    assert_nothing_lost(given, torch.stack(means), run.unsent)


def test_density_is_held(on_device: None) -> None:
    given = torch.stack(list(layered(50_000, 2, 160, jumps={100: 10.0})))
    picked = simulate(ls.MiCRO(density=0.01), given).picked[60:] / 500
    assert 0.95 < picked.mean() < 1.05
    picked = simulate(ls.SketchFusion(density=0.01), given[:10]).picked / 500
    assert picked.min() > 0.9
    assert picked.max() <= 1.1


@every_compressor
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_what_is_not_a_number_is_seen(on_device: None, compressor: ls.Compressor, broken: float) -> None:
    given = normal(8, 2, 300)
    given[2, 1, 77] = broken
    assert not simulate(compressor, given).mean.isfinite().all()


@pytest.mark.parametrize("compressor", [ls.TopK(), ls.ImportancePruning(), ls.OkTopk()], ids=repr)
@pytest.mark.parametrize("place", [3, 49_999])
def test_what_is_not_a_number_goes_before_all_others(on_device: None, compressor: ls.Compressor, place: int) -> None:
    """Also where a sampled threshold is NaN, and wherever it lies."""
    given = normal(3, 2, 50_000)
    given[1, :, place] = torch.nan
    result = simulate(compressor, given)
    assert result.mean[1].isnan().nonzero().flatten().tolist() == [place]
    assert result.picked[2] > 100


@pytest.mark.parametrize(
    ("compressor", "heard"),
    [
        (ls.MiCRO(density=0.1), 2),
        (ls.TopK(density=0.1), 2),
        (ls.ImportancePruning(density=0.1), 1),
        (ls.ImportancePruning(density=0.1, givers=2), 2),
        (ls.OkTopk(density=0.1), 3),
    ],
    ids=repr,
)
@pytest.mark.parametrize("then", ["step", "carry"])
def test_a_damaged_message_is_an_error_in_the_next_step(
    on_device: None, monkeypatch: pytest.MonkeyPatch, compressor: ls.Compressor, heard: int, then: str
) -> None:
    run, given = SimulatedRanks(compressor, 2, 500), normal(3, 2, 500)
    run.step(given[0])
    unpack = device.unpack
    monkeypatch.setattr(device, "unpack", lambda layout, payloads, *rest: unpack(layout, payloads ^ 0x55, *rest))
    run.step(given[1])
    with pytest.raises(CorruptMessage, match=rf"elements in {heard} of {heard} messages of the step before arrived"):
        run.step(given[2]) if then == "step" else compressor.carry([(run.groups[0], 500)])


def test_whatever_a_message_holds_its_indices_are_in_range() -> None:
    layout = MessageLayout(70_000, 50, INDEX_FORMATS["block16"])
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        payloads = torch.randint(0, 256, (3, layout.nbytes), dtype=torch.uint8, generator=generator)
        if seed % 4:
            payloads[:, 2 + seed % 3 : 16] = 0  # a count that may be
        if seed % 5 == 0:
            payloads[:, 16:] = 0
            payloads[:, :4] = 0  # none, and anything of how many nearly were
        for payload, read in zip(payloads, device.unpack(layout, payloads), strict=True):
            assert read.index.min() >= 0
            assert read.index.max() <= layout.n
            try:
                layout.unpack(payload)
            except CorruptMessage:
                assert not read.intact
            else:
                assert read.intact


@pytest.mark.parametrize("dtype", [None, *WIRE_DTYPES.values()])
@pytest.mark.parametrize("capacity", [50, 300])
def test_messages_are_those_of_a_cpu(dtype: ValueFormat | None, capacity: int) -> None:
    layout = MessageLayout(70_000, capacity, INDEX_FORMATS["block16"], dtype)
    x = torch.randn(70_000, generator=torch.Generator().manual_seed(0))
    found = device.with_values(device.select(x, 3.5, capacity), x)
    message = device.pack(layout, found, torch.full((layout.nbytes,), 171, dtype=torch.uint8))
    index = found.index[: int(found.count)]
    assert 30 < index.numel() < 50
    left = x.index_select(0, index) if dtype else x[:0]
    selection = Selection(index, left, int(found.seen), int(found.near))
    expected = layout.pack(selection, torch.full((layout.nbytes,), 171, dtype=torch.uint8))
    if not isinstance(dtype, Blocks) or (dtype == INT8 and capacity == 50):  # padding changes scales
        assert torch.equal(message, expected)
    (read,) = device.unpack(layout, message[None])
    assert torch.equal(read.index, found.index)
    assert [read.count, read.seen, read.near, read.intact] == [index.numel(), selection.seen, selection.near, 1]
    if dtype not in (None, INT2, SIGN):
        assert torch.equal(found.values[: index.numel()], left)
        assert torch.equal(read.values[: index.numel()], layout.unpack(expected).values)
        assert not read.values[index.numel() :].any()


def test_an_index_beyond_a_narrower_part_is_damage() -> None:
    layout = MessageLayout(100, 5, INDEX_FORMATS["block16"])
    found = device.select(torch.arange(100.0), 97.0, 5)
    payloads = device.pack(layout, found, torch.empty(layout.nbytes, dtype=torch.uint8)).expand(3, -1)
    assert [int(read.intact) for read in device.unpack(layout, payloads, [100, 99, 0])] == [1, 0, 0]


@pytest.mark.parametrize("index", [[3, 1, 5, 5], [5, 5], [5, 0], [2], [9, 4, 7]])
def test_padded_indices_write_where_there_is_an_element(index: list[int]) -> None:
    x, values = torch.arange(10.0, 15.0), torch.arange(1.0, 1.0 + len(index))
    expected = x.clone()
    for place, value in zip(index, values, strict=True):
        expected[place : place + 1] = value
    chosen = Selection(torch.tensor(index), values)
    assert device.with_values(chosen, x).values.tolist() == [float(x[i]) if i < 5 else 0 for i in index]
    device.put(chosen, x)
    assert torch.equal(x, expected)


def test_padded_indices_of_parts_are_joined_and_named_once() -> None:
    def padded(*index: int) -> Selection:
        return Selection(torch.tensor(index), seen=torch.tensor(3))

    joined = device.join([padded(0, 2, 3), padded(0), padded(1, 4)], [0, 3, 3, 7])
    assert joined.index.tolist() == [0, 2, 7, 7, 4, 7]
    assert (joined.count, joined.seen) == (3, 9)
    united = device.unite([padded(4, 2, 7), padded(2, 7, 4, 0)], 7)
    assert united.index.tolist() == [0, 2, 7, 4, 7, 7, 7]
    assert united.count == 3


@pytest.mark.parametrize("n", [0, 1, 20, 50, 9000])
@pytest.mark.parametrize("threshold", [0.0, 1.0, 9.0, torch.nan])
def test_the_largest_go_first(n: int, threshold: float) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    x[n // 2 : n // 2 + 1] = torch.nan
    found = device.largest_first(x, torch.tensor(threshold), 40)
    index = found.index[: int(found.count)]
    assert found.index.shape == (40,)
    assert (found.index[int(found.count) :] == n).all()
    assert (index.diff() > 0).all()
    assert int(found.seen) == (~(x.abs() < threshold)).sum()
    if found.seen <= 40:
        assert int(found.count) == found.seen
    elif found.seen <= device.AMONG:
        assert set(index.tolist()) == set(x.abs().topk(40).indices.tolist())
    if 0 < found.seen <= device.AMONG:
        assert x[index].isnan().any()


def test_nobody_waits_to_hand_back_a_sparse_mean() -> None:
    group = Group(0, ("a", "b"), (torch.empty(30, 7, device="meta"), torch.empty(11, device="meta")))
    total = Sparse(torch.empty(9, dtype=torch.int64, device="meta"), torch.empty(9, device="meta"))
    group.hand_back(total, [torch.empty(p.shape, device="meta") for p in group.parameters], 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sparse_mean_is_handed_back(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    group = Group(0, ("a", "b", "c"), (torch.zeros(50, 7), torch.zeros(0), torch.zeros(3, 2, 5, 5)))
    index = torch.randperm(500, generator=torch.Generator().manual_seed(0))[:60].sort().values
    total = Sparse(index, torch.randn(60, generator=torch.Generator().manual_seed(1)))

    def handed_back() -> list[Tensor]:
        gradients = [torch.full(p.shape, 7.0, dtype=dtype) for p in group.parameters]
        gradients[2] = gradients[2].to(memory_format=torch.channels_last)
        group.hand_back(total, gradients, 3)
        return gradients

    expected = handed_back()
    monkeypatch.setattr(kernels, "used_for", lambda x: True)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(handed_back(), expected, strict=True))


class Shapes(Comm):
    """Ranks of which nothing but shapes is known."""

    def _all_reduce(self, x: Tensor, direct: bool) -> Pending:
        return _Arrived(x)

    def _all_gather(self, x: Tensor, out: Tensor) -> Pending:
        return _Arrived(out)

    def _broadcast(self, x: Tensor, source: int) -> Pending:
        return _Arrived(x)

    def _shift(self, x: Tensor, out: Tensor, by: int) -> Pending:
        return _Arrived(out)

    def _all_to_all(self, x: Tensor, out: Tensor, by: Sequence[int]) -> Pending:
        return _Arrived(out)


class _Arrived(Pending):
    def __init__(self, result: Tensor) -> None:
        self.wait = lambda: result  # type: ignore[method-assign]

    def wait(self) -> Tensor: ...  # type: ignore[empty-body]


@pytest.mark.parametrize(
    "compressor",
    [
        ls.MiCRO(density=0.01), ls.SketchFusion(), ls.SketchFusion(momentum=0.5), ls.SketchFusion(exact=False),
        ls.SkipReduce(), ls.Dense(), ls.TopK(), ls.MomentumCorrection(0.9, ls.TopK(density=0.5)),
        ls.ImportancePruning(givers=2), ls.ImportancePruning(rule="fixed", threshold=1.0),
        ls.ImportancePruning(rule="adaptive"), ls.OkTopk(evaluate_every=2, repartition_every=3),
        ls.OkTopk(density=0.5, evaluate_every=1, repartition_every=1),
    ],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("wire_dtype", [FLOAT32, FLOAT16, INT8, INT4])
def test_nobody_looks_at_a_device_s_data(compressor: ls.Compressor, wire_dtype: ValueFormat) -> None:
    group = Group(0, ("a", "b"), (torch.empty(300, 7, device="meta"), torch.empty(11, device="meta")))
    if isinstance(compressor, ls.MiCRO):
        group.memory["held"] = ThresholdController(0.1).state()  # in the first step the threshold is waited for
    comm = Shapes(1, 4).in_format(wire_dtype)
    for step in range(7):
        gradients = [torch.empty(p.shape, device="meta") for p in group.parameters]
        compressor.accumulate(group, gradients, 4)
        total = finish(take_step(compressor, group, comm))
        group.hand_back(total, gradients, 4)
        for key, x in group.memory.items():  # what has arrived at the host by the next step
            if key in ("report", "thresholds"):
                full = isinstance(compressor, ls.OkTopk) and step > 3
                counts = [5, 900, 999, 900, 1] if full else [5, 5, 6, 5, 1]
                report = {"report": counts, "thresholds": [1.0, 1.0, 21.0, 25.0]}
                group.memory[key] = torch.tensor(report[key]).to(x.dtype).expand(x.shape)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "compressor",
    [
        ls.MiCRO(), ls.SketchFusion(), ls.SkipReduce(), ls.TopK(), ls.ImportancePruning(givers=2),
        ls.ImportancePruning(rule="adaptive"), ls.OkTopk(evaluate_every=2, repartition_every=2),
    ],
    ids=repr,
)  # fmt: skip
def test_nobody_waits_for_a_cuda_device(compressor: ls.Compressor) -> None:
    group = Group(0, ("a", "b"), (torch.zeros(3000, 70, device="cuda"), torch.zeros(11, device="cuda")))
    gradients = [torch.randn(p.shape, device="cuda") for p in group.parameters]

    def step() -> None:
        group.add(gradients)
        means = [torch.empty_like(gradient) for gradient in gradients]
        group.hand_back(finish(take_step(compressor, group, Shapes(0, 1))), means, 1)

    for _ in range(3):  # compiles, and finds a threshold
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def finish(rounds: Iterator[Pending]) -> Tensor:
    try:
        pending = next(rounds)
        while True:
            pending = rounds.send(pending.wait())  # type: ignore[attr-defined]
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
