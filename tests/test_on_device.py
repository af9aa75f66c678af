"""What compressors do on a device: the same, without waiting for it.  A CPU stands in, and the meta device, which is
nothing but shapes: whoever looked at data there would fail.
"""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse import kernels
from lightning_sparse.comm import Comm, Pending
from lightning_sparse.compressors.base import take_step
from lightning_sparse.control import Held
from lightning_sparse.group import Group
from lightning_sparse.kernels import messages
from lightning_sparse.simulation import SimNetwork, simulate
from lightning_sparse.sparse import Sparse
from lightning_sparse.wire import INDEX_FORMATS, CorruptMessage, PickLayout
from tests.runs import layered
from tests.test_every_compressor import assert_nothing_lost, gradients

COMPRESSORS = [
    pytest.param(ls.MiCRO(), id="micro"),
    pytest.param(ls.MiCRO(density=0.1, balance=False, slack=1.0), id="micro-even"),
    pytest.param(ls.SketchFusion(), id="sketch_fusion"),
    pytest.param(ls.SketchFusion(density=0.2, momentum=0.9), id="sketch_fusion-momentum"),
    pytest.param(ls.SketchFusion(exact=False), id="sketch_fusion-estimates"),
]
every_compressor = pytest.mark.parametrize("compressor", COMPRESSORS)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "used_for", lambda x: True)


@every_compressor
@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("wire_dtype", ["float32", "bfloat16", "float16", "int8"])
def test_nothing_is_lost(on_device: None, compressor: ls.Compressor, size: int, wire_dtype: str) -> None:
    if compressor == ls.SketchFusion(exact=False):
        pytest.skip("estimates lose what they miss by: its documented price")
    for n in (1, 5, 203):
        given = gradients(5, size, n)
        result = simulate(compressor, given, wire_dtype=wire_dtype)
        assert_nothing_lost(given, result)
        assert result.picked.sum() > 0
        again = simulate(compressor, given, wire_dtype=wire_dtype)
        for field in dataclasses.fields(result):
            assert torch.equal(getattr(result, field.name), getattr(again, field.name)), field.name


@every_compressor
@pytest.mark.parametrize("size", [1, 3])
def test_zeros_stay_zero_and_what_is_owed_is_delivered(on_device: None, compressor: ls.Compressor, size: int) -> None:
    given = torch.zeros(600, size, 40)
    assert not simulate(compressor, given[:3]).mean.any()
    given[0] = gradients(1, size, 40)[0]
    result = simulate(compressor, given)
    if compressor != ls.SketchFusion(exact=False):
        assert torch.allclose(result.mean.sum(0), given[0].mean(0), atol=1e-5)
    assert result.unsent.abs().max() < 1e-6


@pytest.mark.parametrize("size", [1, 2, 5])
def test_micro_sends_what_it_sends_on_a_cpu(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Bit for bit, while messages have room for all."""
    micro = ls.MiCRO(density=0.02, slack=50.0, indices="block16")
    given = torch.stack(list(layered(3000, size, 60, jumps={20: 10.0, 40: 0.05})))
    expected = simulate(micro, given)
    monkeypatch.setattr(kernels, "used_for", lambda x: True)
    result = simulate(micro, given)
    for field in dataclasses.fields(result):
        assert torch.equal(getattr(result, field.name), getattr(expected, field.name)), field.name


def test_density_is_held(on_device: None) -> None:
    given = torch.stack(list(layered(100_000, 4, 160, jumps={100: 10.0})))
    picked = simulate(ls.MiCRO(), given).picked[60:] / 1000
    assert 0.95 < picked.mean() < 1.05
    picked = simulate(ls.SketchFusion(), given[:20]).picked / 1000
    assert picked.min() > 0.9
    assert picked.max() <= 1.1


@every_compressor
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_what_is_not_a_number_is_seen(on_device: None, compressor: ls.Compressor, broken: float) -> None:
    given = gradients(8, 2, 300)
    given[2, 1, 77] = broken
    assert not simulate(compressor, given).mean.isfinite().all()


def test_a_damaged_message_is_an_error_in_the_next_step(on_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    network = SimNetwork(2)
    groups = [Group(0, ("g",), (torch.zeros(500),)) for _ in range(2)]

    def step() -> None:
        for group in groups:
            group.unsent += torch.randn(500, generator=torch.Generator().manual_seed(group.step))
        network.run([take_step(ls.MiCRO(density=0.1), g, c) for g, c in zip(groups, network.comms, strict=True)])

    step()
    unpack = messages.unpack
    monkeypatch.setattr(messages, "unpack", lambda layout, payloads: unpack(layout, payloads ^ 0x55))
    step()
    with pytest.raises(CorruptMessage, match=r"MiCRO: the picks of 2 of 2 ranks arrived damaged"):
        step()


def test_whatever_a_message_holds_its_indices_are_in_range() -> None:
    layout = PickLayout(70_000, 50, INDEX_FORMATS["block16"])
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        payloads = torch.randint(0, 256, (3, layout.nbytes), dtype=torch.uint8, generator=generator)
        payloads[:, 2 + seed % 3 : 16] = 0  # a count that may be
        index, told = messages.unpack(layout, payloads)
        assert index.min() >= 0
        assert index.max() <= layout.n
        for payload, intact in zip(payloads, told[:, 3], strict=True):
            try:
                layout.unpack(payload)
            except CorruptMessage:
                assert not intact
            else:
                assert intact


def test_messages_are_those_of_a_cpu() -> None:
    layout = PickLayout(70_000, 50, INDEX_FORMATS["block16"])
    x = torch.randn(70_000, generator=torch.Generator().manual_seed(0))
    found = kernels.select(x, None, torch.tensor(3.5), 50)
    message = messages.pack(layout, found, torch.full((layout.nbytes,), 171, dtype=torch.uint8))
    picks = layout.unpack(message)
    assert picks.index.tolist() == found.index[: int(found.count)].tolist()
    assert (picks.seen, picks.near) == (int(found.seen), int(found.near))


@pytest.mark.parametrize("n", [0, 1, 20, 50, 9000])
@pytest.mark.parametrize("threshold", [0.0, 1.0, 9.0, torch.nan])
def test_the_largest_go_first(n: int, threshold: float) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    x[n // 2 : n // 2 + 1] = torch.nan
    found = kernels.largest_first(x, torch.tensor(threshold), 40)
    index = found.index[: int(found.count)]
    assert found.index.shape == (40,)
    assert (found.index[int(found.count) :] == n).all()
    assert (index.diff() > 0).all()
    assert int(found.seen) == (~(x.abs() < threshold)).sum()
    if found.seen <= 40:
        assert int(found.count) == found.seen
    elif found.seen <= kernels.AMONG:
        assert set(index.tolist()) == set(x.abs().topk(40).indices.tolist())
    if 0 < found.seen <= kernels.AMONG:
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


class Shapes(Comm):
    """Ranks of which nothing but shapes is known."""

    def _all_reduce(self, x: Tensor) -> Pending:
        return _Arrived(x)

    def _all_gather(self, x: Tensor) -> Pending:
        return _Arrived(x.unsqueeze(0).clone() if self.size == 1 else x.new_empty((self.size, *x.shape)))

    def _broadcast(self, x: Tensor, source: int) -> Pending:
        return _Arrived(x)

    def _shift(self, x: Tensor, out: Tensor, by: int) -> Pending:
        return _Arrived(out)


class _Arrived(Pending):
    def __init__(self, result: Tensor) -> None:
        self.wait = lambda: result  # type: ignore[method-assign]

    def wait(self) -> Tensor: ...  # type: ignore[empty-body]


@pytest.mark.parametrize(
    "compressor",
    [ls.MiCRO(), ls.SketchFusion(), ls.SketchFusion(momentum=0.5), ls.SkipReduce(), ls.Dense()],
    ids=repr,
)
@pytest.mark.parametrize("wire_dtype", [torch.float32, torch.bfloat16])
def test_nobody_looks_at_a_device_s_data(compressor: ls.Compressor, wire_dtype: torch.dtype) -> None:
    group = Group(0, ("a", "b"), (torch.empty(300, 7, device="meta"), torch.empty(11, device="meta")))
    if isinstance(compressor, ls.MiCRO):
        group.memory["held"] = Held(0.1).state()  # in the first step the threshold is waited for
    comm = Shapes(1, 4, wire_dtype)
    for _ in range(3):
        gradients = [torch.empty(p.shape, device="meta") for p in group.parameters]
        group.add(gradients)
        total = finish(take_step(compressor, group, comm))
        group.hand_back(total, gradients, 4)
        if "told" in group.memory:  # that has arrived at the host by the next step
            group.memory["told"] = torch.tensor([[5, 5, 6, 1]] * 4)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compressor", [ls.MiCRO(), ls.SketchFusion(), ls.SkipReduce()], ids=repr)
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
