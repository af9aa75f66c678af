"""The averager put on a model that FSDP2 shards: what the strategies for the Trainer and for Fabric share."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_sparse.auto.active_averager import ActiveAverager
from lightning_sparse.auto.policy import Auto
from lightning_sparse.checkpoint.sharded import MEAN, gather, restore
from lightning_sparse.checkpoint.state import RESIDUALS
from lightning_sparse.checks import check_one_of
from lightning_sparse.compressors import Compressor
from lightning_sparse.hook import SparseHook
from lightning_sparse.local_steps.settings import LocalSteps
from lightning_sparse.network.process_groups import ProcessGroups
from lightning_sparse.network.torch_comm import world
from lightning_sparse.options import Options
from lightning_sparse.sharded.model import SHARD, ShardedModel


class ShardedHook(SparseHook):
    """Averages the shards of a model over its replicas, from now on; to be made on every rank.

    Each call of ``fully_shard`` is a group, or with ``sparse_auto`` LayerFusion makes the groups.
    """

    _wrapper, _member, _of_what, _to_freeze = "the strategy", "replica", " of a shard", ""

    def __init__(
        self,
        model: ShardedModel,
        options: Options,
        timeout: Any,
        evaluates: Callable[[nn.Module], bool] = lambda module: not module.training,
    ) -> None:
        options.agree(model.module, world(), False, None)
        self.model = model
        ddp = cast(DistributedDataParallel, model)  # of which it is all that is needed
        ranks: dict[str, Any] = {"replicas": model.replicas} if options.local else {"columns": model.columns}
        groups = ProcessGroups(ddp, timeout, **ranks)
        self._put_on(ddp, options, None, groups, may_be_local=False, evaluates=evaluates)
        if options.policy is None and options.local is None:
            self._tuning.active.group_as([group.names for group in model.groups])

    @staticmethod
    def _parameters_of(ddp: DistributedDataParallel) -> Mapping[str, Tensor]:
        return cast(ShardedModel, ddp).shards

    @staticmethod
    def _register(ddp: DistributedDataParallel, active: ActiveAverager) -> None:
        cast(ShardedModel, ddp).average_with(active.hand_over, lambda: active.averager)

    def _watch(self, ddp: DistributedDataParallel) -> list[RemovableHandle]:
        return []  # a strategy calls what follows, since a training step need not be a forward of what is sharded

    def begin_forward(self) -> None:
        """To be called before a forward."""
        self._before_forward(self.model.module)

    def end_forward(self) -> None:
        """To be called after it."""
        self._after_forward()
        self.model.require_forward_param_sync = torch.is_grad_enabled()  # as DistributedDataParallel has it

    def state_dict(self, residuals: str = "per_rank", optimizers: Sequence[Optimizer] = ()) -> dict[str, Any]:
        """Return what the ranks have not sent, complete on rank 0; to be called on every rank, between two steps."""
        check_one_of("residuals", residuals, RESIDUALS[:2])
        if self.averager.local is not None:
            self.show_average()
        return self.gather(residuals, False, optimizers)[0]

    def load_state_dict(
        self, state: Mapping[str, Any] | None, optimizers: Sequence[Optimizer] = (), is_loaded: bool = False
    ) -> None:
        """Set what this rank has not sent from what :meth:`state_dict` returned on rank 0; None sets it to zero."""
        self.restore(state, None, optimizers)

    def close(self) -> None:
        super().close()
        self.model.close()

    def gather(
        self, residuals: str, folder: bool, optimizers: Sequence[Optimizer] = (), keep_means: bool = False
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What a checkpoint keeps, and tensors to be written beside one that is a ``folder``; see :func:`gather`."""
        how = self._as_saved, self._tuning.state(), folder, self._parts(optimizers), keep_means
        return gather(self.averager, self.model, residuals, *how)

    def restore(
        self, said: Mapping[str, Any] | None, folder: Path | None, optimizers: Sequence[Optimizer] = ()
    ) -> None:
        """Go on with what was saved, in a distributed checkpoint if it is in a ``folder``."""
        if self.averager.local is not None:
            self.note(*optimizers)
        if said is not None:
            plans = said["plans"]
            self._tuning.resume(plans[self.model.mesh[SHARD].get_local_rank() % len(plans)], said["steps"])
        parts = self._parts(optimizers, is_loaded=True)
        restore(said, folder, self.averager, self.model, self._as_saved, parts)


def options_of(
    compressor: Compressor | Auto | str,
    wire_dtype: str | None,
    warmup_steps: int,
    residuals: str = "per_rank",
    local_steps: int | LocalSteps = 0,
    exact: Sequence[str] = (),
) -> Options:
    """The options of a strategy for sharded models, validated."""
    is_chosen = isinstance(compressor, Auto) or compressor == "sparse_auto"
    fusion = "layer" if is_chosen else "bucket"
    options = Options.of(
        compressor,
        fusion,
        wire_dtype=wire_dtype,
        warmup_steps=warmup_steps,
        residuals=residuals,
        local_steps=local_steps,
        exact=exact,
    )
    if options.local and residuals == MEAN:
        raise ValueError(
            "residuals must be 'per_rank' or 'none' with local_steps for sharded models, of which each replica has "
            "weights of its own; got 'mean'. Leave it out."
        )
    return options
