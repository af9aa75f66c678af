"""The Trainer's strategy: wires the averager into DDP, into Lightning's hooks and into its checkpoints."""

import copy
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_sparse.auto.policy import Auto
from lightning_sparse.checkpoint.state import KEY, nbytes
from lightning_sparse.compressors import COMPRESSORS, Compressor
from lightning_sparse.elastic.averager import ElasticAverager
from lightning_sparse.fusion.layer_fusion import WORTH_PLANNING
from lightning_sparse.fusion.model import Plan
from lightning_sparse.fusion.steps import STEPS_MEASURED
from lightning_sparse.hook import SparseHook
from lightning_sparse.local_steps.settings import LocalSteps
from lightning_sparse.monitor.pictures import draw_timeline
from lightning_sparse.network.elastic import Elastic
from lightning_sparse.network.members import AUTO
from lightning_sparse.options import Options
from lightning_sparse.trainer.averaging import AveragingMixin
from lightning_sparse.trainer.elastic_host import ElasticHost, check_one_machine, own_order
from lightning_sparse.trainer.shown_average import BeforeCallbacks, ShownAverage
from lightning_sparse.trainer.signals import Signals

REPORTED_BYTES, LARGE_BYTES = 2**10, 2**30  # of residuals in a checkpoint
DROPPED = "Only strategies of lightning_sparse resume with them; under plain DDP they are dropped without a word."

# The mixin serves lightning and pytorch_lightning, whose classes are unrelated; type checkers see the first.
if TYPE_CHECKING:
    _Base = DDPStrategy
else:
    _Base = object


# Lightning's hooks in the order in which they come, and what is done in each; the methods below, and those in
# averaging.py, stand in that order.
# Where callbacks and the module have a hook too, Lightning calls the callbacks' first, then the module's, then ours.
# BeforeCallbacks stands before all other callbacks, where local steps are taken or may be chosen.
#
#   __getstate__                 With the start method "spawn": what a fit has made stays in its process.
#   setup_environment            Process groups of Lightning, and threads of forked workers.
#   load_checkpoint              Lightning sets the weights before the model is wrapped; what was not sent waits.
#   configure_ddp                In a fit: DDP around the module, our hook on it, and what is held for this fit.
#   setup_optimizers             In a fit: the hook knows the optimizers.
#   load_optimizer_state_dict    In a fit: they have their states, so what was not sent can be set.
#   distributed_sampler_kwargs   Whenever data are set up, from here on.
#   on_validation_start          Before training for the sanity check, and during it.  BeforeCallbacks has shown the
#                                average to callbacks, which may have set weights.  Here it is shown again, before
#                                signals are watched.  Lightning's handlers have been set by now.
#   on_test_start                As a validation, without signals.
#   on_predict_start             As a test.
#   on_train_start               Signals are watched; after Lightning's own, an elastic host warns of its own schedules.
#   for each batch that is trained on:
#     on_train_batch_start       BeforeCallbacks has had an elastic host enter, before the first batch.  Ranks that meet
#                                at a signal do what Lightning does at it, after Lightning's own and before this batch.
#     training_step              A step begins on every rank.  With automatic optimization this and the next are in the
#                                closure of optimizer_step, or by themselves where gradients are accumulated.
#     backward                   Gradients go to the averager.
#     optimizer_step             Behind Lightning's own, which ends with the optimizer's: the step has ended.
#                                BeforeCallbacks shows the average at the end of a batch to callbacks that average
#                                weights, and to all at the end of an epoch and of training.
#   lightning_module_state_dict  For a checkpoint, at any of these places or afterwards: the average.
#   save_checkpoint              Then what was not sent is added.
#   on_exception                 If there was one, before teardown.
#   teardown                     First what needs every rank: averages are compared.  Then the averager ends its threads
#                                and process groups, and leaves the average in the parameters.  Then Lightning gets its
#                                handlers back, and unwraps the model.  At last a SIGTERM that came too late for a batch
#                                ends the process.  The Trainer restores the handlers of before when this has returned.


class SparseMixin(AveragingMixin, _Base):
    """The part of :class:`SparseDDPStrategy` beside ``DDPStrategy``, for whichever of the two Lightning packages."""

    strategy_name = "sparse_ddp"
    torch_io: ClassVar[tuple[type, type]] = (TorchCheckpointIO, AsyncCheckpointIO)  # what reads with torch.load alone

    def __init__(
        self,
        compressor: Compressor | Auto | str = "sparse_auto",
        fusion: str | Sequence[str] = "layer",
        wire_dtype: str | None = None,
        warmup_steps: int = 0,
        residuals: str = "per_rank",
        local_group: int | str = AUTO,
        local_steps: int | LocalSteps = 0,
        elastic: bool | Elastic = False,
        exact: Sequence[str] = (),
        **ddp_kwargs: Any,
    ) -> None:
        options = Options.of(
            compressor,
            fusion,
            wire_dtype=wire_dtype,
            warmup_steps=warmup_steps,
            residuals=residuals,
            local_group=local_group,
            local_steps=local_steps,
            elastic=elastic,
            exact=exact,
        )
        self.options, ddp_kwargs = options.beside_ddp(ddp_kwargs, super().__init__)
        super().__init__(**ddp_kwargs)  # by this name: jsonargparse reads here where options go
        self.signals = Signals()
        self.hook: SparseHook | None = None  # during fit, and afterwards
        self.shown_average: ShownAverage | None = None  # as long as there is a hook
        self.host: ElasticHost | None = None  # likewise, with elastic
        self._hooked: LightningModule | None = None
        self._size_reported = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.options.brief()})"

    # - before a run

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what a fit has made: threads and process groups belong to the process."""
        made = {"hook": None, "_hooked": None, "shown_average": None, "host": None, "signals": Signals()}
        return super().__getstate__() | made

    def setup_environment(self) -> None:
        """Set up as DDP does; keep forked workers from PyTorch's threads: they hang if the parent has used any."""
        if self.options.hosts is not None:
            check_one_machine(self.num_nodes)
        if self._start_method == "fork" and self.root_device.type == "cpu":
            torch.set_num_threads(1)
        super().setup_environment()

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint as Lightning does; of what the ranks had not sent, a local file is mapped and not yet read.

        All else is copied into memory at once, since it may be kept for longer than the file is.
        """
        io = self.checkpoint_io
        plain = {type(io), type(getattr(io, "checkpoint_io", io))} <= set(self.torch_io)
        if plain and "weights_only" in kwargs:  # Lightning 2.5 knows no such argument, and has a default of its own
            with suppress(OSError, RuntimeError):  # remote, of an old format, damaged, or nothing can be mapped there
                checkpoint: dict[str, Any] = torch.load(
                    checkpoint_path, map_location=lambda storage, _: storage, mmap=True, **kwargs
                )
                mapped = {key: checkpoint.pop(key) for key in (KEY,) if key in checkpoint}
                return copy.deepcopy(checkpoint) | mapped
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    # - a fit is set up

    def configure_ddp(self) -> None:
        """Wrap the model in DDP, once the ranks agree, and put our hook on it, on every device."""
        module = self.lightning_module
        assert module is not None
        if self._ddp_kwargs.get("static_graph") and module.trainer.accumulate_grad_batches > 1:
            raise ValueError(
                "static_graph=True with accumulate_grad_batches above 1 crashes inside PyTorch's DDP "
                "(expect_autograd_hooks_); leave out static_graph=True."
            )

        def wrap() -> nn.parallel.DistributedDataParallel:
            if self.options.hosts is not None:
                self.host = ElasticHost(module.trainer, self.options.hosts)
            super(SparseMixin, self).configure_ddp()
            assert isinstance(self.model, nn.parallel.DistributedDataParallel)
            return self.model

        if self.hook is not None:
            self.hook.close()
        _, hook = SparseHook.around(self, module, getattr(self.precision_plugin, "scaler", None), wrap)
        if self.hook is not None and self._hooked is module:
            hook.take_over(self.hook)  # a second fit goes on where the first ended
        self.hook, self._hooked, self.shown_average = hook, module, ShownAverage(self)
        if self.options.may_be_local:
            BeforeCallbacks.put_before(module.trainer.callbacks)  # type: ignore[attr-defined]  # set by a connector
        if self.host is not None:
            assert isinstance(hook.averager, ElasticAverager)
            hook.averager.serve(self.host)

    def setup_optimizers(self, trainer: Any) -> None:
        """Set up the optimizers, and note them: with ``local_steps`` their states differ between ranks."""
        super().setup_optimizers(trainer)
        if self.hook is not None:
            for optimizer in self.optimizers:
                self.hook.note(optimizer)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore optimizers, and what the ranks had not sent.  Called for fit only, once DDP exists."""
        super().load_optimizer_state_dict(checkpoint)
        if self.hook is not None:
            self.hook.load_state_dict(checkpoint.get(KEY), self.optimizers, is_loaded=True)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """As ever; a host of several has all data, in an order of its own."""
        kwargs: dict[str, Any] = super().distributed_sampler_kwargs
        if self.options.hosts is None:
            return kwargs
        return kwargs | own_order(self.options.hosts.name() if self.host is None else self.host.name)

    # - evaluations, and a training

    def on_train_start(self) -> None:
        super().on_train_start()
        if self.host is not None:
            self.host.warn_of_own_schedules()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, in which every rank takes part."""
        if self.hook is not None:
            self.hook.expect_step()
        return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Backward, as :meth:`SparseHook.backward` has it."""
        with self.hook.backward() if self.hook is not None else nullcontext():
            loss: Tensor = super().backward(closure_loss, *args, **kwargs)
            return loss

    # - checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Add what the ranks have not sent to a checkpoint that holds optimizer states.  Called on every rank."""
        if "optimizer_states" in checkpoint and self.hook is not None and self.options.residuals != "none":
            if self.shown_average is not None and self.shown_average.others_may_be_gone():
                rank_zero_warn(
                    f"lightning_sparse: {filepath} is written without residuals (the gradient not yet sent): training "
                    "was interrupted, and gathering them might wait for a rank that is gone. Resuming from it starts "
                    "them from zero."
                )
            else:
                start_s = time.perf_counter()
                checkpoint[KEY] = state = self.hook.saved(
                    self.options.residuals, self.optimizers, keep_means=self.is_within_a_batch
                )
                self._report_size(nbytes(state), time.perf_counter() - start_s)
        elif "optimizer_states" in checkpoint and self._start_method != "popen" and self.options.residuals != "none":
            rank_zero_warn(
                f"lightning_sparse: {filepath} is written without residuals and optimizer states: training ran in "
                f"child processes (start_method={self._start_method!r}), and they ended with it. For a checkpoint to "
                "resume from, let ModelCheckpoint write it during fit, with save_last=True, say."
            )
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _report_size(self, nbytes: int, seconds: float) -> None:
        """Say once what residuals add to a checkpoint, and who reads them; nothing where hardly anything is unsent."""
        if self._size_reported or nbytes < REPORTED_BYTES:
            return
        self._size_reported = True
        figure = (
            f"residuals (what each rank keeps for itself, residuals={self.options.residuals!r}) add "
            f"{nbytes / 2**20:,.1f} MiB"
        )
        if nbytes > LARGE_BYTES:
            rank_zero_warn(
                f"lightning_sparse: {figure} to every checkpoint, gathered on rank 0 in {seconds:.1f} s. "
                f"residuals='mean' keeps one mean over the ranks, 'none' nothing. {DROPPED}"
            )
        else:
            gathered = f"gathered in {1e3 * seconds:.0f} ms"
            rank_zero_info(f"lightning_sparse: {figure} to a checkpoint, {gathered}. {DROPPED}")

    # - the end

    def on_exception(self, exception: BaseException) -> None:
        """Name our own strategy, not plain DDP, where DDP's text tells what to do about unused parameters."""
        if "Expected to have finished reduction in the prior iteration" in str(exception):
            kinds = {"sparse_auto": Auto, **COMPRESSORS}
            names = [name for name, kind in kinds.items() if type(self.compressor) is kind] or ["sparse_auto"]
            exception.args = (
                f"{exception}\nSome parameters were not used in producing the loss that training_step returned. If "
                f"that is meant, let DDP look for them: strategy='{names[0]}_find_unused_parameters_true', "
                "or SparseDDPStrategy(find_unused_parameters=True).",
            )
        else:
            super().on_exception(exception)

    # - what others ask

    @property
    def plan(self) -> Plan | None:
        """The plan of LayerFusion; None on ranks other than 0, with another ``fusion``, or before it has measured."""
        return self.layer_fusion.plan if self.layer_fusion else None

    def draw_timeline(self, path: str | Path) -> None:
        """Draw the last step of this rank beside what LayerFusion expected of it (needs matplotlib).

        Raises:
            ValueError: there is no plan: see :attr:`plan`.
        """
        if self.layer_fusion is None or self.layer_fusion.plan is None:
            raise ValueError(
                f"there is no plan to draw (rank {self.global_rank}, fusion={self.options.fusion!r}): fusion='layer' "
                f"makes one on rank 0 after the first {STEPS_MEASURED} steps, for more than one rank and "
                f"{WORTH_PLANNING:,} elements. Local steps have none, nor have sums of DDP's own buckets, which "
                "sparse_auto may choose."
            )
        draw_timeline(self.layer_fusion.plan, self.layer_fusion.measured(), path)


class SparseDDPStrategy(SparseMixin, DDPStrategy):
    """Data-parallel training that sends a part of the gradient and keeps the rest for later steps.

    Args:
        compressor: "sparse_auto", which measures and chooses; a name in ``COMPRESSORS``, for its defaults; or an
            instance such as ``SkipReduce(skip=0.5)``.
        fusion: which parameters travel together.  "layer": LayerFusion, groups of 25 MiB in backward order until the
            first steps have been measured, then the fastest; "bucket": groups of ``bucket_cap_mb`` (25) MiB; "none":
            one group a layer; or a list with a shell-style pattern of parameter names for each group.
        wire_dtype: of values on the wire: "float32", "bfloat16", "float16", "int8", "int4", "int2" or "sign"; rounding
            errors are carried over to the next step.  None: "int4" where elements are selected, else "float32".
        warmup_steps: steps in which all elements are sent first, in ``wire_dtype``.
        residuals: what a checkpoint keeps of the gradient not yet sent.  "per_rank": all of it, to resume bit for bit
            on the same number of ranks; "mean": one mean over the ranks; "none".
        local_group: ranks that share a fast link and are one member: what they do together is exact, each sends a slice
            of what travels between members, which alone is compressed, and a checkpoint keeps one residual for each.
            "auto": the ranks of a machine, from two machines on, where devices are GPUs; "node": the ranks of a
            machine; a number: so many consecutive ranks; 1: none.
        local_steps: H, or :class:`LocalSteps`: each rank takes its own optimizer steps, and what they did is exchanged,
            a part of the parameters in H each step.  0: gradients are exchanged.
        elastic: with ``local_steps``, True or :class:`Elastic`: every machine is a training of its own
            (``num_nodes=1``), one of several hosts that may end, stop and join at any time.
        exact: shell-style patterns, such as ``("*norm*", "*bias")``, of names of parameters that are summed in float32,
            whatever the compressor and the format.
        **ddp_kwargs: everything ``lightning.pytorch.strategies.DDPStrategy`` takes.

    Raises:
        ValueError: for an option out of range, with the value and what is allowed.
        TypeError: if ``compressor`` is neither a name nor an instance, or for a keyword that nobody takes.
    """
