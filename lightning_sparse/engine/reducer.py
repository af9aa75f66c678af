"""What sums a DDP's gradients: its reducer with a communication hook or, where that is as good, without one."""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.autograd import Variable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.engine.exchange import Exchange
from lightning_sparse.engine.groups import BUCKET_BYTES


class Forwards:
    """Notes the forwards of a model that trains, after which or within which there is a backward."""

    def __init__(self) -> None:
        self._steps = math.inf  # as the last forward began or ended
        self._is_open = False  # it has not ended

    def begin(self, exchange: Exchange, is_settled: bool) -> None:
        """Note that one begins; ``is_settled``: no steps are measured to choose what sums gradients."""
        self._steps, self._is_open = exchange.steps, True

    def end(self, exchange: Exchange, has_outputs: bool) -> None:
        """Note that one has ended, if one had begun; without ``has_outputs`` it has raised."""
        if self._is_open and exchange.steps == self._steps:  # else backward was within it
            exchange.timeline.begin_backward()
        self._is_open = False

    def close(self) -> None:
        """Call nobody any more."""


class Reducer(Forwards):
    """Gives a DDP a communication hook, and takes it away where DDP alone does the same.

    With a hook DDP does not divide gradients while it copies them into its buckets, so that there is another pass over
    them; and its buckets are the small ones that are best for groups (docs/benchmarks/2026-11-27-plain.md).  A reducer
    keeps its hook, so that it takes another one to be without.

    Args:
        ddp: whose reducer it is.
        parameters: whose gradients it averages.
        hook: see ``DistributedDataParallel.register_comm_hook``.
    """

    def __init__(
        self, ddp: DistributedDataParallel, parameters: Iterable[Tensor], hook: Callable[..., Future[Tensor]]
    ) -> None:
        super().__init__()
        self._ddp, self._parameters, self._hook = weakref.ref(ddp), list(parameters), hook
        self._follows = self._is_within = False  # whether backward has followed a forward, and been within one
        self._without_hook: weakref.finalize[..., Reducer] | None = None  # stops noting backwards, while there is none
        self._exchange: weakref.ref[Exchange] | None = None  # that counts the steps which DDP makes without one
        self._is_expected = False  # DDP makes one in the next backward
        ddp.register_comm_hook(None, hook)

    def begin(self, exchange: Exchange, is_settled: bool) -> None:
        """Note that a forward begins, on every rank, and take the hook away for it, or put it back."""
        self._follows |= exchange.steps > self._steps
        super().begin(exchange, is_settled)
        self._exchange = weakref.ref(exchange)
        ddp = self._ddp()
        if ddp is not None:
            # For a backward within a forward others call the reducer, and for a static graph DDP's first forward does.
            may_be_without = self._follows and not self._is_within and not ddp.static_graph
            if (may_be_without and is_settled and exchange.is_plain) != bool(self._without_hook):
                self._change(ddp)

    def end(self, exchange: Exchange, has_outputs: bool) -> None:
        """Note that a forward has ended, after which DDP's reducer expects a backward."""
        if self._is_open and has_outputs and self._without_hook and self._synchronises:
            self._is_expected = True
        self._is_within |= self._is_open and exchange.steps > self._steps
        super().end(exchange, has_outputs)
        self._steps = exchange.steps

    def close(self) -> None:
        if self._without_hook:
            self._without_hook()

    @property
    def _synchronises(self) -> bool:
        ddp = self._ddp()
        return ddp is not None and ddp.require_backward_grad_sync

    def _change(self, ddp: DistributedDataParallel) -> None:
        """Have another reducer of the same parameters, with a hook if this one has none."""
        bucket_bytes = ddp.bucket_bytes_cap if self._without_hook else max(ddp.bucket_bytes_cap, BUCKET_BYTES)
        bucket_mb = None if bucket_bytes == BUCKET_BYTES else bucket_bytes / 2**20  # None: the first is shorter
        ddp.reducer = ddp.logger = None  # type: ignore[assignment]  # its buckets go before there are others
        with _all_trained(self._parameters):
            other = DistributedDataParallel(
                nn.ParameterList(self._parameters),
                device_ids=ddp.device_ids,
                init_sync=False,
                process_group=ddp.process_group,
                bucket_cap_mb=bucket_mb,
                gradient_as_bucket_view=ddp.gradient_as_bucket_view,
            )
            if self._without_hook:
                self._without_hook()
                self._without_hook = None
                other.register_comm_hook(None, self._hook)
            else:
                self._without_hook = self._watch()
        ddp.reducer, ddp.logger, self._is_expected = other.reducer, other.logger, False
        rank_zero_info(f"sparse_auto: DDP sums gradients with{'out' if self._without_hook else ''} our hook.")

    def _watch(self) -> "weakref.finalize[..., Reducer]":
        """Note each backward where the last gradient is usually ready; return a function that stops this."""
        own = weakref.ref(self)

        def note(_: Tensor) -> None:
            if (me := own()) is not None:
                me._note_backward()

        watch = weakref.finalize(self, self._parameters[0].register_post_accumulate_grad_hook(note).remove)
        watch.atexit = False
        return watch

    def _note_backward(self) -> None:
        """Count a step, of which DDP has all gradients, after all else that is called once backward has ended."""
        exchange = self._exchange() if self._exchange else None
        if exchange is not None and (self._is_expected or (self._is_open and self._synchronises)):
            self._is_expected, end = False, exchange.begin_plain_step()
            at_end = Variable._execution_engine.queue_callback
            at_end(lambda: at_end(end))


@contextmanager
def _all_trained(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Have all ``parameters`` require a gradient, some of which may be frozen for this forward."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
