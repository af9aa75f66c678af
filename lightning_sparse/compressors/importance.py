"""Importance-weighted pruning: a few ranks say which elements matter for their weights, and all ranks sum those."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_sparse import kernels
from lightning_sparse.checks import (
    check_density,
    check_seed,
    check_slack,
    checked_patterns,
    is_number,
    is_whole,
    matches,
)
from lightning_sparse.compressors.base import Compressor, last_report
from lightning_sparse.compressors.group import Group
from lightning_sparse.network.comm import Comm, Rounds
from lightning_sparse.network.ring import sum_at, sum_padded
from lightning_sparse.network.sparse_collectives import Talk
from lightning_sparse.selection import messages, padded
from lightning_sparse.selection.host import count, not_nan, pick, room, sampled_threshold
from lightning_sparse.selection.sparse import Sparse
from lightning_sparse.selection.streams import draw
from lightning_sparse.selection.threshold import LARGEST
from lightning_sparse.wire import PickLayout, Picks, check_index_format, index_format

RULES = ("density", "fixed", "adaptive")


@dataclass(frozen=True)
class ImportancePruning(Compressor):
    """Sums the elements whose gradient is large for their weight, by the opinion of a few random ranks.

    Cheng and Xu, "Bandwidth Reduction using Importance Weighted Pruning on Ring AllReduce" (arXiv 1901.01544).  An
    element's importance is |gradient / weight|.  In each step ``givers`` ranks, drawn from a stream all ranks share,
    tell the indices of what they find important; every rank sends its values there, on a ring.  So what travels does
    not grow with P.

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
        indices: how masks travel: "auto" (the smallest), "int32", "block16", "bitmap" or "elias_fano"; on a GPU always
            "block16".
        protect: shell-style patterns of names of parameters that are always summed densely: where weights are near
            zero, importance says nothing.
        seed: of the draw of mask-givers; the same on every rank.
    """

    density: float = 0.01
    givers: int = 1
    rule: Literal["density", "fixed", "adaptive"] = "density"
    threshold: float = 0.0
    eps: float = 1e-3
    slack: float = 1.25
    indices: str = "auto"
    protect: tuple[str, ...] = ("*bias", "*norm*", "*bn*", "*lora_B*")
    seed: int = 0

    def __post_init__(self) -> None:
        check_density(self, self.density)
        check_slack(self, self.slack)
        check_index_format(self, self.indices)
        if not is_whole(self.givers, least=1):
            raise ValueError(f"ImportancePruning(givers={self.givers!r}): at least one rank must give a mask.")
        if self.rule not in RULES:
            raise ValueError(f"ImportancePruning(rule={self.rule!r}): rule is one of {', '.join(RULES)}.")
        if not (is_number(self.threshold) and abs(self.threshold) <= LARGEST):
            raise ValueError(
                f"ImportancePruning(threshold={self.threshold!r}) is compared with float32 values, so a finite number."
            )
        if not (is_number(self.eps) and 1 / LARGEST <= self.eps <= LARGEST):
            raise ValueError(
                f"ImportancePruning(eps={self.eps!r}) is added to weights that may be 0, so above 0: from 3e-39 to "
                "3e38, where float32 ends."
            )
        for name in ("threshold", "eps"):  # torch takes no integers beyond 64 bits
            object.__setattr__(self, name, float(getattr(self, name)))
        check_seed(self, self.seed)
        object.__setattr__(self, "protect", checked_patterns(self, self.protect))

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        """Join the givers' masks, then sum the values there over all ranks."""
        unsent = group.unsent
        group.target = count(self.density, group.n)
        givers = self._draw_givers(group, comm.size)
        if kernels.used_for(unsent):
            return (yield from self._on_device(group, comm, givers))
        layout = self._layout(group, len(givers), self.indices)

        def give(message: Tensor) -> int:
            mask = self._mask(group, len(givers))
            layout.pack(mask, out=message)
            return mask.seen - mask.index.numel()

        arrived = yield from self._broadcast(group, comm, givers, layout, give)
        masks = [layout.unpack(message).index for message in arrived]
        index = masks[0] if len(masks) == 1 else torch.cat(masks).unique()  # [m], rising

        total = yield from sum_at(index, unsent, len(givers) * layout.capacity, comm)
        return Sparse(index, total)

    def _on_device(self, group: Group, comm: Comm, givers: Sequence[int]) -> Rounds:
        """As :meth:`reduce`, and nobody waits for the device to know how many were picked: all that travels is padded.

        Indices are block16, which the device codes by itself.
        """
        n, unsent = group.n, group.unsent
        last_report(self, group)
        layout = self._layout(group, len(givers), "block16")

        def give(message: Tensor) -> Tensor:
            mask = self._device_mask(group, len(givers))
            messages.pack(layout, mask, out=message)
            return mask.seen - mask.count

        arrived = yield from self._broadcast(group, comm, givers, layout, give)
        masks, report = messages.unpack(layout, torch.stack(arrived))  # [R, capacity], n where there is no pick
        group.send_to_host("report", report)
        index = masks[0] if len(givers) == 1 else padded.distinct(masks.flatten(), n)
        group.picked = (index < n).sum()
        return (yield from sum_padded(index, unsent, comm))

    def _broadcast(
        self,
        group: Group,
        comm: Comm,
        givers: Sequence[int],
        layout: PickLayout,
        give: Callable[[Tensor], int | Tensor],
    ) -> Talk[list[Tensor]]:
        """The givers' messages, [R] of [bytes]; ``give`` writes this rank's, and tells what it had no room for."""
        before = comm.sent_bytes
        flights = []
        for giver in givers:
            message = comm.buffer(layout.nbytes, torch.uint8, group.unsent.device)
            if giver == comm.rank:
                group.overflow = give(message)
            flights.append(comm.broadcast(message, giver))
        group.mask_bytes = comm.sent_bytes - before
        arrived = []
        for flight in flights:
            arrived.append((yield flight))
        return arrived

    def carry(self, parts: Sequence[tuple[Group, int]]) -> dict[str, Tensor]:
        """Nothing, where no message was damaged."""
        for group, _ in parts:
            last_report(self, group)
        return {}

    def _layout(self, group: Group, givers: int, indices: str) -> PickLayout:
        """Messages with a mask: each layer has room of its own."""
        capacity = sum(self._room(size, givers) for size in group.sizes if size)
        return PickLayout(group.n, capacity, index_format(indices, group.n, capacity))

    def _room(self, size: int, givers: int) -> int:
        """Elements of a layer of ``size`` that a mask has room for."""
        return min(size, room(count(self.density / givers, size), self.slack))

    def _draw_givers(self, group: Group, size: int) -> list[int]:
        """R distinct ranks, the same on every rank."""
        chance = group.draw(self.seed)
        return sorted(range(size), key=lambda rank: draw(chance, rank))[: self.givers]

    def _mask(self, group: Group, givers: int) -> Picks:
        """What this rank finds important, layer by layer."""
        found, seen, start = [], 0, 0
        for importance in self._importances(group):
            wanted = count(self.density / givers, importance.numel())
            threshold = float(self._layer_threshold(importance, wanted))
            picks = pick(importance, threshold, self._room(importance.numel(), givers))
            found.append(picks.index + start)
            seen += picks.seen
            start += importance.numel()
        return Picks(torch.cat(found), group.unsent.new_empty(0), seen)

    def _device_mask(self, group: Group, givers: int) -> kernels.Selection:
        """The same, n in place of an index where a layer has fewer than there is room for."""
        found = []
        for importance in self._importances(group):
            size = importance.numel()
            threshold = self._layer_threshold(importance, count(self.density / givers, size))
            found.append(kernels.largest_first(importance, not_nan(threshold), self._room(size, givers)))
        edges = [0, *itertools.accumulate(size for size in group.sizes if size)]
        index = padded.joined([layer.index for layer in found], edges).sort().values
        count_, seen, near = (
            torch.stack([getattr(layer, name) for layer in found]).sum() for name in ("count", "seen", "near")
        )
        return kernels.Selection(index, count_, seen, near)

    def _importances(self, group: Group) -> Iterator[Tensor]:
        """Of the elements of each layer that has any, |unsent / weight|."""
        for slot, parameter in zip(group.slots(group.unsent), group.parameters, strict=True):
            if slot.numel():
                weight = parameter.detach().reshape(-1).float().abs().add_(self.eps)
                yield torch.div(slot, weight, out=weight).abs_()  # in the same memory

    def _layer_threshold(self, importance: Tensor, wanted: int) -> Tensor:
        """[] float32, where the importances are."""
        if self.rule == "fixed":
            return importance.new_full((), self.threshold)
        if self.rule == "adaptive":
            deviation, mean = torch.std_mean(importance, correction=0)
            return mean + self.threshold * deviation
        return sampled_threshold(importance, wanted)

    def is_dense(self, name: str, elements: int) -> bool:
        """Whether ``protect`` exempts this parameter."""
        del elements
        return matches(name, self.protect)
