"""Train a model on P simulated ranks in one process, with a strategy's own compressor and messages."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import AdamW

from lightning_sparse.bench.compare.peers import PEERS, Contender
from lightning_sparse.bench.compare.workloads import ByteGPT, source_windows
from lightning_sparse.compressors import Dense
from lightning_sparse.fusion.groups import lay_out
from lightning_sparse.network.simulated import SimNetwork
from lightning_sparse.options import Options
from lightning_sparse.selection.streams import draw
from lightning_sparse.simulation import take_steps
from lightning_sparse.strategy import SparseDDPStrategy
from lightning_sparse.wire import wire_format

WINDOWS = 8  # of text that a rank learns from in a step
VALIDATION_WINDOWS = 640
HELD_OUT = 20  # one file of the text in so many is validated with
TEXT_BYTES = 4_000_000  # to learn from
WEIGHT_DECAY = 0.01
WARM_UP = 0.1  # of the steps; then the learning rate falls as a cosine, to 0


def options_of(strategy: str) -> Options:
    """Read a strategy as ``lightning-sparse bench`` does.

    Raises:
        ValueError: there is none of this name, an option of it is wrong, or it cannot be simulated.
    """
    built = Contender(strategy, strategy).build()
    if strategy == "ddp":
        return Options.of(Dense(), "bucket")
    if not isinstance(built, SparseDDPStrategy):
        peers = ", ".join(name for name in PEERS if name != "ddp")
        raise ValueError(f"strategies to simulate must be ddp or this project's, not {peers}; got {strategy!r}")
    if built.options.compressor.candidates:
        raise ValueError(f"a strategy to simulate must not be one that chooses by time; got {strategy!r}")
    if built.options.local_group != 1:
        raise ValueError(f"local_group must be 1, since nodes are not simulated; got {strategy!r}")
    return built.options


class Averaging:
    """Averages the gradients of P simulated ranks, group by group.

    Args:
        parameters: of the model, by name.
        options: of the strategy.
        ranks: P.
    """

    def __init__(self, parameters: Mapping[str, Tensor], options: Options, ranks: int) -> None:
        self._network = SimNetwork(ranks, wire_format(options.wire_dtype))
        self._groups = [  # [P][groups], each with what averages it
            lay_out(parameters, options.averaging, options.fusion, options.bucket_bytes) for _ in range(ranks)
        ]

    @property
    def sent_bytes(self) -> float:
        """Payload a rank has put on the wire since the start, the mean over the ranks."""
        return sum(comm.sent_bytes for comm in self._network.comms) / self._network.size

    def add(self, rank: int) -> None:
        """Take in the gradients that the parameters have now, as those of ``rank``."""
        for group, compressor in self._groups[rank]:
            compressor.accumulate(group, [p.grad for p in group.parameters], self._network.size)

    def average(self) -> None:
        """Set the gradients of the parameters to what every rank has after one step of the compressor."""
        for ranks in zip(*self._groups, strict=True):
            group, compressor = ranks[0]
            total = take_steps(compressor, [own for own, _ in ranks], self._network)
            group.hand_back(total, [p.grad for p in group.parameters if p.grad is not None], self._network.size)


@dataclass(frozen=True)
class Task:
    """What is trained: a model and windows of text, each [N, CONTEXT + 1] bytes."""

    model: ByteGPT
    training: Tensor
    validation: Tensor

    def batch(self, seed: int, step: int, rank: int) -> Tensor:
        """The windows that a rank learns from in a step."""
        generator = torch.Generator().manual_seed(draw(seed, step, rank))
        return self.training[torch.randint(len(self.training), (WINDOWS,), generator=generator)]

    @torch.no_grad()
    def validation_loss(self) -> float:
        """The loss on text that nobody learns from, in nats a byte."""
        parts = self.validation.split(128)
        return sum(float(self.model.training_step([part])) * len(part) for part in parts) / len(self.validation)


def byte_lm(seed: int) -> Task:
    """A GPT of 279,168 parameters over the bytes of Python's standard library."""
    torch.manual_seed(seed)
    held_out = source_windows(TEXT_BYTES, lambda number: number % HELD_OUT == 0)
    training = source_windows(TEXT_BYTES, lambda number: number % HELD_OUT != 0)
    evenly = held_out[:: max(1, len(held_out) // VALIDATION_WINDOWS)]
    return Task(ByteGPT(width=96, layers=2, heads=4), training, evenly[:VALIDATION_WINDOWS])


def learning_rate(peak: float, step: int, steps: int) -> float:
    """The learning rate of a step: a warm-up to ``peak``, then a cosine to 0."""
    warm_up = max(1, round(WARM_UP * steps))
    if step < warm_up:
        return peak * (step + 1) / warm_up
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


class Replicas:
    """P replicas of a model in training.  They hold the same weights, so one model and one optimizer stand for all."""

    def __init__(self, model: ByteGPT, options: Options, ranks: int) -> None:
        self._model = model
        self._optimizer = AdamW(model.parameters(), weight_decay=WEIGHT_DECAY)
        self._averaging = Averaging(dict(model.named_parameters()), options, ranks)

    @property
    def sent_bytes(self) -> float:
        """Payload a rank has put on the wire since the start."""
        return self._averaging.sent_bytes

    def step(self, batches: Sequence[Tensor], rate: float) -> float:
        """Learn from a batch on each rank at a learning rate; returns the mean loss before."""
        losses = []
        for rank, batch in enumerate(batches):
            self._optimizer.zero_grad()
            loss = self._model.training_step([batch])
            loss.backward()
            losses.append(float(loss.detach()))
            self._averaging.add(rank)
        self._averaging.average()
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        return sum(losses) / len(losses)
