"""How many elements, and which: counts, thresholds and scans shared by the compressors that pick by magnitude."""

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparse.kernels.reference import NEAR
from lightning_sparse.selection.sparse import nonzero
from lightning_sparse.wire import Picks

Magnitudes = NDArray[np.float32]

SCAN = 2**16  # elements looked at together, so that they stay in a core's cache
NEAR_SAMPLE = 2**18  # elements at least that are counted, where there are so many, to see how steep a distribution is
NEAR_PART = 16  # of each scan at least such a part
SAMPLE = 2**16  # elements at least in a sample, where there are so many ...
SAMPLED_PICKS = 1024  # ... and so many of them above the threshold that is wanted: about 3 % of uncertainty
SUMMARISED = 2**14  # elements at least that are put in order to tell of a distribution, by ...
QUANTILES = 128  # ... so many of them
SMALLEST = 2.0**-149  # the smallest positive float32: a threshold that every element but zero reaches


def count(density: float, n: int) -> int:
    """k: ``density * n`` rounded, at least 1 and at most n."""
    return min(n, max(1, round(density * n)))


def room(picks: float, slack: float) -> int:
    """Picks there is room for in a message that is meant to carry ``picks``: at least 1."""
    return max(1, math.ceil(picks * slack))


def pick(x: Tensor, threshold: float, capacity: int) -> Picks:
    """The elements of ``x`` [n] whose magnitude is at least ``threshold``, the ``capacity`` largest if there are more.

    Values are left out.
    """
    if x.device.type != "cpu":
        picked, near = above(x, threshold), above(x, NEAR * threshold).numel()
    else:
        steepness = _Steepness(x.numel(), threshold)
        picked = above(x, threshold, steepness.look)
        near = steepness.near(picked.numel()) if picked.numel() else above(x, NEAR * threshold).numel()
    return Picks(at_most(capacity, picked, x), x.new_empty(0), picked.numel(), near)


def at_most(capacity: int, index: Tensor, x: Tensor) -> Tensor:
    """``index`` [m], rising, or those ``capacity`` of it where ``x`` [n] has the largest magnitudes."""
    if index.numel() <= capacity:
        return index
    return index.index_select(0, largest(x.index_select(0, index), capacity))


class _Steepness:
    """How many of ``n`` elements reach ``NEAR * threshold`` for each that reaches ``threshold``; from a part."""

    def __init__(self, n: int, threshold: float) -> None:
        self._n = n
        self._counted = SCAN // min(max(1, n // NEAR_SAMPLE), NEAR_PART)  # elements of each scan
        self._threshold, self._nearly = np.float32(threshold), np.float32(NEAR * threshold)
        self._reached = self._near = 0  # elements counted that reach them

    def look(self, magnitudes: Magnitudes) -> None:
        """Count in what is being scanned, while it is in the core's cache."""
        some = magnitudes[: self._counted]
        self._reached += int(np.count_nonzero(some >= self._threshold))
        self._near += int(np.count_nonzero(some >= self._nearly))

    def near(self, seen: int) -> int:
        """Where ``seen`` elements reach the threshold, how many are near it or above."""
        return min(self._n, round(seen * (self._near / self._reached if self._reached else 1 / NEAR)))


def above(x: Tensor, threshold: float, look: Callable[[Magnitudes], None] | None = None) -> Tensor:
    """Indices, rising, of the elements of ``x`` [n] whose magnitude is at least ``threshold``: [m] int64.

    Never zeros, whatever the threshold; always NaN, so that it is seen and not kept.  On a CPU ``look`` is called with
    the magnitudes, ``SCAN`` at a time.
    """
    threshold = max(SMALLEST, threshold)  # of NaN the first: all but zeros
    if x.device.type != "cpu":
        return (~(x.abs() < threshold)).nonzero().squeeze(1)
    flat = x.numpy()
    magnitude = np.empty(SCAN, dtype=np.float32)
    found = []
    for start in range(0, flat.size, SCAN):
        part = flat[start : start + SCAN]
        magnitudes = np.abs(part, out=magnitude[: part.size])
        found.append(np.flatnonzero(~(magnitudes < np.float32(threshold))) + start)
        if look is not None:
            look(magnitudes)
    return torch.from_numpy(np.concatenate(found)) if found else torch.empty(0, dtype=torch.int64)


def estimate_threshold(x: Tensor, k: int) -> float:
    """About the ``k``-th largest magnitude in ``x`` [n], from a regular sample; 0 where fewer than k are not zero."""
    return sampled_threshold(x, k).item()


def sampled_threshold(x: Tensor, k: int) -> Tensor:
    """The same, [] float32 on the device of ``x``: nobody waits for it."""
    n = x.numel()
    if n == 0 or k >= n:
        return x.new_zeros(())
    wanted = max(SAMPLE, SAMPLED_PICKS * n // k)
    stride = max(1, n // wanted) | 1  # odd, so as not to fall in step with the rows of a matrix
    sample = x[::stride].abs()
    return _largest(sample, count(k / n, sample.numel()))


def not_nan(threshold: Tensor) -> Tensor:
    """``threshold`` [], or infinity where it is NaN, which every element reached: so what is not finite goes first."""
    return torch.where(threshold.isnan(), torch.inf, threshold)


def summary(x: Tensor) -> Tensor:
    """How magnitudes in ``x`` [m] are distributed, for :func:`pooled_threshold`: [1 + QUANTILES] float32."""
    m = x.numel()
    if m == 0:
        return x.new_zeros(1 + QUANTILES)
    ordered = x[:: max(1, m // SUMMARISED) | 1].abs().sort().values
    at = torch.linspace(0, ordered.numel() - 1, QUANTILES, dtype=torch.float64, device=x.device).round().long()
    return torch.cat([x.new_tensor([m]), ordered.index_select(0, at)])


def summary_of_largest(x: Tensor, most: int) -> Tensor:
    """The same of the ``most`` largest magnitudes in ``x`` [m], or all: nobody waits for the device."""
    m = min(most, x.numel())
    if m == 0:
        return x.new_zeros(1 + QUANTILES)
    ordered = x.abs().topk(m).values
    at = torch.arange(QUANTILES, device=x.device) * (m - 1) // (QUANTILES - 1)
    return torch.cat([x.new_full((1,), m), ordered.index_select(0, at)])


def pooled_threshold(summaries: Tensor, k: int) -> float:
    """About the ``k``-th largest magnitude of all that ``summaries`` [P, 1 + QUANTILES] tell of; 0 if there are fewer.

    Each quantile stands for as many elements, so k is met to within m / (2 QUANTILES) elements of a summary of m.
    """
    return pooled(summaries.cpu(), k).item()


def pooled(summaries: Tensor, k: int) -> Tensor:
    """The same, [] float64 on the device of ``summaries``: nobody waits for it."""
    counts, quantiles = summaries.double().split([1, QUANTILES], dim=1)
    magnitudes, order = quantiles.flatten().sort(descending=True)
    reached = counts.long().expand_as(quantiles).flatten().index_select(0, order).cumsum(0)  # times QUANTILES
    place = (reached < k * QUANTILES).sum()
    return torch.cat([magnitudes, magnitudes.new_zeros(1)]).index_select(0, place.view(1)).squeeze(0)


def kth_largest(x: Tensor, k: int) -> float:
    """The ``k``-th largest magnitude in ``x`` [n], exactly.  NaN counts as the largest."""
    return _largest(x.index_select(0, _candidates(x, k)).abs(), k).item()


def largest(x: Tensor, k: int) -> Tensor:
    """Indices, rising, of the ``k`` elements of ``x`` [n] with the largest magnitudes: [k] int64."""
    candidates = _candidates(x, k)
    among = x.index_select(0, candidates).abs().topk(k, sorted=False).indices
    chosen = torch.zeros_like(candidates, dtype=torch.bool).index_fill_(0, among, True)  # 10 times as fast as sorting
    return candidates.index_select(0, nonzero(chosen))


def _candidates(x: Tensor, k: int) -> Tensor:
    """Indices, rising, of elements among which the k largest are: one scan in place of a selection over all n."""
    if 0 < k < x.numel() // 4:
        found = above(x, estimate_threshold(x, 2 * k))
        if found.numel() >= k:
            return found
    return torch.arange(x.numel(), device=x.device)


def _largest(magnitudes: Tensor, k: int) -> Tensor:
    return magnitudes.topk(k, sorted=False).values.min()
