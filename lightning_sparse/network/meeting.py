"""Ranks find a place at which all of them stand, without a message until one of them asks for it."""

import time
from contextlib import suppress

from torch.distributed import Store  # type: ignore[attr-defined]  # exported at run time only

LOOK_S = 5.0  # s, after which a rank looks whether another one has asked: a round trip to the store, of some 0.1 ms


class Meeting:
    """The first place of a training that no rank has passed, once one of them asks for it.

    Ranks pass the same places, in the same order, but not at the same time: one waits for another one's gradient a step
    before or after.  So a rank that is asked notes in the ``store`` each place before it passes.  When all ranks have
    noted one, the last of them closes the list, and they meet behind the furthest place in it.  Whoever notes a place
    later finds the list closed, and waits until it is known where they meet.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._asked = self._noted = False
        self.is_over = False  # whether the ranks have met
        self._furthest: int | None = None  # once it is known
        self._looked_s = time.monotonic()

    def ask(self) -> None:
        """Have all ranks meet; may be called in a signal's handler, at any moment."""
        self._asked = True

    @property
    def is_due(self) -> bool:
        """Whether somebody has asked, and the ranks have not met."""
        return self._asked and not self.is_over

    def is_at(self, place: int) -> bool:
        """Whether all ranks meet at this place, which is greater than the one before; True once."""
        if self.is_over or not (self._asked or self._is_asked_by_others()):
            return False
        if self._furthest is None:
            self._furthest = self._agree(place)
        self.is_over = self._furthest is not None and place > self._furthest
        return self.is_over

    def _is_asked_by_others(self) -> bool:
        """Look into the store, once in a while."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            with suppress(RuntimeError):  # the process that keeps the store has ended: the next message will say so
                self._asked = self._store.check(["ranks"])
        return self._asked

    def _agree(self, place: int) -> int | None:
        """Note this place; return the furthest one that may be passed, if that is known now."""
        self._store.set(f"at {self._rank}", str(place))
        if not self._noted and self._store.add("ranks", 1) == self._size:
            self._store.set("closed", "")
            places = [int(self._store.get(f"at {rank}")) for rank in range(self._size)]
            self._store.set("furthest", str(max(places)))
        self._noted = True
        return int(self._store.get("furthest")) if self._store.check(["closed"]) else None
