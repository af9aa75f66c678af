"""What compressors do on a device: the same, without waiting for it.  A CPU stands in, and the meta device, which is
nothing but shapes: whoever looked at data there would fail.
"""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse import kernels
from lightning_sparse.compressors.group import Group
from lightning_sparse.selection import device
from lightning_sparse.selection.sparse import Sparse
from lightning_sparse.simulation import simulate
from lightning_sparse.wire import (
    INDEX_FORMATS,
    INT2,
    INT8,
    SIGN,
    WIRE_DTYPES,
    CorruptMessage,
    MessageLayout,
    Selection,
    ValueFormat,
)
from lightning_sparse.wire.values import Blocks
from tests.support.simulated import SimulatedRanks, assert_nothing_lost, layered, normal

COMPRESSORS = [
    pytest.param(ls.MiCRO(), id="micro"),
    pytest.param(ls.MiCRO(density=0.1, balance=False, slack=1.0), id="micro-even"),
    pytest.param(ls.SketchFusion(density=0.2, momentum=0.9), id="sketch_fusion-momentum"),
    pytest.param(ls.SketchFusion(exact=False), id="sketch_fusion-estimates"),
    pytest.param(ls.TopK(density=0.2), id="top_k-0.2"),
    pytest.param(ls.ImportancePruning(density=0.2, givers=2), id="importance-givers"),
    pytest.param(ls.ImportancePruning(density=0.2, rule="adaptive"), id="importance-adaptive"),
    pytest.param(ls.ImportancePruning(density=0.2, rule="fixed", slack=1.0), id="importance-fixed"),
    pytest.param(ls.OkTopk(density=0.2, evaluate_every=2, repartition_every=2), id="ok_topk-0.2"),
    pytest.param(ls.OkTopk(density=0.05, slack=1.0, repartition_every=1), id="ok_topk-full"),
]
every_compressor = pytest.mark.parametrize("compressor", COMPRESSORS)
ESTIMATES = ls.SketchFusion(exact=False)  # lose what they miss by: its documented price
EXACT: list[Any] = [each.values[0] for each in COMPRESSORS if each.values[0] != ESTIMATES]


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "used_for", lambda x: True)


RANKS_AND_WIRES = [
    (1, "float32"), (1, "int8"), (2, "bfloat16"), (3, "float32"), (3, "float16"), (4, "int8"), (2, "int4"),
    (3, "int2"), (3, "sign"),
]  # fmt: skip
OF_EACH = [RANKS_AND_WIRES[i % 9 :] + RANKS_AND_WIRES[: i % 9] for i, _ in enumerate(EXACT)]


@pytest.mark.parametrize(
    ("compressor", "size", "wire_dtype"),
    [(compressor, *each[at]) for compressor, each in zip(EXACT, OF_EACH, strict=True) for at in (0, 4)],
    ids=repr,
)
def test_nothing_is_lost(on_device: None, compressor: ls.Compressor, size: int, wire_dtype: str) -> None:
    """With each compressor of two ways of ranks and formats, and each such way with two or three compressors."""
    for n in (1, 5, 203):
        given = normal(5, size, n)
        result = simulate(compressor, given, wire_dtype=wire_dtype)
        assert_nothing_lost(given, result.mean, result.unsent)
        assert result.picked.sum() > 0
    again = simulate(compressor, given, wire_dtype=wire_dtype)
    for field in dataclasses.fields(result):
        assert torch.equal(getattr(result, field.name), getattr(again, field.name)), field.name


@every_compressor
def test_zeros_stay_zero_and_what_is_unsent_is_delivered(on_device: None, compressor: ls.Compressor) -> None:
    given = torch.zeros(40, 3, 6)
    assert not simulate(compressor, given[:3]).mean.any()
    given[0] = normal(1, 3, 6)[0]
    result = simulate(compressor, given)
    if compressor != ESTIMATES:
        assert torch.allclose(result.mean.sum(0), given[0].mean(0), atol=1e-5)
    assert result.unsent.abs().max() < 1e-6


@pytest.mark.parametrize(
    "compressor",
    [
        ls.MiCRO(density=0.02, slack=50.0, indices="block16"),
        ls.MomentumCorrection(0.9, ls.TopK(density=0.02, indices="block16")),
        ls.ImportancePruning(density=0.02, givers=2, rule="adaptive", threshold=2.0, indices="block16"),
    ],
    ids=repr,
)
def test_what_is_sent_is_what_is_sent_on_a_cpu(monkeypatch: pytest.MonkeyPatch, compressor: ls.Compressor) -> None:
    """Bit for bit; of MiCRO, while messages have room for all."""
    given = torch.stack(list(layered(3000, 3, 36, jumps={12: 10.0, 24: 0.05})))
    weights = torch.randn(3000, generator=torch.Generator().manual_seed(1))
    expected = simulate(compressor, given, weights)
    monkeypatch.setattr(kernels, "used_for", lambda x: True)
    result = simulate(compressor, given, weights)
    for field in dataclasses.fields(result):
        assert torch.equal(getattr(result, field.name), getattr(expected, field.name)), field.name


@pytest.mark.cuda
@pytest.mark.parametrize("compressor", [ls.Dense(), ls.MiCRO(), ls.TopK(density=0.2), ls.ImportancePruning()], ids=repr)
@pytest.mark.parametrize("wire_dtype", [name for name in WIRE_DTYPES if name != "sign"])
def test_a_cuda_device_sends_what_plain_pytorch_sends(
    monkeypatch: pytest.MonkeyPatch, compressor: ls.Compressor, wire_dtype: str
) -> None:
    """Bit for bit: kernels on CUDA, and the device's path in plain PyTorch on the CPU.

    Among four ranks: CUDA divides by another number of them by multiplying.  Not of ``ok_topk`` and ``sketch_fusion``,
    which chose other elements on the device where this was tried, and lost nothing.
    """
    given = torch.stack(list(layered(3000, 4, 12)))
    weights = torch.randn(3000, generator=torch.Generator().manual_seed(1))
    result = simulate(compressor, given.cuda(), weights.cuda(), wire_dtype=wire_dtype)
    monkeypatch.setattr(kernels, "used_for", lambda x: True)
    expected = simulate(compressor, given, weights, wire_dtype=wire_dtype)
    for field in dataclasses.fields(result):
        ours, theirs = getattr(result, field.name), getattr(expected, field.name)
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0)


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


@every_compressor
def test_what_is_not_a_number_is_seen(on_device: None, compressor: ls.Compressor) -> None:
    given = normal(8, 2, 300)
    given[2, 1, 77] = torch.nan
    assert not simulate(compressor, given).mean.isfinite().all()


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
def test_a_damaged_message_is_an_error_in_the_next_step(
    on_device: None, monkeypatch: pytest.MonkeyPatch, compressor: ls.Compressor, heard: int
) -> None:
    run, given = SimulatedRanks(compressor, 2, 500), normal(3, 2, 500)
    run.step(given[0])
    unpack = device.unpack
    monkeypatch.setattr(device, "unpack", lambda layout, payloads, *rest: unpack(layout, payloads ^ 0x55, *rest))
    run.step(given[1])
    with pytest.raises(CorruptMessage, match=rf"elements in {heard} of {heard} messages of the step before arrived"):
        run.step(given[2])


def test_whatever_a_message_holds_its_indices_are_in_range() -> None:
    layout = MessageLayout(70_000, 50, INDEX_FORMATS["block16"])
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        payloads = torch.randint(0, 256, (3, layout.nbytes), dtype=torch.uint8, generator=generator)
        if seed % 4:
            payloads[:, 2 + seed % 3 : 16] = 0  # a count that may be
        if seed % 5 == 0:
            payloads[:, 16:] = 0
            payloads[:, :4] = 0  # none, and anything of how many nearly were
        several = device.unpack(layout, payloads, layout.n)
        for row, payload in enumerate(payloads):
            read = device.part(several, row)
            assert read.index.min() >= 0
            assert read.index.max() <= layout.n
            try:
                layout.unpack(payload)
            except CorruptMessage:
                assert not read.intact
            else:
                assert read.intact


@pytest.mark.parametrize("dtype", [None, *WIRE_DTYPES.values()])
@pytest.mark.parametrize("capacity", [300])
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
    read = device.part(device.unpack(layout, message[None], layout.n), 0)
    assert torch.equal(read.index, found.index)
    assert [read.count, read.seen, read.near, read.intact] == [index.numel(), selection.seen, selection.near, 1]
    if dtype not in (None, INT2, SIGN):
        assert torch.equal(found.values[: index.numel()], left)
        assert torch.equal(read.values[: index.numel()], layout.unpack(expected).values)


@pytest.mark.parametrize("n", [0, 1, 20, 50, 9000])
@pytest.mark.parametrize("threshold", [0.0, 1.0, 9.0, torch.nan])
def test_the_largest_go_first(n: int, threshold: float) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    x[n // 2 : n // 2 + 1] = torch.nan
    found = device.select(x, torch.tensor(threshold), 40)
    limit = torch.inf if threshold != threshold else threshold
    index = found.index[: int(found.count)]
    assert found.index.shape == (40,)
    assert (found.index[int(found.count) :] == n).all()
    assert (index.diff() > 0).all()
    assert int(found.seen) == (~(x.abs() < limit)).sum()
    if found.seen <= 40:
        assert int(found.count) == found.seen
    elif found.seen <= device.AMONG:
        assert set(index.tolist()) == set(x.abs().topk(40).indices.tolist())
    if 0 < found.seen <= device.AMONG:
        assert x[index].isnan().any()


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
