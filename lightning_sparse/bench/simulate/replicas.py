"""P simulated ranks that train in one process, with a strategy's own compressor, replicas and messages."""

from collections.abc import Sequence
from copy import deepcopy

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.bench.compare.byte_lm import loss_of
from lightning_sparse.bench.compare.peers import PEERS, Contender
from lightning_sparse.bench.simulate.task import OPTIMIZERS
from lightning_sparse.compressors import Dense
from lightning_sparse.engine.groups import lay_out, lay_out_fragments
from lightning_sparse.engine.observers import CompressionError
from lightning_sparse.local_steps.replica import Replica
from lightning_sparse.local_steps.second_moments import MeanMoments, SecondMoments
from lightning_sparse.network.simulated import SimNetwork
from lightning_sparse.options import Options
from lightning_sparse.simulation import take_steps
from lightning_sparse.trainer.strategy import SparseDDPStrategy

Batches = Sequence[tuple[Tensor, ...]]  # one for each rank


def options_of(strategy: str) -> Options:
    """Read a strategy as ``lightning-sparse bench`` does; a ValueError says why it cannot be simulated."""
    contender = Contender(strategy, strategy)
    built = contender.build()
    if contender.learning_rate is not None:
        raise ValueError(f"a strategy to simulate must be given without lr; give --learning-rates; got {strategy!r}")
    if strategy == "ddp":
        return Options.of(Dense(), "bucket")
    if not isinstance(built, SparseDDPStrategy):
        peers = ", ".join(name for name in PEERS if name not in ("ddp", "diloco", "sparse_loco"))
        raise ValueError(
            f"strategies to simulate must be ddp, diloco, sparse_loco or this project's, not {peers}; got {strategy!r}"
        )
    if built.options.policy:
        raise ValueError(f"a strategy to simulate must not be one that chooses by time; got {strategy!r}")
    if built.options.local_group != 1:
        raise ValueError(f"local_group must be 1, since nodes are not simulated; got {strategy!r}")
    return built.options


def _backward(model: LightningModule, batch: tuple[Tensor, ...]) -> None:
    """Set the gradients of ``model`` to those of a batch."""
    model.zero_grad()
    loss_of(model, batch).backward()


def _step(optimizer: Optimizer, rate: float, moments: MeanMoments | None = None) -> None:
    """Take a step at this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    if moments:
        moments.before_update(optimizer)
    optimizer.step()
    if moments:
        moments.after_update(optimizer)


class Replicas:
    """P ranks that average gradients.  They hold the same weights, so one model and its optimizer stand for all."""

    judged_by: CompressionError | None = None  # of the steps so far, if it is to be judged

    def __init__(self, model: LightningModule, options: Options, ranks: int, optimizer: str = "adamw") -> None:
        self.network = SimNetwork(ranks)
        self._model, self._optimizer = model, OPTIMIZERS[optimizer](model)
        parameters = dict(model.named_parameters())
        self._groups = [  # [P][groups], each with what averages it
            lay_out(parameters, options.averaging, options.fusion, options.bucket_bytes) for _ in range(ranks)
        ]

    def step(self, batches: Batches, rate: float) -> None:
        """Learn from a batch on each rank, at a learning rate."""
        for batch, groups in zip(batches, self._groups, strict=True):
            _backward(self._model, batch)
            for group, compressor in groups:
                compressor.accumulate(group, [p.grad for p in group.parameters], self.network.size)
        before = self._unsent()
        for ranks in zip(*self._groups, strict=True):
            group, compressor = ranks[0]
            total = take_steps(compressor, [own for own, _ in ranks], self.network)
            group.hand_back(total, [p.grad for p in group.parameters if p.grad is not None], self.network.size)
        if self.judged_by is not None:
            self.judged_by.step(before, self._unsent())
        _step(self._optimizer, rate)

    def _unsent(self) -> Tensor:
        return torch.stack([torch.cat([group.unsent for group, _ in groups]) for groups in self._groups])


class LocalReplicas:
    """P ranks that average weights, each with a model and an optimizer of its own; ``model`` is their average x̄.

    As :class:`Replicas`.
    """

    judged_by: CompressionError | None = None

    def __init__(self, model: LightningModule, options: Options, ranks: int, optimizer: str = "adamw") -> None:
        assert options.local is not None
        self.network = SimNetwork(ranks)
        self._settings = options.local.led(options.averaging)
        self._average, self._warmup_steps = model, options.warmup_steps
        self._models = [deepcopy(model) for _ in range(ranks)]
        self._optimizers = [OPTIMIZERS[optimizer](each) for each in self._models]
        own = [self._replicas_of(each, options) for each in self._models]  # [P][groups]
        trained = [[x.group for x in of_rank] for of_rank in own]
        self._moments = [SecondMoments(x if self._settings.second_moments == "mean" else ()) for x in trained]
        self._mean_moments = [MeanMoments(each) for each in self._moments]
        self._replicas = list(zip(*own, strict=True))  # [groups][P]
        self._steps = 0
        self._due: list[tuple[Replica, ...]] = []  # exchanged, and not applied yet

    def _replicas_of(self, model: LightningModule, options: Options) -> list[Replica]:
        layout = options.averaging, options.fusion, self._settings.parts, options.bucket_bytes
        groups, fragments = lay_out_fragments(dict(model.named_parameters()), *layout)
        return [Replica(*each, i, self._settings) for each, i in zip(groups, fragments, strict=True)]

    def step(self, batches: Batches, rate: float) -> None:
        """Learn from a batch on each rank, at a learning rate."""
        if self._settings.overlap and self._steps:
            self._exchange()
        ranks = zip(self._models, self._optimizers, self._mean_moments, batches, strict=True)
        for model, optimizer, moments, batch in ranks:
            _backward(model, batch)
            _step(optimizer, rate * (self._settings.lead or 1.0), moments)
        self._steps += 1
        if not self._settings.overlap:
            self._exchange()
        before = self._drift()
        self._apply()
        if self.judged_by is not None:
            self.judged_by.step(before, self._drift())

    @torch.no_grad()
    def _drift(self) -> Tensor:
        """What each rank has not sent, [P, n]."""
        every = [torch.stack([x.unsent(x.tensors()).float() for x in ranks]) for ranks in self._replicas]
        return torch.cat(every, 1)

    def _exchange(self) -> None:
        """Take up the groups whose turn it is after the last step, and average them."""
        step, size, comms = self._steps, self.network.size, self.network.comms
        self._due = [ranks for ranks in self._replicas if all([x.is_due(step, self._warmup_steps) for x in ranks])]
        for ranks in self._due:
            for replica in ranks:
                replica.take_up(size)
            total = take_steps(ranks[0].compressor, [replica.group for replica in ranks], self.network)
            for replica in ranks:
                replica.move(total, size)
        if self._moments[0].is_due(step):
            for moments in self._moments:
                moments.take_up()
            self.network.run([moments.sum_up(comm) for moments, comm in zip(self._moments, comms, strict=True)])

    @torch.no_grad()
    def _apply(self) -> None:
        """Set the weights of what was exchanged: each rank's own, and the average."""
        shared = self._average.state_dict()
        for ranks in self._due:
            for replica in ranks:
                replica.apply()
            for name, average in zip(ranks[0].group.names, ranks[0].averages(), strict=True):
                shared[name].copy_(average)
        for name, _ in self._average.named_buffers():  # statistics, as whoever looks at them has them
            if name in shared and shared[name].is_floating_point():
                own = [model.get_buffer(name) for model in self._models]
                shared[name].copy_(torch.stack(own).mean(0))
        for moments in self._moments:
            moments.receive()
            moments.read(self.network.size)
        self._due = []
