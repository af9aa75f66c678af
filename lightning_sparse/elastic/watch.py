"""The ranks of a host watch each other, and end together, so that a host is there with all of them or not at all."""

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from lightning_sparse.network.host_ranks import HostRanks

BEAT_S = 0.5  # from one sign of life to the next
ALIVE, OVER = b".", b"o"  # what ranks tell each other: that they are there, and that their training is over


class Watch:
    """Ends this rank when another one of its host has ended before its training was over, or has stood still too long.

    Each rank is connected with the first one.  A process that dies closes its connection; one that stands still sends
    no signs of life.  The other hosts hear of a host by its first rank alone, for which they would wait otherwise, and
    its ranks would wait for each other.

    A rank that finds out has the other hosts wait for it no longer, and gives its training as much time again to end by
    itself, with an error that says more, before it ends the process.

    Args:
        ranks: of this host, all of which make one at once.
        address: of the first one.
        limit_s: for which a rank may stand still.  Time in which this rank stands still itself does not count.
        leave: has the other hosts wait no longer; called on another thread.
    """

    def __init__(self, ranks: HostRanks, address: str, limit_s: float, leave: Callable[[], None]) -> None:
        self._limit_s, self._leave = limit_s, leave
        self._others = _connected(ranks, address, limit_s)
        self._over: list[socket.socket] = []  # of those who have ended so, which stay open as long as this rank watches
        self._is_over = False  # the training of this rank
        self._silent = dict.fromkeys(self._others, 0)  # signs of life of this rank since the last of another one
        self._closed = threading.Event()
        threading.Thread(target=self._serve, name="lightning_sparse_watch", daemon=True).start()

    def close(self, is_over: bool) -> None:
        """Watch no longer.  If the training of this rank is not over, but has failed, the others end too."""
        self._is_over = is_over
        for other in list(self._others) if is_over else ():
            with suppress(OSError):
                other.send(OVER)
        self._closed.set()

    def _serve(self) -> None:
        why, next_s = "", time.monotonic()
        while self._others and not why and not self._closed.is_set():
            readable, _, _ = select.select(list(self._others), [], [], BEAT_S)
            for other in readable:
                why = why or self._read(other)
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + BEAT_S
                why = why or self._beat()
        must_end = bool(why) and not self._is_over and not self._closed.is_set()
        if must_end:
            sys.stderr.write(
                f"lightning_sparse: {why}, so this rank ends too, and with it this host; other hosts go on. Start it "
                "again to have it join them.\n"
            )
            self._leave()
        for each in self._others:
            each.close()
        if must_end and not self._closed.wait(self._limit_s):
            os._exit(1)

    def _read(self, other: socket.socket) -> str:
        """Take what ``other`` has sent; returns why this rank is to end, if it is."""
        said = b""
        try:
            said = other.recv(4096)
        except BlockingIOError:
            return ""
        except OSError:  # its process was killed
            pass
        self._silent[other] = 0
        if OVER in said:
            del self._others[other]
            self._over.append(other)
            return ""
        return "" if said else f"rank {self._others[other]} of this host has ended"

    def _beat(self) -> str:
        """Tell the others that this rank is there; returns why it is to end, if it is."""
        for other, rank in self._others.items():
            with suppress(OSError):  # it has ended, which is read next, or its memory for messages is full
                other.send(ALIVE)
            self._silent[other] += 1
            if self._silent[other] * BEAT_S > self._limit_s:
                return f"rank {rank} of this host has stood still for {self._limit_s:g} s"
        return ""


def _connected(ranks: HostRanks, address: str, limit_s: float) -> dict[socket.socket, int]:
    """A connection with the first rank, or from there with each other one, and the rank at its other end."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if ranks.rank > 0:
        own = socket.create_connection(ranks.of_first(("", 0)), limit_s)
        own.sendall(ranks.rank.to_bytes(4, "big"))
        own.setblocking(False)
        return {own: 0}
    with socket.create_server((address, 0), family=family, backlog=ranks.size) as server:
        ranks.of_first((address, server.getsockname()[1]))
        server.settimeout(limit_s)
        found = {}
        for _ in range(1, ranks.size):
            other, _ = server.accept()
            other.settimeout(limit_s)
            found[other] = int.from_bytes(other.recv(4, socket.MSG_WAITALL), "big")
            other.setblocking(False)
    return found
