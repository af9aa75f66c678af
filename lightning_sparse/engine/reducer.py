"""What sums a DDP's gradients: its reducer with a communication hook or, where that is as good, without one."""

import math
import weakref
from collections.abc import Callable

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.autograd import Variable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

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

    def end(self, exchange: Exchange) -> None:
        """Note that one has ended, if one had begun."""
        if self._is_open and exchange.steps == self._steps:  # else backward was within it
            exchange.timeline.begin_backward()
        self._is_open = False


class Reducer(Forwards):
    """Gives a DDP a communication hook, and takes it away where DDP alone does the same.

    With a hook DDP does not divide gradients while it copies them into its buckets, so that there is another pass over
    them; and its buckets are the small ones that are best for groups (docs/benchmarks/2026-11-27-plain.md).  A reducer
    keeps its hook, so that it takes another one to be without.

    Args:
        ddp: whose reducer it is.
        hook: see ``DistributedDataParallel.register_comm_hook``.
    """

    def __init__(self, ddp: DistributedDataParallel, hook: Callable[..., Future[Tensor]]) -> None:
        super().__init__()
        self._ddp, self._hook = weakref.ref(ddp), hook
        self._first = next(p for p in ddp.module.parameters() if p.requires_grad)  # the last to have its gradient
        self._without_hook: RemovableHandle | None = None  # what tells of its gradient, while there is no hook
        self._follows = self._is_within = False  # whether backward has followed a forward, and been within one
        self._expected: weakref.ref[Exchange] | None = None  # whose step DDP makes in the next backward
        ddp.register_comm_hook(None, hook)

    def begin(self, exchange: Exchange, is_settled: bool) -> None:
        """Note that a forward begins, on every rank, and take the hook away for it, or put it back."""
        ddp = self._ddp()
        self._follows |= exchange.steps > self._steps
        super().begin(exchange, is_settled)
        # For a backward within a forward others call the reducer, and for a static graph DDP's first forward does.
        may_change = ddp is not None and self._follows and not self._is_within and not ddp.static_graph
        if may_change and (is_settled and exchange.is_plain) != (self._without_hook is not None):
            self._change(ddp)

    def end(self, exchange: Exchange) -> None:
        """Note that a forward has ended, so that DDP's reducer expects a backward."""
        ddp = self._ddp()
        if self._is_open and ddp is not None and ddp.require_backward_grad_sync:
            self._expected = weakref.ref(exchange)
        self._is_within |= self._is_open and exchange.steps > self._steps
        super().end(exchange)
        self._steps = exchange.steps

    def _change(self, ddp: DistributedDataParallel | None) -> None:
        """Have another reducer, with a hook if this one has none."""
        assert ddp is not None
        bucket_bytes = ddp.bucket_bytes_cap if self._without_hook else max(ddp.bucket_bytes_cap, BUCKET_BYTES)
        ddp.reducer = ddp.logger = None  # type: ignore[assignment]  # its buckets go before there are others
        other = DistributedDataParallel(
            ddp.module,
            device_ids=ddp.device_ids,
            init_sync=False,
            process_group=ddp.process_group,
            bucket_cap_mb=None if bucket_bytes == BUCKET_BYTES else bucket_bytes / 2**20,  # None: the first is shorter
            gradient_as_bucket_view=ddp.gradient_as_bucket_view,
        )
        ddp.reducer, ddp.logger = other.reducer, other.logger
        if self._without_hook:
            self._without_hook.remove()
            self._without_hook = None
            other.register_comm_hook(None, self._hook)
        else:
            own = weakref.ref(self)

            def note(_: Tensor) -> None:
                if (me := own()) is not None:
                    me._note_backward()

            self._without_hook = self._first.register_post_accumulate_grad_hook(note)
        rank_zero_info(f"sparse_auto: DDP sums gradients with{'out' if self._without_hook else ''} our hook.")

    def _note_backward(self) -> None:
        """Count a step, of which DDP has all gradients, after all else that is called once backward has ended."""
        exchange = self._expected() if self._expected else None
        if exchange is not None:
            self._expected, step = None, exchange.begin_plain_step()
            at_end = Variable._execution_engine.queue_callback
            at_end(lambda: at_end(lambda: exchange.end_plain_step(step)))
