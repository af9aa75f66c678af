"""The engines on simulated ranks, over random sequences of what trainings do: properties that hold in any order.

``ANY_ORDER_EXAMPLES=1000`` tries as many sequences of each setup, at random, and prints how many.
"""

import functools
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import lightning_sparse as ls
from lightning_sparse.auto.policy import Candidate
from lightning_sparse.hook import SparseHook
from lightning_sparse.local_steps import averager as flight
from lightning_sparse.local_steps.averager import LocalAverager
from lightning_sparse.local_steps.weights import Phase
from lightning_sparse.network.simulated import same_bits
from lightning_sparse.options import Options
from tests.support.in_process import ThreadComm, ThreadDDP, ThreadGroup, ThreadGroups, ThreadRanks
from tests.support.plain import File, Interrupted, Plain, Tiny, Weights, batch, copied, optimizer_of

EXAMPLES = int(os.environ.get("ANY_ORDER_EXAMPLES", "0"))
NEAR = 3e-5  # of float64, after so many steps in float32; part of the largest value, if that is above 1
MASK = torch.full((3, 3), -torch.inf).triu(1)
NAMES = st.sampled_from(["first.weight", "second.bias", "norm.running_var"])
T = TypeVar("T")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600 + 10 * EXAMPLES)]


@dataclass(frozen=True)
class Setup:
    """A training: how its ranks average, what they optimize with, and whether a teacher follows the student.

    ``candidates`` are of local steps, between which it may change; ``exact`` says that averaging loses nothing, so that
    plain torch says what every weight must be.
    """

    compressor: ls.Compressor = field(default_factory=ls.Dense)
    size: int = 2
    wire: str = "float32"
    local: ls.LocalSteps | None = None
    optimizer: str = "sgd"
    teacher: bool = False
    dtype: torch.dtype = torch.float32
    candidates: tuple[Candidate, ...] = ()

    @property
    def exact(self) -> bool:
        ways = [Candidate(self.compressor, self.wire), *self.candidates]
        dense = all(isinstance(each.compressor, ls.Dense) and each.wire_dtype == "float32" for each in ways)
        own = self.optimizer == "sgd" or (self.local.second_moments == "own" if self.local else not self.candidates)
        return dense and own and self.dtype == torch.float32 and (self.local is None or self.local.lead is None)

    @property
    def takes_outer_steps(self) -> bool:
        """Whether x̄ moves by something else than the mean of what is sent."""
        return self.local is not None and (self.local.outer_rate, self.local.outer_momentum) != (1, 0)

    @property
    def lead(self) -> float:
        """How far ranks look ahead."""
        return (self.local and self.local.lead) or 1.0

    def options(self) -> Options:
        if self.candidates:
            auto = ls.Auto(self.candidates, start=self.compressor)
            return Options.of(auto, "layer")
        return Options.of(self.compressor, "none", wire_dtype=self.wire, local_steps=self.local or 0)


HALF, THIRD = ls.LocalSteps(2), ls.LocalSteps(3)
MICRO = ls.MiCRO(density=0.2)
SETUPS = {
    "gradients": Setup(),
    "gradients of three ranks": Setup(size=3, optimizer="adamw", teacher=True),
    "gradients, top_k": Setup(ls.TopK(density=0.2), optimizer="adamw"),
    "gradients, micro": Setup(MICRO, 3, "int4"),
    "one local step": Setup(size=3, local=ls.LocalSteps(1), teacher=True),
    "one local step, waiting": Setup(local=ls.LocalSteps(1, overlap=False)),
    "two local steps": Setup(local=HALF, optimizer="adamw", teacher=True),
    "two local steps of three ranks": Setup(size=3, local=HALF),
    "two local steps, waiting": Setup(local=replace(HALF, overlap=False), teacher=True),
    "three local steps, all at once": Setup(local=replace(THIRD, fragments=1), optimizer="adamw"),
    "outer momentum": Setup(local=replace(HALF, outer_rate=0.7, outer_momentum=0.5)),
    "local steps, int4": Setup(wire="int4", local=THIRD, teacher=True),
    "local steps, sign": Setup(size=3, wire="sign", local=HALF, optimizer="adamw"),
    "local steps, micro": Setup(MICRO, 2, "int4", replace(HALF, outer_momentum=0.5), "adamw"),
    "half precision": Setup(dtype=torch.bfloat16, local=HALF, optimizer="adamw", teacher=True),
    "ahead": Setup(size=3, local=replace(HALF, lead=1.5), optimizer="adamw"),
    "aside": Setup(ls.TopK(density=0.2), 3, "int2", replace(HALF, error_decay=1.0), "adamw", teacher=True),
    "own second moments": Setup(local=replace(HALF, second_moments="own"), optimizer="adamw"),
    "changes": Setup(candidates=(Candidate(ls.Dense(), "float32", 1), Candidate(ls.Dense(), "float32", 2))),
    "changes of three ranks": Setup(
        size=3, teacher=True,
        candidates=(Candidate(ls.Dense(), "float32", 2), Candidate(ls.Dense(), "float32", 3)),
    ),
    "changes, rounded": Setup(
        MICRO, optimizer="adamw", teacher=True,
        candidates=(Candidate(MICRO, "int4", 2), Candidate(ls.Dense(), "sign", 3)),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_sparse.hook.TorchComm", ThreadComm)
    for name in ("LEAD", "LEAD_OF_SIGNS"):  # but where a setup has one
        monkeypatch.setattr(f"lightning_sparse.local_steps.settings.{name}", 1.0)
    logging.disable(logging.INFO)
    monkeypatch.setattr("lightning_sparse.fusion.steps.StepClock.__call__", lambda _: math.nan)  # nothing goes by time


def in_evaluation(module: nn.Module) -> bool:
    return not module.training


class Training:
    """One rank's."""

    def __init__(self, setup: Setup, group: ThreadGroup, frozen: bool) -> None:
        self.setup, self.group, self.model = setup, group, Tiny(setup.teacher).to(setup.dtype)
        self.model.second.requires_grad_(not frozen)
        self.optimizer = optimizer_of(setup.optimizer, self.model)
        self.begin_fit()

    def begin_fit(self) -> None:
        """Put DDP and a hook around the model, as a strategy does."""
        self.ddp = ThreadDDP(self.model, self.group)
        groups: Any = ThreadGroups(self.group)
        ddp: Any = self.ddp
        self.hook = SparseHook.__new__(SparseHook)
        self.hook._put_on(ddp, self.setup.options(), None, groups, may_be_local=True, evaluates=in_evaluation)
        self.hook.note(self.optimizer)

    def fit_again(self, frozen: bool) -> None:
        """End a fit and begin another, with a layer frozen or not."""
        before = self.hook
        self.close()
        self.optimizer.zero_grad()
        self.model.second.requires_grad_(not frozen)
        self.begin_fit()
        self.hook.take_over(before)

    @property
    def frozen(self) -> bool:
        return not self.model.second.weight.requires_grad

    def change(self, chosen: Candidate | None) -> None:
        """Take the local steps of ``chosen``, or average gradients."""
        course = self.hook._tuning
        if chosen is None:
            course.active.to_gradients()
        else:
            course.active.to_local_steps(chosen)
        course._start(planned=True)

    @property
    def averager(self) -> LocalAverager:
        averager = self.hook.averager
        assert isinstance(averager, LocalAverager)
        return averager

    def close(self) -> None:
        """End a fit."""
        self.hook.close()
        self.ddp.close()

    # - steps

    def forward(self, number: int, sync: bool) -> Tensor:
        with nullcontext() if sync else self.ddp.no_sync():
            loss: Tensor = self.ddp.train()(batch(self.group.rank, number).to(self.setup.dtype))
            return loss

    def step(self, steps: bool) -> Weights:
        """Step the optimizer, if this rank does; returns what it did to its own weights."""
        before = self.own()
        if steps:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return self._since(before)

    def own(self) -> Weights:
        """Copies of this rank's own weights."""
        averager = self.hook.averager
        return copied(averager.own if isinstance(averager, LocalAverager) else self.held())

    def _since(self, before: Weights) -> Weights:
        after = self.own()
        return {name: after[name].double() - x.double() for name, x in before.items() if x.isfinite().all()}

    def watch(self, number: int) -> None:
        with torch.no_grad():
            self.forward(number, sync=True)

    def whole_step(self, number: int) -> None:
        self.forward(number, sync=True).backward()
        self.step(True)

    def evaluate(self, gradients: bool) -> Tensor:
        """The loss of a batch that is the same on every rank."""
        with torch.set_grad_enabled(gradients):
            loss: Tensor = self.ddp.eval()(batch(0, 0).to(self.setup.dtype))
            return loss

    def held(self) -> Weights:
        """What the model holds, by name."""
        return {name: x.detach() for name, x in self.model.state_dict(keep_vars=True).items()}

    def edit(self, name: str, factor: float, through_data: bool) -> Weights:
        """Multiply a weight; returns what that did to this rank's own."""
        before = self.own()
        x = self.model.state_dict(keep_vars=True)[name]
        with torch.no_grad():
            (x.data if through_data else x).mul_(factor)
        return self._since(before)

    # - checkpoints

    def file(self) -> dict[str, Any]:
        """A checkpoint, whole on the first rank."""
        unsent = self.hook.state_dict(optimizers=[self.optimizer])
        return deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "unsent": unsent})

    def file_as_it_is(self) -> dict[str, Any]:
        """A checkpoint that is written while a step goes on: the model is the average."""
        unsent = self.hook.saved("per_rank", [self.optimizer])
        averages = {name: x.to(self.held()[name].dtype) for name, x in self.averager.averages.items()}
        model, optimizer = self.model.state_dict() | averages, self.optimizer.state_dict()
        return deepcopy({"model": model, "optimizer": optimizer, "unsent": unsent})

    def load(self, file: Mapping[str, Any]) -> None:
        """Go on from the first rank's checkpoint, with the model first as Lightning does."""
        file = deepcopy(dict(file))
        self.optimizer.load_state_dict(file["optimizer"])
        self.model.load_state_dict(file["model"])
        self.hook.load_state_dict(file["unsent"], [self.optimizer], is_loaded=True)


@dataclass(frozen=True)
class Seen:
    """What can be seen of one rank's training: copies, by name."""

    held: Weights
    averages: Weights  # empty with averaged gradients
    own: Weights
    left: Weights  # what is unsent with local steps
    unsent: Weights  # of gradients; with local steps until one is taken
    buffers: Weights  # this rank's own, with local steps
    handed_in: Weights
    handed_out: Weights
    phase: Phase | None
    steps: int


def look_at(training: Training) -> Seen:
    averager = training.hook.averager
    ddp, held = training.ddp, copied(training.held())
    names: dict[Tensor, str] = {p: name for name, p in training.model.named_parameters()}
    given, got = ({names[p]: x.clone() for p, x in each.items()} for each in (ddp.handed_in, ddp.handed_out))
    if isinstance(averager, LocalAverager):
        averages, own = copied(averager.averages), copied(averager.own)
        left = {
            name: slot.clone().view(shape)
            for replica in averager.weights.replicas
            for flat, group in [(averager.weights.unsent(replica), replica.group)]
            for name, shape, slot in zip(group.names, group.shapes, group.slots(flat), strict=True)
        }
        unsent = {names[p]: x.double() for p, x in averager.weights.unsent_gradients().items()}
        buffers = copied(averager.buffers)
        return Seen(held, averages, own, left, unsent, buffers, given, got, averager.phase, averager.steps)
    unsent = {
        name: slot.view(shape).double()
        for group in averager.groups
        for name, shape, slot in zip(group.names, group.shapes, group.slots(group.unsent), strict=True)
    }
    return Seen(held, {}, {}, {}, unsent, {}, given, got, None, averager.steps)


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor], what: str) -> None:
    assert one.keys() == other.keys(), f"{what}: {sorted(one)} and {sorted(other)}"
    different = [name for name, x in one.items() if not same_bits(x.reshape(-1), other[name].reshape(-1))]
    assert not different, f"{what}: {', '.join(different)} differ, by {[gap(one[n], other[n]) for n in different]}"


def assert_unchanged(one: Seen, other: Seen, what: str) -> None:
    """What of a training must survive a checkpoint and a second fit, in which more may be averaged."""
    assert_kept(one.averages, other.averages, f"x̄ {what}")
    assert_kept(one.own, other.own, f"own weights {what}")
    assert_kept(one.buffers, other.buffers, f"own buffers {what}")
    trained = one.unsent.keys() & other.unsent.keys()
    assert_kept({name: one.unsent[name] for name in trained}, other.unsent, f"what is unsent {what}")
    shown = {name: x for name, x in one.held.items() if name in one.averages or name in one.unsent}
    assert_kept(shown, other.held, f"what parameters hold {what}")


def assert_kept(one: Mapping[str, Tensor], other: Mapping[str, Tensor], what: str) -> None:
    assert one.keys() <= other.keys(), f"{what}: {sorted(one)} and {sorted(other)}"
    assert_same(one, {name: other[name] for name in one}, what)


def assert_same_file(one: Any, other: Any) -> None:
    (leaves, shape), (others, other_shape) = tree_flatten(one), tree_flatten(other)
    assert shape == other_shape
    for x, y in zip(leaves, others, strict=True):
        assert same_bits(x.reshape(-1), y.reshape(-1)) if isinstance(x, Tensor) else x == y


def without_mask(weights: Weights) -> Weights:
    return {name: x for name, x in weights.items() if name != "mask" and x.is_floating_point()}


def assert_near(one: Mapping[str, Tensor], other: Mapping[str, Tensor], what: str) -> None:
    assert one.keys() <= other.keys(), f"{what}: {sorted(one)} and {sorted(other)}"
    gaps = {name: gap(x, other[name]) / max(1.0, float(x.abs().max())) for name, x in one.items()}
    assert all(each < NEAR for each in gaps.values()), f"{what} differ by {gaps}"


def gap(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max())


def takes_local_steps(machine: "AnyOrder") -> bool:
    return machine.is_local


def holds_same(machine: "AnyOrder") -> bool:
    """Whether models hold the same on all ranks, so that it may be changed."""
    return all(machine.plain.shown) or not machine.is_local


def may(possible: Callable[["AnyOrder"], bool] = lambda _: True, **strategies: Any) -> Callable[..., Any]:
    """A rule, wherever it is ``possible``, after which everything must hold."""

    def checked(function: Callable[..., None]) -> Any:
        @functools.wraps(function)
        def run(machine: "AnyOrder", **drawn: Any) -> None:
            function(machine, **drawn)
            machine.holds()

        return precondition(possible)(rule(**strategies)(run))

    return checked


class AnyOrder(RuleBasedStateMachine):
    """A training on P ranks; each rule is something that all ranks do at once."""

    ran: ClassVar[Counter[str]] = Counter()  # sequences and rules

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.setup = setup
        self.ranks = ThreadRanks(setup.size)
        self.number = 0  # of forwards
        self.losses: list[Tensor] | None = None
        self.plain_losses: list[Tensor] = []
        self.unsynced = False  # gradients that differ between ranks
        self.half_made = False  # a step after whose backward an optimizer has not stepped yet, as SAM's in its middle
        self.pending = False  # gradients that no optimizer has taken yet
        self.file: tuple[dict[str, Any], File, list[Seen]] | None = None
        self.trainings = self.fresh()
        models = [Tiny(setup.teacher) for _ in range(setup.size)]
        self.plain = Plain(models, setup.optimizer, setup.local, self.fragments)
        self.restart()
        self.ran["sequences"] += 1

    # - the ranks

    def everywhere(self, function: Callable[[Training], T]) -> list[T]:
        return self.ranks.everywhere(lambda rank: function(self.trainings[rank]))

    def fresh(self, frozen: bool = False) -> list[Training]:
        groups = [self.ranks.network.group(rank) for rank in range(self.setup.size)]
        return self.ranks.everywhere(lambda rank: Training(self.setup, groups[rank], frozen))

    def look(self) -> list[Seen]:
        return self.everywhere(look_at)

    def teardown(self) -> None:
        if self.ranks.network.failed is None:
            self.everywhere(Training.close)
        self.ranks.close()

    @property
    def is_local(self) -> bool:
        return isinstance(self.trainings[0].hook.averager, LocalAverager)

    def fragments(self) -> dict[str, int]:
        if not self.is_local:
            return {}
        replicas = self.trainings[0].averager.weights.replicas
        return {name: replica.fragment for replica in replicas for name in replica.group.names}

    # - what it must obey

    def restart(self) -> None:
        """Count what is lost, and how x̄ moves, from here on: others than the engine have set weights."""
        self.losses = None
        self.seen = self.account = self.look()
        self.updates: Weights = {}  # of all ranks' weights
        self.set_by_others: set[str] = set()  # which count more than once, where ranks look ahead
        self.plain.turns = self.fragments()

    def holds(self) -> None:
        self.ran["rules"] += 1
        before, self.seen = self.seen, self.look()
        self.half_made = self.half_made and self.plain.counted
        self.plain.turns = self.fragments()
        self.check_replicas()
        self.check_what_is_shown()
        self.check_what_is_not_finite()
        self.check_law()
        self.check_when_x_moves(before[0])
        self.check_against_plain()

    def check_replicas(self) -> None:
        first, *others = self.seen
        for other in others:
            assert first.steps == other.steps
            assert_same(first.averages, other.averages, "x̄ on two ranks")
            if not self.is_local:
                assert_same(self.trained(first.held), self.trained(other.held), "weights on two ranks")

    def trained(self, weights: Weights) -> Weights:
        names = [name for name, p in self.trainings[0].model.named_parameters() if p.requires_grad]
        return {name: weights[name] for name in names}

    def check_what_is_shown(self) -> None:
        for seen, shown in zip(self.seen if self.is_local else [], self.plain.shown, strict=False):
            assert (seen.phase is Phase.SHOWN) == shown, f"{seen.phase}, though {shown=}"
            expected = {name: x.to(seen.held[name].dtype) for name, x in (seen.averages if shown else seen.own).items()}
            assert_same({name: seen.held[name] for name in expected}, expected, f"what parameters hold, with {shown=}")

    def check_what_is_not_finite(self) -> None:
        for seen in self.seen:
            for kept in (seen.held, seen.own, seen.averages, seen.unsent):
                assert torch.equal(kept.get("mask", MASK), MASK)
                assert not [name for name, x in kept.items() if name != "mask" and not x.isfinite().all()]

    def check_law(self) -> None:
        """What was handed in and is not unsent was handed out; with local steps, updates move x̄ or are unsent."""
        for name in self.trained(self.seen[0].left) if self.is_local and not self.setup.takes_outer_steps else ():
            if self.setup.lead != 1 and name in self.set_by_others:
                continue
            arrived = self.setup.lead * self.total("averages", name) + self.total("left", name)
            lost = arrived - self.updates.get(name, torch.zeros(()))
            assert float(lost.abs().max()) < NEAR, f"{name}: {float(lost.abs().max())} of updates is lost"
        for name in () if self.is_local else self.seen[0].unsent:
            lost = self.total("handed_in", name) - self.total("unsent", name) - self.total("handed_out", name)
            assert float(lost.abs().max()) < NEAR, f"{name}: {float(lost.abs().max())} of gradients is lost"

    def total(self, what: str, name: str) -> Tensor:
        """Of all ranks, less that when the account was started."""
        pairs = zip(self.seen, self.account, strict=True)
        each = [getattr(now, what)[name].double() - getattr(before, what)[name].double() for now, before in pairs]
        return torch.stack(each).sum(0)

    def check_when_x_moves(self, before: Seen) -> None:
        """Only when a step is settled."""
        now = self.seen[0]
        if now.steps == before.steps and before.averages:
            known = {name: now.averages[name] for name in before.averages}
            assert_same(known, before.averages, "x̄ after and before a rule that settles nothing")

    def check_against_plain(self) -> None:
        """The weights are what a few lines of plain torch say."""
        for rank, (seen, model) in enumerate(zip(self.seen, self.plain.models, strict=True)):
            assert not self.is_local or seen.steps == self.plain.steps
            assert torch.equal(seen.held["seen"], model.seen)
            if self.setup.exact:
                held = without_mask(seen.held)
                if self.setup.local or self.setup.candidates:  # statistics have tests of their own
                    held = {name: x for name, x in held.items() if "running" not in name}
                assert_near(held, self.plain.tensors(rank), f"what rank {rank} holds")
                assert_near(without_mask(seen.averages), self.plain.average, "x̄")
                if self.is_local:
                    assert_near(without_mask(seen.own), self.plain.own(rank), f"own weights of rank {rank}")

    # - a step

    @may(sync=st.booleans())
    def forward(self, sync: bool = True) -> None:
        self.number += 1
        self.losses = self.everywhere(lambda training: training.forward(self.number, sync))
        self.plain_losses = self.plain.forward(self.number, sync)

    @may(lambda self: self.losses is not None)
    def backward(self) -> None:
        losses, self.losses = self.losses, None
        before = self.trainings[0].ddp.backwards
        self.ranks.everywhere(lambda rank: losses[rank].backward())
        sync = self.trainings[0].ddp.backwards > before
        self.plain.backward(self.plain_losses, sync)
        self.pending, self.unsynced, self.half_made = True, not sync, sync or self.half_made

    @may(lambda self: self.is_local or not self.unsynced, skips=st.booleans())
    def optimizer_step(self, skips: bool = False) -> None:
        """On every rank; with local steps on all but the first, if that ``skips`` it.

        Not of gradients that were not averaged: without local steps ranks would drift apart.
        """
        ranks = range(int(skips and self.is_local), self.setup.size)
        for update in self.everywhere(lambda training: training.step(training.group.rank in ranks)):
            self._note(update)
        self.plain.step(ranks)
        self.half_made = self.half_made and len(ranks) < self.setup.size
        self.pending = self.unsynced = False
        self.losses = None  # of weights as they were

    def _note(self, update: Weights) -> None:
        """Count what others than the engine have done to weights."""
        for name, x in update.items():
            self.updates[name] = self.updates.get(name, torch.zeros(())) + x

    @may(steps=st.sampled_from([1, 1, 2, 11]))
    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.forward()
            self.backward()
            self.optimizer_step()

    @may()
    def interrupted_forward(self) -> None:
        def interrupted(training: Training) -> None:
            training.model.interrupt = True
            with pytest.raises(Interrupted):
                training.forward(self.number, sync=True)
            training.model.interrupt = False

        self.number += 1
        self.losses = None
        self.everywhere(interrupted)
        self.plain.interrupted(self.number)

    # - evaluation

    @may(lambda self: not any(self.plain.shown))
    def watch_statistics(self) -> None:
        """A forward in training mode without gradients; those of a training that is shown would differ by rank."""
        self.number += 1
        self.everywhere(lambda training: training.watch(self.number))
        self.plain.watch(self.number)
        self.losses = None  # which needs statistics as they were

    @may(gradients=st.booleans())
    def validate(self, gradients: bool) -> None:
        are_sent = self.plain.sends_buffers
        first, *others = self.everywhere(lambda training: training.evaluate(gradients).detach())
        self.plain.evaluate(gradients)
        self.losses = None  # DDP, too, sends buffers between, which backward needs as they were
        if self.plain.averages_all and are_sent:
            for other in others:
                assert torch.equal(first, other), f"validated {float(first)} and {float(other)}"

    @may(takes_local_steps)
    def backward_through_the_average(self) -> None:
        losses = self.everywhere(lambda training: training.evaluate(gradients=True))
        self.plain.evaluate(gradients=True)

        def backward(training: Training) -> None:
            with pytest.raises(RuntimeError, match="average"):
                losses[training.group.rank].backward()
            training.ddp.forget_backward()
            training.optimizer.zero_grad()

        self.everywhere(backward)
        self.plain.forget_gradients()
        self.losses, self.pending, self.unsynced = None, False, False

    @may()
    def show_average(self) -> None:
        self.everywhere(lambda training: training.hook.show_average())
        self.plain.show()
        if self.is_local:
            self.losses = None
            first, *others = self.look()
            for other in others:
                names = first.buffers
                assert_same({n: first.held[n] for n in names}, {n: other.held[n] for n in names}, "shown buffers")

    # - weights set by others

    @may(holds_same, name=NAMES, through_data=st.booleans())
    def edit(self, name: str, through_data: bool) -> None:
        self.everywhere(lambda training: training.edit(name, 0.9, through_data))
        self.plain.edit(name, [0.9] * self.setup.size)
        self.restart()

    @may(lambda self: self.is_local and not any(self.plain.shown) and not self.half_made, name=NAMES)
    def edit_own(self, name: str) -> None:
        factors = [1.0 - 0.1 * rank for rank in range(self.setup.size)]
        for update in self.everywhere(lambda training: training.edit(name, factors[training.group.rank], False)):
            self._note(update)
        self.set_by_others.add(name)
        self.plain.edit(name, factors)
        self.losses = None

    # - checkpoints and fits

    @may()
    def save(self) -> None:
        """Twice: the second time nothing has changed."""
        written = self.everywhere(Training.file)
        self.plain.save()
        before = self.look()
        again = self.everywhere(Training.file)
        seen = self.look()
        for one, other in zip(before, seen, strict=True):
            assert_unchanged(one, other, "before and after a checkpoint was written")
        assert_same_file(written[0], again[0])
        for name, x in seen[0].averages.items():
            kept = written[0]["model"][name]
            assert same_bits(kept, x.to(kept.dtype)), f"{name} in the file is not x̄"
        self.file = written[0], self.plain.save(), seen
        if self.is_local:
            self.losses = None

    @may(takes_local_steps)
    def save_within_a_step(self) -> None:
        """As a callback does between a backward and the optimizer's step; the step goes on."""
        before = self.look()
        written = self.everywhere(Training.file_as_it_is)
        seen = self.look()
        for one, other in zip(before, seen, strict=True):
            assert_unchanged(one, other, what := "before and after a checkpoint was written within a step")
            assert_same(one.held, other.held, f"what the model holds {what}")
        self.file = written[0], self.plain.save(show=False), seen

    @may(lambda self: self.file is not None, fresh=st.booleans())
    def load(self, fresh: bool) -> None:
        """Into the training that saved it, or into one that has just begun."""
        if fresh:
            self.everywhere(Training.close)
            self.trainings = self.fresh()
            self.plain.fresh()
            self.pending = self.unsynced = False
        written, plain, saved = self.file
        self.everywhere(lambda training: training.load(written))
        self.plain.load(plain)
        self.restart()
        for one, other in zip(saved, self.seen, strict=True):
            assert_unchanged(replace(one, held=other.held), other, "saved and loaded")

    @may(lambda self: not self.pending and not self.plain.sent, change=st.booleans())
    def resume_beside_it(self, change: bool) -> None:
        """What is resumed goes on as what was saved; then one of them goes on."""
        written = self.everywhere(Training.file)[0]
        self.plain.save()
        others = self.fresh(self.trainings[0].frozen)
        self.ranks.everywhere(lambda rank: others[rank].load(written))
        for step in range(3):
            if step:
                self.train()
                self.ranks.everywhere(lambda rank: others[rank].whole_step(self.number))
            resumed = self.ranks.everywhere(lambda rank: look_at(others[rank]))
            for one, other in zip(self.look(), resumed, strict=True):
                assert_unchanged(one, other, what := f"after {step} steps of what went on and of what was resumed")
                assert one.averages.keys() == other.averages.keys(), what
                if self.is_local:  # else buffers are sent when DDP is made
                    assert_same(one.held, other.held, f"what the model holds {what}")
        if change:
            others, self.trainings = self.trainings, others
            self.seen = self.account = self.look()
            self.updates = {}
        self.ranks.everywhere(lambda rank: others[rank].close())

    @may(frozen=st.booleans(), orderly=st.booleans())
    def second_fit(self, frozen: bool, orderly: bool) -> None:
        """With a layer frozen or not, after a fit that ended or was interrupted; nothing of what is unsent changes."""
        self.everywhere(lambda training: training.hook.averager.show_average(settle=orderly))
        self.plain.end_fit(orderly)
        before = self.look()
        self.everywhere(lambda training: training.fit_again(frozen))
        self.plain.begin_fit(frozen)
        self.pending = self.unsynced = False
        self.restart()
        for one, other in zip(before, self.seen, strict=True):
            assert_unchanged(replace(one, buffers={}), other, "before and after a second fit began")

    # - changes between gradients and local steps

    @may(lambda self: self.setup.candidates and not self.is_local, number=st.integers(0, 1))
    def begin_local_steps(self, number: int) -> None:
        chosen, before = self.setup.candidates[number], self.look()
        self.everywhere(lambda training: training.change(chosen))
        for one, other in zip(before, self.look(), strict=True):
            assert_kept(one.unsent, other.unsent, "what is unsent of gradients, before and after local steps began")
        self.plain.steps = self.trainings[0].averager.steps
        self.plain.begin(ls.LocalSteps(chosen.local_steps))
        self.restart()

    @may(lambda self: self.setup.candidates and self.is_local, number=st.integers(0, 1))
    def change_local_steps(self, number: int) -> None:
        chosen = self.setup.candidates[number]
        self.everywhere(lambda training: training.change(chosen))
        self.plain.change(ls.LocalSteps(chosen.local_steps))
        self.restart()

    @may(lambda self: self.setup.candidates and self.is_local)
    def end_local_steps(self) -> None:
        self.everywhere(lambda training: training.change(None))
        self.plain.merge()
        self.restart()


@pytest.mark.parametrize("name", SETUPS)
def test_whatever_the_order(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Replicas agree, nothing is lost, x̄ moves when a step is settled, and weights are those of plain torch."""
    AnyOrder.ran.clear()
    machine: Any = functools.partial(AnyOrder, SETUPS[name])
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES or 2,
            stateful_step_count=40 if EXAMPLES else 16,
            derandomize=not EXAMPLES,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        ),
    )
    with capsys.disabled() if EXAMPLES else nullcontext():
        print(f"\n{name}: {AnyOrder.ran['sequences']} sequences, {AnyOrder.ran['rules']} rules")


def do(rule: str, /, **drawn: Any) -> tuple[str, dict[str, Any]]:
    return rule, drawn


# By the name of a setup, what is done: sequences that went wrong once.
ONCE_WRONG: dict[str, tuple[str, list[tuple[str, dict[str, Any]]]]] = {
    "what a group remembers of its rounding goes along into other groups": (
        "half precision", [do("train", steps=2), do("second_fit", frozen=True, orderly=False)],
    ),
    "second moments go on where a layer is frozen, and where it is not any more": (
        "three local steps, all at once",
        [
            do("resume_beside_it", change=True), do("second_fit", frozen=True, orderly=False),
            do("resume_beside_it", change=True), do("second_fit", frozen=False, orderly=False),
            do("resume_beside_it", change=False),
        ],
    ),
    "second moments begin anew with a checkpoint of other parameters": (
        "half precision",
        [
            do("save"), do("second_fit", frozen=True, orderly=True), do("load", fresh=False),
            do("resume_beside_it", change=False),
        ],
    ),
    "what waits aside stays there where a layer is frozen": (
        "aside", [do("train", steps=11), do("second_fit", frozen=True, orderly=True)],
    ),
    "local steps that have just begun go on alike to the last bit": (
        "changes, rounded",
        [do("train", steps=4), do("begin_local_steps", number=1), do("resume_beside_it", change=False)],
    ),
    "what is loaded stays where local steps change, also where it is what the average is already": (
        "changes",
        [
            do("save"), do("begin_local_steps", number=1), do("train", steps=1), do("validate", gradients=True),
            do("load", fresh=False), do("begin_local_steps", number=1), do("save"),
            do("change_local_steps", number=0), do("train", steps=1), do("load", fresh=False),
        ],
    ),
    "weights may be set twice where a rank has skipped its optimizer between": (
        "two local steps, waiting",
        [
            do("edit", name="second.bias", through_data=False), do("optimizer_step", skips=True),
            do("validate", gradients=True), do("edit", name="first.weight", through_data=True), do("train"),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ONCE_WRONG)
def test_sequences_that_went_wrong_once(what: str) -> None:
    setup, rules = ONCE_WRONG[what]
    state = AnyOrder(SETUPS[setup])
    for name, drawn in rules:
        getattr(state, name)(**drawn)
    state.teardown()


def test_a_teacher_that_moved_before_the_number_of_local_steps_changed_is_averaged_when_they_end() -> None:
    state = AnyOrder(SETUPS["changes of three ranks"])
    state.train(steps=2)
    state.begin_local_steps(number=0)
    state.train(steps=2)
    state.change_local_steps(number=1)
    state.end_local_steps()
    first, *others = [training.model.teacher for training in state.trainings]
    assert all(torch.equal(first, other) for other in others)
    state.teardown()


def test_what_gradients_have_not_sent_joins_those_of_the_first_local_step_once() -> None:
    """Also where that step is made again, after a checkpoint within it."""
    state = AnyOrder(SETUPS["changes, rounded"])
    state.train(steps=2)
    state.begin_local_steps(number=0)
    unsent = [seen.unsent for seen in state.seen]
    assert all(x.any() for x in unsent[0].values())
    state.forward(sync=False)
    state.backward()
    assert not any(added_by(state, rank)["first.weight"].any() for rank in (0, 1))
    state.forward()
    state.backward()
    for rank in (0, 1):
        assert_near(unsent[rank], added_by(state, rank), f"what rank {rank} has and what its gradients get")
    state.save_within_a_step()
    state.optimizer_step()
    state.train(steps=2)
    for rank in (0, 1):
        assert_near(unsent[rank], added_by(state, rank), f"what rank {rank} had and what its gradients got")
        assert not state.seen[rank].unsent
    state.load(fresh=True)
    state.train(steps=2)
    for rank in (0, 1):
        assert_near(unsent[rank], added_by(state, rank), f"what rank {rank} had saved and what its gradients got")
    state.teardown()


@pytest.mark.parametrize("size", [2, 3])
def test_what_gradients_have_not_sent_goes_along_to_other_settings_and_ranks(size: int) -> None:
    """From a checkpoint within the first local step; to another number of ranks as a mean."""
    setup = SETUPS["changes, rounded"]
    state = AnyOrder(setup)
    state.train(steps=2)
    state.begin_local_steps(number=0)
    state.forward()
    state.save_within_a_step()
    written = state.file[0]
    other = AnyOrder(replace(setup, size=size, candidates=(*setup.candidates, Candidate(ls.Dense(), "int4", 4))))
    other.everywhere(lambda training: training.load(written))
    for name in state.seen[0].unsent:
        saved = [seen.unsent[name] for seen in state.seen]
        loaded = [seen.unsent[name] for seen in other.look()]
        assert_near({name: torch.stack(saved).mean(0)}, {name: torch.stack(loaded).mean(0)}, "means of what is unsent")
    assert state.seen[0].unsent
    for each in (state, other):
        each.teardown()


def added_by(state: AnyOrder, rank: int) -> Weights:
    """What the hook has given back more than it was given, since the account of ``state`` was started."""
    now, then = state.seen[rank], state.account[rank]
    return {
        name: (now.handed_out[name] - now.handed_in[name]) - (then.handed_out[name] - then.handed_in[name])
        for name in now.handed_in
    }


@pytest.mark.parametrize("name", ["local steps, micro", "own second moments"])
def test_a_checkpoint_can_be_loaded_while_messages_are_under_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they bring must not get into the weights that were loaded."""
    average = flight._average

    def late(*args: Any) -> None:
        time.sleep(0.02)
        average(*args)

    monkeypatch.setattr(flight, "_average", late)
    state = AnyOrder(SETUPS[name])
    state.train(steps=2)
    state.save()
    state.train(steps=11)
    state.forward()
    written = state.file[0]
    state.load(fresh=False)
    state.save()
    assert_same_file(written, state.file[0])
    state.teardown()


@pytest.mark.parametrize("name", ["outer momentum", "local steps, micro"])
def test_weights_can_be_set_while_messages_are_under_way(name: str) -> None:
    """As after a forward that raised: what they bring of these weights is dropped."""
    state = AnyOrder(SETUPS[name])
    state.train(steps=11)
    state.interrupted_forward()
    state.validate(gradients=False)
    state.edit(name="first.weight", through_data=False)
    was_set = {"first.weight": state.seen[0].averages["first.weight"]}
    state.train()
    state.show_average()
    assert_kept(was_set, state.seen[0].averages, "x̄ that was set, and after what was under way arrived")
    state.train(steps=11)
    state.teardown()
