"""Local steps among hosts that come and go: an exchange counts on every host that goes on, or on none."""

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.engine.flight import Flight
from lightning_sparse.engine.lane import Lane
from lightning_sparse.engine.meetings import Meetings
from lightning_sparse.network.comm import Comm, Pending
from lightning_sparse.network.torch_comm import RankLost


class ElasticExchange(Meetings):
    """Local steps of a training that is one host of several, each of which may end, stop or join at any time.

    Before each exchange the hosts meet (:class:`Hosts`).  It ends with a vote: a host that has all that it needs says
    so to all others, and applies the exchange if every one of them has said so.  So it knows what a host is to do that
    has voted and lost another's vote: it applies the exchange late if one of those it meets next has done so, and drops
    it if none has.  What was dropped is unsent still, since it is derived: x_r - x̄.  Who is further behind, or new,
    takes x̄ and all that goes with it from the furthest host, with nothing unsent.

    Args:
        groups: as for :class:`Meetings`; and so all others.
    """

    def ask(self, launch: Callable[[Comm], Pending]) -> Tensor:
        """As ever, but of this host alone: others need not ask."""
        return launch(self._alone).wait()

    def metrics(self) -> dict[str, float]:
        hosts = {"hosts": self.members, "lost_hosts": self.lost_hosts, "dropped_exchanges": self.dropped}
        return super().metrics() | {f"sparse/{key}": float(number) for key, number in hosts.items()}

    def compare(self) -> None:
        """Nothing: what no optimizer trains is each host's own."""
        self._note_what_was_set()

    def _begin_comparison(self) -> None:
        pass

    def unpack(self, steps: int | None, *args: Any, **kwargs: Any) -> None:
        super().unpack(steps, *args, **kwargs)
        self._committed = steps or 0

    def close(self) -> bool:
        closed = super().close()
        self._among.leave()  # whatever is under way
        self._hosts.close()
        return closed

    # - an exchange

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
        if (self._failed or self._has_met) and self._pace.is_over:
            if self._has_met:  # others, as they begin the last exchange, which no forward of this host follows
                self._exchange()
            with torch.inference_mode(False):
                self._repeat()

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
        while self._failed:
            try:
                self._meet_until_ready()
            except RuntimeError as error:
                rank_zero_warn(
                    "lightning_sparse: this host ends without the last exchange, which has failed, so its weights may "
                    f"differ from those of other hosts. {error}"
                )
                self._failed = 0
            else:
                self._has_met = True
                self._exchange()
        self.steps = max(self.steps, steps)

    def _advance(self) -> int:
        return self._pace.end_step(lambda steps: self._weights_are_due(self.steps + steps))

    def _weights_are_due(self, step: int) -> bool:
        turns = (self.settings.turn(each.fragment, step, self._warmup_steps) for each in self.weights.replicas)
        return any(turn is not None for turn in turns)

    def _send(self) -> None:
        is_due = self._weights_are_due(self.steps) or self.moments.is_due(self.steps)
        is_due = self._has_met or (is_due and not self._pace.has_ended)
        if is_due and not self._has_met and not self._meet():
            self._note_failure(self._hosts.commit(RankLost("not all hosts have met")))
        elif is_due:
            super()._send()
            self._has_met, self._in_exchange, self._has_voted = False, True, False
            self._pace.vote()
            self._flight.launch(self._lanes[0], self._vote)
        self._exchanged = self.steps

    def _vote(self, lane: Lane) -> None:
        self._has_voted = True
        self._pace.heard = lane.comm.all_gather(self._pace.told).wait()

    def _receive(self) -> None:
        super()._receive()
        self.moments.read(self.members)  # before there may be others

    def _counts(self, flight: Flight) -> bool:
        error, was_exchange, self._in_exchange = flight.error, self._in_exchange, False
        if not was_exchange or (error is not None and not isinstance(error, RankLost)):
            return super()._counts(flight)
        if self._hosts.commit(error):
            self._committed, self._failed = self._exchanged + 1, 0
            self._pace.keep_up()
            return True
        self._note_failure(False)
        if self._has_voted:
            self._in_doubt = flight, self._exchanged
        else:
            self._drop(flight)
        return False
