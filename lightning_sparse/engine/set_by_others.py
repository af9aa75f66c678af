"""Weights that somebody sets beside the optimizers' steps: what is set counts in full, however far ranks look ahead."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.engine.weights import Weights


class SetByOthers:
    """Notices by their versions which trained parameters somebody else than an optimizer or the engine has set.

    A hard copy into a target network, layers that are drawn anew, weights that are clamped after a step: the average
    must move by their mean, not by that over ``lead``, which is for optimizers' steps.  A parameter of which a rank has
    its own copy from the last step tells what was set; of others, until one of their group is set, all that is unsent
    counts as set.  What is written through ``.data`` moves no version, and counts as an optimizer's step.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._places = {
            p: (replica, place)
            for replica in weights.replicas
            if not replica.is_untrained
            for place, p in enumerate(replica.group.parameters)
        }
        self._versions: dict[Tensor, int] = {}
        self._before: dict[Tensor, Tensor] = {}  # copies, of groups of which something was set
        self._under_way: Optimizer | None = None  # the outermost, as one around another

    def begin(self, optimizer: Optimizer) -> None:
        """Enter a step of ``optimizer``."""
        if self._under_way is None:
            self._under_way = optimizer
            self.look(optimizer)

    def look_within(self, optimizer: Optimizer) -> None:
        """Note what was set by others than an ``optimizer`` that is about to set its parameters."""
        if optimizer is self._under_way:
            self.look(optimizer)

    def end(self, optimizer: Optimizer) -> None:
        """Leave a step; what was set since ``optimizer`` was done, in hooks, was set by others."""
        self.look_within(optimizer)
        if optimizer is self._under_way:
            self._under_way = None

    def look(self, optimizer: Optimizer | None = None) -> None:
        """Note what was set of an optimizer's parameters (None: of all) since then, unless the average is shown."""
        if self._weights.shown:
            return
        moved = [p for p in self._parameters(optimizer) if self._has_moved(p)]
        for replica, place in map(self._places.__getitem__, moved):
            p = replica.group.parameters[place]
            if replica.lead != 1:
                replica.note_set(place, p, self._before.get(p))
        also = [p for each in moved for p in self._places[each][0].group.parameters if not self._has_moved(p)]
        self._take([*moved, *also])

    def _has_moved(self, p: Tensor) -> bool:
        return self._versions.get(p, p._version) != p._version

    def record(self, optimizer: Optimizer | None = None) -> None:
        """Take an optimizer's parameters (None: all) as they are for what it, or the engine, has made of them."""
        self._take(self._parameters(optimizer))
        if optimizer is None:
            self._under_way = None

    def _parameters(self, optimizer: Optimizer | None) -> Iterable[Tensor]:
        if optimizer is None:
            return self._places
        return [p for group in optimizer.param_groups for p in group["params"] if p in self._places]

    @torch.no_grad()
    def _take(self, parameters: Iterable[Tensor]) -> None:
        for p in parameters:
            self._versions[p] = p._version
            if self._places[p][0].set_by_others.change is not None:
                self._before.setdefault(p, torch.empty_like(p)).copy_(p)
