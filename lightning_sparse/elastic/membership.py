"""One host among others that come and go: how they meet, who they are, and whether they fit."""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_sparse.network.agreement import differences, everywhere
from lightning_sparse.network.elastic import Elastic
from lightning_sparse.network.elastic_comm import ElasticComm
from lightning_sparse.network.host_ranks import HostRanks
from lightning_sparse.network.hosts import Hosts
from lightning_sparse.network.torch_comm import RankLost

MOST_FAILED = 20  # exchanges, one after the other, after which a host gives up
FIRST_FAILED = 3  # meetings, after which one gives up that has not begun: others, which train, wait for it each time
NOBODY, OTHERS = -1, -2  # in the place of steps: none has begun; others are as far as this host, on another way
LAYERS = "layers"  # of what describes a host: its model as text, which may differ where the model is the same


class Membership:
    """This host among those that have met.

    Args:
        hosts: where they meet.
        described: what must be the same on all hosts, as text by name; of LAYERS a difference is warned of.
        saved: returns what a host needs that is behind; it is asked while this one waits for others.
        ranks: of this host, for the thread that meets: each is a :class:`Membership`, and all find the same.

    Attributes:
        comm: the hosts that have met, for messages.
        committed: 1 + the step of the last exchange that counted; 0 before all.
        history: a checksum of which hosts took part in each exchange that counted here.
        failed: exchanges, one after the other.
        lost: hosts that were here and are gone.
    """

    def __init__(
        self,
        hosts: Elastic,
        described: Mapping[str, str],
        saved: Callable[[], dict[str, Any]],
        ranks: HostRanks | None = None,
    ) -> None:
        self._ranks = ranks or HostRanks()
        self._hosts = Hosts(hosts, saved, self._ranks)
        self.comm = ElasticComm(self._hosts.leave, hosts.limit)
        self.described = dict(described)
        self.quorum_timeout_s = hosts.quorum_timeout
        self.committed = self.history = self.failed = self.lost = 0
        self._name = zlib.crc32(hosts.name().encode())
        self._is_connected = self._all_are = False  # this rank, with those of the last meeting; and all of this host
        self._digest = 0  # of what describes this host, once that is complete
        self._known: set[int] = set()  # the hosts of the last meeting
        self._has_warned = False

    @property
    def size(self) -> int:
        """How many hosts have met."""
        return self._hosts.size

    def describe(self, further: Mapping[str, str]) -> None:
        """Add the rest of what must be the same, before the first meeting."""
        self.described |= further
        self._digest = zlib.crc32(json.dumps(self.described, sort_keys=True).encode())

    # - a meeting

    def meet(self) -> tuple[bool, Mapping[str, Any] | None]:
        """Meet the other hosts; return whether all ranks can send messages, and what the furthest saved, to one behind.

        Raises:
            RuntimeError: that host has other settings.
        """
        is_ready = self._is_connected = self._hosts.meet(self.committed)
        if not is_ready and self._hosts.failure and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"lightning_sparse: not all hosts that have met are connected; got on this one, {self._hosts.address}"
                f"{self._why}. They meet again. If it fails each time, put all on one network, by "
                "Elastic(address=...) or GLOO_SOCKET_IFNAME."
            )
        received = self._hosts.take_received()
        if received is not None and received.get("described", self.described) != self.described:
            self.compare([self.described, received["described"]])
        self._all_are = self._ranks.all(is_ready)
        if not self._ranks.all(received is not None) or received is None:
            return self._all_are, None
        is_of_one = self._ranks.all(received["history"] == self._ranks.of_first(received["history"]))
        return self._all_are, received if is_of_one else None  # else ranks would go on from different averages

    def greet(self, steps: int, looks: int) -> int | None:
        """Tell the others who this is, after so many ``steps`` and ``looks``; return the steps of the furthest host.

        So all send the same fragments.  Gloo ends the process that gets a message of another length than expected.
        None: they must meet again, since a host is lost, they are not equally far, or have just learned whose weights
        to begin with.

        Raises:
            RuntimeError: they have other settings.
        """
        found = self._greet(steps, looks) if self._is_connected else None
        if not self._ranks.all(found is not None):
            self.comm.leave()  # so that no host waits for what this rank would have sent next
            return None
        if found == NOBODY:  # all follow one, which they find furthest the next time
            self.failed -= 1
            if self._hosts.rank == 0:
                self.committed, self.history = 1, self._hosts.key % 2**32
            return None
        if found == OTHERS:
            self.committed -= 1  # so that it gets theirs the next time
            return None
        return found

    def _greet(self, steps: int, looks: int) -> int | None:
        """As :meth:`greet`, of the ranks of this number in all hosts."""
        self.comm.join(self._hosts.group, self._hosts.rank, self._hosts.size)
        own = torch.tensor(
            [steps, self._hosts.key, self._digest, self.committed, looks, self._all_are, self._name, self.history],
            dtype=torch.int64,
            device="cpu",
        )
        try:
            rows = self.comm.all_gather(own).wait()
            none_has_begun, are_same = not rows[:, 3].any(), len(set(rows[:, 2].tolist())) == 1
            if none_has_begun and self._hosts.size > 1 and bool(rows[:, 5].all()):
                return NOBODY  # and who follows will compare
            if not are_same and self._hosts.was_made_anew:  # also where a rank finds no other of its number
                self.compare(
                    [json.loads(each) for each in everywhere(json.dumps(self.described), self.comm, own.device)]
                )
            ways = rows[rows[:, 3] == rows[:, 3].max(), 7].tolist()  # of the furthest
            if len(set(ways)) > 1:  # some met without others for a while, which met by themselves
                is_far, most = self.committed == int(rows[:, 3].max()), max(ways, key=ways.count)
                self._hosts.failure = "hosts are as far as others that they have not met, and follow the most"
                return OTHERS if is_far and self.history != most else None
            if bool((rows[:, 3:5] != rows[0, 3:5]).any()):
                raise RankLost(f"hosts must be equally far; got exchanges and looks {rows[:, 3:5].tolist()}")
        except RankLost as error:
            self._hosts.failure = str(error)
            return None
        if self._hosts.was_made_anew and rows[:, 6].tolist().count(self._name) > 1:
            rank_zero_warn(
                "lightning_sparse: Elastic(replica_id=...) must be a name that no other host has; got that of another "
                "one, so both train on the same data in the same order. Give each its own, or none."
            )
        furthest, now = int(rows[:, 0].max()), set(rows[:, 1].tolist())
        if gone := self._known - now:
            self.lost += len(gone)
            rank_zero_warn(
                f"lightning_sparse: {len(gone)} hosts are gone, and {len(now)} go on after step {furthest}; what "
                "those had not sent is lost."
            )
        self._known = now
        return furthest

    def compare(self, described: Sequence[Mapping[str, str]]) -> None:
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
            lines = zip_longest(*(each.get(LAYERS, "").splitlines() for each in (self.described, other)))
            if (found := next(((own, its) for own, its in lines if own != its), None)) is not None:
                rank_zero_warn(
                    f"lightning_sparse: Hosts must train the same model; got `{(found[0] or '').strip()}` on this one "
                    f"where another has `{(found[1] or '').strip()}`. If they compute differently, start one of them "
                    "again."
                )
                return

    # - what came of it

    def commit(self, error: Exception | None = None) -> bool:
        """Vote whether the exchange counts, which had this ``error``; return whether it does, for all ranks alike."""
        return self._hosts.commit(error)

    def note_success(self, step: int) -> None:
        """Note that the exchange after ``step`` has counted for the hosts that have met."""
        self.committed, self.failed = step + 1, 0
        self.history = zlib.crc32(repr((self.history, step, sorted(self._known))).encode())

    def note_failure(self, committed: bool = False) -> None:
        """Count a failure, unless the others have ``committed``.

        Raises:
            RuntimeError: too many followed each other.
        """
        self.failed = 0 if committed else self.failed + 1
        if self.failed > MOST_FAILED:
            raise RuntimeError(
                f"an exchange among hosts must succeed now and then; got {self.failed} failures one after the other "
                f"on this one, {self._hosts.address}{self._why}. Look at the links between the hosts, "
                "GLOO_SOCKET_IFNAME and Elastic(address=..., timeout=...); then start again."
            )

    def check_reached(self, is_over: bool) -> None:
        """Raise a RuntimeError if this host has never met others, and has tried often, or its time ``is_over``."""
        if not self._known and (self.failed >= FIRST_FAILED or is_over):
            raise RuntimeError(
                f"hosts that meet must reach each other's addresses; got {self.failed} failures one after the "
                f"other on this one, {self._hosts.address}{self._why}. Put all on one network, by "
                "Elastic(address=...) or GLOO_SOCKET_IFNAME, and open its ports among them; then start this host "
                "again."
            )

    @property
    def _why(self) -> str:
        return self._hosts.failure and f": {self._hosts.failure}"

    def end(self) -> None:
        """Have the other hosts wait for this one no longer, whatever other threads wait for."""
        self._hosts.end()

    def close(self) -> None:
        """Leave, whatever is under way."""
        self.comm.leave()
        self._hosts.close()
