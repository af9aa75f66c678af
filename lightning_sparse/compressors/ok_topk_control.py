"""Thresholds and regions of Ok-Topk: evaluated at once on the host, and a step later on a device."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_sparse.compressors.base import last_report, report
from lightning_sparse.compressors.group import Group
from lightning_sparse.network.comm import Comm, Rounds
from lightning_sparse.selection import device, host, partition
from lightning_sparse.selection.estimate import (
    count,
    not_nan,
    pooled_threshold,
    sampled_threshold,
    summary,
    summary_of_largest,
)
from lightning_sparse.selection.sparse import Sparse
from lightning_sparse.selection.threshold import Held
from lightning_sparse.wire import CAUSE, CorruptMessage, Selection

if TYPE_CHECKING:
    from lightning_sparse.compressors.ok_topk import OkTopk

UNKNOWN = Held(-1.0)  # one is evaluated in the next step; likewise where one that was blind is kept negative
CROWDED = 0.5  # of k sums that had no room in the last step: then regions are cut anew at once
ONE = 2**16  # an element, where they are counted in parts of it: integers add up to the same in any order


class Evaluated:
    """Control on the host: counts are known in the step itself, and a threshold that is lost is evaluated at once."""

    def __init__(self, settings: "OkTopk", group: Group, comm: Comm) -> None:
        self.settings, self.group, self.comm = settings, group, comm

    def find(self) -> Rounds[tuple[list[Selection], list[int]]]:
        """Find this rank's large elements in each region, and the regions' edges."""
        group, found = self.group, self._local()
        edges = yield from self._regions(found)
        capacity = self.settings.layout(group, self.comm, max(partition.widths(edges))).capacity
        cuts = torch.searchsorted(found, torch.tensor(edges[1:-1])).tolist()
        inside = [host.at_most(capacity, part, group.unsent) for part in torch.tensor_split(found, cuts)]
        group.overflow = found.numel() - sum(part.numel() for part in inside)
        return [Selection(part - start) for part, start in zip(inside, edges, strict=False)], edges

    def _local(self) -> Tensor:
        """Indices of the elements that reach this rank's own threshold, [m] rising."""
        k, unsent, memory = self.group.target, self.group.unsent, self.group.memory
        held = Held.of(memory["local"]) if "local" in memory else None
        if held is None or self.group.step % self.settings.evaluate_every == 0:
            held = Held(host.kth_largest(unsent, k), held.trend if held else 0.0)
        found = host.select(unsent, held.threshold, self.group.n)
        index = found.index
        if held.lost(found.seen, found.near, k):
            too_low = found.seen > k  # then what is wanted is among what was found
            among = unsent.index_select(0, index) if too_low else unsent
            held = Held(host.kth_largest(among, k))
            found = host.select(among, held.threshold, self.group.n)
            index = index.index_select(0, found.index) if too_low else found.index
        memory["local"] = held.after(found.seen, k, found.seen, found.near).state()
        return index

    def _regions(self, found: Tensor) -> Rounds[list[int]]:
        """Edges [P + 1] of the regions: the mean over the ranks of where each would cut ``found`` evenly."""
        group, size = self.group, self.comm.size
        if "regions" not in group.memory or group.step % self.settings.repartition_every == 0:
            edges = partition.even(group.n, size)
            if size > 1:
                few = found.numel() < size
                inner = edges[1:-1].clone() if few else found[partition.even(found.numel(), size)[1:-1]]
                edges[1:-1] = (yield self.comm.all_reduce(inner)) // size
            group.memory["regions"] = torch.tensor(_rising(edges.tolist(), group.n))
        return list(group.memory["regions"].tolist())

    def choose(self, region: Tensor | Sparse) -> Rounds[tuple[Selection, list[int]]]:
        """Choose the sums in ``region`` that reach the shared threshold; and how many each rank chose."""
        assert isinstance(region, Sparse)
        group, comm, k, memory = self.group, self.comm, self.group.target, self.group.memory
        space = comm.size * self.settings.layout(group, comm, group.n).capacity
        held = Held.of(memory["shared"]) if "shared" in memory else None
        evaluated = held is None or group.step % self.settings.evaluate_every == 0
        blind = False
        while True:
            if evaluated or held is None:
                summaries = yield comm.all_gather(summary(region.values))
                threshold = pooled_threshold(summaries, k).item()
                held = held.renewed(threshold) if held and blind else Held(threshold, held.trend if held else 0.0)
            chosen = host.select(region.values, held.threshold, region.values.numel())
            own = torch.tensor([chosen.seen, chosen.near], dtype=torch.int32)
            sizes = yield comm.all_gather(own)  # [P, 2]
            if int(sizes.min()) < 0 or int(sizes.max()) > group.n:
                raise CorruptMessage(f"counts {sizes.tolist()} arrived, 0 to {group.n} expected: {CAUSE}")
            seen, near = sizes.sum(0).tolist()
            blind = held.blind(min(seen, space), k, seen, near)
            if evaluated or not (blind or held.lost(seen, near, k)):
                break
            evaluated = True
        memory["shared"] = held.after(min(seen, space), k, seen, near).state()
        counts = sizes[:, 0].tolist()
        if seen > space:  # each rank keeps its share of what there is room for
            counts = [c * space // seen for c in counts]
            chosen = host.select(region.values, held.threshold, counts[comm.rank])
            group.overflow += chosen.seen - chosen.count
        if chosen.count != counts[comm.rank]:
            raise CorruptMessage(f"{chosen.count} sums where counts {counts} arrived: {CAUSE}")
        some = region[chosen.index]
        return Selection(some.index, some.values), counts

    def finish(self, mine: Selection, messages: Sequence[Selection]) -> Rounds[None]:
        """Nothing is left to do."""
        del mine, messages
        yield from ()


class Reported:
    """Control on a device: what a step reports of thresholds and regions is looked at in the next.

    - A threshold that was lost is evaluated then, and regions cut anew are used from then on.
    - A rank's own threshold is evaluated from a sample; the shared one from the largest sums of each region, as many
      as a message has room for.
    - Nothing is evened out: what a fuller region has beyond its room stays with its ranks (``group.overflow``), since
      only what arrives is taken out of ``unsent``.
    """

    def __init__(self, settings: "OkTopk", group: Group, comm: Comm) -> None:
        self.settings, self.group, self.comm = settings, group, comm
        crowded = adapt(settings, group)
        self.cut = crowded or "regions" not in group.memory or group.step % settings.repartition_every == 0
        self.edges: list[int] = group.memory.setdefault("regions", partition.even(group.n, comm.size)).tolist()
        self.capacity = settings.layout(group, comm, max(partition.widths(self.edges))).capacity

    def find(self) -> Rounds[tuple[list[Selection], list[int]]]:
        """Find this rank's large elements in each region, and the regions' edges."""
        yield from ()  # nothing is launched
        unsent, local = self.group.unsent, self._known("local")
        self.local = not_nan(sampled_threshold(unsent, self.group.target)) if local is None else local
        parts = unsent.split(partition.widths(self.edges))
        self.found = [device.select(part, self.local, self.capacity) for part in parts]
        return self.found, self.edges

    def choose(self, region: Tensor | Sparse) -> Rounds[tuple[Selection, list[int]]]:
        """Choose the sums in ``region`` that reach the shared threshold; how many each rank chose is not known."""
        assert isinstance(region, Tensor)
        inside = region[: partition.widths(self.edges)[self.comm.rank]]
        shared = self._known("shared")
        if shared is None:
            summaries = yield self.comm.all_gather(summary_of_largest(inside, self.capacity))
            pooled = not_nan(pooled_threshold(summaries, self.group.target).float())
            shared = pooled.clamp(min=0)  # of a damaged message anything may come
        self.shared = shared
        self.chosen = device.with_values(device.select(inside, shared, self.capacity), region)
        return self.chosen, []

    def finish(self, mine: Selection, messages: Sequence[Selection]) -> Rounds[None]:
        """Send this step's counts to the host."""
        group, chosen, found = self.group, self.chosen, self.found
        seen, near, sent = (torch.stack([getattr(part, key) for part in found]) for key in ("seen", "near", "count"))
        report(self.settings, group, messages)
        group.send_to_host("thresholds", torch.stack([self.local, self.shared, seen.sum(), near.sum()]).double())
        group.overflow = (seen - sent).sum() + chosen.seen - chosen.count
        if self.cut and self.comm.size > 1:
            inner = _inner_edges(mine.index.view(self.comm.size, -1), seen, sent, group.n)
            group.send_to_host("cut", (yield self.comm.all_reduce(inner)) // self.comm.size)

    def _known(self, key: str) -> Tensor | None:
        """The threshold kept under ``key``, [] float32 on the device; None where it is to be evaluated."""
        held = Held.of(self.group.memory.setdefault(key, UNKNOWN.state()))
        if held.threshold < 0 or self.group.step % self.settings.evaluate_every == 0:
            return None
        return self.group.unsent.new_full((), held.threshold)


def adapt(settings: "OkTopk", group: Group) -> bool:
    """Set thresholds and regions of this step to what was reported in the last, if anything was.

    Returns:
        Whether so many had no room that regions are to be cut anew.

    Raises:
        CorruptMessage: if a message of the last step arrived damaged.
    """
    reported = last_report(settings, group)
    if reported is None:
        return False
    k, size = count(settings.density, group.n), (len(reported) + 1) // 2
    local, shared, *counts = _reported(group, "thresholds")
    seen, near = (int(x) for x in counts)  # on this rank
    held = _used(group, "local", local)
    lost = held.lost(seen, near, k)
    group.memory["local"] = (UNKNOWN if lost else held.after(seen, k, seen, near)).state()

    crowded = _adapt_shared(group, shared, reported[:size], k)
    if "cut" in group.memory:
        group.memory["regions"] = torch.tensor(_rising([0, *_reported(group, "cut"), group.n], group.n))
        group.memory["shared"][0] = UNKNOWN.threshold  # others find room
    return crowded


def _adapt_shared(group: Group, threshold: float, reported: Sequence[Sequence[int]], k: int) -> bool:
    """Correct the shared threshold as MiCRO's, since there is no room for all in a full region; see :func:`adapt`."""
    held = _used(group, "shared", threshold)
    picked, seen, near, _ = (list(column) for column in zip(*reported, strict=True))  # of each owner
    crowded: bool = sum(seen) - sum(picked) > CROWDED * k
    if crowded or held.lost(sum(seen), sum(near), k):
        held = Held(UNKNOWN.threshold, held.trend)
    elif held.blind(sum(picked), k, sum(seen), sum(near)):
        held = Held(-held.threshold, held.trend)
    else:
        roomy = [p for p in range(len(reported)) if seen[p] == picked[p]] or range(len(reported))
        held = held.after(sum(picked), k, sum(seen[p] for p in roomy), sum(near[p] for p in roomy))
    group.memory["shared"] = held.state()
    return crowded


def _reported(group: Group, key: str) -> list[Any]:
    """What was reported under ``key`` in the last step; and forget it."""
    reported = group.on_host(key)
    assert reported is not None
    del group.memory[key]
    return list(reported.tolist())


def _used(group: Group, key: str, threshold: float) -> Held:
    """What was held under ``key`` in the last step, where ``threshold`` may have been evaluated."""
    before = Held.of(group.memory[key])
    if before.threshold < 0 and before.threshold != UNKNOWN.threshold:
        return Held(-before.threshold, before.trend).renewed(threshold)
    return Held(threshold, before.trend)


def _rising(edges: list[int], n: int) -> list[int]:
    """``edges``, if they can be those of regions of [0, n)."""
    if sorted(edges) != edges or edges[0] != 0 or edges[-1] != n:
        raise CorruptMessage(f"regions with the edges {edges} arrived, rising ones expected: {CAUSE}")
    return edges


def _inner_edges(index: Tensor, seen: Tensor, sent: Tensor, n: int) -> Tensor:
    """Where this rank would cut regions with as many of its elements in each: the inner edges [P - 1].

    Args:
        index: [P, capacity], what was found in each of the regions there are; n where there is nothing.
        seen: [P], how many there would be, were there room; each that was found stands for as many.
        sent: [P], how many there are.
        n: elements of the group.
    """
    size = len(index)
    parts = torch.arange(1, size, device=index.device)
    weight = (ONE * seen // sent.clamp(min=1)).unsqueeze(1)  # [P, 1]
    before = torch.where(index < n, weight, 0).flatten().cumsum(0)
    place = torch.searchsorted(before, parts * before[-1] // size, right=True).clamp(max=before.numel() - 1)
    return torch.where(before[-1] >= size * ONE, index.flatten().index_select(0, place), parts * n // size)
