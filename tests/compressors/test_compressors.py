"""What is particular to a compressor, and what bad settings say."""

import torch
from hypothesis import strategies as st

import lightning_sparse as ls
from lightning_sparse.compressors.random_k import scattered
from lightning_sparse.selection.streams import draw
from lightning_sparse.simulation import simulate
from tests.support.fuzz import LARGE, SEEDS, fuzzed


@fuzzed(100, n=st.one_of(st.integers(1, 1000), st.integers(2**31, LARGE)), k=st.integers(1, 1000), seed=SEEDS)
def test_scattered_indices_are_distinct_and_in_range(n: int, k: int, seed: int) -> None:
    k = min(k, n)
    index = scattered(n, k, torch.Generator().manual_seed(seed))
    assert index.shape == (k,)
    assert index.unique().numel() == k
    assert 0 <= index.min() <= index.max() < n


def test_scattered_indices_favour_nobody() -> None:
    n, k, draws = 50, 7, 5000
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
