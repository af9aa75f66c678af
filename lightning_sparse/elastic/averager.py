"""Local steps among hosts that come and go: an exchange counts on every host that goes on, or on none."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.group import Group
from lightning_sparse.elastic.membership import Membership
from lightning_sparse.elastic.pace import Pace, Training
from lightning_sparse.elastic.watch import Watch
from lightning_sparse.engine.averager import device_of
from lightning_sparse.engine.lanes import Lane, Lanes
from lightning_sparse.local_steps.averager import LocalAverager, PendingExchange
from lightning_sparse.local_steps.buffers import ModuleBuffers, set_to
from lightning_sparse.local_steps.replica import Find
from lightning_sparse.local_steps.settings import LocalSteps
from lightning_sparse.local_steps.untrained import Untrained
from lightning_sparse.network.elastic import Elastic
from lightning_sparse.network.hosts import own_address
from lightning_sparse.network.process_groups import ProcessGroups
from lightning_sparse.network.torch_comm import RankLost


class ElasticAverager(LocalAverager):
    """Local steps of a training that is one host of several, each of which may end, stop or join at any time.

    The hosts meet before each exchange (:class:`Membership`).  The exchange ends with a vote: a host that has received
    everything says so to all others, and applies the exchange once every other host has said so too.  A host that has
    voted and does not hear another's vote is in doubt.  If a host that it meets next has applied the exchange, it
    applies the exchange late; if none has, it drops it.  What was dropped is still unsent, since that is x_r - x̄.  A
    host that is new, or further behind, takes x̄ and all that goes with it from the furthest host; nothing is unsent of
    it then.

    A host may have several ranks, which are a member: each owns a slice of all weights, and exchanges it with the ranks
    of the same number in the other hosts.  A host has received everything when all its ranks have, and only then does
    any of them vote.  So an exchange counts for all slices or for none.

    Args:
        groups: as for :class:`LocalAverager`; and so ``fragments``, ``settings``, ``warmup_steps``, ``lead_is_given``.
        hosts: where they meet.
        host: its ranks, which are one member.
        described: what must be the same on all hosts, as text by name.
        untrained: parameters of the module that no optimizer trains: each host's own.
        buffers: of the module, which hosts do not share; one that joins gets those that a checkpoint keeps.
    """

    def __init__(
        self,
        groups: Sequence[tuple[Group, Compressor]],
        fragments: Sequence[int],
        *,
        hosts: Elastic,
        host: ProcessGroups,
        described: Mapping[str, str],
        untrained: Mapping[str, Find],
        buffers: ModuleBuffers,
        settings: LocalSteps,
        warmup_steps: int = 0,
        lead_is_given: bool = True,
    ) -> None:
        self._ranks, self._voting = host.host_ranks(), host.host_ranks()  # of two threads
        self._membership = Membership(hosts, described, self._saved, self._ranks)
        comm, own = self._membership.comm, host.between
        comm.members = host.members
        lanes = Lanes([comm], threaded=True, device=device_of(groups), asked=own.everyone)
        given: Any = {"settings": settings, "warmup_steps": warmup_steps, "lead_is_given": lead_is_given}
        super().__init__(groups, fragments, lanes, buffers=buffers, inside=own.inside, **given)
        self._others = Untrained(untrained)  # that each host has for itself, and hands on to one that joins
        self._pace = Pace(hosts.own_pace, int(settings.overlap), agreed=self._ranks.of_first)
        self._settings = hosts
        self._watch: Watch | None = None
        self._has_met = False  # others, and their exchange has not begun
        self._has_entered = self._in_exchange = self._has_voted = False
        self._in_doubt: tuple[PendingExchange, int] | None = None  # that may count on other hosts, and its step
        self._remembered_of = 0  # hosts that compressors' memories are of; 0: they start anew with the next
        self._dropped = 0  # exchanges

    # - of a training

    def serve(self, training: Training) -> None:
        """Have a host that joins get the state of this ``training``, whose steps are those of the furthest host."""
        self._pace.training = training

    def enter(self) -> None:
        """Take part from now on; to be called when all that a checkpoint holds is loaded, before the first step."""
        if self._has_entered:
            return
        self._has_entered = True
        if self._ranks.size > 1:
            self._watch = Watch(self._ranks, own_address(self._settings), self._settings.timeout, self._membership.end)
        self._membership.describe(self._pace.training.described())
        self._others.begin()
        if not self.settings.overlap:
            self._exchanged = self.steps  # what is due was sent before the checkpoint was saved
        with torch.inference_mode(False):
            was_shown = self.weights.shown
            self._hide()
            self._meet_until_ready()
            self._membership.failed = 0  # no exchange has failed yet, only meetings
            if self._exchanged < self.steps:
                self._has_met = True
            elif self._membership.commit():
                self._membership.note_success(self.steps)
            self._pace.enter()
            if was_shown:
                self.weights.show()

    def between_steps(self) -> None:
        self.enter()
        if self._has_met and not self.settings.overlap:  # others have met after a step
            self._exchange()
        super().between_steps()
        self._pace.begin_step()

    def before_update(self, optimizer: Optimizer) -> None:
        if not self._pace.counts:  # optimizers leave out what has no gradient
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = None
        super().before_update(optimizer)

    def settle(self) -> None:
        super().settle()
        if (self._membership.failed or self._has_met) and self._pace.is_over:
            if self._has_met:  # others, as they begin the last exchange, which no forward of this host follows
                self._exchange()
            with torch.inference_mode(False):
                self._repeat()

    def _advance(self) -> int:
        return self._pace.end_step(lambda steps: self._weights_are_due(self.steps + steps))

    def _weights_are_due(self, step: int) -> bool:
        turns = (self.settings.turn(each.fragment, step, self._warmup_steps) for each in self.weights.replicas)
        return any(turn is not None for turn in turns)

    # - an exchange

    def _exchange(self) -> None:
        """Send what is due, and wait for it."""
        with torch.inference_mode(False):
            self._hide()
            self._send()
            self._receive()

    def _repeat(self) -> None:
        """Repeat the last exchange of the training, which has failed, since no later one makes up for it."""
        steps = self.steps
        self.steps = next(due for due in count(steps - self._pace.ahead, -1) if self._weights_are_due(due) or due == 0)
        while self._membership.failed:
            try:
                self._meet_until_ready()
            except RuntimeError as error:
                rank_zero_warn(
                    "lightning_sparse: this host ends without the last exchange, which has failed, so its weights may "
                    f"differ from those of other hosts. {error}"
                )
                self._membership.failed = 0
            else:
                self._has_met = True
                self._exchange()
        self.steps = max(self.steps, steps)

    def _send(self) -> None:
        is_due = self._weights_are_due(self.steps) or self.moments.is_due(self.steps)
        is_due = self._has_met or (is_due and not self._pace.has_ended)
        if is_due and not self._has_met and not self._meet():
            self._note_that_not_all_met()
        elif is_due:
            super()._send()
            self._has_met, self._in_exchange, self._has_voted = False, True, False
            self._pace.vote()
            self._pending.launch(self.lanes[0], partial(self._vote, self._pending), always=True)
        self._exchanged = self.steps

    def _vote(self, pending: PendingExchange, lane: Lane) -> None:
        if not self._voting.all(pending.error is None):
            self._membership.comm.leave()
            raise RankLost("another rank of this host has lost a message")
        self._has_voted = True
        self._pace.received = lane.comm.all_gather(self._pace.sent).wait()

    def _receive(self) -> None:
        super()._receive()
        self.moments.read(self.members)  # before there may be others

    def _counts(self, pending: PendingExchange) -> bool:
        error, was_exchange, self._in_exchange = pending.error, self._in_exchange, False
        if not was_exchange or (error is not None and not isinstance(error, RankLost)):
            return super()._counts(pending)
        if self._membership.commit(error):
            self._membership.note_success(self._exchanged)
            self._pace.keep_up()
            return True
        self._membership.note_failure()
        if self._has_voted:
            self._in_doubt = pending, self._exchanged
        else:
            self._drop(pending)
        return False

    def _drop(self, pending: PendingExchange) -> None:
        self._dropped += 1
        self._remembered_of = 0
        for replica in pending.replicas:
            replica.drop()
        self.moments.drop()

    # - a meeting

    def _meet_until_ready(self) -> None:
        """Meet the others until messages can be sent.

        Raises:
            RuntimeError: they cannot.
        """
        end_s = time.monotonic() + self._membership.quorum_timeout_s
        while not self._meet():
            self._note_that_not_all_met()
            self._membership.check_reached(is_over=not self._ranks.all(time.monotonic() <= end_s))

    def _note_that_not_all_met(self) -> None:
        self._membership.note_failure(self._membership.commit(RankLost("not all hosts have met")))

    def _meet(self) -> bool:
        """Meet the other hosts, and catch up with the furthest; returns whether messages can be sent."""
        is_ready, furthest = self._membership.meet()
        if furthest is not None:
            self._catch_up(furthest)
        elif is_ready and self._in_doubt is not None:  # nobody here has applied it
            self._drop(self._in_doubt[0])
            self._in_doubt = None
        steps = self._membership.greet(self.steps, self.moments.looks)
        if steps is None:
            return False
        self.steps = steps
        self._remember(self._membership.size)
        self._pace.meet()
        return True

    def _remember(self, size: int) -> None:
        """Have compressors start anew with what they can carry to another number of hosts, on all of them alike."""
        if size != self._remembered_of:
            for replica in self.weights.replicas:
                group, kept = replica.group, replica.compressor.per_element
                own = {key: group.memory[key] for key in kept if key in group.memory}
                group.memory = replica.compressor.carry([(group, group.n)]) | own
        self._remembered_of = size

    # - from one host to another

    def _saved(self) -> dict[str, Any]:
        """What a host needs that is behind; asked while this one waits for others."""
        own: dict[str, Any] = {"replicas": [replica.shared() for replica in self.weights.replicas]}
        own["history"] = self._membership.history
        return own if self._ranks.rank else own | self._saved_by_first()

    def _saved_by_first(self) -> dict[str, Any]:
        """What all ranks of a host have in common, and need from the first one of another."""
        names = self._others.watched
        changed = [True] * len(names) if self.steps == 0 else self._others.changed().tolist()
        return {
            "described": self._membership.described,
            "steps": self.steps,
            "exchanged": self._exchanged,
            "committed": self._membership.committed,
            "remembered_of": self._remembered_of,
            "moments": {key: x.clone() for key, x in self.mean_moments.state().items()},
            "others": {n: find().detach().clone() for (n, find), c in zip(names.items(), changed, strict=True) if c},
            "buffers": {name: x.detach().clone() for name, x in self.shared_buffers.saved().items()},
            "training": self._pace.training.training_state(),
        }

    @torch.no_grad()
    def _catch_up(self, furthest: Mapping[str, Any]) -> None:
        """Go on from what the furthest host has saved."""
        membership, replicas = self._membership, furthest["replicas"]
        common = {key: x for key, x in furthest.items() if key != "replicas"}
        furthest = self._ranks.of_first(tree_map_only(torch.Tensor, torch.Tensor.cpu, common))
        doubt, self._in_doubt = self._in_doubt, None
        self._remembered_of, before = furthest["remembered_of"], membership.committed
        membership.committed, membership.history = furthest["committed"], furthest["history"]
        if doubt is not None and doubt[1] + 1 == membership.committed:
            self.weights.apply_moves(doubt[0].replicas)
            self.set_by_others.accept()
            self.moments.receive(self._inside)
            self.moments.read(self.members)
            return
        if doubt is not None:
            self._drop(doubt[0])
        if before > 1:
            unsent = self.lanes.sum_over_slices(
                torch.tensor([self.unsent_norm() ** 2], dtype=torch.float32, device=self.device)
            ).sqrt()
            rank_zero_warn(
                f"lightning_sparse: this host is at step {self.steps} and others at {furthest['steps']}; it goes on "
                f"from their average. What it had not sent, of norm {float(unsent):.3g}, is lost."
            )
        self._pace.training.load_training_state(furthest["training"])  # first, since it may refuse to
        self._pace.enter()
        self.steps, self._exchanged = furthest["steps"], furthest["exchanged"]
        for replica, shared in zip(self.weights.replicas, replicas, strict=True):
            replica.start_from_shared(shared)
        self.weights.share(self.weights.replicas)
        self.set_by_others.accept()
        for name, x in furthest["others"].items():
            self._others.watched[name]().copy_(x)
        now = self.shared_buffers.named()
        for name, x in furthest["buffers"].items():
            if name in now and now[name].shape == x.shape:
                set_to(now[name], x)
        self.mean_moments.resume(furthest["moments"], None, max(furthest["remembered_of"], 1))

    # - what others look at

    def compare(self) -> None:
        """Nothing: what no optimizer trains is each host's own."""
        self._note_what_was_set()

    def _begin_comparison(self) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        hosts = {"hosts": self.members, "lost_hosts": self._membership.lost, "dropped_exchanges": self._dropped}
        return super().metrics() | {f"sparse/{key}": float(number) for key, number in hosts.items()}

    def unpack(self, steps: int | None, *args: Any, **kwargs: Any) -> None:
        super().unpack(steps, *args, **kwargs)
        self._membership.committed = steps or 0

    def close(self) -> bool:
        closed = super().close()
        self._membership.close()
        if self._watch is not None:
            self._watch.close(is_over=not self._pace.training.has_failed())
        return closed
