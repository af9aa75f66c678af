"""P simulated ranks that train in one process, with a strategy's own compressor and messages."""

from collections.abc import Sequence

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.bench.compare.peers import PEERS, Contender
from lightning_sparse.bench.simulate.optimizers import OPTIMIZERS
from lightning_sparse.bench.simulate.task import loss_of
from lightning_sparse.compressors import Dense
from lightning_sparse.engine.compression_error import CompressionError
from lightning_sparse.engine.groups import lay_out
from lightning_sparse.network.simulated import SimNetwork
from lightning_sparse.options import Options
from lightning_sparse.simulation import take_steps
from lightning_sparse.strategy import SparseDDPStrategy
from lightning_sparse.wire import wire_format


def options_of(strategy: str) -> Options:
    """Read a strategy as ``lightning-sparse bench`` does.

    Raises:
        ValueError: there is none of this name, an option of it is wrong, or it cannot be simulated.
    """
    contender = Contender(strategy, strategy)
    built = contender.build()
    if contender.learning_rate is not None:
        raise ValueError(f"a strategy to simulate must be given without lr; give --learning-rates; got {strategy!r}")
    if strategy == "ddp":
        return Options.of(Dense(), "bucket")
    if not isinstance(built, SparseDDPStrategy):
        peers = ", ".join(name for name in PEERS if name not in ("ddp", "diloco"))
        raise ValueError(f"strategies to simulate must be ddp, diloco or this project's, not {peers}; got {strategy!r}")
    if built.options.policy:
        raise ValueError(f"a strategy to simulate must not be one that chooses by time; got {strategy!r}")
    if built.options.local_group != 1:
        raise ValueError(f"local_group must be 1, since nodes are not simulated; got {strategy!r}")
    return built.options


def backward(model: LightningModule, batch: Sequence[Tensor]) -> None:
    """Set the gradients of ``model`` to those of a batch."""
    model.zero_grad()
    loss_of(model, batch).backward()


def take_optimizer_steps(optimizers: Sequence[Optimizer], rate: float) -> None:
    """Take a step of each optimizer, at this learning rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()


class Replicas:
    """P ranks that average gradients.  They hold the same weights, so one model and its optimizers stand for all.

    Attributes:
        network: between the ranks.
        faithfulness: of the steps so far, if it is to be judged.
    """

    faithfulness: CompressionError | None = None

    def __init__(self, model: LightningModule, options: Options, ranks: int, optimizer: str = "adamw") -> None:
        self.network = SimNetwork(ranks, wire_format(options.wire_dtype))
        self._model, self._optimizers = model, OPTIMIZERS[optimizer](model)
        parameters = dict(model.named_parameters())
        self._groups = [  # [P][groups], each with what averages it
            lay_out(parameters, options.averaging, options.fusion, options.bucket_bytes) for _ in range(ranks)
        ]

    def step(self, batches: Sequence[Sequence[Tensor]], rate: float) -> None:
        """Learn from a batch on each rank, at a learning rate."""
        for batch, groups in zip(batches, self._groups, strict=True):
            backward(self._model, batch)
            for group, compressor in groups:
                compressor.accumulate(group, [p.grad for p in group.parameters], self.network.size)
        owed = self._unsent()
        for ranks in zip(*self._groups, strict=True):
            group, compressor = ranks[0]
            total = take_steps(compressor, [own for own, _ in ranks], self.network)
            group.hand_back(total, [p.grad for p in group.parameters if p.grad is not None], self.network.size)
        if self.faithfulness is not None:
            self.faithfulness.step(owed, self._unsent())
        take_optimizer_steps(self._optimizers, rate)

    def _unsent(self) -> Tensor:
        """What each rank has not sent, [P, n]."""
        return torch.stack([torch.cat([group.unsent for group, _ in groups]) for groups in self._groups])
