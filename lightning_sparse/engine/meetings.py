"""Local steps among hosts that come and go: how they meet, and what one gets that is behind the others."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.around import Training
from lightning_sparse.engine.buffers import ModuleBuffers
from lightning_sparse.engine.flight import Flight
from lightning_sparse.engine.local_exchange import LocalExchange
from lightning_sparse.engine.local_steps import LocalSteps
from lightning_sparse.engine.pace import Pace
from lightning_sparse.engine.replica import Find
from lightning_sparse.engine.untrained import Untrained
from lightning_sparse.network.agreement import differences
from lightning_sparse.network.comm import Comm
from lightning_sparse.network.elastic import Elastic
from lightning_sparse.network.elastic_comm import ElasticComm
from lightning_sparse.network.hosts import Hosts
from lightning_sparse.network.torch_comm import RankLost
from lightning_sparse.wire import ValueFormat

MOST_FAILED = 20  # exchanges, one after the other, after which a host gives up


class Meetings(LocalExchange):
    """Local steps of one host of several, which meet others before each exchange and catch up with the furthest.

    Args:
        hosts: where they meet.
        wire_dtype: of values on the wire.
        described: what must be the same on all hosts, as text by name.
        alone: this host alone, for messages that another host need not send at the same time.
        untrained: tensors of the module that no optimizer trains: each host's own.
        buffers: of the module, which hosts do not share.
        groups: as for :class:`LocalExchange`; and so all others.
    """

    def __init__(
        self,
        groups: Sequence[tuple[Group, Compressor]],
        fragments: Sequence[int],
        *,
        hosts: Elastic,
        wire_dtype: ValueFormat,
        described: Mapping[str, str],
        alone: Comm,
        untrained: Mapping[str, Find],
        buffers: ModuleBuffers,
        settings: LocalSteps,
        warmup_steps: int = 0,
        lead_is_given: bool = True,
    ) -> None:
        self._hosts = Hosts(hosts, self._shared)
        self._among = ElasticComm(self._hosts.leave, hosts.limit).in_format(wire_dtype)
        given: Any = {"settings": settings, "warmup_steps": warmup_steps, "lead_is_given": lead_is_given}
        super().__init__(groups, fragments, [self._among], threaded=True, buffers=buffers, **given)
        self._described, self._alone = dict(described), alone
        self._others = Untrained(untrained)  # that each host has for itself, and hands on to one that joins
        self._pace = Pace(hosts.own_pace, ahead=int(settings.overlap))
        self._committed = 0  # 1 + the step of the last exchange that counted; 0 before all
        self._has_met = False  # others, and their exchange has not begun
        self._has_entered = self._in_exchange = self._has_voted = False
        self._in_doubt: tuple[Flight, int] | None = None  # an exchange that may count on other hosts, and its step
        self._remembered_of = 0  # hosts that compressors' memories are of; 0: they start anew with the next
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
                f"an exchange among hosts must succeed now and then; got {self._failed} failures one after the other. "
                "Look at the links between the hosts, GLOO_SOCKET_IFNAME and Elastic(timeout=...); then start again."
            )

    def _meet_until_ready(self) -> None:
        while not self._meet():
            self._note_failure(self._hosts.commit(RankLost("not all hosts have met")))

    def _meet(self) -> bool:
        """Meet the other hosts, and catch up with the furthest; returns whether messages can be sent."""
        is_ready = self._hosts.meet(self._committed)
        if (furthest := self._hosts.take_received()) is not None:
            self._catch_up(furthest)
        elif is_ready and self._in_doubt is not None:  # nobody here has applied it
            self._drop(self._in_doubt[0])
            self._in_doubt = None
        if not is_ready:
            return False
        self._among.join(self._hosts.group, self._hosts.rank, self._hosts.size)
        try:
            if self._hosts.was_made_anew:
                self._greet()
        except RankLost:
            return False
        self._remember(self._hosts.size)
        self._pace.meet()
        return True

    def _greet(self) -> None:
        """Tell the other hosts who this is; go on at the step of the one that has taken most.

        Raises:
            RuntimeError: they have other settings.
        """
        digest = zlib.crc32(repr(sorted(self._described.items())).encode())
        own = torch.tensor([self.steps, self._hosts.key, digest], dtype=torch.int64, device="cpu")
        rows = self._among.all_gather(own).wait()
        if len(set(rows[:, 2].tolist())) > 1:
            raise RuntimeError("Hosts must be started with the same program, settings and model; got others.")
        self.steps = int(rows[:, 0].max())
        now = set(rows[:, 1].tolist())
        if gone := self._known - now:
            self.lost_hosts += len(gone)
            rank_zero_warn(
                f"lightning_sparse: {len(gone)} hosts are gone, and {len(now)} go on after step {self.steps}; what "
                "those had not sent is lost."
            )
        self._known = now

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
            "training": self._pace.training.training_state(),
        }

    @torch.no_grad()
    def _catch_up(self, furthest: Mapping[str, Any]) -> None:
        """Go on from what the furthest host has saved.

        Raises:
            RuntimeError: that host was started with other settings.
        """
        if found := self._described.items() ^ furthest["described"].items():
            said = differences([self._described, furthest["described"]])
            raise RuntimeError(
                f"This host must be started with the settings of those that train already; {len(found) // 2} differ. "
                "Rank 0 is this one, rank 1 another:\n  " + "\n  ".join(said)
            )
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
        self.steps, self._exchanged = furthest["steps"], furthest["exchanged"]
        for replica, shared in zip(self.weights.replicas, furthest["replicas"], strict=True):
            replica.start_from_shared(shared)
        self.set_by_others.accept()
        for name, x in furthest["others"].items():
            self._others.watched[name]().copy_(x)
        self._pace.training.load_training_state(furthest["training"])
        self.mean_moments.resume(furthest["moments"], None, max(furthest["remembered_of"], 1))
