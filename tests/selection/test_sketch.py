"""Count-sketches and Sketch-Fusion: linearity, recovery, error, recall, and what travels."""

import math

import pytest
import torch
from hypothesis import strategies as st

import lightning_sparse as ls
from lightning_sparse.selection.sketch import CountSketch, median
from lightning_sparse.simulation import simulate
from tests.support.fuzz import LARGE, SEEDS, fuzzed
from tests.support.simulated import SimulatedRanks, layered


def table(sketch: CountSketch, x: torch.Tensor) -> torch.Tensor:
    return sketch.encode(x, torch.full((sketch.rows, sketch.columns), torch.nan))


def estimate(sketch: CountSketch, x: torch.Tensor) -> torch.Tensor:
    return sketch.estimate(table(sketch, x), torch.full((x.numel(),), torch.nan))


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_the_median_is_the_median(rows: int) -> None:
    x = torch.randn(rows, 1000).round(decimals=1)  # with ties
    assert torch.equal(median(x), x.median(0).values)


def test_errors_are_those_of_a_count_sketch() -> None:
    """Each row's error has the variance ||x||^2 / c; the median of five is within 4 ||x|| / sqrt(c) everywhere."""
    n, columns = 200_000, 2000
    x = torch.cat(list(layered(n, 1, 1, seed=3)))[0]
    scale = float(x.norm()) / math.sqrt(columns)
    one = torch.stack([estimate(CountSketch(1, columns, seed), x) - x for seed in range(20)])
    assert float(one.pow(2).mean()) == pytest.approx(scale**2, rel=0.1)
    assert abs(float(one.mean())) < 0.02 * scale
    five = estimate(CountSketch(5, columns, seed=9), x) - x
    assert float(five.abs().max()) < 4 * scale
    assert float(five.pow(2).mean()) < 0.5 * scale**2


@fuzzed(20, n=st.integers(2**31, LARGE), k=st.integers(1, 1000), seed=SEEDS)
def test_runs_of_buckets_reach_beyond_32_bits(n: int, k: int, seed: int) -> None:
    sketch = CountSketch(3, 4 * k, seed)
    runs = list(sketch._runs(2, n - 10 * k, n))
    assert [elements.start for elements, _, _ in runs] == [n - 10 * k, *(elements.stop for elements, _, _ in runs[:-1])]
    assert runs[-1][0].stop == n
    assert all(0 <= buckets.start < buckets.stop <= sketch.columns for _, buckets, _ in runs)


def test_bytes_are_those_of_a_table_and_k_values() -> None:
    n, size = 100_000, 4
    sent = simulate(ls.SketchFusion(density=0.01), torch.randn(2, size, n)).sent_bytes
    table, values = 4 * 5 * 4000, 4 * 1000  # bytes; the few of the values go to everybody
    assert (sent - 2 * (size - 1) * table // size - (size - 1) * values).abs().max() <= 4


def test_the_sum_at_candidates_is_exact_and_the_estimate_within_its_tolerance() -> None:
    given = torch.stack(list(layered(50_000, 4, 1, seed=7)))
    total = given[0].double().sum(0)
    exact = simulate(ls.SketchFusion(density=0.02), given)
    at = exact.mean[0].nonzero().flatten()
    assert at.numel() == 1000
    assert torch.allclose(4 * exact.mean[0][at].double(), total[at], rtol=1e-4, atol=1e-5)
    rough = simulate(ls.SketchFusion(density=0.02, exact=False), given)
    at = rough.mean[0].nonzero().flatten()
    tolerance = float(total.norm()) / math.sqrt(4000)
    error = (4 * rough.mean[0][at].double() - total[at]).pow(2).mean().sqrt()
    assert error < 2 * tolerance
    assert not rough.unsent[:, at].any()


def test_momentum_chooses_what_was_large_for_long() -> None:
    """A steady small gradient against a noise that jumps about: the running sum of tables finds it."""
    n = 20_000
    given = torch.randn(30, 2, n, generator=torch.Generator().manual_seed(0))
    run = SimulatedRanks(ls.SketchFusion(density=0.01, width=8, momentum=0.9), 2, n)
    for gradient in given:
        total = run.step(gradient)
    assert total.index.numel() == 200
    assert run.groups[0].memory["table"].shape == (5, 1600)
    assert torch.equal(run.groups[0].memory["table"], run.groups[1].memory["table"])
