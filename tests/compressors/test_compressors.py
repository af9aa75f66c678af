"""What is particular to a compressor, and what bad settings say."""

import math
from typing import Any

import pytest
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


CANNOT_BE: list[tuple[type[ls.Compressor], str, list[Any]]] = [
    (ls.TopK, "density", [0]), (ls.RandomK, "density", [1.5]), (ls.OkTopk, "density", [2]), (ls.MiCRO, "density", [-1]),
    (ls.SketchFusion, "density", [0]), (ls.SketchFusion, "rows", [4, -1]), (ls.SketchFusion, "width", [0]),
    (ls.SketchFusion, "momentum", [1]), (ls.OkTopk, "evaluate_every", [0]), (ls.OkTopk, "repartition_every", [0]),
    (ls.OkTopk, "slack", [0.5]), (ls.MiCRO, "slack", [math.nan]), (ls.MiCRO, "indices", ["zip"]),
    (ls.SkipReduce, "skip", [-0.1, math.nan]), (ls.SkipReduce, "rotation", ["left"]),
    (ls.SkipReduce, "divisor", ["none"]), (ls.SkipReduce, "protect_below", [-1]), (ls.SkipReduce, "whole_below", [0.5]),
    (ls.LowRank, "rank", [0, -1, 1.5, True, "4"]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "values"), CANNOT_BE)
def test_a_setting_that_cannot_be_is_refused(kind: type[ls.Compressor], name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"{name} must be|{kind.__name__}.*{name}") as error:
            kind(**{name: value})
        assert repr(value) in str(error.value)
