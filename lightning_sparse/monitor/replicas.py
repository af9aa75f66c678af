"""Checks that the replicas of a model stay the same, bit for bit."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_sparse.checks import is_whole
from lightning_sparse.engine.checksum import checksum
from lightning_sparse.network.agreement import ranks_having
from lightning_sparse.network.comm import Comm
from lightning_sparse.network.torch_comm import world


class ReplicaCheck(Callback):
    """Ends the training if the ranks' parameters are not the same, bit for bit, and names the first that differs.

    With local steps it compares the average that the ranks share; hosts of an elastic training are not compared.

    A check reads every parameter once and sends 8 bytes for each.

    Args:
        every_n_steps: optimizer steps from one check to the next.

    Raises:
        ValueError: ``every_n_steps`` is not an integer, or is below 1.
    """

    def __init__(self, every_n_steps: int = 100) -> None:
        if not is_whole(every_n_steps, least=1):
            raise ValueError(
                f"every_n_steps must be an integer of at least 1, in optimizer steps; got {every_n_steps!r}."
            )
        self.every_n_steps = every_n_steps
        self._checked = 0  # the step after which the replicas were last compared

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count from this training's first step, which is above 0 where it is resumed."""
        self._checked = trainer.global_step
        options = getattr(trainer.strategy, "options", None)
        if options is not None and options.hosts is not None:
            rank_zero_warn("ReplicaCheck compares the ranks of one training, so it compares no hosts. Leave it out.")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step - self._checked >= self.every_n_steps:
            self._check(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._check(trainer, pl_module)

    def _check(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._checked = trainer.global_step
        if trainer.world_size > 1:
            exchange = getattr(trainer.strategy, "exchange", None)
            local = exchange.local if exchange is not None else None
            shared = local.compared() if local is not None else {}
            named = pl_module.named_parameters()
            own = {name: shared.get(p, p) for name, p in named if not hasattr(p, "to_local")}  # a shard is no replica
            sharded = getattr(trainer.strategy, "sharded", None)  # a model of which ranks have shards
            check_replicas(sharded.shards if sharded else own, world(), sharded.shard_size if sharded else 1)


def check_replicas(parameters: Mapping[str, Tensor], comm: Comm, shards: int = 1) -> None:
    """Raise unless all ranks hold the same, or of so many ``shards`` those that have one; to be called on every rank.

    Between two steps.

    Raises:
        RuntimeError: on every rank, with the first parameter that differs and the ranks it differs on.
    """
    if not parameters:
        return
    sums = comm.all_gather(torch.stack([checksum(p) for p in parameters.values()])).wait()  # [P, parameters]
    differs = (sums.unflatten(0, (-1, shards)) != sums[:shards]).any(0).any(0)
    if not bool(differs.any()):
        return
    first = int(differs.nonzero()[0])
    parties = " and ".join(ranks_having(sums[:, first].tolist()).values())
    raise RuntimeError(
        f"The replicas have drifted apart: {list(parameters)[first]}, the first of {int(differs.sum())} parameters, is "
        f"not the same on {parties}. Averaged gradients are the same on every rank, so something else changes it on "
        "some: an optimizer step not all of them take, a random number, or code that asks for its rank."
    )
