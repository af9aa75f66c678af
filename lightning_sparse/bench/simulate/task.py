"""What simulated ranks train: a model, text, an optimizer and its learning rate."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Muon, Optimizer

from lightning_sparse.bench.compare.text import source_windows
from lightning_sparse.bench.compare.workloads import ByteGPT
from lightning_sparse.selection.streams import draw

WINDOWS = 8  # of text that a rank learns from in a step
VALIDATION_WINDOWS = 640
HELD_OUT = 20  # one file of the text in so many is validated with
TEXT_BYTES = 4_000_000  # to learn from
WEIGHT_DECAY = 0.01
WARM_UP = 0.1  # of the steps; then the learning rate falls as a cosine, to 0


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


# - optimizers


def _adamw(model: ByteGPT) -> list[Optimizer]:
    return [AdamW(model.parameters(), weight_decay=WEIGHT_DECAY)]


def _sgd(model: ByteGPT) -> list[Optimizer]:
    return [SGD(model.parameters(), momentum=0.9)]


def _muon(model: ByteGPT) -> list[Optimizer]:
    """Muon for the matrices of the blocks, with steps as long as AdamW's, which the others get."""
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    known = set(matrices)
    others = [p for p in model.parameters() if p not in known]
    return [
        Muon(matrices, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
        AdamW(others, weight_decay=WEIGHT_DECAY),
    ]


#: Name -> what makes the optimizers of a model; all of them take the same learning rate.
OPTIMIZERS: dict[str, Callable[[ByteGPT], list[Optimizer]]] = {"adamw": _adamw, "sgd": _sgd, "muon": _muon}


def learning_rate(peak: float, step: int, steps: int) -> float:
    """The learning rate of a step: a warm-up to ``peak``, then a cosine to 0."""
    warm_up = max(1, round(WARM_UP * steps))
    if step < warm_up:
        return peak * (step + 1) / warm_up
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))
