"""Ok-Topk on a device: all that travels is padded, and nobody waits to know how many were picked.

As :class:`OkTopk` says, but for what the host must know:

- What a step reported of thresholds and regions is looked at in the next.  A threshold that was lost is evaluated
  then, and regions cut anew are used from then on.
- A rank's own threshold is evaluated from a sample; the shared one from the largest sums of each region, as many as a
  message has room for.
- Nothing is evened out: what a fuller region has beyond its room stays with its ranks (``group.overflow``), since only
  what arrives is taken out of ``unsent``.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_sparse import kernels
from lightning_sparse.compressors.base import last_report
from lightning_sparse.compressors.group import Group
from lightning_sparse.kernels import Selection
from lightning_sparse.network.comm import Comm, Rounds, Sums
from lightning_sparse.network.sparse_collectives import Talk
from lightning_sparse.selection import messages, padded, partition
from lightning_sparse.selection.host import count, not_nan, pooled, sampled_threshold, summary_of_largest
from lightning_sparse.selection.threshold import Held
from lightning_sparse.wire import CAUSE, CorruptMessage, PickLayout

if TYPE_CHECKING:
    from lightning_sparse.compressors.ok_topk import OkTopk

UNKNOWN = Held(-1.0)  # one is evaluated in the next step; likewise where one that was blind is kept negative
CROWDED = 0.5  # of k sums that had no room in the last step: then regions are cut anew at once
ONE = 2**16  # a pick, where picks are counted in parts of it: whole numbers add up to the same in any order


def reduce(settings: "OkTopk", group: Group, comm: Comm) -> Rounds:
    """Pick, split and reduce, select and gather; take out what arrived."""
    n, unsent, rank = group.n, group.unsent, comm.rank
    crowded = adapt(settings, group)
    cut = crowded or "regions" not in group.memory or group.step % settings.repartition_every == 0
    edges: list[int] = group.memory.setdefault("regions", partition.even(n, comm.size)).tolist()
    widths = partition.widths(edges)
    layout = settings.layout(group, comm, max(widths))

    local = _known(group, "local", settings.evaluate_every)
    if local is None:
        local = not_nan(sampled_threshold(unsent, group.target))
    found = [kernels.largest_first(part, local, layout.capacity) for part in unsent.split(widths)]  # in each region
    index = padded.joined([part.index for part in found], edges)  # [P * capacity], n where there is no pick
    values = padded.take(unsent, index)
    parts = values.view(comm.size, layout.capacity)
    sums, arrived = yield from _reduce_scatter(found, parts, layout, widths[rank], comm)

    region = sums[: widths[rank]]
    shared = _known(group, "shared", settings.evaluate_every)
    if shared is None:
        summaries = yield comm.all_gather(summary_of_largest(region, layout.capacity))
        shared = not_nan(pooled(summaries, group.target).float()).clamp(min=0)  # of a damaged message anything may come
    chosen = kernels.largest_first(region, shared, layout.capacity)
    left = sums.index_select(0, chosen.index)
    delivered, total, report = yield from _gather(chosen, left, layout, edges, comm)

    reached = torch.zeros(n + 1, dtype=torch.bool, device=unsent.device).index_fill_(0, delivered, True)
    arrived_at = reached.index_select(0, index) & (index < n)
    padded.put(torch.where(arrived_at, index, n), values, unsent)
    own = padded.moved(chosen.index, edges[rank], edges[rank + 1], n)
    padded.put(own, padded.take(unsent, own) + left, unsent)

    seen, near, sent = (torch.stack([getattr(part, key) for part in found]) for key in ("seen", "near", "count"))  # [P]
    group.send_to_host("report", torch.cat([report, *arrived]))
    group.send_to_host("thresholds", torch.stack([local, shared, seen.sum(), near.sum()]).double())
    group.picked = report[:, 0].sum()
    group.overflow = (seen - sent).sum() + chosen.seen - chosen.count
    if cut and comm.size > 1:
        group.send_to_host("cut", (yield from _edges(index.view(comm.size, -1), seen, sent, n, comm)))
    return total


def adapt(settings: "OkTopk", group: Group) -> bool:
    """Thresholds and regions of this step, from what was reported in the last, if anything was.

    Returns:
        Whether so many had no room that regions are to be cut anew.

    Raises:
        CorruptMessage: if a message of the last step arrived damaged.
    """
    report = last_report(settings, group)
    if report is None:
        return False
    k, size = count(settings.density, group.n), (len(report) + 1) // 2
    local, shared, *counts = _reported(group, "thresholds")
    seen, near = (int(x) for x in counts)  # on this rank
    held = _used(group, "local", local)
    lost = held.lost(seen, near, k)
    group.memory["local"] = (UNKNOWN if lost else held.after(seen, k, seen, near)).state()

    crowded = _adapt_shared(group, shared, report[:size], k)
    if "cut" in group.memory:
        edges = [0, *_reported(group, "cut"), group.n]
        if sorted(edges) != edges:
            raise CorruptMessage(f"regions with the edges {edges} arrived, rising ones expected: {CAUSE}")
        group.memory["regions"] = torch.tensor(edges)
        group.memory["shared"][0] = UNKNOWN.threshold  # others find room
    return crowded


def _adapt_shared(group: Group, threshold: float, report: Sequence[Sequence[int]], k: int) -> bool:
    """Correct the shared threshold as MiCRO's, since there is no room for all in a full region; see :func:`adapt`."""
    held = _used(group, "shared", threshold)
    picked, seen, near, _ = (list(column) for column in zip(*report, strict=True))  # of each owner
    crowded: bool = sum(seen) - sum(picked) > CROWDED * k
    if crowded or held.lost(sum(seen), sum(near), k):
        held = Held(UNKNOWN.threshold, held.trend)
    elif held.blind(sum(picked), k, sum(seen), sum(near)):
        held = Held(-held.threshold, held.trend)
    else:
        roomy = [p for p in range(len(report)) if seen[p] == picked[p]] or range(len(report))
        held = held.after(sum(picked), k, sum(seen[p] for p in roomy), sum(near[p] for p in roomy))
    group.memory["shared"] = held.state()
    return crowded


def _reported(group: Group, key: str) -> list[Any]:
    """What was reported under ``key`` in the last step; and forget it."""
    report = group.on_host(key)
    assert report is not None
    del group.memory[key]
    values: list[Any] = report.tolist()
    return values


def _known(group: Group, key: str, evaluate_every: int) -> Tensor | None:
    """The threshold kept under ``key``, [] float32 on the device; None where it is to be evaluated."""
    held = Held.of(group.memory.setdefault(key, UNKNOWN.state()))
    if held.threshold < 0 or group.step % evaluate_every == 0:
        return None
    return group.unsent.new_full((), held.threshold)


def _used(group: Group, key: str, threshold: float) -> Held:
    """What was held under ``key`` in the last step, where ``threshold`` may have been evaluated."""
    before = Held.of(group.memory[key])
    if before.threshold < 0 and before.threshold != UNKNOWN.threshold:
        return Held(-before.threshold, before.trend).renewed(threshold)
    return Held(threshold, before.trend)


def _reduce_scatter(
    found: Sequence[Selection], values: Tensor, layout: PickLayout, width: int, comm: Comm
) -> Talk[tuple[Tensor, list[Tensor]]]:
    """As ``sparse_collectives.reduce_scatter``, of ``found`` [P] and ``values`` [P, capacity], which keep what is left.

    Returns:
        The sum in this rank's region of ``width`` elements, and zeros beyond: [layout.n + 1]; and the header of each
        message that arrived, [1, 4] each.
    """
    flights = []
    for j in range(1, comm.size):
        to = (comm.rank + j) % comm.size
        leaving, arriving = (comm.buffer(layout.nbytes, torch.uint8, values.device) for _ in range(2))
        messages.pack(layout, found[to], leaving, values[to])
        flights.append(comm.shift(leaving, out=arriving, by=j))
    sums = values.new_zeros(layout.n + 1).index_add_(0, found[comm.rank].index, values[comm.rank])
    values[comm.rank] = 0
    report = []
    for flight in flights:
        payload = (yield flight).unsqueeze(0)
        index, header = messages.unpack(layout, payload, [width])
        sums.index_add_(0, index[0], messages.values(layout, payload, index)[0])
        report.append(header)
    return sums, report


def _gather(
    chosen: Selection, values: Tensor, layout: PickLayout, edges: Sequence[int], comm: Comm
) -> Talk[tuple[Tensor, Tensor, Tensor]]:
    """What each rank chose in its region, everywhere; ``values`` [capacity] keep what rounding left.

    Returns:
        Where, [P * capacity], n where there is nothing; the vector in full, [n]; the header of each message, [P, 4].
    """
    n = edges[-1]
    message = messages.pack(layout, chosen, comm.buffer(layout.nbytes, torch.uint8, values.device), values)
    gathered = yield comm.all_gather(message)  # [P, bytes]
    rows, report = messages.unpack(layout, gathered, partition.widths(edges))
    index = padded.joined(list(rows), edges)
    total = values.new_zeros(n + 1).index_copy_(0, index, messages.values(layout, gathered, rows).flatten())
    return index, total[:n], report


def _edges(index: Tensor, seen: Tensor, sent: Tensor, n: int, comm: Comm) -> Sums:
    """The inner edges [P - 1] of regions: the mean over the ranks of where each would cut its own picks evenly.

    Args:
        index: [P, capacity], the picks in each of the regions there are; n where there is none.
        seen: [P], how many there would be, were there room; each pick stands for as many.
        sent: [P], how many there are.
        n: elements of the group.
        comm: the ranks.
    """
    size = comm.size
    parts = torch.arange(1, size, device=index.device)
    weight = (ONE * seen // sent.clamp(min=1)).unsqueeze(1)  # [P, 1]
    before = torch.where(index < n, weight, 0).flatten().cumsum(0)
    place = torch.searchsorted(before, parts * before[-1] // size, right=True).clamp(max=before.numel() - 1)
    inner = torch.where(before[-1] >= size * ONE, index.flatten().index_select(0, place), parts * n // size)
    return (yield comm.all_reduce(inner)) // size
