"""Ok-Topk: a sparse all-reduce whose traffic does not grow with the number of ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_sparse import selection
from lightning_sparse.checks import check_selecting, check_setting, is_whole
from lightning_sparse.compressors.base import Compressor, carry_thresholds, last_report, report
from lightning_sparse.compressors.group import Group
from lightning_sparse.network.comm import Comm, Rounds
from lightning_sparse.network.sums import gather, reduce_scatter
from lightning_sparse.selection import partition
from lightning_sparse.selection.sparse import Sparse
from lightning_sparse.selection.threshold import (
    ThresholdController,
    count,
    not_nan,
    pooled_threshold,
    room,
    sampled_threshold,
    summary,
)

FEW = 8  # elements: of fewer counts do not say how far to move a threshold, which is evaluated in every step
THRESHOLDS = "local", "shared"  # this rank's own, of elements, and that of sums, which all ranks share


@dataclass(frozen=True)
class OkTopk(Compressor):
    """The largest sums of what ranks find large, at nearly the least traffic possible (Li and Hoefler, PPoPP 2022).

    1. Each rank selects the elements that reach its own threshold, about k = density * n of them.
    2. Split and reduce: the vector is cut into P regions, and each rank sends what it selected in a region to its
       owner, who adds them up: one all-to-all.
    3. Gather: owners select the sums that reach a threshold all ranks share, and everyone gathers them.

    Only what arrives in the end is taken out of ``unsent``: what did not reach the shared threshold stays with
    its rank.  A rank sends k (P-1)/P (index, value) pairs in step 2 and as many in step 3, times ``slack``; with 32-bit
    indices and values that is 4 ``slack`` k (P-1)/P words.  The paper's bound is 6, and 2 are needed (Theorem 3.1).

    So two messages follow each other, and a third, of 128 quantiles of each owner's sums, where the shared threshold is
    evaluated: every ``evaluate_every`` steps, where the last step missed by a factor of two, and for k < 8.  Between,
    a :class:`~lightning_sparse.selection.threshold.ThresholdController` corrects either threshold.  Regions move so
    that ranks select equally many in each.  All of this follows counts in the messages' headers, a step later.

    Where ours differs from the authors' code: messages have a fixed size, so what a full region has no room for waits
    (``group.overflow``) where they even out what owners hold, in a message of sizes and one of elements; the shared
    threshold comes from quantiles, not from gathering all sums; thresholds of ranks come from a sample.

    Args:
        density: k / n, the fraction of elements updated in a step, in (0, 1].  The paper's experiments: 0.01 and 0.02.
        evaluate_every: steps between evaluations of the thresholds, tau' in the paper; its code has 32 and 128.
        repartition_every: steps between moves of the regions, tau in the paper; its code has 64, since moving them
            takes a message there.
        slack: room in a message, as a multiple of the k / P elements meant, at least 1.
        indices: how they are written: "auto" (the cheapest), "int32", "block16", "bitmap" or "elias_fano"; on a GPU
            always "block16".  The code: 32 bits each.
    """

    default_wire_dtype = "int4"

    density: float = 0.05
    evaluate_every: int = 32
    repartition_every: int = 1
    slack: float = 1.25
    indices: str = "auto"

    def __post_init__(self) -> None:
        check_selecting(self)
        for name in ("evaluate_every", "repartition_every"):
            whole = is_whole(getattr(self, name), least=1)
            check_setting(self, name, whole, "an integer, at least 1: a number of steps")

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        """Select, split and reduce, select among the sums and gather; take out what arrived."""
        n, size, unsent, on = group.n, comm.size, group.unsent, selection.on(group.unsent)
        k = group.target = count(self.density, n)
        local, shared = self._adapt(group)
        edges = group.memory.setdefault("regions", partition.even(n, size))
        widths = partition.widths(edges.tolist())
        start, width = int(edges[comm.rank]), widths[comm.rank]
        layout = on.layout(max(widths), min(max(widths), room(k / size, self.slack)), self.indices, comm.wire_dtype)

        edges = on.placed(edges, unsent)
        local = not_nan(sampled_threshold(unsent, k)) if local is None else local
        found = on.with_values(on.select(unsent, local, layout.capacity, edges), unsent)
        region, arrived = yield from reduce_scatter(found, layout, edges, start, width, comm)

        if shared is None:
            sums = region.values if isinstance(region, Sparse) else region
            summaries = yield comm.all_gather(summary(sums, layout.capacity))
            shared = not_nan(pooled_threshold(summaries, k).float()).clamp(min=0)  # damaged, it may be anything
        load = found.seen[comm.rank] + arrived.seen.sum()
        own = replace(on.select_from(region, shared, layout.capacity), load=load)
        gathered = yield from gather(own, layout, comm, n, edges)

        on.put(on.among(found, gathered, n), unsent)
        if width:
            on.add(own, unsent[start : start + width])  # what the sums lost by rounding
        report(self, group, gathered, arrived)
        seen, near, sent = torch.stack([found.seen, found.near, found.count]).sum(1)
        used = [torch.as_tensor(each, device=unsent.device) for each in (local, shared, seen, near)]
        group.send_to_host("thresholds", torch.stack(used))
        delivered = on.as_one(gathered)
        group.picked, group.overflow = delivered.count, seen - sent + own.seen - own.count
        return on.total(delivered, n)

    def carry(self, parts: Sequence[tuple[Group, int]]) -> dict[str, Tensor]:
        """Both thresholds."""
        for group, _ in parts:
            self._adapt(group)
        return carry_thresholds(parts, *THRESHOLDS)

    def _adapt(self, group: Group) -> list[Tensor | None]:
        """The rank's own and the shared threshold of this step, [] float32; None where one is to be evaluated.

        They and the regions follow what was reported of the last step.
        """
        reported, memory = last_report(self, group), group.memory
        k = count(self.density, group.n)
        due = group.step % self.evaluate_every == 0 or k < FEW
        unknown = {key for key in THRESHOLDS if key not in memory or due}
        if reported is not None:
            owners = reported[: (len(reported) + 1) // 2]  # P messages were gathered, P - 1 were sent to this rank
            thresholds = group.take_from_host("thresholds")
            assert thresholds is not None  # it is sent with the report
            local, shared, seen, near = thresholds.tolist()
            for key, used, messages in zip(THRESHOLDS, (local, shared), ([[seen, seen, near]], owners), strict=True):
                controller = ThresholdController(used)
                if key in memory:
                    controller = ThresholdController.of(memory[key]).renewed(used)
                following = controller.following(messages, k)
                sent, seen, near = (sum(message[i] for message in messages) for i in range(3))
                if following is None or controller.needs_reestimate(sent, k, seen, near):
                    following = replace(controller, was_reestimated=following is not None)
                    unknown.add(key)
                memory[key] = following.state()
            if group.step % self.repartition_every == 0:
                memory["regions"] = partition.balanced(memory["regions"], [load for *_, load, _ in owners])
        known = {key: ThresholdController.of(memory[key]).threshold for key in THRESHOLDS if key not in unknown}
        return [group.unsent.new_full((), known[key]) if key in known else None for key in THRESHOLDS]
