"""A group's replica: this rank's own weights, the average all ranks share, and the way from one to the other."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.base import take_step
from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.groups import ASIDE, EXACT, SET, UNSENT_GRADIENT, VELOCITY
from lightning_sparse.local_steps.settings import LocalSteps
from lightning_sparse.network.comm import Comm, Rounds
from lightning_sparse.network.cut import shard_of
from lightning_sparse.selection.sparse import Sparse, dense

BLOCK = 2**15  # elements of each tensor that a processor's cache holds at once
HALVES = {torch.bfloat16, torch.float16}  # in which parameters hold neither x_r nor x̄ exactly

Find = Callable[[], Tensor]


class Replica:
    """The weights of a group on this rank, x_r, which are its parameters, and the average x̄.  n = elements.

    Where a member has several ranks, whose weights are the same, this is of the slices that this rank owns; where FSDP2
    shards the model, of the shards that it has.

    Over all P ranks, what a step of the exchange does obeys the law of gradients, with updates in their place:
    ``P * (what x̄ moved) + sum(unsent after) == sum(unsent before + update)``, to the rounding of the weights.

    Between :meth:`snapshot` and :meth:`apply_move`, while messages may be under way on another thread, nothing but
    ``group.unsent`` and the compressor's memory changes.  :meth:`apply_move` moves x̄.  A parameter whose x̄ somebody has
    set meanwhile does not move, and what was under way for it is dropped.

    Attributes:
        group: whose ``unsent`` is x_r - x̄ from :meth:`snapshot` to :meth:`apply_move`.
        compressor: what averages it.
        fragment: with which it takes turns.
        average: x̄ [n], the same bits on every rank; float32, or float64 for tensors in float64.
        unsent_gradient: [n] float32, not sent of gradients when local steps began, until a step is taken.
        set_by_others: what somebody has set beside optimizers' steps since the group was taken up.
    """

    def __init__(
        self,
        group: Group,
        compressor: Compressor,
        fragment: int,
        settings: LocalSteps,
        find: Sequence[Find] = (),
        scratch: "Scratch | None" = None,
    ) -> None:
        """Start from what the parameters hold; ``find`` finds those that no optimizer trains, where they are now."""
        self.unsent_gradient: Tensor | None = None
        self.set_by_others = SetInGroup(group)
        self._scratch = scratch or Scratch()
        self._at_snapshot: Tensor | None = None  # the weights when they were taken up [n], lent by scratch
        self._moves_by: Tensor | None = None  # what x̄ is to move by [n], lent by scratch
        self.group, self.compressor, self.fragment = group, compressor, fragment
        dtypes = {p.dtype for p in group.parameters}
        self.average = group.unsent.to(torch.float64 if torch.float64 in dtypes else torch.float32, copy=True)
        self._settings = replace(settings, outer_rate=1.0, outer_momentum=0.0, lead=1.0) if find else settings
        self.lead = self._settings.lead or 1.0  # this rank's steps are so many times as long as the average's
        self._find, self._warms_up = find, False
        self._own: list[Tensor] = []  # of each parameter, its part of the weights when they were taken up
        self._set_meanwhile: set[int] = set()  # places of parameters whose x̄ was set since then
        self._left_out: Tensor | None = None  # [n] bool, of what no optimizer trains, elements that are not averaged
        self._velocity: Tensor | None = None  # of the outer step [n]
        self._next: tuple[Tensor | Sparse, Tensor | None] | None = None  # what x̄ moves by; and the velocity
        self._memory: Mapping[str, Tensor] | None = None  # the compressor's, when the group was taken up
        self._decay = settings.error_decay
        # [n], unsent and not in the weights: what half precision cannot hold of them, or all with error_decay.
        self._aside = torch.zeros_like(self.average) if dtypes & HALVES or self._decay is not None else None
        for i, tensor in enumerate(self.tensors()):
            self.start_from(i, tensor)

    @property
    def is_untrained(self) -> bool:
        """Whether no optimizer trains its tensors."""
        return bool(self._find)

    @torch.no_grad()
    def note_set(self, place: int, value: Tensor, before: Tensor | None) -> None:
        """Note that somebody has set the parameter at ``place``: all that is unsent, if ``before`` is not known."""
        cut = self.group.cut
        known = (self._own or self.averages())[place] if before is None else cut.own(before)
        self.set_by_others.add(place, cut.own(value.detach()), known, self.average)

    def parameters(self) -> list[Tensor]:
        """The parameters, as they are; a module may have put another tensor in the place of a frozen one."""
        return [find() for find in self._find] or list(self.group.parameters)

    def wholes(self) -> list[Tensor]:
        """What this rank holds of the parameters: all of each, or of one that FSDP2 shards its shard."""
        return [shard_of(p) for p in self.parameters()]

    def tensors(self) -> list[Tensor]:
        """Of each parameter the slice that this rank owns, or all."""
        cut = self.group.cut
        return self.wholes() if cut.count == 1 else [cut.own(whole.detach()) for whole in self.wholes()]

    def values(self) -> list[Tensor]:
        """The values of the parameters, on the device of x̄: after a fit Lightning has moved the model to the CPU."""
        return [tensor.detach().to(self.average.device) for tensor in self.tensors()]

    def averages(self) -> list[Tensor]:
        """The average of each parameter: views, of its shape."""
        slots = self.group.slots(self.average)
        return [slot.view(shape) for slot, shape in zip(slots, self.group.shapes, strict=True)]

    def start_from(self, place: int, average: Tensor, keep_aside: bool = False) -> None:
        """Set the average of the parameter at ``place``, of which nothing is unsent then, but for what is aside."""
        self.averages()[place].copy_(average.detach())
        self._set_meanwhile.add(place)
        if self._aside is not None and not keep_aside:
            self.group.slots(self._aside)[place].zero_()
        self.set_by_others.forget(place)

    def start_anew(self) -> None:
        """Set this rank's weights to the average, of which nothing is unsent then."""
        for place, (tensor, average) in enumerate(zip(self.tensors(), self.averages(), strict=True)):
            tensor.copy_(average)
            self.start_from(place, average)

    def is_due(self, step: int, warmup_steps: int = 0) -> bool:
        """Whether the group travels after ``step``; if so, it then knows which of its turns that is."""
        turn = self._settings.turn(self.fragment, step, warmup_steps)
        self._warms_up = step <= warmup_steps
        if turn is not None:
            self.group.step = turn
        return turn is not None

    def unsent(self, own: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        """What is unsent where this rank's own weights are ``own``: x_r - x̄ [n], in the precision of x̄."""
        flat = torch.empty_like(self.average) if out is None else out
        for weights, average, slot in zip(own, self.averages(), self.group.slots(flat), strict=True):
            torch.sub(weights.detach().to(flat.dtype), average, out=slot.view(weights.shape))
        return flat if self._aside is None else flat.add_(self._aside)

    @torch.no_grad()
    def snapshot(self, size: int) -> None:
        """Set ``unsent`` to x_r - x̄."""
        self._end()
        group = self.group
        self._at_snapshot = self._scratch.take(self.average)  # which can hold what is of another type exactly
        tensors, slots = self.tensors(), group.slots(self._at_snapshot)
        self._own = [slot.view(p.shape).copy_(p.detach()) for p, slot in zip(tensors, slots, strict=True)]
        self._set_meanwhile.clear()
        self._memory = {key: kept.clone() for key, kept in group.memory.items()}
        group.weights = self._own
        is_direct = self.compressor.only_adds and self.average.dtype == group.unsent.dtype
        change = self.unsent(self._own, out=group.unsent if is_direct else self._scratch.take(self.average))
        if self._find:  # send nothing of what is not finite, such as a mask
            self._left_out = ~change.isfinite()
            change.masked_fill_(self._left_out, 0.0)
        self.set_by_others.snapshot(change, self.lead - 1)  # x̄ moves by 1 / lead of what is sent
        if not is_direct:
            group.unsent.zero_()
            parts = zip(group.slots(change), group.shapes, strict=True)
            self.compressor.accumulate(group, [part.view(shape) for part, shape in parts], size)
            self._scratch.give(change)

    def reduce(self, comm: Comm) -> Rounds:
        """Send some of what is unsent; to be run to its end, which returns the total."""
        return take_step(self.compressor, self.group, comm)

    @torch.no_grad()
    def set_move(self, total: Tensor | Sparse, size: int) -> None:
        """Note that x̄ is to move by the mean over ``size`` ranks, or by the outer step that it calls for.

        In the warm-up there is no outer step: one after every step would add up.
        """
        outer = (1.0, 0.0) if self._warms_up else (self._settings.outer_rate, self._settings.outer_momentum)
        rate, momentum = outer[0] / self.lead, outer[1]
        if isinstance(total, Sparse) and not momentum:
            self._next = Sparse(total.index.clone(), (total.values / size * rate).to(self.average.dtype)), None
            return
        total, velocity = dense(total, self.group.n), self._velocity
        moves_by = self._moves_by = self._scratch.take(self.average)
        if not momentum:
            torch.div(total, size / rate, out=moves_by)
        else:
            mean = total / size
            velocity = mean.clone() if velocity is None else velocity.mul(momentum).add_(mean)
            torch.mul(mean.add_(velocity, alpha=momentum), rate, out=moves_by)
        self._next = moves_by, velocity

    @torch.no_grad()
    def apply_move(self) -> None:
        """Move x̄; set this rank's weights to x̄ + unsent, and what its optimizer has done since they were taken up."""
        assert self._next is not None
        velocity = self._velocity
        step, self._velocity = self._next
        set_meanwhile = {place: self.averages()[place].clone() for place in self._set_meanwhile}
        moves: Sequence[Tensor | None] = [None] * len(self._own)
        if isinstance(step, Sparse):
            self.average.index_add_(0, step.index, step.values)
        else:
            moves = self.group.slots(step)
        unsents, averages = self.group.slots(self.group.unsent), self.averages()
        for i, (parameter, own) in enumerate(zip(self.tensors(), self._own, strict=True)):
            if i in set_meanwhile:
                averages[i].copy_(set_meanwhile[i])
                self._undo_velocity(i, velocity)
            else:
                move, unsent = moves[i], unsents[i].view(own.shape)
                if self._is_exact(parameter):
                    _set_in_one_pass(
                        parameter, own, averages[i], unsent, None if move is None else move.view(own.shape)
                    )
                else:
                    if move is not None:
                        averages[i].add_(move.view(own.shape))
                    self._set(i, parameter, own, averages[i], unsent)
        self._end()

    def _is_exact(self, parameter: Tensor) -> bool:
        """Whether the parameter can hold x_r, all of it."""
        return parameter.dtype == torch.float32 and self._left_out is None and self._aside is None

    def _undo_velocity(self, place: int, before: Tensor | None) -> None:
        if self._velocity is not None:
            before = torch.zeros_like(self._velocity) if before is None else before
            self.group.slots(self._velocity)[place].copy_(self.group.slots(before)[place])

    def drop(self) -> None:
        """Forget what was under way, as if it had never been taken up: nothing has left ``unsent``."""
        if self._memory is not None:
            self.group.memory = dict(self._memory)
            self.set_by_others.put_back()
        self._end()

    def _end(self) -> None:
        """Forget what was under way."""
        self._own, self._next, self._left_out, self._memory, self.group.weights = [], None, None, None, None
        self.set_by_others.end()
        for lent in (self._at_snapshot, self._moves_by):
            if lent is not None:
                self._scratch.give(lent)
        self._at_snapshot = self._moves_by = None

    def _set(self, place: int, parameter: Tensor, own: Tensor, average: Tensor, unsent: Tensor) -> None:
        exact = (parameter.to(average.dtype) - own.to(average.dtype)) + average
        if self._decay is None:
            exact += unsent
        if self._left_out is not None:
            left_out = self.group.slots(self._left_out)[place].view(own.shape)
            exact = torch.where(left_out, parameter.to(average.dtype), exact)
        parameter.copy_(exact)
        if self._aside is not None:
            rounding = (exact - parameter.detach().to(exact.dtype)).nan_to_num(0.0, 0.0, 0.0)  # infinity has none
            aside = rounding if self._decay is None else rounding + unsent * self._decay
            self.group.slots(self._aside)[place].view(own.shape).copy_(aside)

    # - one rank's, on another

    def shared(self) -> dict[str, Any]:
        """What another rank needs to go on from here: copies of x̄, of the velocity and of the compressor's memory."""
        velocity = None if self._velocity is None else self._velocity.clone()
        memory = self.group.memory if self._memory is None else self._memory
        memory = {key: kept.clone() for key, kept in memory.items()}
        return {"average": self.average.clone(), VELOCITY: velocity, "memory": memory}

    @torch.no_grad()
    def start_from_shared(self, shared: Mapping[str, Any]) -> None:
        """Go on from what another rank's :meth:`shared` returned, with nothing unsent."""
        self._end()
        self.average.copy_(shared["average"])
        device, velocity = self.average.device, shared[VELOCITY]
        self._velocity = None if velocity is None else velocity.to(device)
        on_device = {key: kept.dtype == torch.float32 for key, kept in shared["memory"].items()}
        self.group.memory = {key: kept.to(device) if on_device[key] else kept for key, kept in shared["memory"].items()}
        self.start_anew()

    # - checkpoints

    def saved(self, own: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """What a checkpoint keeps of this rank where its weights are ``own``: x_r [n] float32, and what is remembered.

        Of a group under way, what its compressor remembered when it was taken up: it will be taken up again.
        """
        flat = torch.cat([weights.detach().reshape(-1) for weights in own])
        memory = dict(self.group.memory if self._memory is None else self._memory)
        kept = {VELOCITY: self._velocity, ASIDE: self._aside, SET: self.set_by_others.whole}
        kept[UNSENT_GRADIENT] = self.unsent_gradient
        memory |= {key: x.clone() for key, x in kept.items() if x is not None}
        if flat.dtype == torch.float64 or self._decay is not None:
            memory[EXACT] = flat
        return (flat if self._aside is None else flat.to(self.average.dtype) + self._aside).float(), memory

    def restore(self, flat: Tensor) -> list[Tensor]:
        """This rank's own weights as :meth:`saved` has them; takes what is remembered out of the group's memory.

        With ``error_decay`` what is unsent waits beside the weights.  Of a checkpoint of another number of ranks nobody
        knows which part of ``flat`` did; then all of it is taken to have waited.
        """
        self._end()
        kept = (self.group.memory.pop(key, None) for key in (VELOCITY, UNSENT_GRADIENT, SET, ASIDE, EXACT))
        found = (None if x is None else x.to(self.average.device) for x in kept)  # a checkpoint has some on the CPU
        self._velocity, unsent_gradient, self.set_by_others.change, aside, exact = found
        self.unsent_gradient = None if self.is_untrained else unsent_gradient
        if self.average.dtype == torch.float64:  # float32 that is that of x̄ has nothing more to say
            flat = torch.where(flat == self.average.float(), self.average, flat.double())
        if exact is not None:
            flat = exact.to(self.average.dtype) + (0.0 if aside is None else aside)
        weights = flat
        if self._aside is not None and aside is not None:
            weights = flat - aside if exact is None else exact
        elif self._decay is not None:
            weights = self.average
        slots = zip(self.group.slots(weights), self.group.shapes, self.group.parameters, strict=True)
        own = [slot.view(shape).to(p.dtype, copy=True) for slot, shape, p in slots]
        if self._aside is not None:
            self._aside = flat - torch.cat([x.reshape(-1).to(flat.dtype) for x in own]) if aside is None else aside
        return own


def _set_in_one_pass(parameter: Tensor, own: Tensor, average: Tensor, unsent: Tensor, move: Tensor | None) -> None:
    """Move x̄, and set the parameter to it and all else; of one shape.  A CPU does all of that to what its cache has."""
    tensors = [parameter.detach(), own, average, unsent, *([] if move is None else [move])]
    blocks = [tensors]
    if parameter.device.type == "cpu" and parameter.is_contiguous():
        blocks = list(zip(*(x.view(-1).split(BLOCK) for x in tensors), strict=True))  # type: ignore[arg-type]
    for weights, then, shared, kept, *by in blocks:
        for step in by:
            shared.add_(step)
        weights.sub_(then).add_(shared).add_(kept)


class SetInGroup:
    """The sum of what was set of each element since the group was taken up.

    Attributes:
        change: [n]; None before anything was set.
    """

    def __init__(self, group: Group) -> None:
        self.change: Tensor | None = None
        self._group = group
        self._at_snapshot: Tensor | None = None

    def add(self, place: int, value: Tensor, before: Tensor, like: Tensor) -> None:
        """Note that the parameter at ``place`` was set to ``value``; ``like`` is [n], of the type to count in."""
        if self.change is None:
            self.change = torch.zeros_like(like)
        slot = self._group.slots(self.change)[place].view(value.shape)
        slot.add_(value.detach().to(like.dtype) - before.to(like.dtype))

    def forget(self, place: int) -> None:
        """Take nothing of the parameter at ``place`` for set."""
        if self.change is not None:
            self._group.slots(self.change)[place].zero_()

    def snapshot(self, unsent: Tensor, more: float) -> None:
        """Add what was set ``more`` times to what is ``unsent`` [n], and count from zero."""
        if self.change is not None:
            unsent.add_(self.change, alpha=more)
            self._at_snapshot, self.change = self.change, torch.zeros_like(self.change)

    def put_back(self) -> None:
        """Count what was taken up once more, since it was not sent."""
        self.change = self.whole

    @property
    def whole(self) -> Tensor | None:
        """What was set, also of what is under way [n]."""
        return self.change if self.change is None or self._at_snapshot is None else self.change + self._at_snapshot

    def end(self) -> None:
        """Forget what is under way."""
        self._at_snapshot = None


class Scratch:
    """Lends tensors [n], uninitialised, and takes them back, so that memory is used again.

    On a CPU the first touch of new memory costs more than what is then computed in it; on other devices PyTorch keeps
    what was freed itself.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lock = threading.Lock()  # lanes take, the main thread gives back

    def take(self, like: Tensor) -> Tensor:
        """Return a tensor of the shape [n] and kind of ``like``: the smallest that is free, or a new one."""
        if like.device.type != "cpu":
            return torch.empty_like(like)
        with self._lock:
            fitting = [x for x in self._free if x.dtype == like.dtype and x.numel() >= like.numel()]
            if fitting:
                found = min(fitting, key=Tensor.numel)
                self._free = [x for x in self._free if x is not found]
            else:  # one that is too small is replaced, so that there are as many as are in use at once
                self._free = sorted(self._free, key=Tensor.numel)[1:]
                found = torch.empty_like(like)
        return found[: like.numel()]

    def give(self, lent: Tensor) -> None:
        """Take back what was lent; nobody may use it any more."""
        if lent.device.type == "cpu":
            with self._lock:
                self._free.append(lent if lent._base is None else lent._base)
