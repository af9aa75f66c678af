"""Importance-weighted pruning: a few ranks say which elements matter for their weights, and all ranks sum those."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_sparse import selection
from lightning_sparse.checks import (
    check_seed,
    check_selecting,
    check_setting,
    checked_patterns,
    is_number,
    is_whole,
    matches,
)
from lightning_sparse.compressors.base import Compressor, report
from lightning_sparse.compressors.group import Group
from lightning_sparse.network.comm import Comm, Rounds
from lightning_sparse.network.costs import traffic
from lightning_sparse.network.sums import broadcast, sum_selected
from lightning_sparse.selection.streams import draw
from lightning_sparse.selection.threshold import LARGEST, count, room, sampled_threshold
from lightning_sparse.wire import Selection

RULES = ("density", "fixed", "adaptive")


@dataclass(frozen=True)
class ImportancePruning(Compressor):
    """Sums the elements whose gradient is large for their weight, by the opinion of a few random ranks.

    Cheng and Xu, "Bandwidth Reduction using Importance Weighted Pruning on Ring AllReduce" (arXiv 1901.01544).  An
    element's importance is |gradient / weight|.  In each step ``givers`` ranks, drawn from a stream all ranks share,
    send the indices of what they find important; every rank sends its values there.  So what is sent does not grow
    with P.

    Of the paper only the abstract could be had: importance, random mask-givers and sums at the mask are the paper's;
    that importance is of all that is unsent, the guard ``eps``, the rules for thresholds, the coding of masks and
    what is always sent densely are ours.

    Args:
        density: fraction of elements in the masks of a step, in (0, 1]; with the rules "fixed" and "adaptive" the most.
        givers: R, ranks that give masks; the masks are joined.
        rule: the threshold of a layer (a parameter).  "density": what ``density`` of its elements reach, estimated from
            a sample; "fixed": ``threshold``; "adaptive": mean + ``threshold`` * deviation of its importances.
        threshold: see ``rule``.
        eps: added to |weight|, so that weights near zero do not always pass.
        slack: room in a mask's message, as a multiple of what is meant, at least 1.
        indices: how masks are written: "auto" (the smallest), "int32", "block16", "bitmap" or "elias_fano"; on a GPU
            always "block16".
        protect: shell-style patterns of names of parameters that are always summed densely: where weights are near
            zero, importance says nothing.
        seed: of the draw of mask-givers; the same on every rank.
    """

    default_wire_dtype = "int4"

    density: float = 0.05
    givers: int = 1
    rule: Literal["density", "fixed", "adaptive"] = "density"
    threshold: float = 0.0
    eps: float = 1e-3
    slack: float = 1.25
    indices: str = "auto"
    protect: tuple[str, ...] = ("*bias", "*norm*", "*bn*", "*lora_B*")
    seed: int = 0

    def __post_init__(self) -> None:
        check_selecting(self)
        finite = is_number(self.threshold) and abs(self.threshold) <= LARGEST
        positive = is_number(self.eps) and 1 / LARGEST <= self.eps <= LARGEST
        check_setting(self, "givers", is_whole(self.givers, least=1), "an integer, at least 1: a number of ranks")
        check_setting(self, "rule", self.rule in RULES, f"one of {', '.join(RULES)}")
        check_setting(self, "threshold", finite, "a finite number: float32 values are compared with it")
        check_setting(self, "eps", positive, "from 3e-39 to 3e38, where float32 ends: weights may be 0")
        check_seed(self, self.seed)
        object.__setattr__(self, "protect", checked_patterns("ImportancePruning: protect", self.protect))

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        """Join the givers' masks, then sum the values there over all ranks."""
        unsent, on = group.unsent, selection.on(group.unsent)
        group.target = count(self.density, group.n)
        givers = self._draw_givers(group, comm.size)
        layout = on.layout(group.n, sum(self._room(size, len(givers)) for size in group.sizes if size), self.indices)

        own = self._mask(group, len(givers)) if comm.rank in givers else None
        masks = yield from broadcast(own, givers, layout, comm, unsent.device)
        group.mask_bytes = len(givers) * traffic("broadcast", layout.nbytes, comm.size)
        report(self, group, masks)
        chosen = on.unite(masks, group.n)
        group.picked, group.overflow = chosen.count, own.seen - own.count if own else 0
        return (yield from sum_selected(chosen, unsent, len(givers) * layout.capacity, comm))

    def _room(self, size: int, givers: int) -> int:
        """Elements of a layer of ``size`` that a mask has room for."""
        return min(size, room(count(self.density / givers, size), self.slack))

    def _draw_givers(self, group: Group, size: int) -> list[int]:
        """R distinct ranks, the same on every rank."""
        chance = group.draw(self.seed)
        return sorted(range(size), key=lambda rank: draw(chance, rank))[: self.givers]

    def _mask(self, group: Group, givers: int) -> Selection:
        """What this rank finds important, layer by layer."""
        on, found, edges = selection.on(group.unsent), [], [0]
        for importance in self._importances(group):
            size = importance.numel()
            threshold = self._layer_threshold(importance, count(self.density / givers, size))
            found.append(on.select(importance, threshold, self._room(size, givers)))
            edges.append(edges[-1] + size)
        return on.compact(on.join(found, edges), group.n)

    def _importances(self, group: Group) -> Iterator[Tensor]:
        """|unsent / weight| for the elements of each layer that has any."""
        weights = group.parts if group.weights is None else group.weights
        for slot, parameter in zip(group.slots(group.unsent), weights, strict=True):
            if slot.numel():
                eps = float(self.eps)  # torch takes no integers beyond 64 bits
                weight = parameter.detach().reshape(-1).float().abs().add_(eps)
                yield torch.div(slot, weight, out=weight).abs_()  # in the same memory

    def _layer_threshold(self, importance: Tensor, wanted: int) -> Tensor:
        """[] float32, where the importances are."""
        if self.rule == "fixed":
            return importance.new_full((), float(self.threshold))
        if self.rule == "adaptive":
            deviation, mean = torch.std_mean(importance, correction=0)
            return mean + float(self.threshold) * deviation
        return sampled_threshold(importance, wanted)

    def is_dense(self, name: str, elements: int) -> bool:
        return matches(name, self.protect)
