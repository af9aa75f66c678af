"""Finds the groups with the shortest step, under a model of its time.  Pure functions; times in seconds."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lightning_sparse.engine.timeline import GroupTime
from lightning_sparse.wire import INDEX_LIMIT

Array = NDArray[np.float64]

MOST_STATES = 32  # plans of the same first layers that are pursued
SHORT = 0.1  # of a step: what repeated measurements differ by
INEXACT = 0.05  # of a span: where plans differ by less, the model cannot tell which is faster


@dataclass(frozen=True)
class Cost:
    """The cost of averaging a group, by its size: lines between measured sizes, and one beyond them.

    Attributes:
        elements: [m] measured sizes, rising.
        busy_s: [m] of a processor, in the compressor's own code.
        spacing_s: [m] by which a group ends after the one before where groups queue: the inverse of the throughput.
        latency_s: [m] from the last gradient to the mean where nothing else is under way; not below ``busy_s``.
        busy_rise: seconds by which ``busy_s`` rises with each element beyond the last size.
        wire_rise: seconds the link needs for each element beyond the last size.
    """

    elements: tuple[int, ...]
    busy_s: tuple[float, ...]
    spacing_s: tuple[float, ...]
    latency_s: tuple[float, ...]
    busy_rise: float
    wire_rise: float

    def at(self, elements: NDArray[np.int64]) -> tuple[Array, Array, Array]:
        """Busy, spacing and latency of groups of any sizes [*s]; 0 for no elements."""
        return (
            self._line(self.busy_s, self.busy_rise, elements),
            self._line(self.spacing_s, max(self.busy_rise, self.wire_rise), elements),
            self._line(self.latency_s, self.busy_rise + self.wire_rise, elements),
        )

    def dense_up_to(self, dense: "Cost") -> int:
        """Return the elements, a power of two, up to which a ``dense`` sum has its mean sooner; 0 for none."""
        sizes = 2 ** np.arange(dense.elements[-1].bit_length())
        first_later = np.append(dense.at(sizes)[2] < self.at(sizes)[2], False).argmin()
        return int(sizes[first_later - 1]) if first_later else 0

    def with_dense(self, dense: "Cost", up_to: int) -> "Cost":
        """Return the cost where groups of at most ``up_to`` elements are summed densely."""
        if not up_to:
            return self
        small = [n for n in {*dense.elements, up_to} if n <= up_to]
        sizes = np.array(sorted({*small, up_to + 1, *(n for n in self.elements if n > up_to)}))
        both = zip(dense.at(sizes), self.at(sizes), strict=True)
        busy_s, spacing_s, latency_s = (tuple(np.where(sizes <= up_to, a, b).tolist()) for a, b in both)
        elements = tuple(sizes.tolist())
        return replace(self, elements=elements, busy_s=busy_s, spacing_s=spacing_s, latency_s=latency_s)

    def _line(self, measured: Sequence[float], rise: float, elements: NDArray[np.int64]) -> Array:
        seconds = np.maximum.accumulate(np.asarray(measured, dtype=np.float64))  # more elements never cost less
        inside = np.interp(elements, self.elements, seconds)
        return np.where(elements > 0, inside + rise * np.maximum(elements - self.elements[-1], 0), 0.0)


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
        blocking: compressing takes the processor from backward, so that all later layers are ready by as much later.
            False: it runs beside backward.
    """

    ready_s: tuple[float, ...]
    elements: tuple[tuple[int, ...], ...]
    costs: tuple[Cost, ...]
    blocking: bool = False

    def times(self, ends: Sequence[int]) -> list[GroupTime]:
        """Return the times of the groups that end before the layers ``ends`` [G], rising, the last of which is L."""
        sums = self._prefix_sums()
        found: list[GroupTime] = []
        end = delay = 0.0
        for first, last in pairwise([0, *ends]):
            busy, spacing, latency = (float(x[0]) for x in self._cost(sums[last] - sums[first : first + 1]))
            ready = self.ready_s[last - 1] + delay
            end = max(end + spacing, ready + latency)
            delay += busy if self.blocking else 0.0
            found.append(GroupTime(ready, end - latency, end, busy))
        return found

    def span(self, ends: Sequence[int]) -> float:
        """Seconds from the start of backward to the last mean."""
        return max(time.end_s for time in self.times(ends)) if ends else 0.0

    def can_be_indexed(self, ends: Sequence[int]) -> bool:
        """Whether no group has more elements than 32-bit indices can tell apart."""
        each = np.diff(self._prefix_sums()[[0, *ends]], axis=0)
        return bool((each <= INDEX_LIMIT).all())

    def best(self, others: Sequence[Sequence[int]] = ()) -> list[int]:
        """The ends of the groups with the shortest span of all; of equals, one with few groups.

        A dynamic program over the layers.  A plan of the first j layers leaves behind when its last group ends and by
        how much backward was delayed; of two plans of the same layers, one that is no better in either is dropped, as
        is one that cannot end before a plan that is known already.  Of more than ``MOST_STATES`` plans of the same
        layers so many are kept, from the soonest end to the least delay; the result is then close to the shortest, and
        no longer than any of ``others``, than one group or than what :meth:`greedy` finds.
        """
        sums = self._prefix_sums()
        layers = len(self.ready_s)
        if not layers:
            return []
        shortest = min([[layers], self.greedy(), *others], key=self.span)
        known = self.span(shortest)
        least = self.ready_s[-1] + float(self._cost(sums[-1:] - sums[-2:-1])[2][0])  # span of the last layer alone
        # States of all prefixes one after the other: where the prefix ends, end and delay it leaves, its state before.
        prefix, end, delay, before = [np.zeros(1, dtype) for dtype in (np.int64, np.float64, np.float64, np.int64)]
        for last in range(1, layers + 1):
            busy, spacing, latency = (x[prefix] for x in self._cost(sums[last] - sums[:last]))
            ends = np.maximum(end + spacing, self.ready_s[last - 1] + delay + latency)
            delays: Array = np.asarray(delay + busy if self.blocking else delay, dtype=np.float64)
            soonest = np.maximum(ends, least + delays) if last < layers else ends
            hopeful = np.flatnonzero(soonest <= known * (1 + 1e-9))
            hopeful = hopeful[_undominated(ends[hopeful], delays[hopeful])]
            kept = hopeful[_spread(delays[hopeful], MOST_STATES)]
            prefix = np.concatenate([prefix, np.full(len(kept), last)])
            end = np.concatenate([end, ends[kept]])
            delay = np.concatenate([delay, delays[kept]])
            before = np.concatenate([before, kept])
        final = np.flatnonzero(prefix == layers)
        if not len(final) or end[final].min() > known:
            return list(shortest)
        at = int(final[np.argmin(end[final])])
        found: list[int] = []
        while at:
            found.append(int(prefix[at]))
            at = int(before[at])
        return found[::-1]

    def greedy(self) -> list[int]:
        """Groups merged one layer at a time, as MG-WFBP does (Shi et al., INFOCOM 2019): for comparison.

        A layer joins the group before it if it is ready before that group could be sent, or so soon after that waiting
        costs less than the start of one more message.
        """
        sums = self._prefix_sums()
        start_s = float(self._cost(np.minimum(sums[-1:], 1))[1][0])  # spacing of a group of next to nothing
        found: list[int] = []
        end, first = 0.0, 0
        for last in range(1, len(self.ready_s) + 1):
            begin = max(end, self.ready_s[last - 1])
            if last < len(self.ready_s) and self.ready_s[last] - begin < start_s:
                continue
            end = begin + float(self._cost(sums[last] - sums[first : first + 1])[1][0])
            first = last
            found.append(last)
        return found

    def _prefix_sums(self) -> NDArray[np.int64]:
        """Elements of each kind in the first i layers, [L + 1, K]."""
        each = np.asarray(self.elements, dtype=np.int64).reshape(len(self.elements), len(self.costs))
        return np.concatenate([np.zeros((1, len(self.costs)), np.int64), each.cumsum(0)])

    def _cost(self, elements: NDArray[np.int64]) -> tuple[Array, Array, Array]:
        """Busy, spacing and latency [m] of groups with ``elements`` [m, K]; one kind after the other."""
        each = [cost.at(elements[:, kind]) for kind, cost in enumerate(self.costs)]
        busy, spacing, latency = (sum(part, np.zeros(len(elements))) for part in zip(*each, strict=True))
        return busy, spacing, latency


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
        sums: which way sums of which size take, in a sentence.
    """

    model: StepModel
    names: tuple[str, ...]
    ends: tuple[int, ...]
    before: tuple[int, ...]
    rest_s: float
    span_s: float
    spans: Mapping[str, float]
    sums: str = ""

    @property
    def times(self) -> list[GroupTime]:
        """The expected times of each group, not corrected."""
        return self.model.times(self.ends)

    @property
    def step_s(self) -> float:
        """The expected seconds of a step."""
        return self.rest_s + self.span_s

    @property
    def limit(self) -> str:
        """What is under way between the last gradient and the last mean: "backward", "compression" or "network"."""
        times, ready_s = self.times, self.model.ready_s[-1]
        after_backward_s = times[-1].end_s - ready_s
        if after_backward_s < SHORT * self.step_s:
            return "backward"
        busy_s = sum(time.busy_s for time in times if time.end_s > ready_s)
        return "compression" if busy_s > after_backward_s / 2 else "network"

    def rejected(self) -> "Plan":
        """Return the plan of the groups there were before."""
        return replace(self, ends=self.before, span_s=self.spans["as before"])

    def one_group(self) -> "Plan | None":
        """Return the plan of one group; None unless the model, which is not exact, cannot tell which is faster."""
        one, span_s = (len(self.names),), self.spans.get("one group", math.inf)
        if self.ends == one or span_s > (1 + INEXACT) * self.span_s or not self.model.can_be_indexed(one):
            return None
        return replace(self, ends=one, span_s=span_s)

    def group_of(self) -> dict[str, int]:
        """The index of each parameter's group, by name."""
        return {name: bisect_right(self.ends, place) for place, name in enumerate(self.names)}

    @property
    def in_short(self) -> str:
        """What it expects to gain, for a log."""
        before_s = self.spans.get("as before", self.span_s)
        return (
            f"{len(self.ends)} group{'s'[: len(self.ends) > 1]}; from the start of backward to the last mean "
            f"{1e3 * self.span_s:.0f} ms are expected, {1e3 * before_s:.0f} ms in the groups before."
        )

    def __str__(self) -> str:
        spans = ", ".join(f"{name} {1e3 * span:.1f} ms" for name, span in self.spans.items())
        groups = "1 group" if len(self.ends) == 1 else f"{len(self.ends)} groups"
        return f"{groups}. Expected from the start of backward to the last mean: {spans}. {self.sums}".rstrip()


def _spread(falling: Array, most: int) -> NDArray[np.int64]:
    """Indices of at most ``most`` values, evenly spread over ``falling``, among them the first and the last."""
    if len(falling) <= most:
        return np.arange(len(falling))
    last = len(falling) - 1
    between = np.searchsorted(-falling, -np.linspace(falling[0], falling[-1], most)[1:-1])
    return np.unique(np.concatenate([[0], between, [last]]))


def _undominated(a: Array, b: Array) -> NDArray[np.int64]:
    """Indices of the points (a, b) no other point is at most as large as in both; of equal points the first.

    In the order of rising a, which is that of falling b.
    """
    if not len(a):
        return np.zeros(0, np.int64)
    least = int(np.argmin(a + b))  # one good point drops most of the others before they are sorted
    near = np.append(np.flatnonzero((a < a[least]) | (b < b[least])), least)
    order = near[np.lexsort((near, b[near], a[near]))]
    lowest = np.minimum.accumulate(b[order])
    kept: NDArray[np.int64] = order[np.append(True, b[order][1:] < lowest[:-1])]
    return kept
