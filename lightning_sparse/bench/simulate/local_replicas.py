"""P simulated ranks that take local steps in one process, with the replicas and messages of the real engine."""

from collections.abc import Sequence
from copy import deepcopy

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_sparse.bench.simulate.optimizers import OPTIMIZERS
from lightning_sparse.bench.simulate.replicas import backward, take_optimizer_steps
from lightning_sparse.compressors.dense import Exact
from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.compression_error import CompressionError
from lightning_sparse.engine.groups import lay_out_fragments
from lightning_sparse.engine.lr_factor import EVERY, LrFactor
from lightning_sparse.engine.replica import Replica
from lightning_sparse.engine.untrained import untrained_of
from lightning_sparse.network.simulated import SimNetwork
from lightning_sparse.options import Options
from lightning_sparse.simulation import take_steps
from lightning_sparse.wire import wire_format


class LocalReplicas:
    """P ranks that average weights, each with a model and optimizers of its own.

    The factor of their steps is compared where it is applied only: on so small a model its sample counts among bytes.

    Args:
        model: the average x̄, before the first step and after each.
        options: of the strategy, with its local steps.
        ranks: P.
        optimizer: one of ``OPTIMIZERS``.

    Attributes:
        network: between the ranks.
        faithfulness: of the steps so far, if it is to be judged.
    """

    faithfulness: CompressionError | None = None

    def __init__(self, model: LightningModule, options: Options, ranks: int, optimizer: str = "adamw") -> None:
        assert options.local is not None
        self.network = SimNetwork(ranks, wire_format(options.wire_dtype))
        self._average, self._settings, self._warmup_steps = model, options.local, options.warmup_steps
        self._models = [deepcopy(model) for _ in range(ranks)]
        self._optimizers = [OPTIMIZERS[optimizer](each) for each in self._models]
        self._replicas = list(zip(*(self._replicas_of(each, options) for each in self._models), strict=True))
        self._factors = [LrFactor([each.group for each in of_rank]) for of_rank in zip(*self._replicas, strict=True)]
        self._steps = 0
        self._due: list[tuple[Replica, ...]] = []  # exchanged, and not applied yet

    def _replicas_of(self, model: LightningModule, options: Options) -> list[Replica]:
        groups, fragments = lay_out_fragments(
            dict(model.named_parameters()),
            options.averaging,
            options.fusion,
            self._settings.parts,
            options.bucket_bytes,
        )
        replicas = [
            Replica(group, compressor, fragment, self._settings)
            for (group, compressor), fragment in zip(groups, fragments, strict=True)
        ]
        if statistics := untrained_of(model, set()):
            tensors = tuple(find() for find in statistics.values())
            group = Group(len(groups), tuple(statistics), tensors)
            replicas.append(Replica(group, Exact(), 0, self._settings, list(statistics.values())))
        return replicas

    def step(self, batches: Sequence[Sequence[Tensor]], rate: float) -> None:
        """Learn from a batch on each rank, at a learning rate."""
        if self._settings.overlaps and self._steps:
            self._exchange()
        ranks = zip(self._models, self._optimizers, self._factors, batches, strict=True)
        for model, optimizers, factor, batch in ranks:
            backward(model, batch)
            if (self._steps + 1) % EVERY == 0:
                factor.take_in((p, p.grad) for p in model.parameters() if p.grad is not None)
            take_optimizer_steps(optimizers, rate * factor.value)
        self._steps += 1
        if not self._settings.overlaps:
            self._exchange()
        owed = self._drift()
        self._apply()
        if self.faithfulness is not None:
            self.faithfulness.step(owed, self._drift())

    @torch.no_grad()
    def _drift(self) -> Tensor:
        """How far each rank's weights are from the average, [P, n]."""
        average, *own = (
            torch.cat([p.reshape(-1) for p in model.parameters()]) for model in (self._average, *self._models)
        )
        return torch.stack(own) - average

    def _exchange(self) -> None:
        """Take up the groups whose turn it is after the last step, and average them."""
        step, size = self._steps, self.network.size
        self._due = [
            ranks for ranks in self._replicas if all([replica.is_due(step, self._warmup_steps) for replica in ranks])
        ]
        for ranks in self._due:
            for replica in ranks:
                replica.take_up(size)
            total = take_steps(ranks[0].compressor, [replica.group for replica in ranks], self.network)
            for replica in ranks:
                replica.move(total, size)
        if self._settings.lr_factor == "measured" and step % EVERY == 0:
            for factor in self._factors:
                factor.take_up()
            self.network.run([factor.sum_up(c) for factor, c in zip(self._factors, self.network.comms, strict=True)])

    @torch.no_grad()
    def _apply(self) -> None:
        """Set the weights of what was exchanged: each rank's own, and the average."""
        shared = self._average.state_dict()
        for ranks in self._due:
            for replica in ranks:
                replica.apply()
            group, average = ranks[0].group, ranks[0].average
            for name, slot in zip(group.names, group.slots(average), strict=True):
                shared[name].copy_(slot.view(shared[name].shape))
        for factor in self._factors:
            factor.read(self.network.size)
        self._due = []
