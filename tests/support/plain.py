"""A tiny training, and what its weights must be: a few lines of plain torch in float64, without any engine."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import lightning_sparse as ls

Weights = dict[str, Tensor]


class Interrupted(Exception):
    """Raised in the middle of a forward."""


class Tiny(nn.Module):
    """Two layers, a norm with running statistics, a mask of minus infinities, a counter, and perhaps a teacher.

    Attributes:
        interrupt: raise in the middle of each forward.
    """

    mask: Tensor
    seen: Tensor

    def __init__(self, teacher: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.utils.skip_init(nn.Linear, 4, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.utils.skip_init(nn.Linear, 6, 3)
        for p in (self.first.weight, self.second.weight, self.second.bias):
            nn.init.uniform_(p, -0.5, 0.5, generator)
        self.teacher = nn.Parameter(self.first.weight.detach().clone(), requires_grad=False) if teacher else None
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.interrupt = False

    def forward(self, x: Tensor) -> Tensor:
        """The loss of a batch [n, 4]."""
        self.seen += len(x)
        hidden = self.norm(self.first(x)).tanh()
        if self.interrupt:
            raise Interrupted
        scores = self.second(hidden).unsqueeze(1) + self.mask.to(x.dtype)
        loss: Tensor = (scores.softmax(2).transpose(1, 2) @ x[:, :3, None]).square().mean()
        if self.teacher is not None:
            if self.training and torch.is_grad_enabled():
                self.teacher.data.lerp_(self.first.weight.detach(), 0.2)
            loss = loss + (self.first(x) - nn.functional.linear(x, self.teacher.detach().clone())).square().mean()
        return loss


def batch(rank: int, number: int) -> Tensor:
    """The batch of a rank in the forward of this number."""
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(1000 * number + rank))


def optimizer_of(kind: str, module: nn.Module) -> Optimizer:
    """An optimizer of all that ``module`` trains now or later; Adam's steps do not depend on how noise is rounded."""
    parameters = [p for name, p in module.named_parameters() if name != "teacher"]
    if kind == "adamw":
        return torch.optim.AdamW(parameters, lr=0.02, eps=0.01)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class File:
    """A checkpoint, as the plain ranks have it."""

    model: Mapping[str, Any]
    own: list[Weights]
    others: list[Weights]  # that are not averaged
    optimizers: list[dict[str, Any]]
    steps: int
    local: "ls.LocalSteps | None"
    velocity: Weights
    has_trained: bool


@dataclass
class UnderWay:
    """A tensor that is being averaged: what each rank had when it was taken up, and the mean of what was unsent."""

    own: list[Tensor]
    mean: Tensor


@dataclass
class Plain:
    """P ranks in float64, with averaged gradients, or with local steps that lose nothing; of these, weights alone.

    Each rank has its own weights x_r, which its model holds; while the average x̄ is shown the model holds that, and x_r
    is in ``held``.

    Args:
        models: one a rank.
        kind: of optimizer.
        local: settings of local steps, if they are taken.
        fragments: which of them each tensor has its turn with, of those that are averaged after what is done now.
        turns: likewise before.
    """

    models: list[Tiny]
    kind: str
    local: "ls.LocalSteps | None"
    fragments: Callable[[], Mapping[str, int]]
    turns: Mapping[str, int] = field(default_factory=dict)
    counted: bool = False  # a synchronised backward, since the last step was settled
    steps: int = 0
    held: list[Weights | None] = field(default_factory=list)  # by rank
    average: Weights = field(default_factory=dict)
    under_way: dict[str, UnderWay] = field(default_factory=dict)
    sent: bool = False  # what was due after the last step, which is applied after this one
    _exchanged: int = 0
    _velocity: Weights = field(default_factory=dict)
    _sends_buffers: bool = True
    _has_trained: bool = False  # since local steps began, so that statistics have changed

    def __post_init__(self) -> None:
        self.optimizers = [optimizer_of(self.kind, model.double()) for model in self.models]
        self.begin(self.local)

    def begin(self, local: "ls.LocalSteps | None") -> None:
        """Start with gradients or with local steps, from weights that are the same on every rank."""
        self.local, self.counted, self._exchanged = local, False, max(self.steps - 1, 0)
        self.under_way, self.sent, self._velocity, self._has_trained = {}, False, {}, False
        self.average, self.held = {}, [None for _ in self.models]
        if local is not None:
            averaged = self.fragments()
            self.average = {name: x.clone() for name, x in self.tensors(0).items() if name in averaged}
            self.held = [self._now(rank) for rank in self._ranks]

    @property
    def _ranks(self) -> range:
        return range(len(self.models))

    @property
    def shown(self) -> list[bool]:
        """Whether each rank's model holds the average."""
        return [held is not None for held in self.held]

    def tensors(self, rank: int) -> Weights:
        """What a rank's model holds that may be averaged."""
        kept = self.models[rank].state_dict(keep_vars=True)
        return {name: x.detach() for name, x in kept.items() if x.is_floating_point() and name != "mask"}

    def own(self, rank: int) -> Weights:
        """A rank's own weights."""
        held = self.held[rank]
        return self._now(rank) if held is None else held

    def _now(self, rank: int) -> Weights:
        """A copy of what a rank's model holds of what is averaged."""
        return {name: x.clone() for name, x in self.tensors(rank).items() if name in self.average}

    @property
    def averages_all(self) -> bool:
        """Whether all weights are averaged; before the first step that counts, a teacher is each rank's own."""
        return self.average.keys() == {name for name in self.tensors(0) if "running" not in name}

    @property
    def sends_buffers(self) -> bool:
        """Whether DistributedDataParallel would send buffers before the next forward."""
        return self._sends_buffers

    def adopt(self) -> None:
        """Average what no optimizer trains and has changed, as the engine has noticed, from the mean on."""
        for name in self.fragments().keys() & self.tensors(0).keys() - self.average.keys():
            self.average[name] = torch.stack([self.tensors(rank)[name] for rank in self._ranks]).mean(0)
            for rank, held in enumerate(self.held):
                if held is not None:
                    held[name] = self.tensors(rank)[name].clone()
                    self.tensors(rank)[name].copy_(self.average[name])

    # - a step

    def forward(self, number: int, sync: bool = True) -> list[Tensor]:
        """Return the losses of a forward that trains."""
        self.settle()
        self.hide()
        self._has_trained = True
        if self.local is None:
            self._send_buffers()
        elif self.local.overlap and self._exchanged < self.steps:
            self._take_up()
        losses = [model.train()(batch(rank, number).double()) for rank, model in enumerate(self.models)]
        self._sends_buffers = sync
        return losses

    def interrupted(self, number: int) -> None:
        """A forward that trains, and raises in the middle."""
        sends_buffers = self._sends_buffers
        for model in self.models:
            model.interrupt = True
        with suppress(Interrupted):
            self.forward(number)
        for rank, model in enumerate(self.models[1:], 1):
            with suppress(Interrupted):
                model.train()(batch(rank, number).double())
        for model in self.models:
            model.interrupt = False
        self._sends_buffers = sends_buffers

    def _send_buffers(self) -> None:
        """As DistributedDataParallel does before a forward, if the last was of a step that is synchronised."""
        for model in self.models[1:] if self._sends_buffers else ():
            for buffer, first in zip(model.buffers(), self.models[0].buffers(), strict=True):
                buffer.copy_(first)

    def watch(self, number: int) -> None:
        """A forward in training mode without gradients, for statistics alone."""
        if self.local is None:
            self._send_buffers()
        self._sends_buffers = False
        with torch.no_grad():
            for rank, model in enumerate(self.models):
                model.train()(batch(rank, number).double())

    def evaluate(self, gradients: bool) -> None:
        """A forward in evaluation mode: models count what they saw."""
        self.show()
        if self.local is None:
            self._send_buffers()
        self._sends_buffers = gradients
        for rank, model in enumerate(self.models):
            model.seen += len(batch(rank, 0))

    def backward(self, losses: Sequence[Tensor], sync: bool) -> None:
        """Add gradients; average them, or count a step."""
        for loss in losses:
            loss.backward()
        self.counted = self.counted or (sync and self.local is not None)
        if sync and self.local is None:
            self.steps += 1
            for every in zip(*(model.parameters() for model in self.models), strict=True):
                if gradients := [p.grad for p in every if p.grad is not None]:
                    mean = torch.stack(gradients).mean(0)
                    for gradient in gradients:
                        gradient.copy_(mean)

    def step(self, ranks: Sequence[int]) -> None:
        """Step the optimizers of ``ranks``; all forget their gradients."""
        for rank, optimizer in enumerate(self.optimizers):
            if rank in ranks:
                self.hide([rank])
                optimizer.step()
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """As after a step."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def settle(self) -> None:
        """End a step that counts: x̄ moves."""
        if self.local is None or not self.counted:
            return
        self.counted, self.steps = False, self.steps + 1
        self.hide()
        if not self.local.overlap:
            self._take_up()
        self._land()
        self.adopt()

    def _take_up(self) -> None:
        self._exchanged = self.steps
        self.sent = self.local.overlap
        turns = {**self.fragments(), **self.turns}
        for name in self.average:
            if name in turns and self.local.turn(turns[name], self.steps) is not None:
                own = [self.tensors(rank)[name].clone() for rank in self._ranks]
                self.under_way[name] = UnderWay(own, torch.stack(own).mean(0) - self.average[name])

    def _land(self) -> None:
        for name, sent in self.under_way.items():
            self.average[name] = self.average[name] + self._outer_step(name, sent.mean)
            for rank, before in enumerate(sent.own):
                now = self.tensors(rank)[name]
                now.copy_(self.average[name] + (now - before))
        self.under_way, self.sent = {}, False

    def _outer_step(self, name: str, mean: Tensor) -> Tensor:
        """Nesterov's, but for what no optimizer trains."""
        if not dict(self.models[0].named_parameters()).get(name, mean).requires_grad:
            return mean
        momentum = self.local.outer_momentum
        self._velocity[name] = self._velocity.get(name, torch.zeros_like(mean)) * momentum + mean
        return (mean + self._velocity[name] * momentum) * self.local.outer_rate

    # - whose weights the models hold

    def show(self) -> None:
        """Have the models hold x̄."""
        if self.local is None:
            return
        self.settle()
        for rank, held in enumerate(self.held):
            if held is None:
                self.held[rank] = self._now(rank)
                self._set(rank, self.average)

    def hide(self, ranks: Sequence[int] | None = None) -> None:
        """Have the models of ``ranks``, by default all, hold their own."""
        for rank in self._ranks if ranks is None else ranks:
            held, self.held[rank] = self.held[rank], None
            self._set(rank, held or {})

    def _set(self, rank: int, weights: Weights) -> None:
        for name, x in weights.items():
            self.tensors(rank)[name].copy_(x)

    def edit(self, name: str, factors: Sequence[float]) -> None:
        """Multiply a weight on each rank; where the average is shown, it becomes that, of which nothing is unsent."""
        for rank, factor in enumerate(factors):
            self.tensors(rank)[name].mul_(factor)
        if all(self.shown) and name in self.average:
            self._restart(name)

    def _restart(self, name: str) -> None:
        """Leave nothing unsent of a tensor: x̄ and x_r are what the first rank's model holds."""
        self.under_way.pop(name, None)
        self.average[name] = self.tensors(0)[name].clone()
        for held in self.held:
            if held is not None:
                held[name] = self.average[name].clone()

    # - checkpoints, other fits and other engines

    def save(self, show: bool = True) -> "File":
        """What a checkpoint must keep; ``show`` the average before, or leave all as it is."""
        if show:
            self.show()
        return File(
            deepcopy(dict(self.models[0].state_dict()) | self.average),
            [copied(self.own(rank)) for rank in self._ranks],
            [self._others(rank) for rank in self._ranks],
            [deepcopy(optimizer.state_dict()) for optimizer in self.optimizers],
            self.steps,
            self.local,
            copied(self._velocity),
            self._has_trained,
        )

    def _others(self, rank: int) -> Weights:
        """A copy of what is not averaged."""
        return {name: x.clone() for name, x in self.tensors(rank).items() if name not in self.average}

    def load(self, file: "File") -> None:
        """Go on from it: what is averaged now, and was not when it was saved, is the first rank's, nothing unsent."""
        for rank, model in enumerate(self.models):
            model.load_state_dict(file.model)
            self.optimizers[rank].load_state_dict(deepcopy(file.optimizers[rank]))
        self.steps = file.steps
        self.begin(file.local)
        self._has_trained = file.has_trained
        if self.local is not None:
            self._go_on_with(file.own, {name: self.tensors(0)[name].clone() for name in file.own[0]}, file.velocity)
            for rank, others in enumerate(file.others):
                self._set(rank, {name: x for name, x in others.items() if name not in self.average})

    def fresh(self) -> None:
        """Begin a training of which everything will be loaded."""
        self.forget_gradients()
        self._sends_buffers = True
        for model in self.models:
            model.second.requires_grad_()

    def end_fit(self, orderly: bool) -> None:
        """End a fit; unless it was ``orderly``, its last step is not settled."""
        self.counted = self.counted and orderly
        self.show()

    def begin_fit(self, frozen: bool) -> None:
        """Begin a second fit, with a layer frozen or not; what is unsent goes along."""
        self.forget_gradients()
        own, average, velocity = [self.own(rank) for rank in self._ranks], self.average, self._velocity
        for rank, model in enumerate(self.models):
            model.second.requires_grad_(not frozen)
            self.held[rank] = None
        self._same_everywhere()
        self.begin(self.local)
        trained = {name for name, p in self.models[0].named_parameters() if p.requires_grad}
        if self.local is not None:
            self._go_on_with(own, average, {name: x for name, x in velocity.items() if name in trained})

    def _same_everywhere(self) -> None:
        """As DistributedDataParallel does when it is made."""
        for model in self.models[1:]:
            model.load_state_dict(self.models[0].state_dict())
        self._sends_buffers = True

    def _go_on_with(self, own: Sequence[Weights], average: Weights, velocity: Weights) -> None:
        self.average |= copied(average)
        self.held = [self._now(rank) | copied(of_rank) for rank, of_rank in enumerate(own)]
        self._velocity = copied(velocity)

    def merge(self) -> None:
        """Change to averaged gradients, from the mean of all weights and of the optimizers' states."""
        self.settle()
        self.hide()
        names = [name for name in self.tensors(0) if name in self.average or (self._has_trained and _untrained(name))]
        for name in names:
            every = [self.tensors(rank)[name] for rank in self._ranks]
            mean = torch.stack(every).mean(0)
            for x in every:
                x.copy_(mean)
        states = [optimizer.state for optimizer in self.optimizers]
        for parameters in zip(*(model.parameters() for model in self.models), strict=True):
            found = [state[p] for state, p in zip(states, parameters, strict=True) if p in state]
            for key in {key for each in found for key, x in each.items() if isinstance(x, Tensor)}:
                mean = torch.stack([each[key] for each in found]).sum(0) / len(self.models)
                for each in found:
                    each[key].copy_(mean)
        self.begin(None)

    def change(self, local: "ls.LocalSteps") -> None:
        """Take other local steps; what is unsent goes along."""
        self.show()
        own, average, has_trained = [self.own(rank) for rank in self._ranks], self.average, self._has_trained
        self.begin(local)
        self._has_trained = has_trained
        self._go_on_with(own, average, {})


def _untrained(name: str) -> bool:
    return name == "teacher" or "running" in name


def copied(weights: Mapping[str, Tensor]) -> Weights:
    return {name: x.detach().clone() for name, x in weights.items()}
