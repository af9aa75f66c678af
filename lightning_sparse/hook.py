"""The averager put on a DistributedDataParallel: what the strategies share, and plain PyTorch can use."""

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_sparse.auto.active_averager import ActiveAverager
from lightning_sparse.auto.chooser import Chooser
from lightning_sparse.auto.policy import Auto
from lightning_sparse.auto.tuning_loop import tuning_loop_of
from lightning_sparse.checkpoint import residuals as checkpoint
from lightning_sparse.checkpoint.rank_local import RankLocalState, in_order
from lightning_sparse.checkpoint.state import RESIDUALS
from lightning_sparse.checks import check_one_of, renamed
from lightning_sparse.compressors import Compressor
from lightning_sparse.engine.averager import Averager
from lightning_sparse.engine.ddp_checks import averaged_parameters, check_may_begin, check_still_frozen
from lightning_sparse.engine.groups import BUCKET_BYTES, not_carried
from lightning_sparse.fusion.layer_fusion import LayerFusion
from lightning_sparse.local_steps.settings import LocalSteps
from lightning_sparse.network.members import AUTO
from lightning_sparse.network.process_groups import ProcessGroups, check_has_ranks
from lightning_sparse.network.torch_comm import TorchComm, world
from lightning_sparse.options import Options
from lightning_sparse.settings import brief, counted


class SparseHook:
    """Averages the gradients of ``ddp`` with a compressor, from now on; the optimizer sees ordinary averaged gradients.

    >>> ddp = DistributedDataParallel(model)                                              # doctest: +SKIP
    >>> hook = SparseHook(ddp, "micro")                                                   # doctest: +SKIP
    >>> checkpoint = {"model": model.state_dict(), "unsent": hook.state_dict()}           # doctest: +SKIP

    To be made on every rank, before the first backward.  ``SparseDDPStrategy`` makes one by itself.

    Args:
        ddp: on CUDA its process group must be NCCL's.
        compressor: "sparse_auto"; a name in ``COMPRESSORS``, for its defaults; or an instance.
        fusion: which parameters travel together, as for ``SparseDDPStrategy``; None: "layer" for "sparse_auto", else
            "bucket".  For "layer" and "none" make ``ddp`` with a small ``bucket_cap_mb``, such as 1, since its buckets
            decide when gradients arrive.
        wire_dtype: of values on the wire: "float32", "bfloat16", "float16", "int8", "int4", "int2" or "sign"; rounding
            errors are carried over to the next step.  None: "int4" where elements are selected, else "float32".
        warmup_steps: steps in which all elements are sent first, in ``wire_dtype``.
        scaler: the ``torch.amp.GradScaler`` that scales the loss, if there is one.
        local_steps: H, or :class:`LocalSteps`: exchange what the optimizers did, not gradients.
        bucket_bytes: of float32 gradient in a group with ``fusion="bucket"``.
        local_group: which ranks are a member together, as for ``SparseDDPStrategy``.
        exact: patterns of names of parameters that are summed in float32.
        process_groups: with a time limit of their own.

    Raises:
        ValueError: for an option out of range, or a parameter whose gradient cannot be averaged.
        TypeError: if ``compressor`` is neither a name nor an instance.
        RuntimeError: on every rank, if they were not given the same.
    """

    _warned_of_bytes = False
    # What a user calls what is averaged, and what it takes to freeze a part of it meanwhile.
    _wrapper, _member, _of_what, _to_freeze = "DDP", "rank", "", ", with find_unused_parameters=True"

    def __init__(
        self,
        ddp: DistributedDataParallel,
        compressor: Compressor | Auto | str = "skip_reduce",
        *,
        fusion: str | Sequence[str] | None = None,
        wire_dtype: str | None = None,
        warmup_steps: int = 0,
        scaler: torch.amp.GradScaler | None = None,
        local_steps: int | LocalSteps = 0,
        bucket_bytes: int = BUCKET_BYTES,
        local_group: int | str = AUTO,
        exact: Sequence[str] = (),
        process_groups: ProcessGroups | None = None,
    ) -> None:
        if fusion is None:
            fusion = "layer" if isinstance(compressor, Auto) or compressor == "sparse_auto" else "bucket"
        options = Options.of(
            compressor,
            fusion,
            wire_dtype=wire_dtype,
            warmup_steps=warmup_steps,
            local_steps=local_steps,
            bucket_bytes=bucket_bytes,
            local_group=local_group,
            exact=exact,
        )
        check_has_ranks(ddp)
        options.agree(ddp.module, TorchComm(ddp.process_group), ddp.find_unused_parameters, scaler)
        groups = process_groups or ProcessGroups(ddp, local_group=local_group)
        self._put_on(ddp, options, scaler, groups, may_be_local=False, evaluates=lambda module: not module.training)

    @classmethod
    def around(
        cls, strategy: Any, module: nn.Module, scaler: Any, wrap: Callable[[], DistributedDataParallel]
    ) -> "tuple[DistributedDataParallel, SparseHook]":
        """Return the DDP that ``wrap`` makes of ``module``, once all ranks agree on the options, and a hook on it.

        The ``strategy``, Lightning's or Fabric's, has ``options`` and knows whether a model is being evaluated.
        """
        options: Options = strategy.options
        options.agree(module, world(), strategy._ddp_kwargs.get("find_unused_parameters"), scaler)
        with options.buckets_for(module, strategy):
            ddp = wrap()
        hook, owner = cls.__new__(cls), weakref.ref(strategy)
        hook._put_on(
            ddp,
            options,
            scaler,
            ProcessGroups(ddp, strategy._timeout, world().size if options.hosts else options.local_group),
            may_be_local=True,
            evaluates=lambda module: (own := owner()) is not None and own.evaluates(module),
        )
        return ddp, hook

    def _put_on(
        self,
        ddp: DistributedDataParallel,
        options: Options,
        scaler: torch.amp.GradScaler | None,
        groups: ProcessGroups,
        may_be_local: bool,
        evaluates: Callable[[nn.Module], bool],
    ) -> None:
        parameters = self._parameters_of(ddp)
        self._evaluates = evaluates
        self._as_saved, self._has_hosts = options.as_saved, options.hosts is not None
        self._groups, self._scaler, self._module = groups, scaler, ddp.module
        self._ranks = TorchComm(ddp.process_group)  # for the main thread, between two steps
        self._tuning = tuning_loop_of(
            ddp, parameters, options.averaging_config, options.policy, groups, scaler, self._ranks, may_be_local
        )
        self._frozen = [(name, p) for name, p in ddp.module.named_parameters() if not p.requires_grad]
        self._handles = self._watch(ddp)
        self._steps_before: int | None = None  # the forward that is under way, if there is one that trains
        self._register(ddp, self._tuning.active)
        self._ddp = weakref.ref(ddp)
        ddp.join_hook = self._join_hook  # type: ignore[method-assign]
        dropped = weakref.finalize(self, _end, self._tuning.active, groups, by_all=False)  # without close()
        dropped.atexit = False
        alone = f"{counted(self.averager.size, self._member)}{self._of_what}"
        members = str(groups.members) if groups.local_size > 1 else alone
        local = options.local if self.averager.local else None
        turns = f", each once in {counted(local.steps, 'local step')}" if local else ""
        rank_zero_info(
            f"lightning_sparse: {brief(options.compressor)} averages {sum(g.elements for g in self.averager.groups):,} "
            f"elements among {'all hosts that come' if options.hosts else members}"
            f"{turns}."
        )

    def _watch(self, ddp: DistributedDataParallel) -> list[RemovableHandle]:
        before, after = self._before_forward, self._after_forward
        return [ddp.register_forward_pre_hook(before), ddp.register_forward_hook(after, always_call=True)]

    @staticmethod
    def _parameters_of(ddp: DistributedDataParallel) -> Mapping[str, Tensor]:
        return averaged_parameters(ddp)

    @staticmethod
    def _register(ddp: DistributedDataParallel, active: ActiveAverager) -> None:
        ddp.register_comm_hook(None, active.hook)

    @property
    def averager(self) -> Averager:
        """What averages now."""
        return self._tuning.active.averager

    exchange = renamed("exchange", "averager")

    @property
    def layer_fusion(self) -> LayerFusion | None:
        return self._tuning.active.layer_fusion

    @property
    def chooser(self) -> Chooser | None:
        return self._tuning.chooser

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_forward(self, module: nn.Module, *_: object) -> None:
        """Between two steps: the time to measure, and to change groups.  Every rank passes here as often."""
        check_may_begin(self._ddp(), self.averager.error)
        self._warn_if_nothing_is_saved()
        check_still_frozen(self._frozen, self._wrapper, self._to_freeze, self._has_hosts)
        if self._trains(module):
            self._tuning.between_steps()
            self._steps_before = self.averager.steps
        elif self._evaluates(module):
            self._end_forward()  # also of one that was interrupted
            sends = getattr(self._ddp(), "require_forward_param_sync", True)  # before the first after one that trains
            self.averager.show_average(buffers=sends)

    def _trains(self, module: nn.Module) -> bool:
        """Whether a forward of ``module`` now is trained on: with local steps, others are of the average."""
        is_evaluated = self.averager.local is not None and self._evaluates(module)
        return torch.is_grad_enabled() and not is_evaluated

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_forward(self, *_: object) -> None:
        self._end_forward()
        if self._steps_before == self.averager.steps:  # else backward was within it
            self.averager.timeline.begin_backward()
        self._steps_before = None

    def _end_forward(self) -> None:
        if self.averager.local is not None:
            self.averager.local.end_forward()

    def _join_hook(self, **options: Any) -> JoinHook:
        """Return DDP's own hook; asked for on every rank by ``ddp.join()``, before its first message.

        In a step that a joined rank shadows, DDP hands our hook zeros there: what it has not sent is sent all the same.
        """
        self._tuning.check_join(options)
        ordinary: JoinHook = DistributedDataParallel.join_hook(self._ddp(), **options)  # type: ignore[arg-type]  # it called
        return ordinary

    def _warn_if_nothing_is_saved(self) -> None:
        if not self._warned_of_bytes and (warning := warning_if_nothing_saved(self.averager)):
            self._warned_of_bytes = True
            rank_zero_warn(f"lightning_sparse: {warning}")

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Note the backward that runs in the block; raise the averager's own error, not DDP's that a future failed."""
        self.averager.begin_backward()
        self.averager.timeline.begin_backward()
        try:
            yield
        except RuntimeError:
            if self.averager.error is not None:
                raise self.averager.error from None
            raise

    def take_over(self, before: "SparseHook") -> None:
        """Go on where ``before`` ended, with parameters of the same name and shape; one warning names all others."""
        self._tuning.follow(before._tuning)
        if (before.averager.local is None) != (self.averager.local is None):
            return  # what was not sent is of another kind
        self.averager.take_over(before.averager, memories=before._as_saved == self._as_saved)
        if lost := not_carried(before.averager.groups, self.averager.groups):
            rank_zero_warn(f"lightning_sparse: The model has changed since the fit before: {'; '.join(lost)}.")

    def show_average(self) -> None:
        """With ``local_steps``, have the parameters hold the average of all ranks until the next forward that trains.

        To be called on every rank between two steps, before the model is evaluated or saved.  A forward of ``ddp`` in
        evaluation mode without gradients does it by itself.
        """
        self.averager.show_average()

    def expect_step(self) -> None:
        """Note that every rank begins a step with its next forward."""
        self._tuning.expect_step()

    def note(self, *optimizers: Optimizer) -> None:
        """Have :meth:`state_dict` and :meth:`load_state_dict` know them before they have stepped."""
        self._tuning.active.note(*optimizers)

    def state_dict(self, residuals: str = "per_rank", optimizers: Sequence[Optimizer] = ()) -> dict[str, Any]:
        """Return what the ranks have not sent, as tensors, strings and integers; complete on rank 0.

        To be called on every rank, between two steps.

        Args:
            residuals: "per_rank": all of it, to go on bit for bit on as many ranks; "mean": a mean over the ranks.
            optimizers: with ``local_steps``, all of them: their states differ between ranks.  If none is given, those
                that have stepped.  The model is then the average when it is saved too, before the next forward.

        Raises:
            ValueError: for any other ``residuals``.
        """
        check_one_of("residuals", residuals, RESIDUALS[:2])
        self.show_average()
        return self.saved(residuals, optimizers, keep_means=False)

    def saved(self, residuals: str, optimizers: Sequence[Optimizer] = (), keep_means: bool = True) -> dict[str, Any]:
        """As :meth:`state_dict`, at any time: parameters stay as they are; an open step stays so, and is made again."""
        how = self._as_saved, self._tuning.state(), self._parts(optimizers), keep_means
        with self._groups.between_steps() as between:
            return checkpoint.gather(self.averager, residuals, between, *how).to_dict()

    def load_state_dict(
        self, state: Mapping[str, Any] | None, optimizers: Sequence[Optimizer] = (), is_loaded: bool = False
    ) -> None:
        """Set what this rank has not sent from what :meth:`state_dict` returned on rank 0; None sets it to zero.

        To be called with the same on every rank; with ``local_steps`` with all ``optimizers``, which then have their
        states from rank 0 already.

        Args:
            state: what was returned.
            optimizers: that train the model.
            is_loaded: the model has its weights from the checkpoint too.  Where it holds other weights, somebody has
                set them since, and they are kept.

        Raises:
            ValueError: on every rank, if one of them finds it damaged; each reads what it goes on with, and no more.
            RuntimeError: on every rank, if they were not given the same.
        """
        self._tuning.active.note(*optimizers)
        saved = checkpoint.read(state, self.averager, self._ranks)
        if self.averager.local is not None:
            self.averager.local.abandon(is_loaded)
        if saved is not None:
            self._tuning.resume(saved.plan, saved.steps)
        checkpoint.restore(self.averager, saved, self._as_saved, self._parts(optimizers, is_loaded))

    def _parts(self, optimizers: Sequence[Optimizer], is_loaded: bool = False) -> RankLocalState:
        active = self._tuning.active
        known = in_order(optimizers or active.optimizers.seen, list(active.held.values()))
        return RankLocalState(known, self._scaler, self._module, is_loaded)

    def close(self) -> None:
        """End the issuing threads and process groups.  ``ddp`` must not be trained any more.  What is unsent is kept.

        To be called on every rank; where an exception is being handled, to which other ranks may not have come, process
        groups over NCCL stay until the process ends.
        Let ``ddp`` go out of scope before ``dist.destroy_process_group()``; the other way round PyTorch may hang.
        """
        for handle in self._handles:
            handle.remove()
        _end(self._tuning.active, self._groups, by_all=sys.exc_info()[0] is None)
        self._warn_if_nothing_is_saved()


def warning_if_nothing_saved(averager: Averager) -> str:
    """Say that the last step sent as much as dense DDP, if it was one of the compressor proper; else nothing."""
    last = averager.last
    if last is None or last.saves_bytes():
        return ""
    steps = zip(averager.compressors, averager.groups, strict=True)
    compressor = next((c for c, group in steps if c.compresses(group.step - 1)), None)
    if compressor is None:
        return ""
    return (
        f"{compressor} sent {last.sent_bytes:,} bytes in a step, where dense DDP sends {last.dense_bytes:,}: nothing "
        "is saved. Choose settings that send less, such as a lower density or wire_dtype='bfloat16', or train with "
        "strategy='ddp'."
    )


def _end(active: ActiveAverager, process_groups: ProcessGroups, by_all: bool) -> None:
    """End both.  Process groups with a message under way stay: to destroy one waits for its messages."""
    if active.close():
        process_groups.close(by_all)
