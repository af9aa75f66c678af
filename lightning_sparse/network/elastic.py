"""The settings of an elastic training: whom a host asks who else trains, and how long it waits."""

import math
import os
import socket
import uuid
from dataclasses import dataclass
from datetime import timedelta
from functools import cache

from lightning_sparse.checks import check_setting, check_switch, check_whole, is_number
from lightning_sparse.settings import names_checked

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"  # torchft's own variable


@names_checked
@dataclass(frozen=True)
class Elastic:
    """Has hosts come and go while the others train on.

    Each host is a training of its own.  What local steps exchange crosses between those that a lighthouse, a program of
    torchft, knows to be alive.

    Args:
        lighthouse: where ``torchft_lighthouse`` answers, such as "http://10.0.0.1:29510".  None: what the environment
            variable ``TORCHFT_LIGHTHOUSE`` says.
        min_hosts: the fewest that exchange; fewer wait for others.  Give the lighthouse as many ``--min_replicas``.
        timeout: seconds that a message may take, or what a host gets when it joins: so long others wait for one that
            has stopped, or whose link was cut.
        quorum_timeout: seconds that a host waits for a lighthouse that is gone, or for ``min_hosts``; then its
            training ends with an error.
        replica_id: the name of this host, from which the order of its data follows.  None: another in each start.
        address: an address of this host, or its name, under which the others reach it; all that hosts send each other
            goes there.  None: that of the interface that ``GLOO_SOCKET_IFNAME`` names, or of the first of several; if
            it names none, that on the network that leads to the lighthouse.
        own_pace: each host takes as many own steps from one exchange to the next as come nearest to the time that the
            fastest needs for the steps of the schedule, or the slowest for one if that is longer.  False: all take as
            many.

    Raises:
        ValueError: for a setting out of range, with the value and what is allowed.
    """

    lighthouse: str | None = None
    min_hosts: int = 1
    timeout: float = 60.0
    quorum_timeout: float = 600.0
    replica_id: str | None = None
    address: str | None = None
    own_pace: bool = False

    def __post_init__(self) -> None:
        check_whole("Elastic: min_hosts", self.min_hosts, 1)
        check_switch(self, "own_pace")
        for name in ("timeout", "quorum_timeout"):
            seconds = getattr(self, name)
            check_setting(self, name, is_number(seconds) and 0 < seconds < math.inf, "a number of seconds above 0")
        named = self.replica_id is None or (isinstance(self.replica_id, str) and self.replica_id != "")
        check_setting(self, "replica_id", named, "a name, which no other host has, or None")
        reached = self.address is None or (isinstance(self.address, str) and self.address != "")
        check_setting(self, "address", reached, "an address of this host such as '10.0.0.2', its name, or None")
        if self.lighthouse is not None:
            is_address = isinstance(self.lighthouse, str) and self.lighthouse.startswith("http")
            check_setting(self, "lighthouse", is_address, "an address such as 'http://10.0.0.1:29510', or None")

    @classmethod
    def of(cls, given: "bool | Elastic | None") -> "Elastic | None":
        """Return the settings that a user gave, with True for all by default; None for False.

        Raises:
            ValueError: if it is anything else.
        """
        if given is None or isinstance(given, Elastic):
            return given
        if not isinstance(given, bool):
            raise ValueError(f"elastic must be True, False or ls.Elastic(...); got {given!r}.")
        return cls() if given else None

    @property
    def limit(self) -> timedelta:
        """``timeout``."""
        return timedelta(seconds=self.timeout)

    def name(self) -> str:
        """The name of this host; if none is given, that of the machine and a random one of this process."""
        return self.replica_id or _name_of(os.getpid())

    def found_lighthouse(self) -> str:
        """Where the lighthouse answers.

        Raises:
            ValueError: nobody says it.
        """
        found = self.lighthouse or os.environ.get(LIGHTHOUSE)
        if not found:
            raise ValueError(
                "an elastic training must know its lighthouse; got neither Elastic(lighthouse=...) nor the environment "
                f"variable {LIGHTHOUSE}. Start one with `torchft_lighthouse --min_replicas 1`, and set "
                f"{LIGHTHOUSE}=http://<its host>:29510 on every host."
            )
        return found


@cache
def _name_of(process: int) -> str:
    return f"{socket.gethostname()}-{process}-{uuid.uuid4().hex[:8]}"
