"""Gradients that a user throws away: what is unsent is then as it was before the backward that made them."""

import weakref
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.base import Exact
from lightning_sparse.compressors.group import Group

SAMPLE = 256  # elements of a gradient that are compared, about
TOLERANCE = 1e-6
EXPLAINED = 0.8  # what other means leave of an edit that is made of them, as squares; of noise they leave nearly all
FIRST = 10  # backwards after which it is known whether a loop sets gradients to zero
MOST = 16  # means between two steps that a gradient may have a part of
UNSENT = ""  # beside the keys of a group's memory


class Discards:
    """Notes what became of each mean that was handed back, and undoes what nobody has stepped with.

    A mean that was handed back is in ``.grad``.  It counts as used in two cases: the version of its parameter has
    changed since the last forward, or an optimizer has stepped whose writes change no version.  It was thrown away if
    it was not used, and ``.grad`` is None or was set to zero before another gradient is added to it.  What is unsent of
    this parameter is then as it was before.  Otherwise nobody knows yet.  All this is the same on every rank, as steps
    are, so that no message is needed.

    After gradient surgery an optimizer steps with parts of means that were zeroed before.  Those were used, not thrown
    away, and as long as steps are so, nothing counts as thrown away.

    What is unsent is copied before each backward once a gradient was thrown away, and not before: what was unsent
    before the first such backward is lost.  A group of whose means none was used has skipped the step: its number and
    what its compressor remembers go back.  Turns therefore do not depend on discards.

    Args:
        held: the parameter that an optimizer has in the place of one of the groups', a shard say.

    Attributes:
        seen: a gradient was thrown away.
        by_hand: the last step was with what was put together by hand.
        knows_steps: an optimizer of these parameters is known, or a version has moved after a backward; before that,
            weights may be moved by hand where versions do not show it, and nothing counts as thrown away.
    """

    def __init__(self, held: Mapping[Tensor, Tensor]) -> None:
        self.seen = self.by_hand = self.knows_steps = False
        self._lost: list[str] = []
        self._held = held
        self._groups: list[tuple[Group, Compressor]] = []
        self._versions: dict[Tensor, int] = {}  # of each parameter before the backward whose mean it has
        self._due: dict[Tensor, int] = {}  # parameters whose mean nobody has stepped with so far: the version of .grad
        self._backwards = 0
        #: What .grad was before a backward, and its version.
        self._earlier_mean: dict[Tensor, tuple[weakref.ref[Tensor], int] | None] = {}
        self._is_written = False  # somebody writes into .grad, which clipping does, too
        self._samples: dict[Tensor, Tensor] = {}  # then, or once a mean was thrown away: some of each mean that is due
        self._earlier: dict[Tensor, list[Tensor]] = {}  # samples of means that were thrown away since the last step
        self._places: dict[Tensor, tuple[Group, Compressor, int]] = {}
        self._stepped: set[Tensor] = set()  # due parameters that an optimizer has stepped with
        #: Of due parameters, whether .grad was empty when the next backward reached them.
        self._thrown: dict[Tensor, bool | None] = {}
        self._copies: dict[Tensor, dict[str, Tensor]] = {}  # what is unsent, and remembered of each element
        self._before: dict[int, tuple[int, dict[str, Tensor]]] = {}  # by group: its step, and all else it remembers
        self._ended: set[int] = set()  # groups that were averaged in a backward that has ended, of these
        self._handles: dict[Tensor, RemovableHandle] = {}

    def lay_out(self, groups: Sequence[Group], compressors: Sequence[Compressor]) -> None:
        """Go on with these groups.  Nothing is ever unsent of those that are summed exactly."""
        pairs = zip(groups, compressors, strict=True)
        self._groups = [(group, compressor) for group, compressor in pairs if not isinstance(compressor, Exact)]
        self._places = {p: (group, c, i) for group, c in self._groups for i, p in enumerate(group.parameters)}
        self._before.clear()
        self._ended.clear()

    # - around a step, on the main thread

    def settle(self) -> list[Group]:
        """Undo what was thrown away so far, between two steps; returns the groups of which something was."""
        return [group for group, compressor in self._groups if self.settle_group(group, compressor, is_between=True)]

    def begin(self) -> None:
        """Note that a forward or a backward begins; to be called after :meth:`settle`, where all is known that it asks.

        From now on every mean that is still there is looked at once a gradient is to be added to it.
        """
        for group, _ in self._groups:
            self._note_moves(group)
            self._versions.update((p, p._version) for p in group.parameters if p not in self._due)
            for parameter in group.parameters:
                gradient = self.gradient_of(parameter)
                known = None if gradient is None else (weakref.ref(gradient), gradient._version)
                self._earlier_mean[parameter] = known
        for parameter in self._due:
            if parameter.requires_grad and parameter not in self._handles:
                look = partial(_look, weakref.ref(self), weakref.ref(parameter))
                self._handles[parameter] = parameter.register_hook(look)
        for parameter in self._handles.keys() - self._due.keys():
            self._handles.pop(parameter).remove()

    def look(self, parameter: Tensor, before: Tensor | None) -> None:
        """Note what ``.grad`` of a parameter holds just ``before`` a backward adds to it for the first time."""
        if parameter in self._due and parameter not in self._thrown:
            self._thrown[parameter] = self._is_empty(parameter, before)

    def handed_back(self) -> None:
        """Note that a backward has ended, in which groups were averaged, and the means are in ``.grad``."""
        self._thrown.clear()
        self._ended.update(self._before)
        self._backwards += 1
        samples = self.seen or self._backwards <= FIRST  # later to look, on a device, is to wait for it
        for group, _ in self._groups:
            for parameter in group.parameters:
                gradient = self.gradient_of(parameter)
                if gradient is not None and not self._is_earlier(parameter, gradient):
                    self._due[parameter] = gradient._version
                    if samples or (self._is_written and gradient.device.type == "cpu"):
                        self._samples[parameter] = _sample(gradient)

    def _is_earlier(self, parameter: Tensor, gradient: Tensor) -> bool:
        """Whether ``.grad`` holds what it did before the backward, which no rank has used the parameter in."""
        before, version = self._earlier_mean.get(parameter) or (None, -1)
        is_same = before is not None and before() is gradient and version == gradient._version
        return is_same and parameter not in self._held

    def before_step(self, held: Collection[Tensor]) -> list[Group]:
        """Find out what an optimizer that has these parameters is about to step with; returns groups of what is undone.

        It may be zeros, where a mean was thrown away, or what was put together by hand.
        """
        self._find_what_was_put_together(held)
        zeroed = [p for p in self._due if self._held.get(p, p) in held and self._was_zeroed(p)]
        self._thrown.update(dict.fromkeys(zeroed, True))
        groups = {id(self._places[p][0]): self._places[p][:2] for p in zeroed}.values()
        return [group for group, compressor in groups if self.settle_group(group, compressor)]

    def _was_zeroed(self, parameter: Tensor) -> bool | None:
        """Whether its mean was set to zero, which moves the version; None: it may be, as it was zero by itself.

        That of a shard never moves, and those of views of one bucket move together.
        """
        gradient, mean = self.gradient_of(parameter), self._samples.get(parameter)
        if gradient is None or (gradient._version == self._due[parameter] and parameter not in self._held):
            return False
        self._is_written = True
        if mean is None or bool(_sample(gradient).any()) or bool(gradient.any()):
            return False
        return True if bool(mean.any()) else None

    def _find_what_was_put_together(self, held: Collection[Tensor]) -> None:
        ours = [p for p in self._earlier if p in self._due and p in self._samples and self._held.get(p, p) in held]
        now = [gradient for p in ours if (gradient := self.gradient_of(p)) is not None]
        if not now or len(now) < len(ours):
            return
        most = max(len(self._earlier[p]) for p in ours)
        means = [[self._samples[p], *self._earlier[p]] for p in ours]
        padded = [[*each, *[torch.zeros_like(each[0])] * (most + 1 - len(each))] for each in means]
        columns = torch.cat([torch.stack(each, 1) for each in padded])  # [m, 1 + most]
        self.by_hand = _has_part_of_others(torch.cat(list(map(_sample, now))), columns)

    def stepped(self, held: Collection[Tensor]) -> None:
        """Note that an optimizer has stepped which has these parameters, some of which may have no gradient."""
        self.knows_steps = True
        for parameter in self._due:
            if self._held.get(parameter, parameter) in held and self.gradient_of(parameter) is not None:
                self._stepped.add(parameter)
                self._earlier.pop(parameter, None)

    def take_lost(self) -> list[str]:
        """Return the names of parameters of which something was lost since this was asked last."""
        lost, self._lost = self._lost, []
        return lost

    def forget(self) -> None:
        """Note that somebody else has undone the last step: nothing of it is unsent."""
        for kept in (self._due, self._thrown, self._copies, self._before, self._ended, self._stepped):
            kept.clear()

    def close(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    @property
    def may_throw_away(self) -> bool:
        """Whether a gradient was thrown away, or is if nobody steps with it any more."""
        return self.seen or (self.knows_steps and bool(self._due))

    def without_due(self, group: Group, compressor: Compressor) -> Group:
        """``group`` as it is where nobody steps with the means that are in ``.grad``, as far as that is known."""
        due = [i for i, p in enumerate(group.parameters) if p in self._due]
        if not due or not self.knows_steps:
            return group
        kept = group.snapshot()
        for i in due:
            copies = self._copies.get(group.parameters[i], {})
            for key, slot in _slots(kept, compressor, i).items():
                slot.copy_(copies[key]) if key in copies else slot.zero_()
        if len(due) == len(group.parameters) and id(group) in self._ended:
            kept.step, memory = self._before[id(group)]
            kept.memory = memory | {k: kept.memory[k] for k in compressor.per_element if k in kept.memory}
        return kept

    # - around a group's step, on whichever thread averages it

    def settle_group(self, group: Group, compressor: Compressor, is_between: bool = False) -> bool:
        """Undo what was thrown away of ``group`` so far; returns whether anything was.

        ``is_between`` two steps: what is in ``.grad`` now is what a user has left there.
        """
        self._note_moves(group)
        due = [i for i, p in enumerate(group.parameters) if p in self._due]
        if not self.knows_steps or not (due or id(group) in self._ended):
            return False
        known = {i: self._was_thrown(group.parameters[i], is_between) for i in due}
        others = True in known.values()  # what is not known goes as the rest of the group
        thrown = [i for i, is_thrown in known.items() if is_thrown or (is_thrown is None and others)]
        if self.by_hand:  # they may be used, by the next step that somebody takes
            for p in (group.parameters[i] for i in thrown):
                self._note_thrown(p)
                self._thrown[p] = False
            return False
        for i in thrown:
            self._restore(group, compressor, i)
        if len(thrown) == len(due) and id(group) in self._ended:  # nobody has stepped with any of it
            self._ended.discard(id(group))
            group.step, memory = self._before.pop(id(group))
            group.memory = memory | {k: group.memory[k] for k in compressor.per_element if k in group.memory}
        return bool(thrown)

    def _note_moves(self, group: Group) -> None:
        """Note which parameters of ``group`` somebody has stepped with."""
        moved = [p for p in group.parameters if p in self._stepped or p._version != self._versions.get(p, p._version)]
        for parameter in moved:
            self._forget(parameter)
        if moved:
            self.knows_steps = True
            self._ended.discard(id(group))
            self._before.pop(id(group), None)

    def keep(self, group: Group, compressor: Compressor) -> None:
        """Keep what it takes to undo this group's step; to be called before its gradients are added."""
        if isinstance(compressor, Exact):
            return
        if id(group) not in self._before:
            others = {key: x for key, x in group.memory.items() if key not in compressor.per_element}
            self._before[id(group)] = group.step, {k: x.clone() for k, x in others.items()} if self.seen else others
        if self.seen:
            for i, parameter in enumerate(group.parameters):
                if parameter not in self._due:
                    slots = _slots(group, compressor, i).items()
                    self._copies[parameter] = {key: slot.clone() for key, slot in slots}

    def _was_thrown(self, parameter: Tensor, is_between: bool) -> bool | None:
        if parameter in self._thrown:
            return self._thrown[parameter]
        gradient = self.gradient_of(parameter)
        return gradient is None or (is_between and self._is_empty(parameter, gradient))

    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        """What is in ``.grad`` of a parameter, of a shard this rank's."""
        gradient = self._held.get(parameter, parameter).grad
        return getattr(gradient, "_local_tensor", gradient)

    def _is_empty(self, parameter: Tensor, gradient: Tensor | None) -> bool | None:
        """Whether ``.grad`` is None, or a mean in it that was not zero was set to zero."""
        return gradient is None or self._was_zeroed(parameter)

    def _restore(self, group: Group, compressor: Compressor, i: int) -> None:
        parameter = group.parameters[i]
        copies = self._copies.get(parameter)
        if copies is None and self._before.get(id(group), (1,))[0]:  # else nothing was unsent before the first step
            self._lost.append(group.names[i])
        for key, slot in _slots(group, compressor, i).items():
            before = copies.get(key) if copies else None
            slot.zero_() if before is None else slot.copy_(before)
        self.seen = True
        self._note_thrown(parameter)
        self._forget(parameter)

    def _note_thrown(self, parameter: Tensor) -> None:
        if parameter in self._samples:
            self._earlier[parameter] = [*self._earlier.get(parameter, []), self._samples[parameter]][-MOST:]

    def _forget(self, parameter: Tensor) -> None:
        self._due.pop(parameter, None)
        self._copies.pop(parameter, None)
        self._samples.pop(parameter, None)
        self._stepped.discard(parameter)


def _slots(group: Group, compressor: Compressor, i: int) -> dict[str, Tensor]:
    """What the ``i``-th parameter of ``group`` has in ``unsent``, and in what is remembered of each element."""
    flat = {UNSENT: group.unsent} | {k: group.memory[k] for k in compressor.per_element if k in group.memory}
    return {key: group.slots(x)[i] for key, x in flat.items()}


def _sample(gradient: Tensor) -> Tensor:
    """Some elements, [m]."""
    flat = gradient.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)].clone()


def _has_part_of_others(now: Tensor, means: Tensor) -> bool:
    """Whether a gradient [m] has a part of other ``means`` [m, 1 + k] than the first, which may be scaled or edited."""
    x, columns = (each.to("cpu", torch.float64).nan_to_num(0.0, 0.0, 0.0) for each in (now, means))
    left = [_left(x, columns[:, :1]), _left(x, columns)]
    return bool(left[0] > TOLERANCE * x.square().sum()) and bool(left[1] < EXPLAINED * left[0])


def _left(x: Tensor, columns: Tensor) -> Tensor:
    """The squared norm of what no combination of ``columns`` [m, k] explains of ``x`` [m]."""
    found: Tensor = torch.linalg.lstsq(columns, x[:, None], driver="gelsd").solution
    return (x[:, None] - columns @ found).square().sum()


def _look(discards: "weakref.ref[Discards]", parameter: "weakref.ref[Tensor]", _: Tensor) -> None:
    """A parameter's hook, called before a gradient is added to its ``.grad``."""
    me, p = discards(), parameter()
    if me is not None and p is not None:
        me.look(p, p.grad)
