"""What is particular to a compressor, and what bad settings say."""

import re
from itertools import pairwise

import pytest
import torch

import lightning_sparse as ls
from lightning_sparse.compressors import by_name
from lightning_sparse.compressors.group import Group
from lightning_sparse.compressors.random_k import scattered
from lightning_sparse.selection.sparse import Sparse
from lightning_sparse.selection.streams import draw
from lightning_sparse.simulation import simulate


@pytest.mark.parametrize(("n", "k"), [(1, 1), (10, 1), (10, 10), (1000, 37), (1001, 1000)])
def test_scattered_indices_are_distinct_and_in_range(n: int, k: int) -> None:
    for seed in range(20):
        index = scattered(n, k, torch.Generator().manual_seed(seed))
        assert index.shape == (k,)
        assert index.unique().numel() == k
        assert 0 <= index.min() <= index.max() < n


def test_scattered_indices_favour_nobody() -> None:
    n, k, draws = 50, 7, 20000
    hits = torch.zeros(n)
    for step in range(draws):
        hits[scattered(n, k, torch.Generator().manual_seed(draw(3, step)))] += 1
    expected = k / n
    sigma = (expected * (1 - expected) / draws) ** 0.5
    assert (hits / draws - expected).abs().max() < 4.5 * sigma


def test_random_k_sends_no_indices_and_updates_what_it_meant_to() -> None:
    result = simulate(ls.RandomK(density=0.1), torch.randn(4, 4, 1000))
    assert (result.picked == 100).all()
    assert ((result.mean != 0).sum(1) == 100).all()
    assert (result.sent_bytes == 3 * 100 * 4).all()  # so few go to everybody


def test_random_k_chooses_anew_each_step() -> None:
    result = simulate(ls.RandomK(density=0.1), torch.randn(2, 2, 1000))
    assert ((result.mean[0] != 0) & (result.mean[1] != 0)).sum() < 50


def test_top_k_is_the_sum_of_each_ranks_largest() -> None:
    given = torch.randn(1, 3, 100)
    expected = torch.zeros(100)
    for own in given[0]:
        index = own.abs().topk(10).indices
        expected[index] += own[index]
    result = simulate(ls.TopK(density=0.1, indices="int32"), given)
    assert torch.allclose(result.mean[0], expected / 3)
    assert result.picked[0] == (expected != 0).sum()
    assert (result.sent_bytes == 2 * (16 + 10 * (4 + 4))).all()  # a header of 16 bytes


def test_warmup_is_dense_first() -> None:
    given = torch.randn(3, 2, 1000)
    result = simulate(ls.Warmup(2, ls.RandomK(density=0.01)), given)
    assert result.picked.tolist() == [1000, 1000, 10]
    assert torch.allclose(result.mean[:2], given[:2].mean(1))


def test_phases_that_compress() -> None:
    ladder = ls.DensityLadder(2, ls.TopK(density=0.1), densities=(0.5, 0.2))
    for compressor, first in (
        (ls.TopK(), 0),
        (ls.Warmup(3, "micro"), 3),
        (ladder, 4),
        (ls.MomentumCorrection(0.9, ls.Warmup(5, ladder)), 5),
    ):
        assert [step for step in range(9) if compressor.compresses(step)] == list(range(first, 9))
    for dense in (ls.Dense(), ls.Warmup(1, "sparse_dense")):
        assert not any(dense.compresses(step) for step in range(9))


def test_what_is_active_is_made_once_for_each_phase() -> None:
    """It was made and checked in every step."""
    ladder = ls.DensityLadder(2, ls.TopK(density=0.1), densities=(0.5, 0.2))
    for compressor in (ladder, ls.MomentumCorrection(0.9, ladder), ls.Warmup(3, ls.MomentumCorrection(0.9, "micro"))):
        active = [compressor.active(step) for step in range(9)]
        assert [compressor.active(step) for step in range(9)] == active
        assert all(compressor.active(step) is compressor.active(step) for step in range(9))
        assert all(b is a for a, b in pairwise(active) if a == b)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ls.TopK(density=0), "TopK: density must be above 0 and at most 1; got 0."),
        (lambda: ls.RandomK(density=1.5), "RandomK: density must be above 0 and at most 1; got 1.5."),
        (lambda: ls.SkipReduce(skip=-0.1), "SkipReduce: skip must be in [0, 1], the fraction of ranks"),
        (lambda: ls.SkipReduce(skip=float("nan")), "SkipReduce: skip must be in [0, 1], the fraction of ranks"),
        (lambda: ls.SkipReduce(rotation="left"), "rotation must be one of even, random, static"),  # type: ignore[arg-type]
        (lambda: ls.SkipReduce(divisor="none"), "divisor must be one of world, contributors"),  # type: ignore[arg-type]
        (lambda: ls.SkipReduce(divisor="contributors"), "use divisor='world', or error_feedback=False"),
        (lambda: ls.SkipReduce(protect="bias"), "protect must be a list of patterns; got 'bias'. Write ['bias']"),  # type: ignore[arg-type]
        (lambda: ls.SkipReduce(protect_below=-1), "SkipReduce: protect_below must be"),
        (lambda: ls.Warmup(-1, ls.Dense()), "Warmup: steps must be an integer of at least 0; got -1. Give 0 for none."),
        (lambda: by_name("skipreduce"), "compressor must be one of skip_reduce, "),
        (lambda: simulate("dense", torch.ones(1, 1, 1)), "compressor must be one of"),
        (lambda: simulate("skip_reduce", torch.ones(1, 1)), "gradients must be [steps, ranks, elements]"),
        (lambda: simulate("skip_reduce", torch.ones(1, 2, 3), torch.ones(4)), "weights must be [n] = [3]"),
        (
            lambda: simulate("skip_reduce", torch.ones(1, 2, 3), wire_dtype="int2"),
            "wire_dtype must be one of float32, bfloat16, float16, int8, int4, sign; got 'int2'",
        ),
    ],
)
def test_bad_settings_name_the_value_and_what_is_allowed(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()  # type: ignore[operator]


def test_a_compressor_that_is_neither_name_nor_instance_is_refused() -> None:
    with pytest.raises(TypeError, match="must be a name"):
        by_name(ls.TopK)


def test_draws_depend_on_every_counter_and_nothing_else() -> None:
    draws = {draw(seed, step, group) for seed in range(10) for step in range(10) for group in range(10)}
    assert len(draws) == 1000
    assert draw(1, 2, 3) == draw(1, 2, 3)
    assert draw(1, 2, 3) != draw(1, 3, 2)


def test_gradients_set_to_zero_beforehand_change_no_mean() -> None:
    """Only where the mean of the step before was sparse; whatever this one is, and the memory order of gradients."""
    group = Group(0, ("a", "b"), (torch.zeros(50, 7), torch.zeros(3, 2, 5, 5)))
    sparse = Sparse(torch.tensor([3, 349, 350, 499]), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    totals: list[Sparse | torch.Tensor] = [sparse, torch.arange(500.0), torch.arange(500.0), sparse, sparse]
    zeroed = []
    for total in totals:
        gradients = [torch.full(p.shape, 7.0) for p in group.parameters]
        gradients[1] = gradients[1].to(memory_format=torch.channels_last)
        group.make_way(gradients)
        zeroed.append(not gradients[0].any())
        group.hand_back(total, gradients, 2)
        expected = (total.dense(500) if isinstance(total, Sparse) else total) / 2
        assert torch.equal(torch.cat([g.reshape(-1) for g in gradients]), expected)
    assert zeroed == [False, True, False, False, True]
