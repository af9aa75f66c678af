"""The strategy for models that must be sharded: FSDP2 inside nodes, compressed averages between them."""

import shutil
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_sparse.auto.policy import Auto
from lightning_sparse.checkpoint.sharded import KEY, save_tensors
from lightning_sparse.checks import check_whole
from lightning_sparse.compressors import Compressor
from lightning_sparse.local_steps.settings import LocalSteps
from lightning_sparse.sharded.model import REPLICATE, SHARD, ShardedModel
from lightning_sparse.sharded_hook import ShardedHook, options_of
from lightning_sparse.trainer.averaging import AveragingMixin
from lightning_sparse.trainer.shown_average import BeforeCallbacks, ShownAverage
from lightning_sparse.trainer.signals import Signals

FITTING = "fit"  # the state of a Trainer, of either package
GIVEN_TO_LIGHTNING = ("save_distributed_checkpoint", "process_group_backend", "timeout")
NOT_HERE = {  # options of other strategies, and what is to be done about them
    "elastic": "Hosts come and go with SparseDDPStrategy and local_steps alone.",
    "fusion": "Each call of fully_shard is a group.",
    "local_group": "The ranks of a node have shards: give shard_size.",
    "data_parallel_size": "Give replicate_size.",
    "tensor_parallel_size": "Give shard_size; there is no tensor parallelism here.",
}

# The mixin serves lightning and pytorch_lightning, whose classes are unrelated; type checkers see the first.
if TYPE_CHECKING:
    _Base = ModelParallelStrategy
else:
    _Base = object


class OnMesh:
    """The part of a strategy that makes the mesh of R x S ranks, beside a Trainer's or Fabric's own.

    Of the sizes R and S "auto" is as many nodes, devices of a node, or what the other one leaves.
    """

    def _set_sizes(self, replicate_size: int | str, shard_size: int | str) -> None:
        for name, size in (("replicate_size", replicate_size), ("shard_size", shard_size)):
            if size != "auto":
                check_whole(name, size, 1, "Or leave it out.")
        self._sizes = replicate_size, shard_size

    def __repr__(self: Any) -> str:
        return f"{type(self).__name__}({self.options.brief('fusion')})"

    @property
    def distributed_sampler_kwargs(self: Any) -> dict[str, Any]:
        """Every rank has data of its own."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_environment(self: Any) -> None:
        """Set up as Lightning does, with the mesh of replicas and shards.

        Raises:
            ValueError: R times S is not the number of ranks.
        """
        (replicate, shard), ranks = self._sizes, self.num_nodes * self.num_processes
        if replicate == "auto":
            replicate = self.num_nodes if shard == "auto" else ranks // int(shard)
        sizes = int(replicate), ranks // int(replicate or 1) if shard == "auto" else int(shard)
        if sizes[0] * sizes[1] != ranks:
            given = zip(("replicate_size", "shard_size"), self._sizes, strict=True)
            got = " and ".join(f"{name}={size}" for name, size in given if size != "auto")
            raise ValueError(
                f"replicate_size times shard_size must be the number of ranks, {ranks}; got {got}. Leave out one of "
                "them, or both for nodes x devices."
            )
        super().setup_environment()  # type: ignore[misc]  # of the class beside
        mesh = init_device_mesh(self.root_device.type, sizes, mesh_dim_names=(REPLICATE, SHARD))
        setattr(self, "_device_mesh", mesh)  # noqa: B010  # of the class beside


class HSDPMixin(OnMesh, AveragingMixin, _Base):
    """The part of :class:`SparseHSDPStrategy` beside ``ModelParallelStrategy``, for both Lightning packages."""

    def __init__(
        self,
        compressor: Compressor | Auto | str = "sparse_auto",
        wire_dtype: str | None = None,
        warmup_steps: int = 0,
        residuals: str = "per_rank",
        replicate_size: int | Literal["auto"] = "auto",
        shard_size: int | Literal["auto"] = "auto",
        local_steps: int | LocalSteps = 0,
        exact: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        self.options = options_of(compressor, wire_dtype, warmup_steps, residuals, local_steps, exact)
        self._set_sizes(replicate_size, shard_size)
        # A config file names all that Lightning's strategy takes, "auto" where nothing was given.
        if unknown := [name for name, given in kwargs.items() if name not in GIVEN_TO_LIGHTNING and given != "auto"]:
            raise TypeError(
                f"{unknown[0]} must be an option of SparseHSDPStrategy, or one of {', '.join(GIVEN_TO_LIGHTNING)}; got "
                f"{unknown[0]}={kwargs[unknown[0]]!r}. {NOT_HERE.get(unknown[0], 'Leave it out, or correct its name.')}"
            )
        super().__init__(**kwargs)
        self.signals = Signals()
        self.sharded: ShardedModel | None = None
        self.hook: ShardedHook | None = None
        self.shown_average: ShownAverage | None = None

    def setup_environment(self) -> None:
        super().setup_environment()
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    def setup(self, trainer: Any) -> None:
        """Set up model and optimizers, and for a fit put our hook on what was sharded."""
        super().setup(trainer)
        if trainer.state.fn != FITTING:
            return
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                "precision must be '32-true', 'bf16-mixed' or 'bf16-true'; got '16-mixed', whose loss scale each shard "
                "would have to know. Give 'bf16-mixed'."
            )
        module = self.lightning_module
        assert module is not None
        norms = {type(each) for each in module.modules() if isinstance(each, _BatchNorm)}
        if self._layer_sync is not None and not all(issubclass(kind, nn.SyncBatchNorm) for kind in norms):
            raise ValueError(
                "sync_batchnorm must be False for sharded models, of which Lightning converts no layers; got True. In "
                "configure_model call torch.nn.SyncBatchNorm.convert_sync_batchnorm(net) before fully_shard."
            )
        if not any(p.requires_grad for p in module.parameters()):
            return  # nothing to average
        before, is_same = self.hook, self.sharded is not None and self.sharded.module is module
        if before is not None:
            before.close()
        self.sharded = ShardedModel(module, self.device_mesh)
        owner = weakref.ref(self)

        def evaluates(module: nn.Module) -> bool:
            return (own := owner()) is not None and own.evaluates(module)

        self.hook = ShardedHook(self.sharded, self.options, self._timeout, evaluates)
        self.shown_average = ShownAverage(self)
        if self.options.local:
            self.hook.note(*self.optimizers)
            BeforeCallbacks.put_before(trainer.callbacks)
        if before is not None and is_same:
            self.hook.take_over(before)  # a second fit goes on where the first ended

    # - a training; for the order of all hooks see strategy.py

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.hook is None:
            return super().training_step(*args, **kwargs)
        self.hook.expect_step()
        self.hook.begin_forward()
        try:
            return super().training_step(*args, **kwargs)
        finally:
            self.hook.end_forward()

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Backward, as :meth:`SparseHook.backward` has it, and the means of what it reached."""
        if self.hook is None:
            return super().backward(closure_loss, *args, **kwargs)
        assert self.lightning_module is not None
        module, precision = self.lightning_module, self.precision_plugin
        self.pre_backward(closure_loss)  # as Lightning's own, which calls on_after_backward before it ends
        loss = precision.pre_backward(closure_loss, module)
        with self.hook.backward(), self.hook.model.backward(always=True):
            precision.backward(loss, module, *args, **kwargs)
        loss = precision.post_backward(loss, module)  # here, where .grad holds the means
        self.post_backward(loss)
        return loss

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate: reduce gradients inside nodes alone until the last batch of a step."""
        parts = self.sharded.parts if self.sharded is not None else []
        for part in parts:
            part.set_requires_all_reduce(False, recurse=False)
        try:
            yield
        finally:
            for part in parts:
                part.set_requires_all_reduce(True, recurse=False)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Add what the ranks have not sent to a checkpoint that holds optimizer states.  Called on every rank."""
        tensors: dict[str, Tensor] = {}
        is_folder, residuals = self._save_distributed_checkpoint, self.options.residuals
        if self.hook is not None and residuals != "none" and "optimizer_states" in checkpoint:
            checkpoint[KEY], tensors = self.hook.gather(residuals, is_folder, self.optimizers, self.is_within_a_batch)
        if self.options.local and is_folder and self.hook is not None and self.hook.averager.rank > 0:
            checkpoint["optimizer_states"] = []  # or whoever reads the folder would find parts of several replicas'
        if self.global_rank == 0:  # what an interrupted save leaves must not be taken for whole
            shutil.rmtree(Path(filepath) / KEY, ignore_errors=True)
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if is_folder and KEY in checkpoint:  # on every rank, also where it has no tensors
            save_tensors(tensors, Path(self.broadcast(filepath)))

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load weights and optimizers, and for a fit what the ranks had not sent."""
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        said = loaded.pop(KEY, None)
        path = Path(self.broadcast(checkpoint_path))
        if self.hook is not None and self.lightning_module.trainer.state.fn == FITTING:  # type: ignore[union-attr]
            self.hook.restore(said, path if path.is_dir() else None, self.optimizers)
        return loaded


class SparseHSDPStrategy(HSDPMixin, ModelParallelStrategy):
    """Trains a model that FSDP2 shards inside each node, and compresses what crosses nodes.

    The mesh has the dimensions "replicate" (R, between nodes) and "shard" (S, inside one).  ``configure_model`` calls
    ``fully_shard(module, mesh=self.device_mesh["shard"])`` on parts of the model and at last on all of it.  FSDP sums
    gradients inside the node, and this strategy averages each shard over the R nodes, as ``SparseDDPStrategy`` averages
    gradients, or with ``local_steps`` weights: what a rank does not send of its shard it keeps for later steps.

    Args:
        compressor: a name in ``COMPRESSORS``, for its defaults, an instance such as ``MiCRO(density=0.05)``, or
            ``sparse_auto``, which chooses among averaged gradients.
        wire_dtype: of values between nodes, as for ``SparseDDPStrategy``.
        warmup_steps: steps in which all elements are sent first, in ``wire_dtype``.
        residuals: what a checkpoint keeps of what was not yet sent: "per_rank", "mean" over replicas, "none".
        replicate_size: R; "auto": the nodes.
        shard_size: S; "auto": the devices of a node.
        local_steps: H, or :class:`LocalSteps`: each replica takes its own optimizer steps, and what they did to a shard
            is exchanged, a part of the parameters in H each step.  0: gradients are exchanged.
        exact: patterns of names of parameters that are summed in float32.
        **kwargs: ``save_distributed_checkpoint``, ``process_group_backend`` and ``timeout`` of Lightning's
            ``ModelParallelStrategy``.

    Raises:
        ValueError: for an option out of range, with the value and what is allowed; at the start of a fit, for a model
            that is not sharded so.
    """
