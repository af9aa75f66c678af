"""Signals under a Trainer: what Lightning does at one waits until every rank stands before the same batch."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from uuid import uuid4

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # exported at run time only
from torch.distributed.distributed_c10d import _get_default_store

from lightning_sparse.network.meeting import Meeting

LIGHTNING = ("lightning", "pytorch_lightning")


class Signals:
    """Puts off what Lightning does at SIGTERM, and at SLURM's signal to requeue a job; a strategy holds one.

    Lightning's handlers send messages, in the middle of a step, in which another rank may wait for a gradient: then
    each waits for the other.  Here a signal is only noted, the ranks agree on a batch, and before that each calls
    Lightning's handler.  So all of them end after that batch, also those that had no signal.  It is one that is trained
    on: of those that are validated a rank may have fewer.
    """

    def __init__(self) -> None:
        self._meetings: dict[int, tuple[Meeting, Callable[..., Any]]] = {}  # by signal, with Lightning's handler
        self._batches = 0  # trained on

    @property
    def ends_together(self) -> bool:
        """Whether SIGTERM ends this training, after the same batch on all ranks."""
        return signal.SIGTERM in self._meetings and self._meetings[signal.SIGTERM][0].is_over

    def watch(self, strategy: Any) -> None:
        """Put our handlers in the place of Lightning's, which are set when ranks begin to train or to validate.

        To be called on every rank, at the start of each: it does nothing where it has been done.  ``strategy`` is a
        strategy of either package, which is not kept.
        """
        if self._meetings or strategy.world_size == 1:
            return
        slurm = strategy.cluster_environment
        requeue = [int(slurm.requeue_signal)] if getattr(slurm, "auto_requeue", False) and slurm.requeue_signal else []
        fit = strategy.broadcast(uuid4().hex)  # the store may outlive this fit
        for number in (int(signal.SIGTERM), *requeue):
            store = PrefixStore(f"lightning_sparse/{fit}/{number}", _get_default_store())
            meeting, handler = Meeting(store, strategy.global_rank, strategy.world_size), signal.getsignal(number)
            is_lightnings = type(handler).__module__.partition(".")[0] in LIGHTNING
            is_lightnings &= threading.current_thread() is threading.main_thread()
            if strategy.reduce_boolean_decision(is_lightnings):  # on every rank: one's own handler sends no message
                signal.signal(number, partial(_ask, meeting))
                self._meetings[number] = meeting, handler  # type: ignore[assignment]  # Lightning's is a function
        if signal.SIGTERM in self._meetings:
            leave_out_message_before_batches(strategy.lightning_module.trainer)

    def begin_batch(self) -> None:
        """Note that a batch begins that is trained on, and call Lightning's handlers if the ranks meet before it."""
        self._batches += 1
        for number, (meeting, handler) in self._meetings.items():
            if meeting.is_at(self._batches):
                handler(number, None)

    @contextmanager
    def forgotten(self, strategy: Any) -> Iterator[None]:
        """Forget the signals, around Lightning's own teardown: Lightning gives them their handlers of before.

        Raises:
            SystemExit: after it, if SIGTERM came after the last batch, or where none is trained on.
        """
        is_due = signal.SIGTERM in self._meetings and self._meetings[signal.SIGTERM][0].is_due
        for number, (_, handler) in self._meetings.items():
            if getattr(signal.getsignal(number), "func", None) is _ask:
                signal.signal(number, handler)
        self._meetings, self._batches = {}, 0
        yield
        if is_due and not strategy.lightning_module.trainer.interrupted:
            raise SystemExit(128 + signal.SIGTERM)


def leave_out_message_before_batches(trainer: Any) -> None:
    """Have ranks not ask rank 0 before every batch, and wait for its answer, whether one of them has had SIGTERM.

    Lightning does so since 2.6 (its issue 21487); a device has to finish its work for it too.
    """
    if hasattr(loop := trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"):
        loop._broadcast_sigterm_tensor = _nothing


def _nothing() -> None:
    pass


def _ask(meeting: Meeting, *_: object) -> None:
    meeting.ask()
