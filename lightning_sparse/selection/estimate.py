"""How many elements, and which thresholds as many reach: estimated from samples, without waiting for a device."""

import math

import torch
from torch import Tensor

SAMPLE = 2**16  # elements at least in a sample, where there are so many ...
SAMPLED_ABOVE = 1024  # ... and so many of them above the threshold that is wanted: about 3 % of uncertainty
QUANTILES = 128  # that summarise a distribution


def count(density: float, n: int) -> int:
    """k: ``density * n`` rounded, at least 1 and at most n."""
    return min(n, max(1, round(density * n)))


def room(wanted: float, slack: float) -> int:
    """Elements there is room for in a message that is meant to carry ``wanted``: at least 1."""
    return max(1, math.ceil(wanted * slack))


def sampled_threshold(x: Tensor, k: int) -> Tensor:
    """About the ``k``-th largest magnitude in ``x`` [n], [] float32, from a regular sample.

    Zero where fewer than k elements are not; NaN where the sample has too many of it.
    """
    n = x.numel()
    if n == 0 or k >= n:
        return x.new_zeros(())
    wanted = max(SAMPLE, SAMPLED_ABOVE * n // k)
    stride = max(1, n // wanted) | 1  # odd, so as not to fall in step with the rows of a matrix
    sample = x[::stride].abs()
    return least_of_largest(sample, count(k / n, sample.numel()))


def least_of_largest(magnitudes: Tensor, k: int) -> Tensor:
    """The ``k``-th largest of ``magnitudes`` [m], exactly: [].  NaN counts as the largest."""
    return magnitudes.topk(k, sorted=False).values.min()


def not_nan(threshold: Tensor) -> Tensor:
    """``threshold`` [], or infinity where it is NaN, which every element reached: so what is not finite goes first."""
    return torch.where(threshold.isnan(), torch.inf, threshold)


def summary(x: Tensor, most: int) -> Tensor:
    """How the ``most`` largest magnitudes in ``x`` [m] are distributed, for :func:`pooled_threshold`.

    Returns:
        [1 + QUANTILES] float32: how many they are, and their quantiles.
    """
    m = min(most, x.numel())
    if m == 0:
        return x.new_zeros(1 + QUANTILES)
    ordered = x.abs().topk(m).values
    at = torch.arange(QUANTILES, device=x.device) * (m - 1) // (QUANTILES - 1)
    return torch.cat([x.new_full((1,), m), ordered.index_select(0, at)])


def pooled_threshold(summaries: Tensor, k: int) -> Tensor:
    """About the ``k``-th largest magnitude of all that ``summaries`` [P, 1 + QUANTILES] describe: [] float64.

    Zero if there are fewer.  Each quantile stands for as many elements, so k is met to within m / (2 QUANTILES)
    elements of a summary of m.
    """
    counts, quantiles = summaries.double().split([1, QUANTILES], dim=1)
    magnitudes, order = quantiles.flatten().sort(descending=True)
    reached = counts.long().expand_as(quantiles).flatten().index_select(0, order).cumsum(0)  # times QUANTILES
    place = (reached < k * QUANTILES).sum()
    return torch.cat([magnitudes, magnitudes.new_zeros(1)]).index_select(0, place.view(1)).squeeze(0)
