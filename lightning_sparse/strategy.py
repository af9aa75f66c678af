"""The Strategy: wires the exchange into DDP and into Lightning's checkpoints."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import DDPStrategy
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_sparse import checkpoint as checkpoints
from lightning_sparse.comm import TorchComm, wire_dtype_named
from lightning_sparse.compressors import COMPRESSORS, Compressor, Warmup, by_name
from lightning_sparse.exchange import LANES, Exchange
from lightning_sparse.fusion import BUCKET_BYTES, check_fusion, lay_out
from lightning_sparse.layer_fusion import STEPS_MEASURED, WORTH_PLANNING, LayerFusion, Plan
from lightning_sparse.plan_views import draw_timeline

UNSUPPORTED = (
    "delay_all_reduce_named_params",
    "device_mesh",
    "mixed_precision",
    "param_to_hook_all_reduce",
    "process_group",
    "skip_all_reduce_unused_params",
)

HAND_OVER_MB = 1  # of gradient, between one call of our hook and the next

# The mixin serves lightning and pytorch_lightning, whose classes are unrelated; type checkers see the first.
if TYPE_CHECKING:
    _Base = DDPStrategy
else:
    _Base = object


class SparseMixin(_Base):
    """What :class:`SparseDDPStrategy` adds to ``DDPStrategy``, for whichever of the two Lightning packages."""

    strategy_name = "sparse_ddp"
    package: ClassVar[str] = "lightning"
    accelerator_class: ClassVar[type] = Accelerator

    def __init__(
        self,
        compressor: str | Compressor = "skip_reduce",
        fusion: str | Sequence[str] = "layer",
        wire_dtype: str = "float32",
        warmup_steps: int = 0,
        residuals: str = "per_rank",
        **ddp_kwargs: Any,
    ) -> None:
        if residuals not in checkpoints.RESIDUALS:
            raise ValueError(f"residuals={residuals!r} is not one of {', '.join(checkpoints.RESIDUALS)}.")
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps={warmup_steps} is a number of dense steps, so 0 or more; 0 is none.")
        if ddp_kwargs.get("ddp_comm_hook") is not None:
            raise ValueError(
                "ddp_comm_hook cannot be combined with a compressor: DDP takes one hook, and this strategy registers "
                "its own. For values in half precision on the wire give wire_dtype='bfloat16'."
            )
        for name in UNSUPPORTED:
            if ddp_kwargs.get(name):
                raise ValueError(
                    f"{name}={ddp_kwargs[name]!r} is not supported: with it DDP does not hand every gradient of every "
                    "rank to its hook. Leave it out."
                )
        fusion = check_fusion(fusion)
        if fusion != "bucket" and ddp_kwargs.get("bucket_cap_mb") is None:
            # DDP's buckets decide when gradients reach us: soon, at some 50 us for each bucket.
            ddp_kwargs["bucket_cap_mb"] = 1e-6 if fusion == "none" else HAND_OVER_MB
        super().__init__(**ddp_kwargs)
        self.compressor = by_name(compressor)
        self.fusion = fusion
        self.wire_dtype = wire_dtype_named(wire_dtype)
        self.warmup_steps = warmup_steps
        self.residuals = residuals
        self.exchange: Exchange | None = None  # during fit
        self.layer_fusion: LayerFusion | None = None  # during fit with fusion="layer"
        self._lane_groups: list[dist.ProcessGroup] = []

    # - the exchange

    def _register_ddp_hooks(self) -> None:
        """Register our hook, on every device; Lightning's own registration does nothing off CUDA."""
        ddp = self.model
        assert isinstance(ddp, nn.parallel.DistributedDataParallel)
        assert self.lightning_module is not None
        self._refuse_what_cannot_work(self.lightning_module)
        self._close_exchange()
        ignored = ddp.parameters_to_ignore
        parameters = {
            name.replace("_orig_mod.", ""): parameter
            for name, parameter in self.lightning_module.named_parameters()
            if parameter.requires_grad and name not in ignored
        }
        compressor = Warmup(self.warmup_steps, self.compressor) if self.warmup_steps else self.compressor
        bucket_mb = self._ddp_kwargs.get("bucket_cap_mb") if self.fusion == "bucket" else None
        bucket_bytes = BUCKET_BYTES if bucket_mb is None else int(bucket_mb * 2**20)
        nccl = self.root_device.type == "cuda"
        self.exchange = Exchange(
            lay_out(parameters, compressor, self.fusion, bucket_bytes),
            [TorchComm(group, self.wire_dtype) for group in self._process_groups(nccl)],
            threaded=not nccl,
            may_be_unused=bool(self._ddp_kwargs.get("find_unused_parameters")),
        )
        self.layer_fusion = LayerFusion(self.exchange, compressor, parameters) if self.fusion == "layer" else None
        ddp.register_comm_hook(None, self.exchange.hook)
        rank_zero_info(
            f"lightning_sparse: {self.compressor} averages {sum(g.n for g in self.exchange.groups):,} elements "
            f"in {len(self.exchange.groups)} groups among {self.exchange.size} ranks."
        )

    def _process_groups(self, nccl: bool) -> list[dist.ProcessGroup]:
        """One for each lane of the exchange; see [Note: who issues messages]."""
        if nccl:  # several NCCL communicators need one order of launching, so stay on DDP's, from DDP's hook
            assert isinstance(self.model, nn.parallel.DistributedDataParallel)
            return [self.model.process_group]
        if not self._lane_groups:  # of their own, since Lightning uses the default group from the main thread
            self._lane_groups = [dist.new_group(timeout=self._timeout) for _ in range(LANES)]
        return self._lane_groups

    def _refuse_what_cannot_work(self, module: LightningModule) -> None:
        if self._ddp_kwargs.get("static_graph") and module.trainer.accumulate_grad_batches > 1:
            raise ValueError(
                "static_graph=True with accumulate_grad_batches above 1 crashes inside PyTorch's DDP "
                "(expect_autograd_hooks_); leave out static_graph=True."
            )
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                "precision='16-mixed' multiplies gradients by a loss scale that changes, which would distort what is "
                "kept for later steps; use precision='bf16-mixed' or '32-true'."
            )
        if self.root_device.type == "cuda" and "nccl" not in str(dist.get_backend()):
            raise ValueError(f"on CUDA the process group must be NCCL, not {dist.get_backend()}.")
        for name, child in module.named_modules():
            if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
                raise ValueError(
                    f"{name} is an embedding with sparse=True, whose gradient has no dense layout to send "
                    "a part of; use sparse=False."
                )
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise ValueError(
                    f"parameter {name} has dtype {parameter.dtype}; gradients are averaged and kept in float32, so "
                    "only float32, bfloat16 and float16 parameters can be trained."
                )

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Backward, with the exchange's own error instead of DDP's word that a future failed."""
        if self.exchange is None:
            return super().backward(closure_loss, *args, **kwargs)
        self.exchange.timeline.begin_backward()
        try:
            loss: Tensor = super().backward(closure_loss, *args, **kwargs)
        except RuntimeError:
            if self.exchange.error is not None:
                raise self.exchange.error from None
            raise
        self.exchange.timeline.end_backward()
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Between two steps: the time to measure, and to change groups."""
        super().on_train_batch_start(batch, batch_idx)
        if self.layer_fusion is not None:
            self.layer_fusion.between_steps()

    def draw_timeline(self, path: str | Path) -> None:
        """Draw the last step of this rank beside what LayerFusion expected of it (needs matplotlib).

        Raises:
            ValueError: there is no plan: see :attr:`plan`.
        """
        if self.layer_fusion is None or self.layer_fusion.plan is None:
            raise ValueError(
                f"there is no plan to draw (rank {self.global_rank}, fusion={self.fusion!r}): fusion='layer' makes one "
                f"on rank 0 after the first {STEPS_MEASURED} steps, for more than one rank and {WORTH_PLANNING:,} "
                "elements."
            )
        draw_timeline(self.layer_fusion.plan, self.layer_fusion.measured(), path)

    @property
    def plan(self) -> Plan | None:
        """What LayerFusion planned; None on ranks other than 0, with another ``fusion``, or before it has measured."""
        return self.layer_fusion.plan if self.layer_fusion else None

    def _close_exchange(self) -> None:
        if self.exchange is not None:
            self.exchange.close()

    def teardown(self) -> None:
        """End the exchange's thread; the group of processes outlives it."""
        self._close_exchange()
        super().teardown()

    # - checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Add what the ranks have not sent to a checkpoint that holds optimizer states.  Called on every rank."""
        if "optimizer_states" in checkpoint and self.exchange is not None and self.residuals != "none":
            assert self.lightning_module is not None
            if self.lightning_module.trainer.interrupted or self.exchange.error is not None:
                rank_zero_warn(
                    f"{filepath} is written without residuals (the gradient not yet sent): training was interrupted, "
                    "and gathering them might wait for a rank that is gone. Resuming from it starts them from zero."
                )
            else:
                state = checkpoints.gather(self.exchange, self.residuals)
                checkpoint[checkpoints.KEY] = state | {"plan": self.layer_fusion.state() if self.layer_fusion else {}}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore optimizers, and what the ranks had not sent.  Called for fit only, once DDP exists."""
        super().load_optimizer_state_dict(checkpoint)
        if self.exchange is not None:
            state = checkpoint.get(checkpoints.KEY)
            if self.layer_fusion is not None and state is not None:
                self.layer_fusion.resume(state.get("plan", {}), state["steps"])
            checkpoints.restore(self.exchange, state)

    # - Lightning's manners

    @property
    def accelerator(self) -> Any:
        """The accelerator Lightning gave us."""
        return super().accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        if accelerator is not None and not isinstance(accelerator, self.accelerator_class):
            raise TypeError(
                f"a strategy of the package {self.package!r} was given to a Trainer of "
                f"{type(accelerator).__module__.partition('.')[0]!r}; the two packages do not mix. With 'lightning' "
                "use lightning_sparse.SparseDDPStrategy, with 'pytorch_lightning' "
                "lightning_sparse.pytorch_lightning.SparseDDPStrategy, or in both a name: strategy='skip_reduce'."
            )
        super(SparseMixin, type(self)).accelerator.fset(self, accelerator)  # type: ignore[attr-defined]

    def on_exception(self, exception: BaseException) -> None:
        """Name our own strategy, not plain DDP, where DDP's text tells what to do about unused parameters."""
        if "Expected to have finished reduction in the prior iteration" in str(exception):
            names = [name for name, kind in COMPRESSORS.items() if type(self.compressor) is kind] or ["skip_reduce"]
            exception.args = (
                f"{exception}\nSome parameters were not used in producing the loss that training_step returned. If "
                f"that is meant, let DDP look for them: strategy='{names[0]}_find_unused_parameters_true', "
                "or SparseDDPStrategy(find_unused_parameters=True).",
            )
        else:
            super().on_exception(exception)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register a name for each compressor, with the variants of DDP's names."""
        starts = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
        for name, compressor in COMPRESSORS.items():
            summary = (compressor.__doc__ or "").strip().partition("\n")[0]
            for suffix, start_method in starts.items():
                for unused_suffix, unused in {"": None, "_find_unused_parameters_true": True}.items():
                    options = {"find_unused_parameters": True} if unused else {}
                    strategy_registry.register(
                        name + suffix + unused_suffix,
                        cls,
                        description=f"{summary} Start method {start_method!r}.",
                        override=True,
                        compressor=name,
                        start_method=start_method,
                        **options,
                    )


class SparseDDPStrategy(SparseMixin, DDPStrategy):
    """Data-parallel training that sends a part of the gradient and keeps the rest for later steps.

    Args:
        compressor: a name in ``COMPRESSORS``, for its defaults, or an instance such as ``SkipReduce(skip=0.5)``.
        fusion: which parameters travel together.  "layer": LayerFusion, groups of 25 MiB in backward order until the
            first steps have been measured, then the fastest; "bucket": groups of ``bucket_cap_mb`` (25) MiB; "none":
            one group a layer; or a list with a pattern of parameter names (as of a shell) for each group.
        wire_dtype: of values on the wire: "float32", "bfloat16", "float16" or "int8"; what rounding leaves is kept.
        warmup_steps: dense steps before the compressor starts.
        residuals: what a checkpoint keeps of the gradient not yet sent.  "per_rank": all of it, to resume bit for bit
            on the same number of ranks; "mean": one mean over the ranks; "none".
        **ddp_kwargs: everything ``lightning.pytorch.strategies.DDPStrategy`` takes.

    Raises:
        ValueError: for an option out of range, with the value and what is allowed.
        TypeError: if ``compressor`` is neither a name nor an instance.
    """
