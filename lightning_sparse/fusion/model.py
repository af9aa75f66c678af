"""Finds the groups with the shortest step, under a model of its time.  Pure functions; times in seconds."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_sparse.engine.timeline import GroupTime
from lightning_sparse.settings import counted
from lightning_sparse.wire import INDEX_LIMIT

Array = NDArray[np.float64]
Integers = NDArray[np.int64]


class SizeCost(NamedTuple):
    """The cost of averaging a group of one size.

    Attributes:
        elements: of the group.
        busy_s: of a processor, in the compressor's own code.
        spacing_s: by which a group ends after the one before where groups queue: the inverse of the throughput.
        latency_s: from the last gradient to the mean where nothing else is under way; not below ``busy_s``.
        sent_bytes: by a rank.
    """

    elements: int
    busy_s: float
    spacing_s: float
    latency_s: float
    sent_bytes: int


class Cost(NamedTuple):
    """The cost of averaging a group, by its size: lines through ``few`` elements, the least that matter, and ``many``.

    Where both are one size, it is the cost of that.
    """

    few: SizeCost
    many: SizeCost

    @property
    def bytes_each(self) -> float:
        """The bytes that a rank sends of each element."""
        return self.many.sent_bytes / self.many.elements

    def at(self, elements: Integers) -> Array:
        """Busy, spacing and latency of groups of any sizes, [*s] -> [3, *s]; 0 for no elements."""
        more = np.maximum(elements - self.few.elements, 0) / max(self.many.elements - self.few.elements, 1)
        lines = [few + max(many - few, 0.0) * more for few, many in zip(self.few[1:4], self.many[1:4], strict=True)]
        return np.where(elements > 0, np.stack(lines), 0.0)


@dataclass(frozen=True)
class StepModel:
    """A backward whose layers become ready one after the other, and what averaging groups of them costs.

    Groups are runs of layers in the order in which they become ready; layer i of L has elements of K kinds (compressed,
    and dense), each of which makes a group of its own where there are any.  A group ends ``spacing`` after the one
    before, and not before its last layer is ready and its ``latency`` over:

        end = max(end of the group before + spacing, ready + latency)

    Attributes:
        ready_s: [L] since backward began, rising.
        elements: [L] of tuples of K.
        costs: of the K kinds.
    """

    ready_s: tuple[float, ...]
    elements: tuple[tuple[int, ...], ...]
    costs: tuple[Cost, ...]

    def times(self, ends: Sequence[int]) -> list[GroupTime]:
        """Return the times of the groups that end before the layers ``ends`` [G], rising, the last of which is L."""
        found: list[GroupTime] = []
        end = 0.0
        for first, last in pairwise([0, *ends]):
            busy, spacing, latency = self._cost(slice(first, first + 1), last)[:, 0].tolist()
            ready = self.ready_s[last - 1]
            end = max(end + spacing, ready + latency)
            found.append(GroupTime(ready, end - latency, end, busy))
        return found

    def span(self, ends: Sequence[int]) -> float:
        """Seconds from the start of backward to the last mean."""
        return max((time.end_s for time in self.times(ends)), default=0.0)

    def can_be_indexed(self, ends: Sequence[int]) -> bool:
        """Whether no group has more elements than 32-bit indices can tell apart."""
        return bool((np.diff(self._sums[[0, *ends]], axis=0) <= INDEX_LIMIT).all())

    def best(self) -> list[int]:
        """The ends of the groups with the shortest span of all; of equals, one with a large last group.

        A dynamic program over the layers: the sooner the groups of the first i layers end, the sooner do all plans that
        go on from there, so that of the plans of a prefix only the best is kept.
        """
        layers = len(self.ready_s)
        end, start = np.zeros(layers + 1), [0] * (layers + 1)  # of the last group of the first i layers
        for last in range(1, layers + 1):
            _, spacing, latency = self._cost(slice(last), last)
            ends = np.maximum(end[:last] + spacing, self.ready_s[last - 1] + latency)
            start[last] = int(np.argmin(ends))
            end[last] = ends[start[last]]
        found = [layers] if layers else []
        while found and start[found[-1]]:
            found.append(start[found[-1]])
        return found[::-1]

    @cached_property
    def _sums(self) -> Integers:
        """Elements of each kind in the first i layers, [L + 1, K]."""
        each = np.asarray(self.elements, dtype=np.int64).reshape(len(self.elements), len(self.costs))
        return np.concatenate([np.zeros((1, len(self.costs)), np.int64), each.cumsum(0)])

    def _cost(self, firsts: slice, last: int) -> Array:
        """Busy, spacing and latency [3, m] of groups from layers ``firsts`` [m] to ``last``; one kind after another."""
        elements = self._sums[last] - self._sums[firsts]
        each = (cost.at(elements[:, kind]) for kind, cost in enumerate(self.costs))
        return sum(each, np.zeros((3, len(elements))))


@dataclass(frozen=True)
class Plan:
    """The groups chosen, and what was expected of them.

    Attributes:
        model: of what was measured.
        names: [L] of the parameters, in the order in which they become ready.
        ends: [G] where the groups end.
        before: where the groups before them ended.
        rest_s: seconds of a step outside backward and communication.
        span_s: expected from the start of backward to the last mean; the model's, corrected by measured steps.
        spans: ``span_s`` of each plan that was considered, by name.
    """

    model: StepModel
    names: tuple[str, ...]
    ends: tuple[int, ...]
    before: tuple[int, ...]
    rest_s: float
    span_s: float
    spans: Mapping[str, float]

    @property
    def times(self) -> list[GroupTime]:
        """The expected times of each group, not corrected."""
        return self.model.times(self.ends)

    @property
    def step_s(self) -> float:
        """The expected seconds of a step."""
        return self.rest_s + self.span_s

    def rejected(self) -> "Plan":
        """Return the plan of the groups there were before."""
        return replace(self, ends=self.before, span_s=self.spans["as before"])

    def group_of(self) -> dict[str, int]:
        """The index of each parameter's group, by name."""
        return {name: bisect_right(self.ends, place) for place, name in enumerate(self.names)}

    def __str__(self) -> str:
        spans = ", ".join(f"{name} {1e3 * span:.1f} ms" for name, span in self.spans.items() if math.isfinite(span))
        return f"{counted(len(self.ends), 'group')}. Expected from the start of backward to the last mean: {spans}."
