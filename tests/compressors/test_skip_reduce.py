"""What the papers say about Skip-Reduce (algorithms: ring reduce-scatter with its first steps left out)."""

import itertools

import pytest
import torch

import lightning_sparse as ls
from lightning_sparse.simulation import simulate


def contributors(compressor: ls.SkipReduce, size: int, width: int = 3, steps: int = 1) -> torch.Tensor:
    """Who is in each slice: [steps, P slices, P ranks] bool, read off powers of two that each rank alone sends."""
    powers = 2.0 ** torch.arange(size)
    result = simulate(compressor, powers[None, :, None].expand(steps, size, size * width))
    totals = (result.mean * size).reshape(steps, size, width)
    assert (totals == totals[:, :, :1]).all()  # a slice is of one piece
    return (totals[:, :, 0].long()[:, :, None] >> torch.arange(size)) % 2 == 1


@pytest.mark.parametrize(("size", "skipped"), [(p, s) for p in (2, 3, 8) for s in range(0, p, 2)])
def test_a_slice_holds_all_but_the_ranks_after_its_owner(size: int, skipped: int) -> None:
    compressor = ls.SkipReduce(skip=skipped / size, rotation="static", error_feedback=False)
    inside = contributors(compressor, size)[0]
    for owner, rank in itertools.product(range(size), range(size)):
        left_out = (rank - owner - 1) % size < skipped
        assert inside[owner, rank] == (not left_out), (owner, rank)


@pytest.mark.parametrize(("size", "skip", "n"), [(2, 0.0, 1), (3, 1.0, 5), (4, 0.5, 4096), (8, 0.75, 4099)])
def test_sent_bytes_are_the_papers(size: int, skip: float, n: int) -> None:
    compressor = ls.SkipReduce(skip=skip)
    sent = simulate(compressor, torch.ones(2, size, n)).sent_bytes
    slices = 2 * (size - 1) - compressor.steps_skipped(size)
    assert (sent == slices * -(-n // size) * 4).all()


def test_random_rotation_skips_every_rank_and_slice_equally_often() -> None:
    steps, size = 1000, 4
    inside = contributors(ls.SkipReduce(skip=0.5, rotation="random", error_feedback=False), size, steps=steps)
    skipped = 1 - inside.float().mean(0)  # [P slices, P ranks]
    sigma = (0.5 * 0.5 / steps) ** 0.5
    assert (skipped - 0.5).abs().max() < 4 * sigma


@pytest.mark.parametrize(("size", "skipped"), [(2, 1), (4, 1), (4, 3), (8, 6)])
def test_even_rotation_skips_in_s_of_p_steps_and_never_longer_than_it_must(size: int, skipped: int) -> None:
    compressor = ls.SkipReduce(skip=skipped / size, rotation="even", error_feedback=False)
    out = ~contributors(compressor, size, steps=4 * size)  # [T, P slices, P ranks]
    for start in range(3 * size):
        assert (out[start : start + size].sum(0) == skipped).all()
    longest = -(-skipped // (size - skipped))  # steps in a row
    in_a_row = out.unfold(0, longest + 1, 1).all(-1)
    assert not in_a_row.any()


def test_dividing_by_the_contributors_gives_the_true_mean_on_average() -> None:
    """E[output] * P / (P - s) is the mean: the paper's shrink by 1 - s / P is undone.

    Over P steps of the even rotation, in which each rank is left out of each slice as often, that is so exactly.
    """
    size = 4
    given = torch.randn(1, size, 8, generator=torch.Generator().manual_seed(1)).expand(size, -1, -1)
    unbiased = ls.SkipReduce(skip=0.5, divisor="contributors", error_feedback=False)
    assert torch.allclose(simulate(unbiased, given).mean.mean(0), given[0].mean(0))
    shrunk = simulate(ls.SkipReduce(skip=0.5, error_feedback=False), given).mean.mean(0)
    assert torch.allclose(shrunk, given[0].mean(0) / 2)


def test_without_error_feedback_exactly_the_skipped_slices_are_dropped() -> None:
    given = torch.randint(-100, 100, (1, 4, 40)).float()
    kept = simulate(ls.SkipReduce(skip=0.5), given)
    dropped = simulate(ls.SkipReduce(skip=0.5, error_feedback=False), given)
    assert torch.equal(kept.mean, dropped.mean)
    assert not dropped.unsent.any()
    assert torch.equal(given[0].sum(0) - 4 * dropped.mean[0], kept.unsent.sum(0))
    assert ((kept.unsent != 0).reshape(4, 4, 10).any(2).sum(1) == 2).all()  # each rank keeps s = 2 of its P slices


def test_protected_parameters_are_dense() -> None:
    given = torch.randint(-100, 100, (2, 4, 40)).float()
    dense = simulate(ls.Dense(), given)
    for compressor in (ls.SkipReduce(protect=["grad*"]), ls.SkipReduce(protect_below=41)):
        result = simulate(compressor, given)
        assert torch.equal(result.mean, dense.mean)
        assert torch.equal(result.sent_bytes, dense.sent_bytes)
    assert not torch.equal(simulate(ls.SkipReduce(protect_below=40), given).mean, dense.mean)


def test_as_published_small_groups_are_whole_and_of_others_the_rest_is_dropped() -> None:
    published, free = ls.SkipReduce.as_published(skip=0.5), ls.SkipReduce(0.5, "random", error_feedback=False)
    for n, expected in ((99_999, ls.SkipReduce(skip=0)), (100_000, free)):
        given = torch.randn(2, 3, n, generator=torch.Generator().manual_seed(n))
        result, other = simulate(published, given), simulate(expected, given)
        assert torch.equal(result.mean, other.mean)
        assert torch.equal(result.sent_bytes, other.sent_bytes)
        assert not result.unsent.any()
