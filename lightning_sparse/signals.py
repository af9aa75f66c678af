"""Signals under a Trainer: what Lightning does at one waits until every rank stands before the same batch."""

import signal
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from uuid import uuid4

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # exported at run time only
from torch.distributed.distributed_c10d import _get_default_store

from lightning_sparse.network.meeting import Meeting

LIGHTNING = ("lightning", "pytorch_lightning")


class MeetsAtSignals:
    """The part of a strategy that puts off what Lightning does at SIGTERM, and at SLURM's signal to requeue a job.

    Lightning's handlers send messages, in the middle of a step, in which another rank may wait for a gradient: then
    each waits for the other.  Here a signal is only noted, the ranks agree on a batch, and before that each calls
    Lightning's handler.  So all of them end after that batch, also those that had no signal.
    """

    _meetings: Mapping[int, tuple[Meeting, Callable[..., Any] | None]] = {}  # by signal, with Lightning's handler
    _place = (0, 0)  # batches trained on, and batches of the evaluation since

    @property
    def ends_together(self) -> bool:
        """Whether SIGTERM ends this training, after the same batch on all ranks."""
        return any(meeting.is_over for number, (meeting, _) in self._meetings.items() if number == signal.SIGTERM)

    def on_train_start(self: Any) -> None:
        self._watch_signals()
        super().on_train_start()  # type: ignore[misc]  # of the class beside, here and below

    def on_validation_start(self: Any) -> None:
        self._watch_signals()
        super().on_validation_start()  # type: ignore[misc]

    def on_train_batch_start(self: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)  # type: ignore[misc]
        self._come_to((self._place[0] + 1, 0))

    def validation_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._come_to((self._place[0], self._place[1] + 1))
        return super().validation_step(*args, **kwargs)  # type: ignore[misc]

    def teardown(self: Any) -> None:
        """Forget the signals: Lightning gives them their handlers of before."""
        self._meetings, self._place = {}, (0, 0)
        super().teardown()  # type: ignore[misc]

    def _watch_signals(self: Any) -> None:
        """Put our handlers in the place of Lightning's, which are set when ranks begin to train or to validate."""
        if self._meetings or self.world_size == 1:
            return
        slurm = self.cluster_environment
        requeue = [int(slurm.requeue_signal)] if getattr(slurm, "auto_requeue", False) and slurm.requeue_signal else []
        fit = self.broadcast(uuid4().hex)  # the store may outlive this fit
        for number in (int(signal.SIGTERM), *requeue):
            store = PrefixStore(f"lightning_sparse/{fit}/{number}", _get_default_store())
            meeting, handler = Meeting(store, self.global_rank, self.world_size), signal.getsignal(number)
            is_lightnings = type(handler).__module__.partition(".")[0] in LIGHTNING
            if is_lightnings and threading.current_thread() is threading.main_thread():
                signal.signal(number, partial(_ask, meeting))
            self._meetings = {**self._meetings, number: (meeting, handler if is_lightnings else None)}

    def _come_to(self, place: tuple[int, int]) -> None:
        self._place = place
        for number, (meeting, handler) in self._meetings.items():
            if meeting.is_at(place) and handler is not None:
                handler(number, None)


def _ask(meeting: Meeting, *_: object) -> None:
    meeting.ask()
