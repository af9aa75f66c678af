"""A group lays its parameters out one after the other, whatever their size and memory order."""

import math

import torch
from hypothesis import strategies as st
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.compressors.group import Group
from lightning_sparse.selection.sparse import Sparse
from lightning_sparse.selection.threshold import count, room
from tests.support.fuzz import LARGE, SEEDS, fuzzed, laid_out


def test_a_group_of_two_to_the_33_elements_is_laid_out() -> None:
    """On the meta device, where nothing is allocated."""
    parameters = (torch.empty(2**16, 2**17, device="meta"), torch.empty(5, device="meta"))
    group = Group(0, ("a", "b"), parameters)
    group.add(parameters)
    group.hand_back(torch.empty(LARGE + 5, device="meta"), parameters, 3)
    assert group.n == LARGE + 5
    assert [slot.storage_offset() for slot in group.slots(group.unsent)] == [0, LARGE]
    assert count(0.01, group.n) == round(0.01 * group.n)
    assert room(count(1.0, group.n), 1.25) == math.ceil(1.25 * group.n)
    a, b = Sparse(torch.tensor([0, LARGE - 1, LARGE, LARGE + 4]), torch.arange(4.0)).split(group.sizes)
    assert (a.index.tolist(), b.index.tolist()) == ([0, LARGE - 1], [0, 4])


@fuzzed(60, x=laid_out(), scale=st.sampled_from([1.0, 0.5, 2.0**-16]), momentum=st.booleans(), seed=SEEDS)
def test_a_gradient_in_any_memory_order_is_added_as_a_contiguous_one(
    x: Tensor, scale: float, momentum: bool, seed: int
) -> None:
    x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
    groups = [Group(0, ("x",), (x,)) for _ in range(2)]
    compressor = ls.MomentumCorrection(0.9, ls.TopK(), clip_norm=0.5) if momentum else ls.TopK()
    for group, gradient in zip(groups, (x, x.contiguous()), strict=True):
        group.memory["velocity"] = torch.ones(group.n)
        compressor.accumulate(group, [gradient], 4, scale)
    assert torch.equal(groups[0].unsent, groups[1].unsent)
    assert momentum or torch.equal(groups[0].unsent, x.reshape(-1).float() * scale)


@fuzzed(60, x=laid_out(), size=st.integers(1, 4), share=st.floats(0, 1), seed=SEEDS)
def test_a_mean_is_written_in_any_memory_order_and_nowhere_else(x: Tensor, size: int, share: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    total = torch.randn(x.numel(), generator=generator) * (torch.rand(x.numel(), generator=generator) < share)
    index = total.nonzero().squeeze(1)
    group = Group(0, ("x",), (x,))
    expected = (total / size).to(x.dtype).view(x.shape)
    memory = x.new_empty(0).set_(x.untyped_storage())  # type: ignore[call-overload]
    for result in (total, Sparse(index, total[index])):
        memory.fill_(7)
        group.hand_back(result, [x], size)
        assert torch.equal(x, expected)
        x.fill_(7)
        assert (memory == 7).all()  # in the gaps nothing was written


def test_gradients_set_to_zero_beforehand_change_no_mean() -> None:
    """Only where the mean of the step before was sparse; whatever this one is, and the memory order of gradients."""
    group = Group(0, ("a", "b"), (torch.zeros(50, 7), torch.zeros(3, 2, 5, 5)))
    sparse = Sparse(torch.tensor([3, 349, 350, 499]), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    totals: list[Sparse | torch.Tensor] = [sparse, torch.arange(500.0), torch.arange(500.0), sparse, sparse]
    zeroed = []
    for total in totals:
        gradients = [torch.full(p.shape, 7.0) for p in group.parameters]
        gradients[1] = gradients[1].to(memory_format=torch.channels_last)
        group.zero_gradients_early(gradients)
        zeroed.append(not gradients[0].any())
        group.hand_back(total, gradients, 2)
        expected = (total.dense(500) if isinstance(total, Sparse) else total) / 2
        assert torch.equal(torch.cat([g.reshape(-1) for g in gradients]), expected)
    assert zeroed == [False, True, False, False, True]
