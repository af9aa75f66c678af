"""Weights that somebody sets beside the optimizers' steps: what is set counts in full, however far ranks look ahead."""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.local_steps.weights import Weights
from lightning_sparse.network.cut import shard_of, version_of


class SetByOthers:
    """Notices by their versions which trained parameters somebody else than an optimizer or the averager has set.

    A hard copy into a target network, layers that are drawn anew, weights that are clamped after a step: the average
    must move by their mean, not by that over ``lead``, which is for optimizers' steps.  If this rank has a copy of
    the parameter from the last step, the difference from it is what was set; if not, all that is unsent counts as set.
    Copies are kept once something in the group was set.  What is written through ``.data`` moves no version, and counts
    as an optimizer's step.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        trained = [replica for replica in weights.replicas if not replica.is_untrained]
        self._places = [(replica, place) for replica in trained for place in range(len(replica.group.names))]
        self._all = [replica.group.parameters[place] for replica, place in self._places]
        self._versions = [version_of(p) for p in self._all]
        self._before: dict[int, Tensor] = {}  # copies, of groups of which something was set
        self._under_way: Optimizer | None = None  # the outermost, as one around another
        self._has_asked = False  # it has asked a closure in this step
        #: Which parameters an optimizer has, and how many it had in all when this was found out.
        self._of_optimizer: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[int]]] = weakref.WeakKeyDictionary()

    def begin(self, optimizer: Optimizer) -> None:
        """Enter a step of ``optimizer``."""
        if self._under_way is None:
            self._under_way, self._has_asked = optimizer, False
            self.look(optimizer)

    def look_within(self, optimizer: Optimizer) -> None:
        """Note what was set by others than an ``optimizer`` that is about to set its parameters."""
        if optimizer is self._under_way:
            self.look(optimizer)

    def ask(self, optimizer: Optimizer | None) -> None:
        """Note that an ``optimizer`` asks a closure, before which it has set nothing the first time."""
        if optimizer is not None and not self._has_asked:
            self._has_asked = True
            self.look_within(optimizer)
        self.accept(optimizer)

    def end(self, optimizer: Optimizer) -> None:
        """Leave a step; what was set since ``optimizer`` was done, in hooks, was set by others."""
        self.look_within(optimizer)
        if optimizer is self._under_way:
            self._under_way = None

    def look(self, optimizer: Optimizer | None = None) -> None:
        """Note what was set of an optimizer's parameters (None: of all) since then, unless the average is shown."""
        if self._weights.shown:
            return
        of, now, then = self._parameters(optimizer), self._all, self._versions
        for i in (moved := [i for i in of if version_of(now[i]) != then[i]]):
            replica, place = self._places[i]
            if replica.lead != 1:
                replica.note_set(place, shard_of(now[i]), self._before.get(i))
        self._take(moved)

    def accept(self, optimizer: Optimizer | None = None) -> None:
        """Take an optimizer's parameters (None: all) as they are for what it, or the averager, has made of them."""
        self._take(self._parameters(optimizer))

    def _parameters(self, optimizer: Optimizer | None) -> Sequence[int]:
        if optimizer is None:
            return range(len(self._all))
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._of_optimizer.get(optimizer)
        if known is None or known[0] != size:
            own = {p for group in optimizer.param_groups for p in group["params"]}
            known = self._of_optimizer[optimizer] = size, [i for i, p in enumerate(self._all) if p in own]
        return known[1]

    @torch.no_grad()
    def _take(self, parameters: Sequence[int]) -> None:
        versions, every = self._versions, self._all
        for i in parameters:
            versions[i] = version_of(every[i])
        was_set = {replica for replica in self._weights.replicas if replica.set_by_others.change is not None}
        for i in parameters if was_set else ():
            if self._places[i][0] in was_set:
                if i not in self._before:
                    self._before[i] = torch.empty_like(shard_of(every[i]))
                self._before[i].copy_(shard_of(every[i]))
