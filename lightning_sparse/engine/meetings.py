"""Local steps among hosts that come and go: how they meet, and what one gets that is behind the others."""

import json
import time
import zlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.around import Training
from lightning_sparse.engine.buffer_message import set_to
from lightning_sparse.engine.buffers import ModuleBuffers
from lightning_sparse.engine.flight import Flight
from lightning_sparse.engine.local_exchange import LocalExchange
from lightning_sparse.engine.local_steps import LocalSteps
from lightning_sparse.engine.pace import Pace
from lightning_sparse.engine.replica import Find
from lightning_sparse.engine.untrained import Untrained
from lightning_sparse.network.agreement import differences, everywhere
from lightning_sparse.network.comm import Comm
from lightning_sparse.network.elastic import Elastic
from lightning_sparse.network.elastic_comm import ElasticComm
from lightning_sparse.network.hosts import Hosts
from lightning_sparse.network.torch_comm import RankLost

MOST_FAILED = 20  # exchanges, one after the other, after which a host gives up
FIRST_FAILED = 3  # meetings, after which one gives up that has not begun: others, which train, wait for it each time
LAYERS = "layers"  # of what describes a host: its model as text, which may differ where the model is the same


class Meetings(LocalExchange):
    """Local steps of one host of several, which meet others before each exchange and catch up with the furthest.

    Args:
        hosts: where they meet.
        described: what must be the same on all hosts, as text by name; of LAYERS a difference is warned of.
        alone: this host alone, for messages that another host need not send at the same time.
        untrained: parameters of the module that no optimizer trains: each host's own.
        buffers: of the module, which hosts do not share; one that joins gets those that a checkpoint keeps.
        groups: as for :class:`LocalExchange`; and so all others.
    """

    def __init__(
        self,
        groups: Sequence[tuple[Group, Compressor]],
        fragments: Sequence[int],
        *,
        hosts: Elastic,
        described: Mapping[str, str],
        alone: Comm,
        untrained: Mapping[str, Find],
        buffers: ModuleBuffers,
        settings: LocalSteps,
        warmup_steps: int = 0,
        lead_is_given: bool = True,
    ) -> None:
        self._hosts = Hosts(hosts, self._shared)
        self._among = ElasticComm(self._hosts.leave, hosts.limit)
        given: Any = {"settings": settings, "warmup_steps": warmup_steps, "lead_is_given": lead_is_given}
        super().__init__(groups, fragments, [self._among], threaded=True, buffers=buffers, **given)
        self._described, self._alone = dict(described), alone
        self._digest = 0  # of what describes this host, once it has entered
        self._others = Untrained(untrained)  # that each host has for itself, and hands on to one that joins
        self._pace = Pace(hosts.own_pace, ahead=int(settings.overlap))
        self._committed = 0  # 1 + the step of the last exchange that counted; 0 before all
        self._has_met = False  # others, and their exchange has not begun
        self._has_entered = self._in_exchange = self._has_voted = False
        self._in_doubt: tuple[Flight, int] | None = None  # an exchange that may count on other hosts, and its step
        self._remembered_of = 0  # hosts that compressors' memories are of; 0: they start anew with the next
        self._quorum_timeout, self._has_warned = hosts.quorum_timeout, False
        self._known: set[int] = set()  # the hosts of the last meeting
        self.lost_hosts = self.dropped = self._failed = 0  # exchanges dropped so far, and one after the other

    def serve(self, training: Training) -> None:
        """Have a host that joins get the state of this ``training``, whose steps are those of the furthest host."""
        self._pace.training = training

    def enter(self) -> None:
        """Take part from now on; to be called when all that a checkpoint holds is loaded, before the first step."""
        if self._has_entered:
            return
        self._has_entered = True
        self._described |= self._pace.training.described()
        self._digest = zlib.crc32(json.dumps(self._described, sort_keys=True).encode())
        self._others.begin()
        if not self.settings.overlap:
            self._exchanged = self.steps  # what is due was sent before the checkpoint was saved
        with torch.inference_mode(False):
            was_shown = self.weights.shown
            self._hide()
            self._meet_until_ready()
            self._failed = 0  # no exchange has failed yet, only meetings
            if self._exchanged < self.steps:
                self._has_met = True
            elif self._hosts.commit():
                self._committed = self.steps + 1
            self._pace.enter()
            if was_shown:
                self.weights.show()

    def _drop(self, flight: Flight) -> None:
        self.dropped += 1
        self._remembered_of = 0
        for replica in flight.replicas:
            replica.drop()
        self.moments.drop()

    def _note_failure(self, committed: bool) -> None:
        self._failed = 0 if committed else self._failed + 1
        if self._failed > MOST_FAILED:
            raise RuntimeError(
                f"an exchange among hosts must succeed now and then; got {self._failed} failures one after the other "
                f"on this one, {self._hosts.address}{self._why()}. Look at the links between the hosts, "
                "GLOO_SOCKET_IFNAME and Elastic(address=..., timeout=...); then start again."
            )

    def _why(self) -> str:
        return self._hosts.failure and f": {self._hosts.failure}"

    def _meet_until_ready(self) -> None:
        """Meet the others until messages can be sent.

        Raises:
            RuntimeError: they cannot.
        """
        end_s = time.monotonic() + self._quorum_timeout
        while not self._meet():
            self._note_failure(self._hosts.commit(RankLost("not all hosts have met")))
            if not self._known and (self._failed >= FIRST_FAILED or time.monotonic() > end_s):
                raise RuntimeError(
                    f"hosts that meet must reach each other's addresses; got {self._failed} failures one after the "
                    f"other on this one, {self._hosts.address}{self._why()}. Put all on one network, by "
                    "Elastic(address=...) or GLOO_SOCKET_IFNAME, and open its ports among them; then start this host "
                    "again."
                )

    def _meet(self) -> bool:
        """Meet the other hosts, and catch up with the furthest; returns whether messages can be sent."""
        is_ready = self._hosts.meet(self._committed)
        if (furthest := self._hosts.take_received()) is not None:
            self._catch_up(furthest)
        elif is_ready and self._in_doubt is not None:  # nobody here has applied it
            self._drop(self._in_doubt[0])
            self._in_doubt = None
        if not is_ready:
            self._warn_of_failure()
            return False
        self._among.join(self._hosts.group, self._hosts.rank, self._hosts.size)
        try:
            self._greet()
        except RankLost as error:
            self._hosts.failure = str(error)
            return False
        self._remember(self._hosts.size)
        self._pace.meet()
        return True

    def _warn_of_failure(self) -> None:
        if self._hosts.failure and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"lightning_sparse: not all hosts that have met are connected; got on this one, {self._hosts.address}"
                f"{self._why()}. They meet again. If it fails each time, put all on one network, by "
                "Elastic(address=...) or GLOO_SOCKET_IFNAME."
            )

    def _greet(self) -> None:
        """Tell the other hosts who this is; go on at the step of the one that has taken most.

        So all send the same fragments.  Gloo ends the process that gets a message of another length than expected.

        Raises:
            RuntimeError: they have other settings.
            RankLost: they are not equally far, and must meet again.
        """
        own = torch.tensor(
            [self.steps, self._hosts.key, self._digest, self._committed, self.moments.looks],
            dtype=torch.int64,
            device="cpu",
        )
        rows = self._among.all_gather(own).wait()
        if len(set(rows[:, 2].tolist())) > 1 and self._hosts.was_made_anew:
            self._compare(
                [json.loads(each) for each in everywhere(json.dumps(self._described), self._among, own.device)]
            )
        if bool((rows[:, 3:] != rows[0, 3:]).any()):
            raise RankLost(f"hosts must be equally far; got exchanges and looks {rows[:, 3:].tolist()}")
        self.steps = int(rows[:, 0].max())
        now = set(rows[:, 1].tolist())
        if gone := self._known - now:
            self.lost_hosts += len(gone)
            rank_zero_warn(
                f"lightning_sparse: {len(gone)} hosts are gone, and {len(now)} go on after step {self.steps}; what "
                "those had not sent is lost."
            )
        self._known = now

    def _compare(self, described: Sequence[Mapping[str, str]]) -> None:
        """Warn of other layers than on other hosts; ``described`` is of all.

        Raises:
            RuntimeError: another host has other settings.
        """
        settings = [{name: text for name, text in each.items() if name != LAYERS} for each in described]
        if any(each != settings[0] for each in settings):
            raise RuntimeError(
                "Hosts must be started with the same settings, optimizers and model; got others. Start again those "
                "that have others than the hosts that train already; of two, host 0 is this one:\n  "
                + "\n  ".join(differences(settings, "host"))
            )
        for other in described:
            lines = zip_longest(*(each.get(LAYERS, "").splitlines() for each in (self._described, other)))
            if (found := next(((own, its) for own, its in lines if own != its), None)) is not None:
                rank_zero_warn(
                    f"Hosts must train the same model; got `{(found[0] or '').strip()}` on this one where another has "
                    f"`{(found[1] or '').strip()}`. If they compute differently, start one of them again."
                )
                return

    def _remember(self, size: int) -> None:
        """Have compressors start anew with what they can carry to another number of hosts, on all of them alike."""
        if size != self._remembered_of:
            for replica in self.weights.replicas:
                group, kept = replica.group, replica.compressor.per_element
                own = {key: group.memory[key] for key in kept if key in group.memory}
                group.memory = replica.compressor.carry([(group, group.n)]) | own
        self._remembered_of = size

    # - from one host to another

    def _shared(self) -> dict[str, Any]:
        """What a host needs that is behind; asked while this one waits for others."""
        names = self._others.watched
        changed = [True] * len(names) if self.steps == 0 else self._others.changed().tolist()
        return {
            "described": self._described,
            "steps": self.steps,
            "exchanged": self._exchanged,
            "committed": self._committed,
            "remembered_of": self._remembered_of,
            "replicas": [replica.shared() for replica in self.weights.replicas],
            "moments": {key: x.clone() for key, x in self.mean_moments.state().items()},
            "others": {n: find().detach().clone() for (n, find), c in zip(names.items(), changed, strict=True) if c},
            "buffers": {name: x.detach().clone() for name, x in self.shared_buffers.saved().items()},
            "training": self._pace.training.training_state(),
        }

    @torch.no_grad()
    def _catch_up(self, furthest: Mapping[str, Any]) -> None:
        """Go on from what the furthest host has saved.

        Raises:
            RuntimeError: that host was started with other settings.
        """
        if self._described != furthest["described"]:
            self._compare([self._described, furthest["described"]])
        doubt, self._in_doubt = self._in_doubt, None
        self._remembered_of, before = furthest["remembered_of"], self._committed
        self._committed = furthest["committed"]
        if doubt is not None and doubt[1] + 1 == self._committed:
            for replica in doubt[0].replicas:
                replica.apply()
            self.set_by_others.accept()
            self.moments.receive()
            self.moments.read(self.members)
            return
        if doubt is not None:
            self._drop(doubt[0])
        if before > 1:
            rank_zero_warn(
                f"lightning_sparse: this host is at step {self.steps} and others at {furthest['steps']}; it goes on "
                f"from their average. What it had not sent, of norm {self.unsent_norm():.3g}, is lost."
            )
        self._pace.training.load_training_state(furthest["training"])  # first, since it may refuse to
        self._pace.enter()
        self.steps, self._exchanged = furthest["steps"], furthest["exchanged"]
        for replica, shared in zip(self.weights.replicas, furthest["replicas"], strict=True):
            replica.start_from_shared(shared)
        self.set_by_others.accept()
        for name, x in furthest["others"].items():
            self._others.watched[name]().copy_(x)
        now = self.shared_buffers.named()
        for name, x in furthest["buffers"].items():
            if name in now and now[name].shape == x.shape:
                set_to(now[name], x)
        self.mean_moments.resume(furthest["moments"], None, max(furthest["remembered_of"], 1))
